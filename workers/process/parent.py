"""The parent: forks, reaps and restarts children, forwards signals, and removes the shared resources at the end.

The parent always has one thread and no event loop, so it stays safe to fork. It waits for a signal (`signals`), a child's report, or
the next deadline of the policy (`restart`). It handles pending signals before exits. So a child that drained because of a signal to
the whole process group gets no successor.

    stop           set the word `stopping` (not ready) -> SIGTERM to the workers -> they drain for at most `drain_timeout_s` plus
                   `GRACE_S` -> the supervisor sees the end of both pipes, and ends -> remove names -> exit 0
    second stop    set the word `hurry`: within `HURRY_S`, workers refuse waiting requests and cut open streams
    halt           like stop, but without draining; exit 1
    truncated      another program truncated a segment: kill the children -> remove names -> exit 1. Any access to such memory ends
                   a process by SIGBUS, so the parent checks the sizes after each wait, before it touches the memory
    parent killed  workers see the end of `parent_pipe` and drain; the supervisor ends last and removes the names
    SIGHUP         reload the configuration (`reload`), or obey a command that waits (`asks`)
    SIGTTIN        one worker more, up to `--workers-max`
    SIGTTOU        one worker fewer, down to one; the worker in the highest ordinal drains
    SIGUSR1, SIGUSR2, SIGALRM    ignored: tools that rotate logs or measure send them, and by default they would end the parent

The parent writes only these shared words: `serving` per process, `stopping`, `hurry`, the list of queries of death, the pools out of
service, the record of children (`children`), and the numbers of the configuration in force and of the candidate (`generations`). After
a worker has ended, the parent also clears two words in the worker's area (`culprits`).
"""

import contextlib
import math
import os
import resource
import signal
import time
from collections.abc import Callable
from functools import partial

import structlog

from workers.host.exit_codes import INTENDED, ExitCode, ending
from workers.process import fork
from workers.process.children import cause_of
from workers.process.credentials import tls_in_words
from workers.process.culprits import Culprits
from workers.process.instance import Instance
from workers.process.reload import Reloads, Trial
from workers.process.restart import SUPERVISOR, Abort, Action, Drain, Halt, Kill, Policy, Spawn, child_name
from workers.process.signals import POLL_MAX_S, Signals
from workers.shared.query_of_death import crashed

GRACE_S = 2.0
LEAVE_GRACE_S = 10.0  # long, because a worker that leaves may wait for its successor, and no process waits for the end of the worker
HURRY_S = 1.0
SUPERVISOR_END_S = 5.0
HALT_END_S = 1.0

ChildMain = Callable[[Instance, int], int]

log = structlog.get_logger()


