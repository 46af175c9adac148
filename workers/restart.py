"""The restart policy: what the parent does about children that exit, hang, do not come up, or are too many or too few.

A *seat* is a place for one child that is filled again when it falls empty: seat 0 is the supervisor's, 1.. are the workers'
(the same numbers as their lanes). There are more seats than workers. A seat is *wanted* or not: a wanted one is kept filled,
the child in one that is not wanted any more leaves, and nobody follows it. The policy is told what happened (`spawned`,
`ready`, `leaving`, `exited`, `resize`) and asked with `decide`; it returns what to do and does nothing itself: no process, no
signal, no clock.

- A seat is filled again only after `exited`, that is after its child was reaped.
- `resize` adds the lowest free seats, or gives up the highest ones.
- A worker that leaves by itself (`leaving`) hands its place to a free seat, so that its successor serves while it drains.
  Where no seat is free, its own is filled again after it has gone.
- Back-off: a child that had been ready for `STABLE_S` is followed after the shortest delay; each one that was not doubles it.
  One that ended as intended is followed at once.
- Booting and running have separate deadlines. Booting ends with the child's ready message. Then its beat must stay younger
  than `BEAT_ABORT_S` (SIGABRT: the child prints its stacks and dies) and `BEAT_KILL_S` (SIGKILL). A child that leaves has
  `leave_s` for it.
- A parent that was itself not running (stopped, a suspended machine, no CPU) has no right to judge beats: after a gap between
  two calls they count from the second one.
- Halt: a seat of the first start that never had a ready child gives up at once when the child says that it cannot boot, and
  after `BOOT_FAILURES_MAX` failures of another kind. Any other seat is tried on for ever while any child is ready.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from workers.exit_codes import INTENDED, ExitCode, ending

BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 10.0
STABLE_S = 2.0
BOOT_DEADLINE_S = 30.0
BOOT_FAILURES_MAX = 5
BEAT_ABORT_S = 3.0
BEAT_KILL_S = 5.0
ABORT_TO_KILL_S = BEAT_KILL_S - BEAT_ABORT_S
DECIDE_PERIOD_S = 0.5
STALL_S = 2 * DECIDE_PERIOD_S
SUPERVISOR = 0


class Spawn(NamedTuple):
    """Fill the seat."""

    seat: int


class Drain(NamedTuple):
    """SIGTERM: the seat is given up, its child leaves when its streams have ended."""

    seat: int


class Abort(NamedTuple):
    """SIGABRT: let the child print where it hangs."""

    seat: int
    reason: str


class Kill(NamedTuple):
    """SIGKILL."""

    seat: int
    reason: str


class Halt(NamedTuple):
    """Give up: end everything, exit with the reason."""

    reason: str


Action = Spawn | Drain | Abort | Kill | Halt


class _Seat:
    """What is known about one seat; `started` is None while it is empty."""

    __slots__ = ("aborted", "boot_failures", "failures", "leaving", "proven", "ready", "retry", "started", "wanted")

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted
        self.started: float | None = None
        self.ready: float | None = None
        self.leaving: float | None = None
        self.aborted: float | None = None
        self.retry = 0.0
        self.failures = 0
        self.boot_failures = 0
        self.proven = False  # once ready, or added to a picker that runs: its failures are not those of a first start

    def want(self, now: float) -> None:
        """From now on; a child that is still leaving is followed when it has gone."""
        self.wanted, self.proven = True, True
        self.retry, self.failures, self.boot_failures = now, 0, 0


class Policy:
    """The state of all seats. `decide` is called at least every `DECIDE_PERIOD_S`.

    At first the supervisor and `workers` workers are wanted; without a number all seats are.
    """

    def __init__(self, seats: int, workers: int | None = None, *, leave_s: float = math.inf) -> None:
        wanted = seats if workers is None else 1 + workers
        self._seats = [_Seat(number < wanted) for number in range(seats)]
        self._leave_s = leave_s
        self._halt: Halt | None = None
        self._called = math.inf
        self._trusted_since = -math.inf

    @property
    def workers(self) -> int:
        """How many are wanted."""
        return sum(place.wanted for place in self._seats[1:])

    @property
    def workers_max(self) -> int:
        return len(self._seats) - 1

    def resize(self, workers: int, now: float) -> None:
        """So many workers from now on, at least one and at most as there are seats."""
        target = min(max(workers, 1), self.workers_max)
        while self.workers < target:
            free = [place for place in self._seats[1:] if not place.wanted]
            next((place for place in free if place.started is None), free[0]).want(now)
        while self.workers > target:
            next(place for place in reversed(self._seats) if place.wanted).wanted = False

    def spawned(self, seat: int, now: float) -> None:
        """The seat has a child."""
        place = self._seats[seat]
        place.started, place.ready, place.leaving, place.aborted = now, None, None, None

    def ready(self, seat: int, now: float) -> None:
        """The seat's child serves."""
        place = self._seats[seat]
        place.ready, place.proven, place.boot_failures = now, True, 0

    def leaving(self, seat: int, now: float) -> None:
        """The seat's child has begun to leave; if it was wanted, a free seat takes its place."""
        place = self._seats[seat]
        if place.leaving is not None:
            return
        place.leaving = now
        heir = next((p for p in self._seats[1:] if not p.wanted and p.started is None), None)
        if place.wanted and heir is not None:
            place.wanted = False
            heir.want(now)

    def exited(self, seat: int, code: int, now: float, message: str = "") -> None:
        """The seat's child was reaped. `code` is negative for a signal; `message` is what the child said before."""
        place = self._seats[seat]
        ready, place.started, place.ready, place.aborted = place.ready, None, None, None
        place.leaving = None
        if not place.wanted:
            return
        if ready is None:
            self._boot_failed(seat, code, message)
        elif code in INTENDED:
            place.failures, place.retry = 0, now
            return
        stable = ready is not None and now - ready >= STABLE_S
        place.failures = 1 if stable else place.failures + 1
        place.retry = now + min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2.0 ** min(place.failures - 1, 30))

    def decide(self, now: float, beat_ages: Sequence[float]) -> list[Action]:
        """What to do now. `beat_ages[seat]`: seconds since the child's last beat, infinite before the first."""
        if now - self._called > STALL_S:
            self._trusted_since = now
        self._called = now
        if self._halt is not None:
            return [self._halt]
        actions: list[Action] = []
        for number, place in enumerate(self._seats):
            if place.started is None:
                if place.wanted and now >= place.retry:
                    actions.append(Spawn(number))
            elif (action := self._judge(number, place, now, beat_ages[number])) is not None:
                actions.append(action)
        return actions

    def next_deadline(self, now: float) -> float:
        """Seconds until `decide` must be asked again; events of other kinds come sooner."""
        retries = [place.retry - now for place in self._seats if place.wanted and place.started is None]
        return max(0.0, min([DECIDE_PERIOD_S, *retries]))

    def _judge(self, number: int, place: _Seat, now: float, beat_age: float) -> Action | None:
        assert place.started is not None
        if place.aborted is not None:
            if now - place.aborted >= ABORT_TO_KILL_S:
                return Kill(number, f"it did not end within {ABORT_TO_KILL_S:g} s of SIGABRT")
            return None
        trusted = now - self._trusted_since
        if place.ready is None:
            if min(now - place.started, trusted) < BOOT_DEADLINE_S:
                return None
            reason = f"it was not ready within {BOOT_DEADLINE_S:g} s"
        else:
            age = min(beat_age, now - place.ready, trusted)
            if age < BEAT_ABORT_S:
                return self._judge_leaving(number, place, now)
            reason = f"its loop has not turned for {age:.1f} s"
        place.aborted = now
        return Abort(number, reason)

    def _judge_leaving(self, number: int, place: _Seat, now: float) -> Action | None:
        if place.leaving is None:
            if place.wanted:
                return None
            place.leaving = now
            return Drain(number)
        if now - place.leaving < self._leave_s:
            return None
        return Kill(number, f"it was told to leave and did not within {self._leave_s:g} s")

    def _boot_failed(self, seat: int, code: int, message: str) -> None:
        place = self._seats[seat]
        place.boot_failures += 1
        said = f": {message}" if message else ""
        if not place.proven and code == ExitCode.BOOT_FAILED:
            self._halt = Halt(f"{seat_name(seat)} cannot start{said}")
        elif place.boot_failures >= BOOT_FAILURES_MAX and not (place.proven and self._any_ready()):
            self._halt = Halt(
                f"{seat_name(seat)} ended {place.boot_failures} times running before it was ready, at last with {ending(code)}{said}"
            )

    def _any_ready(self) -> bool:
        return any(place.ready is not None for place in self._seats)


def seat_name(seat: int) -> str:
    """As it stands in logs and in process names."""
    return "supervisor" if seat == SUPERVISOR else f"worker {seat - 1}"
