"""Ejects endpoints whose requests fail, and lets them return. This is pure code: every result depends only on the calls and their `now`.

    in use ─ POINTS_TO_EJECT without a success ─▶ ejected ─ back-off ─▶ on trial ─ its request succeeds ─▶ in use
                                                     ▲ ◀─ its request fails, back-off doubles ──┘

- Each worker counts per slot in its own area (`shm.areas`): requests that were served, and failure points. A request that could not be sent
  adds CONNECTION_POINTS, and an answer 5xx of the model server adds 1. So two failed connections in a row or five 5xx in a row eject the
  endpoint. With 1 % random errors, five errors in a row occur once in ten billion requests.
- If the server has also refused the last scrape, the first failure ejects the endpoint.
- An endpoint that fails far more of its answers than the other endpoints is ejected, too (`workers.shared.outliers`). Its trial succeeds
  with an answer that has not failed. If its failures have moved on to other endpoints during the back-off, it returns without a trial.
- At most half of a pool is ejected at a time.
- A trial is given to one worker, which sends one request. If that worker has no request to send, the next worker gets the trial after
  TRIAL_S.

The flags in the endpoint's table row tell the workers what to do: EJECTED, or during a trial the area of the chosen worker and the number
of the trial (`shm.table.trial`). For an endpoint in use, they say by how much its share of failed answers exceeds the share of the others.
Only the supervisor writes these flags. A supervisor that replaces another begins with no endpoint ejected. If a reload replaces the data
layer of a supervisor, the ejections of endpoints that keep their slots go on.
"""

import enum
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shm.table import EJECTED, FAILING_AT, trial
from workers.shared.outliers import LOOK_S, STEPS, Outliers

CONNECTION_POINTS = 3
POINTS_TO_EJECT = 5
BACK_OFF_S = 1.0
BACK_OFF_S_MAX = 30.0
CALM_S = 60.0  # after this time without an ejection, back-offs begin with the shortest again
TRIAL_S = 0.5
SHARE_MAX = 0.5  # the part of the pool that may be ejected
FAILURES = "failures"
FAILURES_WHY = "it has failed its last requests without a success between them: connections failed, or its answers were 5xx"
MOVED = "requests"
MOVED_WHY = "while it was ejected, the same requests failed at other endpoints: look at their clients"

Ints = npt.NDArray[np.int64]


class Step(enum.Enum):
    """A change in the ejection of one endpoint."""

    EJECTED = "ejected"
    TRIAL = "trial"
    RETURNED = "returned"
    FAILING = "failing"  # the endpoint fails more of its answers than the others, but is not ejected for this
    SHARE = "share"  # the endpoint's share of failed answers has changed


class Scraped(Protocol):
    """The part of an endpoint's state that comes from scrapes."""

    @property
    def refuses(self) -> bool:
        """Whether the server refused the last scrape."""

    @property
    def is_down(self) -> bool:
        """Whether the endpoint is down. An endpoint that is down gets no requests, so a trial would be useless."""

    @property
    def pool(self) -> int:
        """The number of the pool. Only endpoints of the same pool are compared."""


@dataclass(slots=True)
class Ejected:
    """The state of an endpoint that was ejected at least once. `cause`, `why`: why it last changed, in a word and in a sentence."""

    ejected: bool = False
    cause: str = ""
    why: str = ""
    flags: int = 0
    back_off_s: float = 0.0
    until: float = 0.0  # the end of the back-off; after a good trial, the time at which `back_off_s` is forgotten
    handed_at: float = 0.0  # the time at which a worker got the trial
    inflight: int = 0  # the requests in flight at that time, which may take long
    answered_at: float = 0.0  # the time of the answer in the trial of an outlier, or 0 before this answer

    @property
    def on_trial(self) -> bool:
        return self.ejected and self.flags != EJECTED


