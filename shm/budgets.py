"""Budgets: how much tenants have used. Each worker writes its own row, and the supervisor writes the row of other replicas; all processes
read all rows.

    row      | place 0 | place 1 | ... | place n-1 |                      one cache line each
    place    | key | plan | lapsed tokens | lapsed requests | tokens | requests | in flight | touched |

Tokens, requests, lapsed tokens and requests, and `touched` (monotonic seconds) are float64, the others int64. The key names a tenant; if it
is 0, the place is free. Tokens and requests say how much the row's writer has let the tenant use; tokens may fall when an answer turns out
to be cheaper. A successor continues these numbers, and clears `in flight`. `lapsed` is the largest value of rate * time - used, for a
budget with this plan only: the rates of tokens and requests per second, as two float32 (0 without a limit). In the row of other replicas,
the two `lapsed` words instead say when the other replicas expect the bucket to be full. `touched` changes with each change, and is stored
together with the numbers before it: a request costs two stores, and no read.

The key selects a set of WAYS places. If all are taken, a new tenant gets the place that was touched longest ago, if possible one without a
request in flight. A tenant that has lost its places begins with a full bucket, like an idle tenant. The words of a place do not change
together.

This module does not know with what the numbers are compared.
"""

import math
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from shm.layout import CACHE_LINE, WORD, Layout
from shm.segment import Floats, Ints, Region

PLACES: Final = 1024  # tenants of one row
WAYS: Final = 8
LINE: Final = CACHE_LINE // WORD
ROW_WORDS: Final = PLACES * LINE
KEY, PLAN, LAPSED_TOKENS, LAPSED_REQUESTS, TOKENS, REQUESTS, IN_FLIGHT, TOUCHED = range(LINE)
NOWHERE: Final = -1
KEY_MAX: Final = (1 << 63) - 1
FILLS_MAX: Final = 86_400.0
_RATES: Final = struct.Struct("<ff")
_store_used: Final = struct.Struct("@ddqd").pack_into  # tokens, requests, in flight, touched: the native mode stores each word whole


class BudgetsSchema(Layout):
    """Lays out the rows of a number of workers, and the row of other replicas behind them."""

    def __init__(self, workers: int) -> None:
        if workers < 1:
            raise ValueError(f"budgets need at least one worker, not {workers}")
        self.workers = workers
        self.row_bytes = ROW_WORDS * WORD
        self.bytes = (workers + 1) * self.row_bytes
        super().__init__("budgets", "budgets 1", PLACES, workers=workers)


class Elsewhere(NamedTuple):
    """How much a tenant has used according to the rows of other writers. `lapsed_*`: the largest number in these rows, or -inf. `full_*`:
    when other replicas expect the bucket to be full; -inf if they do not know the tenant.
    """

    tokens: float
    requests: float
    in_flight: int
    lapsed_tokens: float
    lapsed_requests: float
    full_tokens: float
    full_requests: float


class Sum(NamedTuple):
    """How much a tenant has used, summed over workers. `fills_*`: in how many seconds a bucket is full, if no more is used."""

    tokens: float
    requests: float
    in_flight: int
    fills_tokens: float = 0.0
    fills_requests: float = 0.0


NOBODY: Final = Sum(0.0, 0.0, 0)
NEVER: Final = (-math.inf, 0, -math.inf, -math.inf)


class Place:
    """A place as its only writer knows it. `at`: where it begins in the row, in words; NOWHERE if another tenant has the place."""

    __slots__ = ("at", "in_flight", "key", "lapsed_requests", "lapsed_tokens", "plan", "requests", "tokens")

    def __init__(self, key: int, at: int) -> None:
        self.key = key
        self.at = at
        self.plan = 0
        self.lapsed_tokens = self.lapsed_requests = 0.0
        self.tokens = self.requests = 0.0
        self.in_flight = 0


