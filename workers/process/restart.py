"""Holds the restart policy: decides how the parent reacts to children that exit, hang or do not start, and to a change of their number.

An *ordinal* is the number of a child, as of a pod in a StatefulSet. The supervisor has ordinal 0, and workers have the ordinals from 1
on. Areas have the same numbers. There are more ordinals than workers. When the child of a *wanted* ordinal ends, the parent starts another
one. The child of an ordinal that is no longer wanted drains and gets no successor. The parent reports events (`spawned`, `ready`,
`leaving`, `exited`, `resize`) and calls `decide`, which returns actions. The policy itself starts no process, sends no signal and reads
no clock.

- The ordinal of the kv-events process, if there is one, follows those of the workers. It is always wanted.
- An ordinal is refilled only after `exited`, that is, after its child was reaped.
- `resize` adds the lowest free ordinals, or gives up the highest ones.
- If a worker leaves by itself (`leaving`), a free ordinal becomes wanted instead of its ordinal. So its successor serves while the
  worker drains. If no ordinal is free, the worker's own ordinal is refilled after the worker has ended.
- Back-off: after a child that was ready for `STABLE_S`, the delay is `BACKOFF_FIRST_S`. Each child that was ready for less time doubles
  the delay, up to `BACKOFF_MAX_S`. After an intended end there is no delay.
- Start and run have separate deadlines. The start ends with the child's ready report. From then on, the child gets SIGABRT when its
  heartbeat is older than `HEARTBEAT_ABORT_S` (it prints its stacks and ends), and SIGKILL at `HEARTBEAT_KILL_S`. A child that leaves has
  `leave_s` to end.
- If the parent itself did not run (stopped, suspended machine, no CPU), heartbeats look too old. So after a gap between two calls of
  `decide`, the age of heartbeats is measured from the second call.
- Halt: this rule is about ordinals that were wanted at the first start and never had a ready child. If the child of such an ordinal reports
  that it cannot start, the picker halts at once; it also halts after `BOOT_FAILURES_MAX` failures of another kind of such an ordinal. Other
  ordinals are retried without limit while any child is ready.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from workers.host.exit_codes import INTENDED, ExitCode, ending

BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 10.0
STABLE_S = 2.0
BOOT_DEADLINE_S = 30.0
BOOT_FAILURES_MAX = 5
HEARTBEAT_ABORT_S = 3.0
HEARTBEAT_KILL_S = 5.0
ABORT_TO_KILL_S = HEARTBEAT_KILL_S - HEARTBEAT_ABORT_S
DECIDE_PERIOD_S = 0.5
STALL_S = 2 * DECIDE_PERIOD_S
SUPERVISOR = 0


class Spawn(NamedTuple):
    """Tells the parent to start a child with the ordinal."""

    ordinal: int


class Drain(NamedTuple):
    """Tells the parent to send SIGTERM: the ordinal is no longer wanted, and its child ends after its streams."""

    ordinal: int


class Abort(NamedTuple):
    """Tells the parent to send SIGABRT: the child prints its stacks, which show where it hangs, and ends."""

    ordinal: int
    reason: str


class Kill(NamedTuple):
    """Tells the parent to send SIGKILL."""

    ordinal: int
    reason: str


class Halt(NamedTuple):
    """Tells the parent to give up: to end all children and the picker, for this reason."""

    reason: str


Action = Spawn | Drain | Abort | Kill | Halt


@dataclass(slots=True)
class _Ordinal:
    """The state of one ordinal. `started` is None while the ordinal is empty. All times are in monotonic seconds.

    `proven`: whether the ordinal had a ready child or was added later. If so, a child that cannot start does not halt the picker.
    """

    wanted: bool
    started: float | None = None
    ready: float | None = None
    leaving: float | None = None
    aborted: float | None = None
    retry: float = 0.0
    failures: int = 0
    boot_failures: int = 0
    proven: bool = False

    def want(self, now: float) -> None:
        """Makes the ordinal wanted from now on. If its child is still leaving, a successor follows after the child's end."""
        self.wanted, self.proven = True, True
        self.retry, self.failures, self.boot_failures = now, 0, 0