class Ejections:
    """Decides which endpoints are ejected, on trial, or back in use. Identifies endpoints by their slots."""

    def __init__(
        self,
        outcomes: Callable[[], tuple[Ints, Ints]],
        workers: Callable[[], Sequence[int]],
        inflight: Callable[[int], int],
        outliers: Outliers,
        earlier: "Ejections | None" = None,
    ) -> None:
        """`outcomes` returns two arrays with a cell per slot: the served requests and the failure points, summed over all workers. The
        counts only grow. The arrays may be shorter than the table, but have all slots in use.

        `workers` returns the areas of the serving workers. `inflight(slot)` returns the number of requests in flight at a slot.
        `outliers`: compares the answers of the endpoints. `earlier`: the object that this one replaces.
        """
        self._outcomes = outcomes
        self._workers = workers
        self._inflight = inflight
        self.outliers = outliers
        self._failing: set[int] = set()
        self._served, self._failed = (counts.copy() for counts in outcomes())
        self._points: dict[int, int] = {}  # slot -> points since the last success
        self._known: dict[int, Ejected] = {}
        # The ejections that `earlier` knew, of slots that no endpoint has adopted yet
        self._earlier: dict[int, Ejected] = {} if earlier is None else earlier._earlier | earlier._known
        self._turn: int = 0 if earlier is None else earlier._turn
        self.total = 0

    def flags(self, slot: int) -> int:
        """Returns the bits about ejection for the flags of the slot's row; 0 if the endpoint is in use."""
        known = self._known.get(slot)
        if known is not None and known.ejected:
            return known.flags
        return self.outliers.steps(slot) << FAILING_AT

    def reason(self, slot: int) -> tuple[str, str]:
        """Returns why the slot is ejected, has returned, or is failing: the cause in a word, and the evidence. Both are "" otherwise."""
        known = self._known.get(slot)
        if known is not None and (known.ejected or known.why):
            return known.cause, known.why
        return self.outliers.reason(slot)

    def failing(self) -> dict[int, tuple[str, str, float]]:
        """Returns slot -> cause, evidence, and share of failed requests beyond the others, for all endpoints that are ejected (share 1) or
        failing.
        """
        out = {slot: (known.cause, known.why, 1.0) for slot, known in self._known.items() if known.ejected}
        outliers = self.outliers
        return {slot: (*outliers.reason(slot), outliers.steps(slot) / STEPS) for slot in self._failing - out.keys()} | out

    def adopt(self, slot: int) -> None:
        """Continues with an ejection that the object before this one knew, because the slot still has the same endpoint."""
        if (known := self._earlier.pop(slot, None)) is not None:
            self._known[slot] = known

    def forget(self, slot: int) -> None:
        """Forgets the points and the ejection of a slot, because its endpoint has changed or left."""
        self._points.pop(slot, None)
        self._known.pop(slot, None)
        self._earlier.pop(slot, None)
        self._failing.discard(slot)
        self.outliers.forget(slot)

    def count(self) -> int:
        """Returns the number of endpoints that are ejected or on trial."""
        return sum(known.ejected for known in self._known.values())

    def sweep(self, now: float, pool: Mapping[int, Scraped]) -> Iterator[tuple[int, Step]]:
        """Ejects endpoints, begins and ends trials. Yields each slot whose ejection flags have changed, with the change.

        `pool`: all endpoints by slot, of one or several pools.
        """
        served, failed = self._outcomes()
        if len(failed) != len(self._failed):
            self._served, self._failed = _fitted(self._served, served), _fitted(self._failed, failed)
        # Most sweeps see no failure. Comparing bytes takes a tenth of the time of comparing arrays.
        if self._points or self._known or failed.tobytes() != self._failed.tobytes():
            yield from self._judge(now, served - self._served, failed - self._failed, pool)
        if self.outliers.due(now):
            yield from self._compare(now, pool)
        if self._known:
            yield from self._advance(now, pool)
        self._served, self._failed = served, failed

    def _judge(self, now: float, served: Ints, failed: Ints, pool: Mapping[int, Scraped]) -> Iterator[tuple[int, Step]]:
        """Counts the successes and failures since the last sweep. Ends good trials and ejects endpoints."""
        for slot in [slot for slot in self._points if served[slot] > 0]:
            del self._points[slot]
        for slot, tried in self._known.items():
            if tried.on_trial and served[slot] > 0:
                if slot in self.outliers.accused:
                    tried.answered_at = now  # the next `look` finds out whether the answer has failed
                    continue
                self._return(slot, now)
                yield slot, Step.RETURNED
        for slot in np.flatnonzero(failed).tolist():
            if served[slot] > 0 or slot not in pool:
                continue
            self._points[slot] = points = self._points.get(slot, 0) + int(failed[slot])
            known = self._known.get(slot)
            if (known is not None and known.on_trial) or (
                (known is None or not known.ejected) and (points >= POINTS_TO_EJECT or pool[slot].refuses) and self._may_eject(slot, pool)
            ):
                self._eject(slot, now, FAILURES, FAILURES_WHY)
                yield slot, Step.EJECTED

    def _compare(self, now: float, pool: Mapping[int, Scraped]) -> Iterator[tuple[int, Step]]:
        """Ejects outliers, ends their trials, and marks failing endpoints."""
        outliers = self.outliers
        out = {slot for slot, known in self._known.items() if known.ejected}
        for slot, cause, why in outliers.look(now, lambda: _by_pool(pool, out)):
            if self._may_eject(slot, pool):
                self._eject(slot, now, cause, why)
                outliers.accuse(slot)
                yield slot, Step.EJECTED
        for slot in out:
            tried = self._known[slot]
            if not tried.on_trial or slot not in outliers.accused:
                continue
            if outliers.accused[slot].failed:
                self._eject(slot, now, tried.cause, tried.why)
                yield slot, Step.EJECTED
            elif tried.answered_at and now - tried.answered_at >= LOOK_S:
                self._return(slot, now)
                yield slot, Step.RETURNED
        changed, outliers.changed = outliers.changed, set()
        for slot in changed:
            known = self._known.get(slot)
            if slot in pool and (known is None or not known.ejected):
                begins = outliers.steps(slot) > 0 and slot not in self._failing
                yield slot, Step.FAILING if begins else Step.SHARE
        self._failing = {slot for slot in pool if outliers.steps(slot)}

    def _may_eject(self, slot: int, pool: Mapping[int, Scraped]) -> bool:
        number = pool[slot].pool
        out = sum(known.ejected for each, known in self._known.items() if pool[each].pool == number)
        return out + 1 <= SHARE_MAX * sum(each.pool == number for each in pool.values())

    def _return(self, slot: int, now: float, cause: str = "", why: str = "") -> None:
        known = self._known[slot]
        known.ejected, known.flags, known.until = False, 0, now + CALM_S
        known.cause, known.why = cause, why
        self.outliers.acquit(slot)

    def _eject(self, slot: int, now: float, cause: str, why: str) -> None:
        known = self._known.setdefault(slot, Ejected())
        known.back_off_s = min(2 * known.back_off_s, BACK_OFF_S_MAX) if known.back_off_s else BACK_OFF_S
        known.ejected, known.flags, known.until = True, EJECTED, now + known.back_off_s
        known.cause, known.why = cause, why
        self._points.pop(slot, None)
        self.total += 1

    def _advance(self, now: float, pool: Mapping[int, Scraped]) -> Iterator[tuple[int, Step]]:
        """Begins trials, passes unused trials to the next worker, and forgets ended back-offs."""
        for slot, known in list(self._known.items()):
            if now < known.until:
                continue
            accused = self.outliers.accused.get(slot)
            if not known.ejected:
                del self._known[slot]
            elif accused is not None and accused.innocent:
                self._return(slot, now, MOVED, MOVED_WHY)
                known.back_off_s = 0.0
                yield slot, Step.RETURNED
            elif not pool[slot].is_down and (not known.on_trial or self._unused(slot, known, now)):
                workers = self._workers()
                if workers:
                    self._turn += 1
                    known.handed_at, known.answered_at, known.inflight = now, 0.0, self._inflight(slot)
                    known.flags = trial(workers[self._turn % len(workers)], self._turn)
                    if accused is not None:
                        accused.failed = 0
                    yield slot, Step.TRIAL

    def _unused(self, slot: int, known: Ejected, now: float) -> bool:
        """Returns whether the worker that got the trial had no request to send."""
        return now - known.handed_at >= TRIAL_S and not known.answered_at and self._inflight(slot) <= known.inflight


def _by_pool(pool: Mapping[int, Scraped], out: Collection[int]) -> Collection[Sequence[int]]:
    """Returns the slots of each pool, in order, without those in `out`."""
    pools: dict[int, list[int]] = {}
    for slot in sorted(pool):
        if slot not in out:
            pools.setdefault(pool[slot].pool, []).append(slot)
    return pools.values()


def _fitted(before: Ints, now: Ints) -> Ints:
    """Fits the counts `before` to the length of `now`. A slot that is new in `now` is treated as unchanged."""
    return np.concatenate((before[: len(now)], now[len(before) :]))
