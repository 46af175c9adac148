"""The restart policy: what the parent does about children that exit, hang or do not come up.

A *seat* is a place for one child that is filled again when it falls empty: seat 0 is the supervisor's, 1.. are the workers'
(the same numbers as their lanes). The policy is told what happened (`spawned`, `ready`, `exited`) and asked with `decide`; it
returns what to do and does nothing itself: no process, no signal, no clock.

- A seat is filled again only after `exited`, that is after its child was reaped.
- Back-off: a child that had been ready for `STABLE_S` is followed after the shortest delay; each one that was not doubles it.
- Booting and running have separate deadlines. Booting ends with the child's ready message. Then its beat must stay younger
  than `BEAT_ABORT_S` (SIGABRT: the child prints its stacks and dies) and `BEAT_KILL_S` (SIGKILL).
- A parent that was itself not running (stopped, a suspended machine, no CPU) has no right to judge beats: after a gap between
  two calls they count from the second one.
- Halt: a seat that never had a ready child gives up at once when the child says that it cannot boot, and after
  `BOOT_FAILURES_MAX` failures of another kind. A seat that once was ready is tried on for ever while any other is ready.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from workers.exit_codes import ExitCode

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


class Spawn(NamedTuple):
    """Fill the seat."""

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


Action = Spawn | Abort | Kill | Halt


class _Seat:
    """What is known about one seat; `started` is None while it is empty."""

    __slots__ = ("aborted", "boot_failures", "ever_ready", "failures", "ready", "retry", "started")

    def __init__(self) -> None:
        self.started: float | None = None
        self.ready: float | None = None
        self.aborted: float | None = None
        self.retry = 0.0
        self.failures = 0
        self.boot_failures = 0
        self.ever_ready = False


class Policy:
    """The state of all seats. `decide` is called at least every `DECIDE_PERIOD_S`."""

    def __init__(self, seats: int) -> None:
        self._seats = [_Seat() for _ in range(seats)]
        self._halt: Halt | None = None
        self._called = math.inf
        self._trusted_since = -math.inf

    def spawned(self, seat: int, now: float) -> None:
        """The seat has a child."""
        place = self._seats[seat]
        place.started, place.ready, place.aborted = now, None, None

    def ready(self, seat: int, now: float) -> None:
        """The seat's child serves."""
        place = self._seats[seat]
        place.ready, place.ever_ready, place.boot_failures = now, True, 0

    def exited(self, seat: int, code: int, now: float, message: str = "") -> None:
        """The seat's child was reaped. `code` is negative for a signal; `message` is what the child said before."""
        place = self._seats[seat]
        ready, place.started, place.ready, place.aborted = place.ready, None, None, None
        if ready is None:
            self._boot_failed(seat, code, message)
        elif code == ExitCode.OK:
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
                if now >= place.retry:
                    actions.append(Spawn(number))
            elif (action := self._judge(number, place, now, beat_ages[number])) is not None:
                actions.append(action)
        return actions

    def next_deadline(self, now: float) -> float:
        """Seconds until `decide` must be asked again; events of other kinds come sooner."""
        retries = [place.retry - now for place in self._seats if place.started is None]
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
                return None
            reason = f"its loop has not turned for {age:.1f} s"
        place.aborted = now
        return Abort(number, reason)

    def _boot_failed(self, seat: int, code: int, message: str) -> None:
        place = self._seats[seat]
        place.boot_failures += 1
        said = f": {message}" if message else ""
        if not place.ever_ready and code == ExitCode.BOOT_FAILED:
            self._halt = Halt(f"{seat_name(seat)} cannot start{said}")
        elif place.boot_failures >= BOOT_FAILURES_MAX and not (place.ever_ready and self._any_ready()):
            self._halt = Halt(
                f"{seat_name(seat)} ended {place.boot_failures} times running before it was ready, at last with {ending(code)}{said}"
            )

    def _any_ready(self) -> bool:
        return any(place.ready is not None for place in self._seats)


def seat_name(seat: int) -> str:
    """As it stands in logs and in process names."""
    return "supervisor" if seat == 0 else f"worker {seat - 1}"


def ending(code: int) -> str:
    """An exit code in words."""
    return f"signal {-code}" if code < 0 else f"exit code {code}"
