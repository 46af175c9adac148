"""The parent: forks, reaps, restarts, passes signals on, and removes what it made.

It has one thread and no event loop, for ever: whoever forks must stay safe to fork. It waits in `poll` for three things: a
signal, a child's report, the next time that the policy (`restart`) wants to be asked. Signal handlers only count; the loop
acts. Pending signals are handled before exits are: a child that drained because the whole group was told to end is not
followed by a successor.

    told to stop   stopping word set (not ready any more) -> SIGTERM to the workers -> they drain, at most `drain_timeout_s` and
                   `GRACE_S` -> the supervisor sees life and family end and leaves -> names removed -> exit 0
    told again     hurry word set: the workers refuse what waits, cut the rest, and have `HURRY_S` for it
    halt           as told to stop, without draining; exit 1
    parent killed  workers see the end of `life` and drain, the supervisor leaves last and removes the names
    SIGTTIN        one worker more, up to `--workers-max`
    SIGTTOU        one worker less, down to one: the highest drains

The kernel merges signals of one kind that come faster than they are taken: a hundred SIGTTIN in a millisecond may be one.

Its only shared words: `serving` per worker, `stopping`, `hurry`, and the list of requests that end workers.
"""

import contextlib
import os
import resource
import select
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType

import structlog

from workers import fork
from workers.exit_codes import INTENDED, ExitCode, ending
from workers.instance import Instance
from workers.query_of_death import DECIDING, LISTED_S, Suspects, crashed
from workers.restart import SUPERVISOR, Abort, Action, Drain, Halt, Kill, Policy, Spawn, seat_name

GRACE_S = 2.0
LEAVE_GRACE_S = 10.0  # a worker that leaves alone may wait for its successor first, and nobody waits for it
HURRY_S = 1.0
SUPERVISOR_END_S = 5.0
HALT_END_S = 1.0
POLL_MAX_S = 0.5
CAUGHT = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, signal.SIGTTIN, signal.SIGTTOU)

ChildMain = Callable[[Instance, int], int]

log = structlog.get_logger()


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Around all that makes names: a signal that comes before `run` listens waits, instead of leaving them behind."""
    signal.pthread_sigmask(signal.SIG_BLOCK, CAUGHT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, CAUGHT)


def run(instance: Instance, *, supervisor: Callable[[Instance], int], worker: ChildMain) -> int:
    """Runs the instance to its end; what to exit with. The names are removed whatever happens."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core holds prompts
    try:
        return Parent(instance, supervisor, worker).run()
    finally:
        instance.unlink()