def run(
    instance: Instance,
    *,
    supervisor: Callable[[Instance], int],
    worker: ChildMain,
    trial: Trial,
    kv_events: Callable[[Instance], int] | None = None,
) -> int:
    """Runs the instance to its end and returns the exit code. Removes the names of its shared memory in every case.

    `supervisor`, `worker`, `trial`, `kv_events`: the main functions of the children. `kv_events` is None if the picker needs no kv-events
    process.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump would contain prompts
    try:
        return Parent(instance, supervisor, worker, trial, kv_events).run()
    finally:
        instance.unlink()


class TruncatedError(Exception):
    """Raised if another program has truncated a segment. The text names the segment."""


class Parent:
    """Runs the children: acts on their reports and ends, on signals, and on what the restart policy decides."""

    def __init__(
        self,
        instance: Instance,
        supervisor: Callable[[Instance], int],
        worker: ChildMain,
        trial: Trial,
        kv_events: Callable[[Instance], int] | None,
    ) -> None:
        self._instance = instance
        self._mains: list[Callable[[], int]] = [
            lambda: supervisor(instance),
            *(partial(worker, instance, i) for i in range(instance.layout.workers_max)),
            *([lambda: kv_events(instance)] if kv_events is not None else []),
        ]
        self._policy = Policy(
            instance.layout.ordinals,
            instance.options.workers,
            leave_s=instance.options.drain_timeout_s + LEAVE_GRACE_S,
            helpers=kv_events is not None,
        )
        self._pids: dict[int, int] = {}  # pid -> ordinal
        self._hung: set[int] = set()  # pids of children that got SIGABRT or SIGKILL because they did not answer or end
        self._culprits = Culprits(instance)
        self._error_texts: dict[int, str] = {}  # pid -> the reason that the child reported for its end or failed start
        self._deadline: float | None = None  # the time by which workers must have ended; None until a signal to stop
        self._halt: Halt | None = None
        self._ready: set[int] = set()
        self._announced = False
        self._signals = Signals(instance.pipes.reports.reader)
        self._reloads = Reloads(instance, trial, lambda: [*instance.not_for_trial(), *self._signals.descriptors])

    def run(self) -> int:
        """Runs until the picker is stopped or halts. Returns the exit code."""
        self._signals.catch()
        fork.prepare()
        try:
            return self._run()
        except TruncatedError as truncated:
            return self._end_truncated(str(truncated))

    def _run(self) -> int:
        while self._deadline is None:
            self._turn()
            if self._deadline is None and self._halt is None:
                self._apply_policy()
            if self._halt is not None:
                return self._end_halted(self._halt)
        return self._end_stopped()

    def _turn(self) -> None:
        """Waits for an event, then handles all pending events."""
        now = time.monotonic()
        self._wait(min(self._policy.next_deadline(now), self._reloads.next_deadline(now)))
        self._handle_signals()
        self._handle_reports()
        self._reap()
        self._handle_signals()  # a signal that arrived with an exit must count before the policy reacts to the exit

    def _wait(self, seconds: float) -> None:
        self._signals.wait(seconds)
        if name := self._instance.memory.truncated():
            raise TruncatedError(f"another program has truncated the shared memory {name}: find it, then start again")

    def _apply_policy(self) -> None:
        now = time.monotonic()
        self._culprits.look(now)
        self._reloads.look(now)
        for action in self._policy.decide(now, self._heartbeat_ages(now)):
            self._act(action)

    def _act(self, action: Action) -> None:
        match action:
            case Spawn(ordinal):
                self._spawn(ordinal)
            case Drain(ordinal):
                log.info("child gets SIGTERM: it drains", child=self._name(ordinal))
                self._signal(ordinal, signal.SIGTERM)
            case Abort(ordinal, reason):
                log.error("child hangs, SIGABRT makes it print its stacks and end", child=self._name(ordinal), reason=reason)
                self._hung.update(self._pids_in(ordinal))
                self._signal(ordinal, signal.SIGABRT)
            case Kill(ordinal, reason):
                log.error("child killed", child=self._name(ordinal), reason=reason)
                self._hung.update(self._pids_in(ordinal))
                self._signal(ordinal, signal.SIGKILL)
            case Halt():
                self._halt = action

    def _spawn(self, ordinal: int) -> None:
        instance = self._instance
        self._policy.spawned(ordinal, time.monotonic())
        try:
            pid = fork.spawn(
                f"{fork.TITLE}{self._name(ordinal)}",
                self._mains[ordinal],
                closed=[*instance.not_for(ordinal), *self._signals.descriptors],
                failed=lambda text: instance.reports.failed(ordinal, text),
            )
        except OSError as refused:  # no memory or too many processes: other children serve on, the policy tries again
            log.error("child cannot be started", child=self._name(ordinal), why=str(refused))
            self._policy.exited(ordinal, ExitCode.FAULT, time.monotonic(), f"fork: {refused}")
            return
        self._pids[pid] = ordinal
        instance.children.started(ordinal, pid)
        log.info("child started", child=self._name(ordinal), child_pid=pid)

    def _handle_signals(self) -> None:
        pending = self._signals.taken()
        if pending[signal.SIGHUP]:
            log.info("SIGHUP")
            self._reloads.hang_up()
        change = pending[signal.SIGTTIN] - pending[signal.SIGTTOU]
        if change and self._deadline is None:
            self._resize(change)
        stops = pending[signal.SIGTERM] + pending[signal.SIGINT]
        if not stops:
            return
        now = time.monotonic()
        if self._deadline is None:
            self._instance.words.stop()
            self._deadline = now + self._instance.options.drain_timeout_s + GRACE_S
            log.info(
                "stopping: workers drain",
                drain_timeout_s=self._instance.options.drain_timeout_s,
                open_streams=sum(self._instance.memory.areas.scalars("streams")),
            )
            stops -= 1
            self._signal_workers(signal.SIGTERM)
        if stops and now + HURRY_S < self._deadline:
            self._deadline = now + HURRY_S
            self._instance.words.hurry()
            log.warning("second signal to stop: open streams are cut", within_s=HURRY_S)

    def _resize(self, change: int) -> None:
        """Changes the number of wanted workers by `change`. Logs a warning if a limit is reached."""
        policy = self._policy
        before, wanted = policy.workers, policy.workers + change
        policy.resize(wanted, time.monotonic())
        if policy.workers != before:
            log.info("number of workers changed", workers=policy.workers, before=before)
        if wanted > policy.workers:
            log.warning("SIGTTIN has no effect", workers=policy.workers, why="--workers-max allows no more: restart with a higher one")
        elif wanted < policy.workers:
            log.warning("SIGTTOU has no effect", workers=policy.workers, why="the last worker stays; SIGTERM ends the picker")

    def _handle_reports(self) -> None:
        for report in self._instance.reports.received():
            if self._pids.get(report.pid) != report.ordinal:
                continue  # a predecessor in this ordinal wrote the report
            now = time.monotonic()
            if self._reloads.heard(report, self._name(report.ordinal), now):
                continue
            if report.text:
                self._error_texts[report.pid] = report.text
                continue
            if report.leaving:
                self._policy.leaving(report.ordinal, now)
                continue
            self._policy.ready(report.ordinal, now)
            self._set_serving(report.ordinal, True)
            log.info("child ready", child=self._name(report.ordinal), child_pid=report.pid)
            self._ready.add(report.ordinal)
            if not self._announced and SUPERVISOR in self._ready and any(map(self._is_worker, self._ready)):
                self._announced = True
                log.info("the picker serves", **self._instance.sockets.ports(), tls=tls_in_words(self._instance.options))
            if self._deadline is not None and self._is_worker(report.ordinal):
                self._signal(report.ordinal, signal.SIGTERM)  # again: the child ignored the first one while it started

    def _reap(self) -> None:
        while (pid := ended_child()) is not None:
            # A child sends its last report before it ends. The reaction to the report may be a signal to the child, so the parent reaps the
            # child afterwards.
            self._handle_reports()
            self._reloads.ends(pid)
            _, status, use = os.wait4(pid, 0)
            code = os.waitstatus_to_exitcode(status)
            if self._reloads.ended(pid, code, time.monotonic()):
                continue
            ordinal = self._pids.pop(pid, None)
            if ordinal is not None:  # None: the pid of an orphan that this process inherited as process 1 of a container
                self._ended(ordinal, pid, code, use.ru_utime + use.ru_stime)

    def _ended(self, ordinal: int, pid: int, code: int, cpu_s: float) -> None:
        # Until a child serves, the area has the numbers of the child's predecessor.
        served = self._has_area(ordinal) and self._instance.memory.areas.serving(ordinal)
        self._set_serving(ordinal, False)
        error_text = self._error_texts.pop(pid, "")
        self._policy.exited(ordinal, code, time.monotonic(), error_text)
        hung = pid in self._hung
        self._hung.discard(pid)
        cause = cause_of(code, hung=hung)
        self._instance.children.ended(ordinal, cause, cpu_s)
        said = {"said": error_text} if error_text and code not in INTENDED else {}
        write = log.info if code in INTENDED else log.error
        write("child ended", child=self._name(ordinal), child_pid=pid, ending=ending(code), cause=cause.name.lower(), **said)
        failed = hung or crashed(code)
        if served and failed:
            self._culprits.request_ended(ordinal)
        pool = self._culprits.pool_ended(ordinal, self._name(ordinal), code, crashed=failed) if self._is_worker(ordinal) else None
        self._reloads.lost(self._name(ordinal), code, time.monotonic(), hung=hung, pool=pool)

    def _end_stopped(self) -> int:
        """Lets workers drain until the deadline, then ends the supervisor."""
        self._reloads.stop()
        self._drain()
        self._end_all(SUPERVISOR_END_S)
        return ExitCode.OK

    def _end_halted(self, halt: Halt) -> int:
        log.critical("giving up", reason=halt.reason)
        self._instance.words.stop()
        self._deadline = time.monotonic() + HALT_END_S
        self._signal_workers(signal.SIGTERM)
        self._drain()
        self._end_all(HALT_END_S)
        return ExitCode.FAULT

    def _end_truncated(self, reason: str) -> int:
        """Kills all children, without access to the shared memory."""
        log.critical("giving up", reason=reason)
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        return ExitCode.FAULT

    def _drain(self) -> None:
        """Waits until all workers have ended, or until the deadline."""
        while self._workers() and (left := self._left()) > 0:
            self._wait(left)
            self._handle_signals()
            self._handle_reports()
            self._reap()

    def _end_all(self, supervisor_s: float) -> None:
        """Kills the remaining workers. Waits `supervisor_s` seconds for the other children to end, then kills them, too."""
        for ordinal in self._workers():
            log.error("worker did not drain in time, it gets SIGKILL", child=self._name(ordinal))
            self._signal(ordinal, signal.SIGKILL)
        self._instance.pipes.release_children()
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
        return [ordinal for ordinal in self._pids.values() if self._is_worker(ordinal)]

    def _is_worker(self, ordinal: int) -> bool:
        return SUPERVISOR < ordinal < self._instance.layout.ordinals

    def _has_area(self, ordinal: int) -> bool:
        return ordinal < self._instance.layout.ordinals

    def _set_serving(self, ordinal: int, serving: bool) -> None:
        if self._has_area(ordinal):
            self._instance.memory.areas.set_serving(ordinal, serving)

    def _name(self, ordinal: int) -> str:
        return child_name(ordinal, self._instance.layout.ordinals)

    def _heartbeat_ages(self, now: float) -> list[float]:
        """Returns, by ordinal, the seconds since the last heartbeat of the child; infinite before its first heartbeat."""
        ages = self._instance.memory.areas.ages(now)
        if (held := self._instance.memory.kv_events) is not None:
            heartbeat = held.positions.last_heartbeat
            ages.append(now - heartbeat if heartbeat else math.inf)
        return ages

    def _signal_workers(self, number: int) -> None:
        for ordinal in self._workers():
            self._signal(ordinal, number)

    def _signal(self, ordinal: int, number: int) -> None:
        for pid in self._pids_in(ordinal):  # the child was not reaped yet, so no other process has its pid
            os.kill(pid, number)

    def _pids_in(self, ordinal: int) -> list[int]:
        return [pid for pid, taken in self._pids.items() if taken == ordinal]


def ended_child() -> int | None:
    """Returns the pid of a child that has ended, without reaping the child. Returns None if no child has ended."""
    try:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return ended.si_pid if ended is not None else None
