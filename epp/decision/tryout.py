"""Tries a candidate configuration beside the one in force: decides which requests it gets, and whether it is worse.

    share     a hash of the flow or of the request id chooses the configuration: the same one in all workers, without any state
    sides     counts of the requests of each configuration since the candidate began
    watch     a sequential test of the sides: says why the candidate is worse, or that nothing shows that it is

The test compares two shares: the share of requests that failed, and the share of requests that waited longer for their first token than 95
% of the requests of the configuration in force did. A share is worse if it is larger by more than a margin. The test may look at any time
and as often as it likes: the probability that it ever calls an equal candidate worse stays below ALPHA per share (mixture sequential
probability ratio test of two shares; Johari, Pekelis, Walsh: Always Valid Inference, 2015, section 4, with the variance of both shares).
"""

import math
from collections.abc import Sequence
from typing import Final

import msgspec
from xxhash import xxh3_64_intdigest

from epp.metrics.buckets import TRYOUT_FIRST_TOKEN_S

BY_FLOW: Final = "flow"
BY_REQUEST: Final = "request"
WHOLE: Final = 1_000_000  # the share of all requests, in millionths
DIGEST_BITS: Final = 64

IN_FORCE: Final = "in_force"
CANDIDATE: Final = "candidate"

MARGIN: Final = 0.005  # a share that is larger by no more than this is not worse
ALPHA: Final = 0.002  # probability that an equal candidate is called worse, for each of the two shares
SPREAD: Final = 0.03  # standard deviation of the differences that the test expects: it is quickest for such differences
LEAST: Final = 20  # requests that each configuration must have had before the test says anything
SLOW: Final = 0.05  # the share of requests of the configuration in force that are called slow
LEARNED: Final = 200  # first tokens of the configuration in force from which the test learns what is slow


class Share(msgspec.Struct, frozen=True, array_like=True):
    """Says which requests a candidate decides.

    `millionths`: the candidate's share of all requests; 0 for a shadow test. `by`: BY_FLOW or BY_REQUEST.
    """

    millionths: int = 0
    by: str = BY_REQUEST

    def takes(self, key: str, seed: int) -> bool:
        """Returns whether the candidate decides the requests with this key. `seed`: the same for all requests of one candidate."""
        return xxh3_64_intdigest(key.encode("utf-8", "surrogatepass"), seed) * WHOLE >> DIGEST_BITS < self.millionths

    def __str__(self) -> str:
        if not self.millionths:
            return "as a shadow"
        return f"with {self.millionths / (WHOLE / 100):g}% of the traffic by {self.by}"


class Side(msgspec.Struct, frozen=True, array_like=True):
    """Holds the counts of one configuration.

    `requests`: requests that have ended. `errors`: how many of these failed, in the picker or at the model server. `prompt`, `cached`:
    tokens that model servers reported. `decisions`, `decision_s`: answers of the picker, and the seconds that they took. `first_token`:
    number of requests per bucket of `TRYOUT_FIRST_TOKEN_S`, by time to the first token; the last number is for times above the last bound.
    """

    requests: int = 0
    errors: int = 0
    prompt: int = 0
    cached: int = 0
    decisions: int = 0
    decision_s: float = 0.0
    first_token: tuple[int, ...] = (0,) * (len(TRYOUT_FIRST_TOKEN_S) + 1)

    def since(self, before: "Side") -> "Side":
        """Returns how much the counts have grown since `before`."""
        return Side(
            self.requests - before.requests,
            self.errors - before.errors,
            self.prompt - before.prompt,
            self.cached - before.cached,
            self.decisions - before.decisions,
            self.decision_s - before.decision_s,
            tuple(now - then for now, then in zip(self.first_token, before.first_token, strict=True)),
        )

    @property
    def error_share(self) -> float | None:
        return self.errors / self.requests if self.requests else None

    @property
    def cached_share(self) -> float | None:
        return self.cached / self.prompt if self.prompt else None

    @property
    def seconds_per_decision(self) -> float | None:
        return self.decision_s / self.decisions if self.decisions else None

    @property
    def computed_tokens(self) -> float | None:
        """Returns the uncached prompt tokens per request, which model servers had to compute. Returns None if this number is unknown."""
        return (self.prompt - self.cached) / self.requests if self.requests and self.prompt else None

    def first_token_s(self, q: float) -> float | None:
        """Returns the `q`-quantile of the times to the first token, in seconds, rounded up to the bound of a bucket (down in the last
        bucket).

        Returns None if no time was counted.
        """
        total = sum(self.first_token)
        seen = 0
        for count, bound in zip(self.first_token, (*TRYOUT_FIRST_TOKEN_S, TRYOUT_FIRST_TOKEN_S[-1]), strict=True):
            seen += count
            if total and seen >= q * total:
                return bound
        return None

    def slower(self, bucket: int) -> tuple[int, int]:
        """Returns how many first tokens came after the bound of this bucket, and how many first tokens there were."""
        return sum(self.first_token[bucket + 1 :]), sum(self.first_token)