class Parent:
    """The children by seat, and what they and the outside have said."""

    def __init__(self, instance: Instance, supervisor: Callable[[Instance], int], worker: ChildMain) -> None:
        self._instance = instance
        self._mains = [
            lambda: supervisor(instance),
            *(self._worker_main(worker, i) for i in range(instance.workers_max)),
        ]
        self._policy = Policy(
            instance.seats, instance.options.workers, leave_s=instance.options.drain_timeout_s + LEAVE_GRACE_S
        )
        self._pids: dict[int, int] = {}  # pid -> seat
        self._hung: set[int] = set()  # pids that it killed because they did not end by themselves
        self._suspects = Suspects(instance.deadly)
        self._said: dict[int, str] = {}  # pid -> why it cannot go on
        self._pending: Counter[int] = Counter()
        self._deadline: float | None = None  # of the workers' end; None while nobody told us to stop
        self._halt: Halt | None = None
        self._ready: set[int] = set()
        self._announced = False
        self._woken, self._wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll = select.poll()

    def run(self) -> int:
        """Until stopped or halted."""
        self._catch_signals()
        fork.prepare()
        for descriptor in (self._woken, self._instance.reports.reader):
            self._poll.register(descriptor, select.POLLIN)
        while self._deadline is None:
            self._turn()
            if self._deadline is None and self._halt is None:
                self._obey()
            if self._halt is not None:
                return self._end_halted(self._halt)
        return self._end_stopped()

    def _turn(self) -> None:
        """Wait for an event, then take in all there are."""
        self._wait(self._policy.next_deadline(time.monotonic()))
        self._hear_signals()
        self._hear_children()
        self._reap()
        self._hear_signals()  # one that came with an exit must be known before the exit is answered

    def _wait(self, seconds: float) -> None:
        self._poll.poll(min(seconds, POLL_MAX_S) * 1000.0)
        with contextlib.suppress(BlockingIOError):
            while os.read(self._woken, 4096):
                pass

    def _obey(self) -> None:
        now = time.monotonic()
        self._suspects.look(now)
        for action in self._policy.decide(now, self._instance.lanes.ages(now)):
            self._act(action)

    def _act(self, action: Action) -> None:
        match action:
            case Spawn(seat):
                self._spawn(seat)
            case Drain(seat):
                log.info("child told to leave", child=seat_name(seat))
                self._signal(seat, signal.SIGTERM)
            case Abort(seat, reason):
                log.error("child hangs, it is told to print its stacks and end", child=seat_name(seat), reason=reason)
                self._signal(seat, signal.SIGABRT)
            case Kill(seat, reason):
                log.error("child killed", child=seat_name(seat), reason=reason)
                self._hung.update(pid for pid, taken in self._pids.items() if taken == seat)
                self._signal(seat, signal.SIGKILL)
            case Halt():
                self._halt = action

    def _spawn(self, seat: int) -> None:
        instance = self._instance
        closed = instance.not_for_supervisor() if seat == SUPERVISOR else instance.not_for_worker(seat - 1)
        self._policy.spawned(seat, time.monotonic())
        try:
            pid = fork.spawn(
                f"epp: {seat_name(seat)}",
                self._mains[seat],
                closed=[*closed, self._woken, self._wakes],
                failed=lambda text: instance.failed(seat, text),
            )
        except OSError as refused:  # no memory, or the limit of processes: the others serve on, and it is tried again
            log.error("child cannot be started", child=seat_name(seat), why=str(refused))
            self._policy.exited(seat, ExitCode.FAULT, time.monotonic(), f"fork: {refused}")
            return
        self._pids[pid] = seat
        log.info("child started", child=seat_name(seat), child_pid=pid)

    def _hear_signals(self) -> None:
        pending, self._pending = self._pending, Counter()
        if pending[signal.SIGHUP]:
            log.warning(
                "SIGHUP is reserved for reloading the configuration, which this version does not do: restart instead"
            )
        change = pending[signal.SIGTTIN] - pending[signal.SIGTTOU]
        if change and self._deadline is None:
            self._resize(change)
        stops = pending[signal.SIGTERM] + pending[signal.SIGINT]
        if not stops:
            return
        now = time.monotonic()
        if self._deadline is None:
            self._instance.stop()
            self._deadline = now + self._instance.options.drain_timeout_s + GRACE_S
            log.info("stopping: workers drain", drain_timeout_s=self._instance.options.drain_timeout_s)
            stops -= 1
            self._signal_workers(signal.SIGTERM)
        if stops and now + HURRY_S < self._deadline:
            self._deadline = now + HURRY_S
            self._instance.hurry()
            log.warning("told to stop again: open streams are cut", within_s=HURRY_S)

    def _resize(self, change: int) -> None:
        """More workers or fewer; a limit is said, not an error."""
        policy = self._policy
        before, wanted = policy.workers, policy.workers + change
        policy.resize(wanted, time.monotonic())
        if policy.workers != before:
            log.info("number of workers changed", workers=policy.workers, before=before)
        if wanted > policy.workers:
            log.warning(
                f"SIGTTIN: there are {policy.workers} workers already, and --workers-max allows no more; restart with a higher one"
            )
        elif wanted < policy.workers:
            log.warning("SIGTTOU: the last worker stays; SIGTERM ends the picker")

    def _hear_children(self) -> None:
        for report in self._instance.received():
            if self._pids.get(report.pid) != report.seat:
                continue  # said by a predecessor
            if report.text:
                self._said[report.pid] = report.text
                continue
            if report.leaving:
                self._policy.leaving(report.seat, time.monotonic())
                continue
            self._policy.ready(report.seat, time.monotonic())
            self._instance.lanes.set_serving(report.seat, True)
            log.info("child ready", child=seat_name(report.seat), child_pid=report.pid)
            self._ready.add(report.seat)
            if not self._announced and SUPERVISOR in self._ready and len(self._ready) > 1:
                self._announced = True
                log.info("the picker serves", **self._instance.ports())
            if self._deadline is not None and report.seat != SUPERVISOR:
                self._signal(report.seat, signal.SIGTERM)  # told to stop while it booted: it did not listen yet

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._hear_children()  # its last words, if any, were said before it ended
            seat = self._pids.pop(pid, None)
            if seat is not None:  # else an orphan that process 1 of a container inherits
                self._gone(seat, pid, os.waitstatus_to_exitcode(status))

    def _gone(self, seat: int, pid: int, code: int) -> None:
        served = self._instance.lanes.serving(seat)  # else its lane is its predecessor's still
        self._instance.lanes.set_serving(seat, False)
        said = self._said.pop(pid, "")
        self._policy.exited(seat, code, time.monotonic(), said)
        if code in INTENDED:
            log.info("child ended", child=seat_name(seat), child_pid=pid, ending=ending(code))
        else:
            why = {"said": said} if said else {}
            log.error("child ended", child=seat_name(seat), child_pid=pid, ending=ending(code), **why)
        hung = pid in self._hung
        self._hung.discard(pid)
        if served and (hung or crashed(code)):
            self._suspect(seat)

    def _suspect(self, seat: int) -> None:
        """What the child was deciding may have ended it."""
        deciding = self._instance.lanes.scalars(DECIDING)[seat]
        if deciding and self._suspects.ended(deciding, time.monotonic()):
            log.error(
                "a request has ended two workers: whoever sends it again gets 400",
                fingerprint=f"{deciding & (1 << 64) - 1:016x}",
                for_s=LISTED_S,
            )

    def _end_stopped(self) -> int:
        """Workers drain until the deadline, then the supervisor leaves."""
        while self._workers() and (left := self._left()) > 0:
            self._wait(left)
            self._hear_signals()
            self._hear_children()
            self._reap()
        self._end_all(SUPERVISOR_END_S)
        return ExitCode.OK

    def _end_halted(self, halt: Halt) -> int:
        log.critical("giving up", reason=halt.reason)
        self._instance.stop()
        self._deadline = time.monotonic() + HALT_END_S
        self._signal_workers(signal.SIGTERM)
        while self._workers() and (left := self._left()) > 0:
            self._wait(left)
            self._hear_children()
            self._reap()
        self._end_all(HALT_END_S)
        return ExitCode.FAULT

    def _end_all(self, supervisor_s: float) -> None:
        """Workers that are left are killed; the supervisor leaves by itself, or is killed too."""
        for seat in self._workers():
            log.error("worker did not drain in time, it is killed", child=seat_name(seat))
            self._signal(seat, signal.SIGKILL)
        self._instance.release_children()
        self._deadline = time.monotonic() + supervisor_s
        while self._pids and (left := self._left()) > 0:
            self._wait(left)
            self._reap()
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)
        while self._pids:
            self._wait(POLL_MAX_S)
            self._reap()

    def _left(self) -> float:
        assert self._deadline is not None
        return self._deadline - time.monotonic()

    def _workers(self) -> list[int]:
        return [seat for seat in self._pids.values() if seat != SUPERVISOR]

    def _signal_workers(self, number: int) -> None:
        for seat in self._workers():
            self._signal(seat, number)

    def _signal(self, seat: int, number: int) -> None:
        for pid, taken in self._pids.items():  # not reaped yet, so the pid is still the child's
            if taken == seat:
                os.kill(pid, number)

    def _worker_main(self, worker: ChildMain, index: int) -> Callable[[], int]:
        return lambda: worker(self._instance, index)

    def _catch_signals(self) -> None:
        signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False)
        for number in CAUGHT:
            signal.signal(number, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, CAUGHT)  # those that came before are heard now

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._pending[number] += 1