class Policy:
    """Keeps the state of all ordinals, and decides what the parent does. The parent calls `decide` at least every `DECIDE_PERIOD_S`.

    At the start, the ordinals of the supervisor and of `workers` workers are wanted; all ordinals if `workers` is None.
    """

    def __init__(self, ordinals: int, workers: int | None = None, *, leave_s: float = math.inf, helpers: int = 0) -> None:
        """`ordinals`: the number of ordinals of the supervisor and of workers. `leave_s`: how many seconds a child may take to leave.

        `helpers`: the number of other children, such as the kv-events process. Their ordinals come after those of the workers.
        """
        wanted = ordinals if workers is None else 1 + workers
        self._ordinals = [_Ordinal(number < wanted) for number in range(ordinals)]
        self._for_workers = self._ordinals[1:]
        self._ordinals += [_Ordinal(True) for _ in range(helpers)]
        self._leave_s = leave_s
        self._halt: Halt | None = None
        self._called = math.inf
        self._trusted_since = -math.inf

    @property
    def workers(self) -> int:
        """The number of wanted workers."""
        return sum(state.wanted for state in self._for_workers)

    @property
    def workers_max(self) -> int:
        return len(self._for_workers)

    def resize(self, workers: int, now: float) -> None:
        """Sets the number of wanted workers: at least one, at most one per ordinal."""
        target = min(max(workers, 1), self.workers_max)
        while self.workers < target:
            free = [state for state in self._for_workers if not state.wanted]
            next((state for state in free if state.started is None), free[0]).want(now)
        while self.workers > target:
            next(state for state in reversed(self._for_workers) if state.wanted).wanted = False

    def spawned(self, ordinal: int, now: float) -> None:
        """Records that the ordinal has a child."""
        state = self._ordinals[ordinal]
        state.started, state.ready, state.leaving, state.aborted = now, None, None, None

    def ready(self, ordinal: int, now: float) -> None:
        """Records that the ordinal's child serves."""
        state = self._ordinals[ordinal]
        state.ready, state.proven, state.boot_failures = now, True, 0

    def leaving(self, ordinal: int, now: float) -> None:
        """Records that the ordinal's child has begun to leave. If the ordinal was wanted, a free ordinal becomes wanted instead."""
        state = self._ordinals[ordinal]
        if state.leaving is not None:
            return
        state.leaving = now
        free = next((each for each in self._for_workers if not each.wanted and each.started is None), None)
        if state.wanted and free is not None:
            state.wanted = False
            free.want(now)

    def exited(self, ordinal: int, code: int, now: float, message: str = "") -> None:
        """Records that the ordinal's child was reaped. `code` is negative for a signal; `message` is the child's last error report."""
        state = self._ordinals[ordinal]
        ready, state.started, state.ready, state.aborted = state.ready, None, None, None
        state.leaving = None
        if not state.wanted:
            return
        if ready is None:
            self._boot_failed(ordinal, code, message)
        elif code in INTENDED:
            state.failures, state.retry = 0, now
            return
        stable = ready is not None and now - ready >= STABLE_S
        state.failures = 1 if stable else state.failures + 1
        state.retry = now + min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2.0 ** min(state.failures - 1, 30))

    def decide(self, now: float, heartbeat_ages: Sequence[float]) -> list[Action]:
        """Returns the actions to take now. `heartbeat_ages[ordinal]`: seconds since the child's last heartbeat; infinite before the first
        heartbeat.
        """
        if now - self._called > STALL_S:
            self._trusted_since = now
        self._called = now
        if self._halt is not None:
            return [self._halt]
        actions: list[Action] = []
        for number, state in enumerate(self._ordinals):
            if state.started is None:
                if state.wanted and now >= state.retry:
                    actions.append(Spawn(number))
            elif (action := self._judge(number, state, now, heartbeat_ages[number])) is not None:
                actions.append(action)
        return actions

    def next_deadline(self, now: float) -> float:
        """Returns the seconds until `decide` must be called again, if no event happens before."""
        retries = [state.retry - now for state in self._ordinals if state.wanted and state.started is None]
        return max(0.0, min([DECIDE_PERIOD_S, *retries]))

    def _judge(self, number: int, state: _Ordinal, now: float, heartbeat_age: float) -> Action | None:
        assert state.started is not None
        if state.aborted is not None:
            if now - state.aborted >= ABORT_TO_KILL_S:
                return Kill(number, f"it did not end within {ABORT_TO_KILL_S:g} s of SIGABRT")
            return None
        trusted = now - self._trusted_since
        if state.ready is None:
            if min(now - state.started, trusted) < BOOT_DEADLINE_S:
                return None
            reason = f"it was not ready within {BOOT_DEADLINE_S:g} s"
        else:
            age = min(heartbeat_age, now - state.ready, trusted)
            if age < HEARTBEAT_ABORT_S:
                return self._judge_leaving(number, state, now)
            reason = f"its event loop has not turned for {age:.1f} s"
        state.aborted = now
        return Abort(number, reason)

    def _judge_leaving(self, number: int, state: _Ordinal, now: float) -> Action | None:
        if state.leaving is None:
            if state.wanted:
                return None
            state.leaving = now
            return Drain(number)
        if now - state.leaving < self._leave_s:
            return None
        return Kill(number, f"it did not end within {self._leave_s:g} s after it began to leave")

    def _boot_failed(self, ordinal: int, code: int, message: str) -> None:
        state = self._ordinals[ordinal]
        state.boot_failures += 1
        why = f": {message}" if message else ""
        if not state.proven and code == ExitCode.BOOT_FAILED:
            self._halt = Halt(f"{self._name(ordinal)} cannot start{why}")
        elif state.boot_failures >= BOOT_FAILURES_MAX and not (state.proven and self._any_ready()):
            self._halt = Halt(
                f"{self._name(ordinal)} ended {state.boot_failures} times in a row before it was ready; the last time: {ending(code)}{why}"
            )

    def _any_ready(self) -> bool:
        return any(state.ready is not None for state in self._ordinals)

    def _name(self, ordinal: int) -> str:
        return child_name(ordinal, len(self._for_workers) + 1)


def kv_events_ordinal(ordinals: int) -> int:
    """Returns the number of the kv-events process's ordinal. `ordinals`: the number of the other ordinals, which come before it."""
    return ordinals


def child_name(ordinal: int, ordinals: int) -> str:
    """Returns the name of an ordinal in logs and in process names. `ordinals`: the number of ordinals of the supervisor and of workers."""
    if ordinal >= ordinals:
        return "kv-events"
    return "supervisor" if ordinal == SUPERVISOR else f"worker {ordinal - 1}"
