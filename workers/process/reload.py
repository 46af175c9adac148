"""Changes the configuration of a running picker, in the parent. `rollout` decides; this carries out its actions and reports to it.

    asked ─▶ trial: a child reads, loads and proves it ─▶ publish: one word ─▶ children take over, and show its number in their lanes

The parent runs no code of the configuration, which could hang or crash it. It forks the trial child, reads the child's result, and stores
the number. If a child dies meanwhile, its successor loads the configuration in force before it serves.
A candidate goes through the same steps, but its number goes into a second word: workers then use it beside the configuration in force
(`tryout`).
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable

import msgspec
import structlog

from shm.documents import DocumentWriter
from workers.host.exit_codes import INTENDED, ending
from workers.process import asks, fork
from workers.process.asks import Ask
from workers.process.generations import Attempt, Generations, Result
from workers.process.instance import Instance
from workers.process.layout import CANDIDATE, GENERATION
from workers.process.reports import Report
from workers.process.restart import SUPERVISOR
from workers.process.rollout import (
    RELOAD,
    TRIAL_S,
    Action,
    Asked,
    CannotUse,
    Crashed,
    Event,
    Fork,
    Kill,
    Publish,
    Restore,
    Rollout,
    Say,
    Spreading,
    Tick,
    TrialEnded,
    Try,
    Withdraw,
    Worse,
)
from workers.process.tryout import Tryout
from workers.shared import reload_status
from workers.shared.reload_status import TEXT_MAX, ReloadStatus

Trial = Callable[[Instance, Attempt], int]  # the main function of a trial child: writes its result into `Attempt.slot`

log = structlog.get_logger()


class Reloads:
    """Carries out the actions of one `Rollout`. `trial`: runs in a child of its own."""

    def __init__(self, instance: Instance, trial: Trial, closed: Callable[[], list[int]]) -> None:
        """`closed`: returns the descriptors that a trial child closes."""
        self._instance = instance
        self._trial = trial
        self._closed = closed
        self._generations: Generations = instance.generations
        self._names = instance.layout.names
        self._status = DocumentWriter(reload_status.SCHEMA, instance.memory.reload)
        self._tryout = Tryout(instance)
        self._pid = 0  # the trial child, which was not reaped; 0: none
        self._slot = 0  # of its result
        self._not_started = ""  # why the last trial child could not be started
        self._last = ReloadStatus(0, "", "", 0.0)
        number = self._generations.number
        self._rollout = Rollout(number, self._generations.hash_of(number))
        if number:
            self._write()

    def ask(self, command: Ask | None = RELOAD) -> None:
        """Asks for a change. It begins at once, or after the present one."""
        self._tell(Asked(command), time.monotonic())

    def hang_up(self) -> None:
        """Acts on SIGHUP: takes the command that waits (`asks`). If none waits, asks for a reload of the files."""
        options = self._instance.options
        try:
            command = asks.take(options.run_dir, options.instance)
        except asks.Refused as refused:
            log.error("command is not obeyed", why=str(refused))
            return
        if command is None:
            log.info("the configuration is loaded again")
        else:
            log.info("command", what=command.what, **({"source": command.source} if command.source else {}))
        self.ask(command)

    def next_deadline(self, now: float) -> float:
        """Returns the seconds until `look` must be called, even if no event comes before."""
        return min(self._rollout.next_deadline(now), self._tryout.next_deadline(now))

    def look(self, now: float) -> None:
        """Does what is due."""
        why = self._tryout.look(now)
        if why is not None:
            if why:
                self._tell(Worse(why), now)
            else:
                self._write()
        spreads = isinstance(self._rollout.state, Spreading)
        self._tell(Tick(tuple(lagging(self._instance)) if spreads else ()), now)
        if self._not_started:
            text, self._not_started = self._not_started, ""
            self._tell(TrialEnded(None, text), now)

    def ends(self, pid: int) -> None:
        """Acts on the end of a child before the parent reaps it: kills the processes that a plugin may have left in the trial's group."""
        if pid == self._pid:
            self._kill_group()

    def ended(self, pid: int, code: int, now: float) -> bool:
        """Acts on the end of a child, which the parent has reaped. Returns whether it was the trial child."""
        if pid != self._pid:
            return False
        self._pid = 0
        result = self._generations.result(self._slot)
        if result is None or result.pid != pid:
            why = f"it took more than {TRIAL_S:g} s" if self._rollout.late else (f"its process ended before it was done: {ending(code)}")
            result = Result(pid, f"error[trial]: the configuration was tried in a process of its own, and {why}")
        self._tell(TrialEnded(result.bundle.hash if result.bundle is not None else None, result.text), now)
        return True

    def heard(self, report: Report, child: str, now: float) -> bool:
        """Acts on the report of a child. `child`: its name. Returns whether the report was about the configuration."""
        if report.changed:
            self.ask()
        elif report.generation and report.text:
            self._tell(CannotUse(report.generation, f"{child} cannot use it: {report.text}"), now)
        return report.changed or report.generation > 0

    def lost(self, child: str, code: int, now: float, *, hung: bool, pool: int | None = None) -> None:
        """If a child crashed or hung, blames the configuration that was put in force last, or the candidate.

        A SIGKILL that the parent did not send does not count, because it says nothing about the configuration. `pool`: which one the child
        worked for; None: not known.
        """
        if code not in INTENDED and (hung or code != -signal.SIGKILL):
            self._tell(Crashed(child), now)

    def stop(self) -> None:
        """Ends a running trial, because the picker ends. Its result does not count any more."""
        self._kill()
        self._pid = 0

    def _tell(self, event: Event, now: float) -> None:
        actions = self._rollout.on(event, now)
        for action in actions:
            self._act(action, now)
        if actions:
            self._write()
        if any(isinstance(action, Publish | Try | Withdraw) for action in actions):
            self._instance.pipes.wake_workers()

    def _act(self, action: Action, now: float) -> None:
        generations = self._generations
        match action:
            case Fork((number, slot, ask)):
                self._fork(Attempt(slot, number, self._names, ask))
            case Kill():
                self._kill()
            case Restore(source, slot, number, why):
                log.warning("configuration is taken back", generation=generations.number, why=why)
                # Under the present names, because places in shared memory that later configurations have taken stay taken.
                before = {"number": number, "names": self._names, "at": time.time(), "followed": False}
                restored = msgspec.structs.replace(generations.bundle(source), **before)
                generations.store(slot, Result(os.getpid(), "", restored))
            case Publish(slot, number):
                self._names = generations.bundle(slot).names
                generations.publish(slot, number)
            case Try(slot, number):
                bundle = generations.bundle(slot)
                self._names = bundle.names
                self._tryout.begin(bundle, now)
                generations.try_out(slot, number)
            case Withdraw(why):
                if why:
                    log.warning("candidate is taken back", generation=generations.candidate_number, why=why)
                generations.withdraw()
                self._tryout.end()
            case Say():
                self._say(action)

    def _fork(self, attempt: Attempt) -> None:
        self._generations.clear(attempt.slot)
        self._slot = attempt.slot
        try:
            self._pid = fork.spawn(
                f"{fork.TITLE}trial",
                lambda: self._try(attempt),
                closed=self._closed(),
                failed=lambda text: self._generations.store(attempt.slot, Result(os.getpid(), f"error[trial]: {text}")),
            )
        except OSError as refused:  # no memory, or too many processes
            self._not_started = f"the trial cannot be started: {refused}"

    def _try(self, attempt: Attempt) -> int:
        fork.end_with(self._instance.parent_pid)  # otherwise a trial that hangs would keep the lock of the instance
        os.setpgid(0, 0)  # so that the parent can also end the processes that a plugin starts
        return self._trial(self._instance, attempt)

    def _kill(self) -> None:
        """Kills the trial child and its process group, unless the parent has reaped it."""
        if self._pid:
            self._kill_group()
            os.kill(self._pid, signal.SIGKILL)  # it may have no group yet

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)

    def _say(self, said: Say) -> None:
        """Notes what has ended and what is under way, for the status."""
        generation = self._generations.number
        ended = said.finished > self._last.finished
        if ended:
            findings = {"findings": said.text} if said.text else {}
            (log.info if said.successful else log.error)("reload", successful=said.successful, generation=generation, **findings)
        self._last = msgspec.structs.replace(
            self._last,
            finished=said.finished,
            answered=said.answered,
            owed=said.owed,
            busy=said.busy,
            successful=said.successful,
            text=said.text[:TEXT_MAX],
            at=time.time() if ended else self._last.at,
        )

    def _write(self) -> None:
        bundle = self._generations.current()
        self._last = msgspec.structs.replace(
            self._last, generation=bundle.number, hash=bundle.hash, source=bundle.source, since=bundle.at, tryout=self._tryout.status()
        )
        self._status.write(0, reload_status.encode(self._last))


def lagging(instance: Instance) -> list[int]:
    """Returns the seats whose processes serve, but do not use what the words of `Generations` name."""
    lanes, generations = instance.memory.lanes, instance.generations
    wanted = [(generations.number, generations.candidate_number)] * instance.layout.seats
    wanted[SUPERVISOR] = generations.number, 0  # it uses no candidate
    used = zip(lanes.scalars(GENERATION), lanes.scalars(CANDIDATE), strict=True)
    return [seat for seat, pair in enumerate(used) if lanes.serving(seat) and pair != wanted[seat]]