class BudgetRow:
    """Writes one row, and reads all. `row`: the worker's number from 0, or the number of workers for the row of other replicas.

    `serving`: a word per worker; if it is 0, no request of the worker is in flight.
    """

    def __init__(self, schema: BudgetsSchema, region: Region, row: int, serving: Sequence[int]) -> None:
        self._bytes = region.bytes
        self._words: memoryview = region.bytes.cast("q")
        self._floats: memoryview[float] = region.bytes.cast("d")
        self._rows = schema.workers + 1
        self._workers = schema.workers
        self._row = row
        self._first = row * ROW_WORDS
        self._serving = serving
        self._places: dict[int, Place] = {}

    def take_over(self) -> None:
        """Clears the predecessor's numbers of requests in flight."""
        for at in range(self._first, self._first + ROW_WORDS, LINE):
            self._words[at + IN_FLIGHT] = 0

    def place(self, key: int, now: float) -> Place:
        """Returns the tenant's place in this row. A tenant without a place gets one."""
        place = self._places.get(key)
        if place is not None:
            return place
        words, floats = self._words, self._floats
        first = self._first + _set_of(key)
        oldest, rank = first, (True, float("inf"))
        for at in range(first, first + WAYS * LINE, LINE):
            held = words[at + KEY]
            if held == key:
                return self._known(key, at)
            at_rank = (words[at + IN_FLIGHT] > 0, floats[at + TOUCHED] if held else float("-inf"))
            if at_rank < rank:
                oldest, rank = at, at_rank
        gone = self._places.pop(words[oldest + KEY], None)
        if gone is not None:
            gone.at = NOWHERE
        words[oldest + KEY] = 0  # a reader must not combine the old key with the new numbers
        for word in range(PLAN, LINE):
            words[oldest + word] = 0
        floats[oldest + TOUCHED] = now
        words[oldest + KEY] = key
        return self._known(key, oldest)

    def store(self, place: Place, now: float) -> None:
        """Stores how much the tenant has used, and its requests in flight."""
        _store_used(self._bytes, (place.at + TOKENS) * WORD, place.tokens, place.requests, place.in_flight, now)

    def lapse(self, place: Place) -> None:
        """Stores the lapsed tokens and requests, and the plan."""
        words, floats, at = self._words, self._floats, place.at
        if words[at + PLAN] != place.plan:
            words[at + PLAN] = 0
        floats[at + LAPSED_TOKENS], floats[at + LAPSED_REQUESTS] = place.lapsed_tokens, place.lapsed_requests
        words[at + PLAN] = place.plan

    def _known(self, key: int, at: int) -> Place:
        words, floats = self._words, self._floats
        place = self._places[key] = Place(key, at)
        place.plan, place.in_flight = words[at + PLAN], words[at + IN_FLIGHT]
        place.lapsed_tokens, place.lapsed_requests = floats[at + LAPSED_TOKENS], floats[at + LAPSED_REQUESTS]
        place.tokens, place.requests = floats[at + TOKENS], floats[at + REQUESTS]
        return place

    def elsewhere(self, key: int, plan: int) -> Elsewhere:
        """Returns how much the tenant has used according to the other rows. `plan`: the plan for which lapsed numbers are wanted."""
        words, floats, workers = self._words, self._floats, self._workers
        tokens = requests = 0.0
        in_flight = 0
        lapsed_tokens = lapsed_requests = full_tokens = full_requests = float("-inf")
        first = _set_of(key)
        for row in range(self._rows):
            if row == self._row:
                continue
            start = row * ROW_WORDS + first
            keys = words[start : start + WAYS * LINE : LINE].tolist()
            if key not in keys:
                continue
            at = start + keys.index(key) * LINE
            row_tokens, row_requests = floats[at + TOKENS], floats[at + REQUESTS]
            flying = words[at + IN_FLIGHT] if row == workers or self._serving[row] else 0
            if row == workers:
                full_tokens, full_requests = floats[at + LAPSED_TOKENS], floats[at + LAPSED_REQUESTS]
            elif words[at + PLAN] == plan:
                lapsed_tokens = max(lapsed_tokens, floats[at + LAPSED_TOKENS])
                lapsed_requests = max(lapsed_requests, floats[at + LAPSED_REQUESTS])
            if words[at] == key:  # check that no other tenant has taken the place since
                tokens += row_tokens
                requests += row_requests
                in_flight += flying
        return Elsewhere(tokens, requests, in_flight, lapsed_tokens, lapsed_requests, full_tokens, full_requests)


class BudgetSums:
    """Sums the rows of all workers, for the supervisor."""

    def __init__(self, schema: BudgetsSchema, region: Region, serving: Sequence[int]) -> None:
        shape = (schema.workers + 1, PLACES, LINE)
        self._workers = schema.workers
        self._ints: Ints = region.array(np.int64, 0, shape)
        self._floats: Floats = region.array(np.float64, 0, shape)
        self._serving = serving

    def changes(self) -> int:
        """Returns a number that changes with each count."""
        return int(self._ints[: self._workers, :, TOUCHED].sum())

    def sums(self, now: float) -> dict[int, Sum]:
        """Returns key of a tenant -> how much it has used, for each tenant in the rows of workers."""
        found: dict[int, Sum] = {}
        lapsed: dict[int, tuple[float, int, float, float]] = {}  # key -> when touched, plan, lapsed tokens, lapsed requests
        rows, places = np.nonzero(self._ints[:, :, KEY])
        elsewhere: dict[int, tuple[float, float]] = {}
        for row, place in zip(rows.tolist(), places.tolist(), strict=True):
            key, plan, _, _, _, _, flying, _ = self._ints[row, place].tolist()
            _, _, lapsed_tokens, lapsed_requests, tokens, requests, _, touched = self._floats[row, place].tolist()
            if row == self._workers:
                elsewhere[key] = tokens, requests
                continue
            before = found.get(key, NOBODY)
            found[key] = Sum(before.tokens + tokens, before.requests + requests, before.in_flight + flying * bool(self._serving[row]))
            touched, last, most_tokens, most_requests = max(lapsed.get(key, NEVER), (touched, plan, -math.inf, -math.inf))
            if last == plan:
                most_tokens, most_requests = max(most_tokens, lapsed_tokens), max(most_requests, lapsed_requests)
            lapsed[key] = touched, last, most_tokens, most_requests
        for key, used in found.items():
            _, plan, lapsed_tokens, lapsed_requests = lapsed[key]
            more_tokens, more_requests = elsewhere.get(key, (0.0, 0.0))
            of_tokens, of_requests = rates_of(plan)
            fills_tokens = (used.tokens + more_tokens + lapsed_tokens) / of_tokens - now if of_tokens else 0.0
            fills_requests = (used.requests + more_requests + lapsed_requests) / of_requests - now if of_requests else 0.0
            found[key] = used._replace(fills_tokens=_seconds(fills_tokens), fills_requests=_seconds(fills_requests))
        return found


def rates_of(plan: int) -> tuple[float, float]:
    """Decodes a plan into its limits of tokens and requests per second. 0 means no limit."""
    tokens, requests = _RATES.unpack(plan.to_bytes(WORD, "little"))
    return tokens, requests


def _seconds(seconds: float) -> float:
    """Returns a time until a bucket is full, within its bounds."""
    return min(max(0.0, seconds), FILLS_MAX) if seconds == seconds else 0.0


def _set_of(key: int) -> int:
    """Returns where the set of a key begins in a row, in words."""
    return (key % (PLACES // WAYS)) * WAYS * LINE
