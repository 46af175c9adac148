"""Finds endpoints with answers that fail far more often than the answers of other endpoints to the same kind of request. Pure code.

    workers ─ counts ─▶ evidence per kind, which fades ─┬─▶ failing: its failed answers are load (`epp.endpoints.failing`)
                                                        └─▶ outlier: to be ejected (`workers.shared.ejection`)

An answer has failed if its status is 400 or more, or if it is a 200 without a body where tokens were due. A server that fails requests at
once looks idle, and would get most requests. But a client may also send requests that no server can serve. So an endpoint is only compared
with the others of its pool, and only among requests of one *kind*: the same model, path and flow. Over all kinds, the excess of its failed
answers is divided by its standard deviation under the hypothesis that failures are spread at random over the endpoints (N. Mantel and W.
Haenszel, "Statistical aspects of the analysis of data from retrospective studies of disease", 1959, with their correction of a half):

    z = (sum of failed - expected - 1/2) / root of the sum of variances       n of T answers of the kind, M of which failed:
    expected = n * M / T        variance = n * (T - n) * M * (T - M) / (T * T * (T - 1))

A kind that only one endpoint gets adds nothing. Nor does a client with its own flow, if its requests fail at every endpoint.

    failing     z >= Z_FAILING
    outlier     z >= Z_OUTLIER, at least half of all its answers fail, and at most half as many succeed as with the others. The
                limits are high, because the evidence is read ten times per second
    sole        it gets all requests of the pool for SOLE_S, because it alone holds their prefixes, and fails nearly all of them: an
                outlier, too, since nobody is served anyway. Where its requests go then tells whether it was the server

If a client has no flow of its own, and all its bad requests go to one endpoint, they look like a fault of this endpoint. After the ejection
of the endpoint, the client's failures move on to other endpoints. The same test compares the answers of the other endpoints before and
after the ejection, and finds this out. Then the endpoint is innocent, and for BLAMED_S these kinds of requests eject no endpoint. The same
happens if an endpoint sheds load because all endpoints are full.

Counts fade with HALF_LIFE_S. Workers count good answers only while there is evidence. So a pool without failures costs nothing.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from shm.answers import FAILED, SENT, AnswersReader

OUTCOMES: Final = ("sent", "400", "404", "429", "other 4xx", "5xx", "empty answers")
CLIENT_ERROR, SERVER_ERROR, EMPTY = 4, 5, 6
KINDS: Final = 8  # the number of kinds that a worker tells apart; all further kinds are one kind
OTHERS: Final = 1  # the number of that kind
LOOK_S: Final = 0.1
HALF_LIFE_S: Final = 30.0
LITTLE: Final = 0.5  # evidence with fewer failed answers is dropped
KINDS_MAX: Final = 256  # the number of kinds with kept evidence
FAILED_MIN: Final = 5.0  # fewer failed answers of an endpoint say nothing
PROBATION: Final = 10.0  # for an endpoint that has returned, the requests before its ejection are worth this many requests
Z_FAILING: Final = 3.0
Z_OUTLIER: Final = 5.0
Z_MOVED: Final = 3.0
SHARE_MIN: Final = 0.5  # the least share of an outlier's answers that fail
SOLE_S: Final = 0.5
SOLE_MIN: Final = 10.0  # fewer answers of a sole endpoint say nothing
SOLE_SHARE_MIN: Final = 0.95  # the least share of a sole endpoint's answers that fail
SUCCESS_MAX: Final = 0.5  # an outlier's share of successful answers is at most this part of the others' share
BLAMED_S: Final = 60.0
STEPS: Final = 15  # the number of steps in which shares of failed answers are published
STEPS_MIN: Final = 2

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class Evidence:
    """The requests of one kind: SENT and FAILED per slot, faded. `blamed_until`: the time until which their clients are blamed."""

    counts: Floats
    blamed_until: float = 0.0


@dataclass(slots=True)
class Accused:
    """An endpoint that was ejected as an outlier.

    `kinds`: kind -> the requests of all others, shape (2, 2): [SENT or FAILED, before or since]. If the others had no requests before, the
    code assumes that they would have served the endpoint's requests. `own`: kind -> the endpoint's own requests, SENT and FAILED, at its
    ejection. `outcomes`: all its own requests at its ejection. `failed`: its failed answers since its trial began. `innocent`: whether its
    failures have moved on to others.
    """

    kinds: dict[int, Floats]
    own: dict[int, Floats]
    outcomes: Floats
    failed: int = 0
    innocent: bool = False


class Outliers:
    """Judges the answers of all endpoints. Identifies endpoints by their slots.

    `accused`: the endpoints that were ejected as outliers and have not returned. `changed`: the slots for which `steps` has changed; the
    reader clears this set.
    """

    def __init__(self, answers: AnswersReader) -> None:
        self._read = answers
        self._watching = False
        answers.watch(False)
        self._changes = answers.changes()
        self._before = answers.counts()
        self._slots = self._before.outcomes.shape[1]
        self._kinds: dict[int, Evidence] = {}
        self._outcomes: Floats = np.zeros(self._before.outcomes.shape)  # the outcomes of all kinds together, faded
        # failed answers per slot, faded, since the slot's last ejection
        self._fresh: Floats = np.zeros(self._slots)
        self.accused: dict[int, Accused] = {}
        self._steps: dict[int, int] = {}
        self._reasons: dict[int, tuple[str, str]] = {}  # cause and evidence of the slots that are failing
        self._due = self._at = 0.0
        self._watching_since = 0.0
        self.changed: set[int] = set()

    def steps(self, slot: int) -> int:
        """Returns by how many of STEPS steps a failing endpoint's share of failed answers exceeds the others' share; 0 if it is not
        failing.
        """
        return self._steps.get(slot, 0)

    def reason(self, slot: int) -> tuple[str, str]:
        """Returns why a slot is failing: the cause of most of its failed answers, and the evidence. Both are "" otherwise."""
        return self._reasons.get(slot, ("", "")) if slot in self._steps else ("", "")

    def forget(self, slot: int) -> None:
        """Forgets the answers of a slot, because its endpoint has changed or left."""
        self.accused.pop(slot, None)
        self._clear(slot)

    def due(self, now: float) -> bool:
        """Returns whether it is time to look again."""
        return now >= self._due

    def look(self, now: float, used: Callable[[], Iterable[Sequence[int]]]) -> list[tuple[int, str, str]]:
        """Reads the counts since the last look. Returns the outliers, the worst first: slot, cause, and the evidence in words.

        `used`: returns the slots of the endpoints that get requests, for each pool, in order.
        """
        self._due = now + LOOK_S
        changes = self._read.changes()
        if changes != self._changes or self._watching:
            self._changes = changes
            self._take(0.5 ** ((now - self._at) / HALF_LIFE_S))
            if not self._watching:
                self._watching_since = now
            self._watch(bool(self._kinds or self.accused))
            self._blame(now)
            found = self._judge(now, used())
        else:
            found = []
        self._at = now
        return found

    def accuse(self, slot: int) -> None:
        """Notes that an outlier was ejected. From now on, the answers of the others say whether the outlier is innocent."""
        kinds, own = {}, {}
        for kind, evidence in self._kinds.items():
            if evidence.counts[FAILED, slot] > 0.0:
                own[kind] = evidence.counts[:, slot].copy()
                others = evidence.counts.sum(axis=1) - own[kind]
                before = others if others[SENT] >= LITTLE else np.array([own[kind][SENT], 0.0])
                kinds[kind] = np.stack((before, np.zeros(2)), axis=1)
        self.accused[slot] = Accused(kinds, own, self._outcomes[:, slot].copy())
        self._clear(slot)
        self._watch(True)

    def acquit(self, slot: int) -> None:
        """Notes that an endpoint returns. Unless the endpoint is innocent, it is on probation: a part of the evidence stays."""
        accused = self.accused.pop(slot, None)
        if accused is None or accused.innocent:
            return
        part = min(1.0, PROBATION / float(accused.outcomes[SENT]))
        self._outcomes[:, slot] = part * accused.outcomes
        for kind in accused.own.keys() & self._kinds.keys():
            self._kinds[kind].counts[:, slot] = part * accused.own[kind]

    def _clear(self, slot: int) -> None:
        for evidence in self._kinds.values():
            evidence.counts[:, slot] = 0.0
        self._outcomes[:, slot] = self._fresh[slot] = 0.0
        if self._steps.pop(slot, 0):
            self.changed.add(slot)

    def _watch(self, on: bool) -> None:
        if on != self._watching:
            self._watching = on
            self._read.watch(on)

    def _take(self, keep: float) -> None:
        """Adds the new counts to the evidence, after it has faded to the part `keep`."""
        counts, before = self._read.counts(), self._before
        self._before = counts
        grown = counts.outcomes - before.outcomes
        self._outcomes = self._outcomes * keep + grown
        self._fresh = self._fresh * keep + grown[1:].sum(axis=0)
        for slot, accused in self.accused.items():
            accused.failed += int(grown[1:, slot].sum())
            self._outcomes[:, slot] = self._fresh[slot] = 0.0
        for evidence in self._kinds.values():
            evidence.counts *= keep
        for row, place in zip(*np.nonzero(counts.kinds), strict=True):
            kind, answers = int(counts.kinds[row, place]), counts.answers[row, :, place]
            grown = answers - before.answers[row, :, place]
            if kind == before.kinds[row, place] and not (grown < 0).any():
                answers = grown  # otherwise another kind got the place, and its counts have begun anew
            if answers.any():
                self._add(kind, answers)
        needed = {kind for accused in self.accused.values() for kind in accused.own}
        self._kinds = {kind: each for kind, each in self._kinds.items() if kind in needed or each.counts[FAILED].sum() >= LITTLE}

    def _add(self, kind: int, answers: Ints) -> None:
        evidence = self._kinds.get(kind)
        if evidence is None:
            if len(self._kinds) >= KINDS_MAX:
                return
            evidence = self._kinds[kind] = Evidence(np.zeros((2, self._slots)))
        evidence.counts += answers
        for slot, accused in self.accused.items():
            evidence.counts[:, slot] = 0.0
            if kind in accused.kinds:
                accused.kinds[kind][:, 1] += answers.sum(axis=1) - answers[:, slot]

    def _blame(self, now: float) -> None:
        """Blames the clients for kinds of requests whose failures have moved on from an accused endpoint to others."""
        for accused in self.accused.values():
            kinds = accused.kinds
            if kinds and not accused.innocent and excess(np.stack(list(kinds.values())))[1] >= Z_MOVED:
                accused.innocent = True
                for kind in kinds.keys() & self._kinds.keys():
                    self._kinds[kind].blamed_until = now + BLAMED_S

    def _judge(self, now: float, pools: Iterable[Sequence[int]]) -> list[tuple[int, str, str]]:
        """Publishes which endpoints are failing. Returns the outliers."""
        shares = dict.fromkeys(self._steps, 0)
        found: list[tuple[float, int]] = []
        if self._kinds:
            for used in pools:
                # Most pools have no failure.
                if len(used) > 1 and (self._outcomes[FAILED:, used].sum() >= FAILED_MIN or any(slot in shares for slot in used)):
                    found += self._compare(now, used, shares)
        for slot, steps in shares.items():
            self._publish(slot, steps if steps >= STEPS_MIN else 0)
        return [(slot, *self._reasons[slot]) for _, slot in sorted(found, reverse=True)]

    def _compare(self, now: float, used: Sequence[int], shares: dict[int, int]) -> list[tuple[float, int]]:
        """Compares the endpoints of one pool. Stores the steps of those that are failing. Returns the outliers: z and slot."""
        found: list[tuple[float, int]] = []
        every = np.stack([each.counts[:, used] for each in self._kinds.values()])
        certain = every[[each.blamed_until <= now for each in self._kinds.values()]]
        sent, failed = self._outcomes[SENT, used], self._outcomes[FAILED:, used].sum(axis=0)
        z, worse = excess(certain), worse_than_others(certain)
        for at in np.flatnonzero((failed >= FAILED_MIN) & (excess(every) >= Z_FAILING)).tolist():
            slot, (own, others) = used[at], _shares(failed, sent, at)
            shares[slot] = int(STEPS * (1.0 - (1.0 - own) / (1.0 - others))) if own > others else 0
            self._reasons[slot] = self._reason(slot, own, others, float(sent[at]))
            if z[at] >= Z_OUTLIER and own >= SHARE_MIN and worse[at] and self._fresh[slot] >= FAILED_MIN:
                found.append((float(z[at]), slot))
        watched = now - self._watching_since >= SOLE_S
        alone = watched & (sent.sum() - sent < LITTLE) & (sent >= SOLE_MIN) & (certain[:, FAILED].sum(axis=0) >= FAILED_MIN)
        for at in np.flatnonzero(alone & (failed >= SOLE_SHARE_MIN * sent)).tolist():
            self._reasons[used[at]] = self._reason(used[at], float(failed[at] / sent[at]), None, float(sent[at]))
            found.append((0.0, used[at]))
        return found

    def _reason(self, slot: int, own: float, others: float | None, answered: float) -> tuple[str, str]:
        """Returns cause and evidence. `others`: the failed share of the other endpoints; None if these got no requests."""
        cause = OUTCOMES[1 + int(self._outcomes[1:, slot].argmax())]
        compared = "no other endpoint got a request" if others is None else f"{others:.0%} of the answers of the other endpoints"
        return cause, f"{own:.0%} of its last {answered:.0f} answers failed (most: {cause}), and {compared}"

    def _publish(self, slot: int, steps: int) -> None:
        before = self._steps.get(slot, 0)
        if steps == before or (steps and before and abs(steps - before) < STEPS_MIN):
            return
        self._steps[slot] = steps
        if not steps:
            del self._steps[slot]
        self.changed.add(slot)


def excess(counts: Floats) -> Floats:
    """Returns z for each of the compared groups. `counts`: requests and failed answers, shape (kinds, 2, groups)."""
    each, failed = counts[:, SENT], counts[:, FAILED]
    total, wrong = each.sum(axis=1, keepdims=True), failed.sum(axis=1, keepdims=True)
    says = total >= 2.0  # fewer faded requests say nothing
    total = np.where(says, total, 2.0)
    above: Floats = ((failed - each * wrong / total) * says).sum(axis=0) - 0.5
    variance = each * (total - each) * wrong * (total - wrong) / (total * total * (total - 1.0)) * says
    deviation: Floats = np.sqrt(np.maximum(variance.sum(axis=0), 0.0))
    return np.divide(above, deviation, out=np.zeros_like(above), where=deviation > 0.0)


def worse_than_others(counts: Floats) -> npt.NDArray[np.bool_]:
    """Returns for each group whether its share of successful requests is at most SUCCESS_MAX times the share of the others, for the same
    kinds.
    """
    each, failed = counts[:, SENT], counts[:, FAILED]
    others = each.sum(axis=1, keepdims=True) - each
    compared = each * (others > 0.0)
    of_others = (failed.sum(axis=1, keepdims=True) - failed) / np.maximum(others, 1e-12)
    own, total = (failed * (others > 0.0)).sum(axis=0), compared.sum(axis=0)
    worse: npt.NDArray[np.bool_] = total - own <= SUCCESS_MAX * (total - (compared * of_others).sum(axis=0))
    return worse


def _shares(failed: Floats, sent: Floats, at: int) -> tuple[float, float]:
    """Returns which share of its requests an endpoint has failed, and which share the others have failed."""
    own = min(1.0, float(failed[at] / max(1e-12, sent[at])))
    others = float((failed.sum() - failed[at]) / max(1e-12, sent.sum() - sent[at]))
    return own, min(1.0 - 1e-9, others)
