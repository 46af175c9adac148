"""A tenant's budget: how much the tenant may use, how much is left, and the answer to a request that exceeds the budget.

A token bucket holds `size` tokens at most and gets `rate` tokens per second. Several processes use it at once. No process keeps the
content of the bucket. The content follows from two numbers that processes merge:

    used    the sum of what all processes have used since any fixed time; each writes its own part
    lapsed  the largest value that rate * time - used has ever had; each process writes the largest value that it has seen
    left    size + rate * time - used - lapsed

The lapsed tokens would have made the bucket overflow. So an unused bucket stays full, and `left` is at most `size`. Two processes that see
the same overflow write the same number, so an overflow is never counted twice. If a process learns late what other processes have used, it
lets too much pass until then, but the debt stays: `left` falls below 0. Over a long time, no more is used than was granted.

Times are monotonic seconds. This module does not depend on wall clocks.
"""

import math
import struct
from collections.abc import Mapping
from typing import Final

from epp.errors import Cause, Refused

MINUTE_S: Final = 60.0
ANSWER_BYTES_PER_TOKEN: Final = 4
BEHIND: Final = -(1 << 31)  # the priority of requests beyond their tenant's budget that wait behind all others
SOON_S: Final = 1.0  # when to ask again for a place among the requests in flight
RETRY_MAX_S: Final = 3600


_RATE: Final = struct.Struct("<f")


class Bucket:
    """A token bucket. `rate`: tokens per second. `size`: the most tokens that the bucket holds."""

    __slots__ = ("rate", "size")

    def __init__(self, rate: float, size: float) -> None:
        self.rate: float = _RATE.unpack(_RATE.pack(rate))[0]  # rounded as in `Budget.plan`
        self.size = size

    def lapsed(self, used: float, full: float) -> float:
        """Returns how many tokens have lapsed if the bucket is full at the time `full`: now, or when other processes expect that."""
        return self.rate * full - used

    def left(self, used: float, lapsed: float, now: float) -> float:
        """Returns how many tokens may be used now. A number below 0 says how many were used too early."""
        return self.size + self.rate * now - used - lapsed

    def needed(self, amount: float) -> float:
        """Returns how much must be left for a use of `amount`: at most the size, because the bucket never holds more."""
        return min(self.size, amount)

    def seconds_until(self, needed: float, left: float) -> float:
        """Returns in how many seconds `needed` tokens are left, if no token is used before."""
        return max(0.0, (needed - left) / self.rate)


class Budget:
    """What one tenant may use. `tokens`, `requests`: None without a limit. `concurrent`: requests in flight at most; 0 without a limit.

    `cached_price`: the part of a token that a cached token of a prompt costs. `queues`: whether requests beyond the budget wait behind all
    others, or are refused. `plan`: the rates of both buckets; how many tokens have lapsed depends on them (`shm.budgets.rates_of`).
    """

    __slots__ = ("cached_price", "concurrent", "plan", "queues", "requests", "tokens")

    def __init__(
        self, tokens: Bucket | None, requests: Bucket | None, concurrent: int = 0, cached_price: float = 1.0, *, queues: bool = False
    ) -> None:
        self.tokens = tokens
        self.requests = requests
        self.concurrent = concurrent
        self.cached_price = cached_price
        self.queues = queues
        rates = (_RATE.pack(bucket.rate if bucket is not None else 0.0) for bucket in (tokens, requests))
        self.plan = int.from_bytes(b"".join(rates), "little")


class Left:
    """What is left of a budget at one moment. `in_flight`: the tenant's requests in flight."""

    __slots__ = ("budget", "in_flight", "requests", "tokens")

    def __init__(self, budget: Budget, tokens: float, requests: float, in_flight: int) -> None:
        self.budget = budget
        self.tokens = tokens
        self.requests = requests
        self.in_flight = in_flight

    def admits(self, tokens: float) -> bool:
        """Returns whether a request with a prompt of `tokens` tokens may pass."""
        budget = self.budget
        if budget.concurrent and self.in_flight >= budget.concurrent:
            return False
        if budget.requests is not None and self.requests < budget.requests.needed(1.0):
            return False
        return budget.tokens is None or self.tokens >= budget.tokens.needed(tokens)

    def refusal(self, tokens: float) -> Refused:
        """Returns the answer to a request that is not admitted, with the headers that clients of OpenAI obey."""
        budget, reached, wait_s = self.budget, [], 0.0
        if budget.tokens is not None and self.tokens < (needed := budget.tokens.needed(tokens)):
            reached.append("tokens per minute")
            wait_s = budget.tokens.seconds_until(needed, self.tokens)
        if budget.requests is not None and self.requests < 1.0:
            reached.append("requests per minute")
            wait_s = max(wait_s, budget.requests.seconds_until(1.0, self.requests))
        if budget.concurrent and self.in_flight >= budget.concurrent:
            reached.append("concurrent requests")
            wait_s = max(wait_s, SOON_S)
        retry_s = max(1, min(RETRY_MAX_S, math.ceil(wait_s)))
        return Refused(Cause.OVER_BUDGET, " and ".join(reached), retry_s, headers=self.headers())

    def headers(self) -> Mapping[str, str]:
        """Returns headers with each limit, how much of it is left, and when all of it will be left again."""
        found: dict[str, str] = {}
        for name, bucket, left in (("requests", self.budget.requests, self.requests), ("tokens", self.budget.tokens, self.tokens)):
            if bucket is not None:
                found[f"x-ratelimit-limit-{name}"] = f"{bucket.rate * MINUTE_S:.0f}"
                found[f"x-ratelimit-remaining-{name}"] = f"{max(0.0, math.floor(left)):.0f}"
                found[f"x-ratelimit-reset-{name}"] = duration(bucket.seconds_until(bucket.size, left))
        return found


def duration(seconds: float) -> str:
    """Writes a duration as OpenAI's headers do: 12ms, 1.25s, 6m0s."""
    ms = math.ceil(seconds * 1e3)
    if ms < 1000:
        return f"{ms}ms"
    minutes, ms = divmod(ms, 60_000)
    return f"{minutes}m{ms / 1e3:g}s" if minutes else f"{ms / 1e3:g}s"