def evidence(candidate: tuple[int, int], in_force: tuple[int, int], margin: float = MARGIN) -> float:
    """Returns the log of the mixture likelihood ratio for "the candidate's share is larger by more than `margin`"; a value below 0 speaks
    against that.

    `candidate`, `in_force`: (number of events, number of requests). The variance is that of the share (events + 0.5) / (requests + 1), so
    it is never 0.
    """
    (events, requests), (usual, others) = candidate, in_force
    if min(requests, others) < LEAST:
        return -math.inf
    difference = events / requests - usual / others - margin
    if difference <= 0.0:
        return -math.inf
    variance = _variance(events, requests) + _variance(usual, others)
    mixed = variance + SPREAD**2
    return 0.5 * math.log(variance / mixed) + SPREAD**2 * difference**2 / (2.0 * variance * mixed)


def _variance(events: int, requests: int) -> float:
    share = (events + 0.5) / (requests + 1.0)
    return share * (1.0 - share) / requests


def worse(candidate: tuple[int, int], in_force: tuple[int, int], margin: float = MARGIN) -> bool:
    """Returns whether the candidate's share is larger by more than `margin`.

    However often this is called for an equal candidate, the probability that it ever returns True is at most ALPHA.
    """
    return evidence(candidate, in_force, margin) >= -math.log(ALPHA)


class Watch:
    """Runs the sequential test of one candidate. Call `look` repeatedly with the counts since the candidate began."""

    def __init__(self) -> None:
        self._slow = -1  # requests above the bound of this bucket are slow; -1 if not known yet
        self._from: tuple[Side, Side] = (Side(), Side())  # the numbers of both sides at the moment when `_slow` became known

    def look(self, in_force: Side, candidate: Side) -> str:
        """Says why the candidate is worse; "" if nothing shows that it is worse."""
        if worse((candidate.errors, candidate.requests), (in_force.errors, in_force.requests)):
            return (
                f"{_percent(candidate.errors, candidate.requests)} of its {candidate.requests} requests failed, and "
                f"{_percent(in_force.errors, in_force.requests)} of the {in_force.requests} requests of the configuration in force"
            )
        if self._slow < 0:
            if sum(in_force.first_token) >= LEARNED:
                self._slow = slow_from(in_force.first_token)
                self._from = in_force, candidate
            return ""
        of_candidate = candidate.since(self._from[1]).slower(self._slow)
        of_usual = in_force.since(self._from[0]).slower(self._slow)
        if worse(of_candidate, of_usual):
            return (
                f"{_percent(*of_candidate)} of its {of_candidate[1]} first tokens took more than "
                f"{TRYOUT_FIRST_TOKEN_S[self._slow]:.3g} s, and {_percent(*of_usual)} of the {of_usual[1]} of the configuration in force"
            )
        return ""


def slow_from(counts: Sequence[int]) -> int:
    """Returns the bucket whose bound best separates the slowest requests: the share of requests above the bound is nearest to SLOW."""
    total, above = sum(counts), sum(counts)
    shares = []
    for count in counts[:-1]:
        above -= count
        shares.append(abs(above / total - SLOW))
    return shares.index(min(shares))


def _percent(events: int, requests: int) -> str:
    return f"{100.0 * events / max(1, requests):.1f} %"
