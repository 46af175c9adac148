"""Changes the configuration of a running picker, in the parent. Makes one attempt at a time.

    asked ─▶ trial: a child reads, loads and proves it ─▶ publish: one word ─▶ spread: children take over ─▶ done
               │ refused, or TRIAL_S are over                                     │ one cannot, or SPREAD_S are over
               ▼                                                                  ▼
             the configuration stays                                            publish the one before

The parent runs no code of the configuration, which could hang or crash it. It forks the trial child, reads the child's offer, and stores
the number. If a child dies during the spread, its successor loads the configuration in force before it serves.
A candidate goes through the same steps, but its number goes into a second word: workers then use it beside the configuration in force
(`tryout`). To promote the candidate, the parent publishes it. To roll it back, the parent clears the second word.
If children crash CRASHES times within WATCH_S after a change, the parent takes the change back. If several reloads are asked for during
an attempt, the parent makes one attempt for all of them afterwards.
A trial is about the configuration in force. So when the parent takes that back meanwhile, it ends the trial, and makes the attempt again
after the spread. A trial child keeps its file and its number until the parent has reaped it.
"""

import contextlib
import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec
import structlog

from shm.documents import DocumentWriter
from workers.host.exit_codes import INTENDED, ending
from workers.process import asks, fork
from workers.process.asks import Ask
from workers.process.generations import Attempt, Bundle, Generations, Offer, Slots
from workers.process.instance import Instance
from workers.process.layout import CANDIDATE, GENERATION, Names
from workers.process.reports import Report
from workers.process.restart import SUPERVISOR
from workers.process.tryout import Tryout
from workers.shared import reload_status
from workers.shared.reload_status import TEXT_MAX, ReloadStatus

TRIAL_S: Final = 10.0
SPREAD_S: Final = 10.0  # long, because a busy machine loads slowly. Beats show earlier which children hang
WATCH_S: Final = 10.0
CRASHES: Final = 2
ASKS_MAX: Final = 8

Trial = Callable[[Instance, Attempt], int]  # the main function of a trial child: writes its offer into `Attempt.slot`

log = structlog.get_logger()


class Reloads:
    """Makes attempts to change the configuration, one at a time. `trial`: runs in a child of its own."""

    def __init__(self, instance: Instance, trial: Trial) -> None:
        self._instance = instance
        self._trial = trial
        self._generations: Generations = instance.generations
        self._slots = Slots(self._generations.number)
        self._status = DocumentWriter(reload_status.SCHEMA, instance.memory.reload)
        self._tryout = Tryout(instance)
        self._names = instance.layout.names
        self._asked = False
        self._asks: deque[Ask] = deque()
        self._attempt: Attempt | None = None  # what is tried
        self._pid = 0  # the trial child; 0: none runs
        self._late = False  # whether the trial took longer than TRIAL_S
        self._again = (
            False  # whether the attempt is made again, because the configuration in force has changed meanwhile
        )
        self._trial_until = 0.0
        self._spread_until = 0.0
        self._spreading = ""  # the gauge that must show the new number in all children; "": nothing spreads
        self._watched_until = 0.0  # crashes until then count against the configuration
        self._crashes = 0
        self._stays = 0  # the number of a configuration that cannot be taken back; 0: none
        self._last = ReloadStatus(0, "", "", 0.0)
        if self._generations.number:
            self._say()

    def ask(self) -> None:
        """Asks for an attempt with the picker's files as they are now. It begins at once, or after the present attempt."""
        self._asked = True

    def hang_up(self) -> None:
        """Acts on SIGHUP: queues the command that waits (`asks`). If none waits, asks for a reload of the files."""
        options = self._instance.options
        try:
            command = asks.take(options.run_dir, options.instance)
        except asks.Refused as refused:
            log.error("command is not obeyed", why=str(refused))
            return
        if command is None:
            log.info("the configuration is loaded again")
            self.ask()
        elif len(self._asks) < ASKS_MAX:
            log.info("command", what=command.what, **({"source": command.source} if command.source else {}))
            self._asks.append(command)

    @property
    def busy(self) -> bool:
        return bool(self._spreading) or self._attempt is not None

    def next_deadline(self, now: float) -> float:
        """Returns the seconds until `look` must be called, even if no event comes before."""
        if self._pid or self._spreading:
            trial, spread = (self._trial_until if self._pid else math.inf), self._spread_until
            return max(0.0, min(trial, spread if self._spreading else math.inf) - now)
        if self._again or (not self.busy and (self._asked or self._asks)):
            return 0.0
        return math.inf if self.busy else self._tryout.next_deadline(now)

    def look(self, now: float, closed: list[int]) -> None:
        """Ends a trial or a spread that has taken too long, and begins the next attempt.

        `closed`: the descriptors that a trial child closes.
        """
        if self._pid and now >= self._trial_until:
            self._kill()  # `ended` does the rest when the parent reaps the child
            self._late, self._trial_until = True, now + TRIAL_S
        if self._spreading:
            self._look_at_children(now)
        if (why := self._tryout.look(now)) is not None and not self.busy:
            if why:
                self._take_back(f"it is worse: {why}", now)
            else:
                self._say()
        if self._again and self._attempt is not None and not (self._pid or self._spreading):
            self._begin(self._attempt.ask, now, closed)
        elif self._asked and not self.busy:
            self._asked = False
            self._begin(None, now, closed)
        elif self._asks and not self.busy:
            self._obey(self._asks.popleft(), now, closed)

    def ended(self, pid: int, code: int, now: float) -> bool:
        """Acts on the end of a child, which the parent has reaped. Returns whether it was the trial child."""
        attempt = self._attempt
        if pid != self._pid or attempt is None:
            return False
        self._kill_group()  # ends the processes that a plugin may have left there
        self._pid, self._slots.trial = 0, None
        if self._again:
            return True
        offer = self._generations.offered(attempt.slot)
        if offer is None or offer.pid != pid:
            why = (
                f"it took more than {TRIAL_S:g} s"
                if self._late
                else f"its process ended before it was done: {ending(code)}"
            )
            offer = Offer(pid, f"error[trial]: the configuration was tried in a process of its own, and {why}")
        self._attempt = None
        if offer.bundle is None:
            self._finish(successful=False, text=offer.text)
        elif attempt.ask is not None:
            self._try_out(offer.bundle, attempt.slot, offer.text, now)
        else:
            self._publish(offer.bundle, attempt.slot, offer.text, now)
        return True

    def heard(self, report: Report, child: str, now: float) -> bool:
        """Acts on the report of a child. `child`: its name. Returns whether the report was about the configuration."""
        if report.changed:
            self.ask()
        elif report.generation and report.text:
            why = f"{child} cannot use it: {report.text}"
            # the child tries one that stays again and again
            if report.generation == self._generations.number != self._stays:
                self._go_back(why, now)
            elif report.generation == self._tryout.number:
                self._take_back(why, now)
        return report.changed or report.generation > 0

    def lost(self, child: str, code: int, now: float, *, hung: bool) -> None:
        """Counts the end of a child against a new configuration or the candidate, if the child crashed or hung.

        A SIGKILL that the parent did not send does not count, because it says nothing about the configuration.
        """
        if code in INTENDED or (code == -signal.SIGKILL and not hung):
            return
        if now < self._watched_until:
            self._crashes += 1
            if self._crashes >= CRASHES:
                self._go_back(f"{self._crashes} processes ended with it, the last one was {child}", now)
        elif self._tryout.crashed(now, WATCH_S) >= CRASHES:
            self._take_back(f"{CRASHES} processes ended while it was tried, the last one was {child}", now)

    def stop(self) -> None:
        """Ends a running trial, because the picker ends."""
        if self._pid:
            self._kill()

    def _obey(self, command: Ask, now: float, closed: list[int]) -> None:
        bundle = self._tryout.bundle
        if command.what == "try":
            self._begin(command, now, closed)
        elif command.what == "rollback" and bundle is None:
            self._go_back("epp config rollback", now, successful=True)
        elif command.what == "rollback":
            self._take_back("epp config rollback", now, successful=True)
        elif bundle is None:
            text = "error[no-candidate]: no configuration is tried: `epp config try FILE` begins to try one"
            self._finish(successful=False, text=text)
        else:
            self._publish(bundle, self._tryout.slot, "", now)

    def _begin(self, command: Ask | None, now: float, closed: list[int]) -> None:
        number, slot = self._slots.take()
        attempt = Attempt(slot, number, self._names, command)
        self._generations.clear(slot)
        self._late, self._again, self._trial_until = False, False, now + TRIAL_S
        try:
            self._pid = fork.spawn(
                f"{fork.TITLE}trial",
                lambda: self._try(attempt),
                closed=closed,
                failed=lambda text: self._generations.offer(attempt.slot, Offer(os.getpid(), f"error[trial]: {text}")),
            )
        except OSError as refused:  # no memory, or too many processes
            self._attempt = None
            self._finish(successful=False, text=f"the trial cannot be started: {refused}")
            return
        self._attempt, self._slots.trial = attempt, slot
        self._say(busy=True)

    def _try(self, attempt: Attempt) -> int:
        fork.end_with(self._instance.parent_pid)  # otherwise a trial that hangs would keep the lock of the instance
        os.setpgid(0, 0)  # so that the parent can also end the processes that a plugin starts
        return self._trial(self._instance, attempt)

    def _kill(self) -> None:
        """Kills the trial child, which the parent has not reaped yet, and its process group."""
        self._kill_group()
        os.kill(self._pid, signal.SIGKILL)  # it may have no group yet

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)

    def _publish(self, bundle: Bundle, slot: int, text: str, now: float) -> None:
        replaced = self._tryout.number not in (0, bundle.number)
        self._slots.add(bundle.number, slot, equal=self._generations.equal_to(bundle, self._slots.kept))
        if replaced:
            text = "\n".join(filter(None, (text, self._no_longer(text="the configuration in force changes"))))
            self._end_tryout()
        self._names = bundle.names
        # Comes before the end of the tryout, so that a worker that promotes the candidate keeps the candidate's pipeline.
        self._generations.publish(slot, bundle.number)
        if not replaced:
            self._end_tryout()
        self._watched_until, self._crashes = now + WATCH_S, 0
        self._spread(GENERATION, text, now)

    def _try_out(self, bundle: Bundle, slot: int, text: str, now: float) -> None:
        """Lets workers use this candidate from now on. Another candidate that is tried is withdrawn."""
        self._end_tryout()
        self._slots.candidate = slot
        self._names = bundle.names
        self._tryout.begin(bundle, slot, now)
        self._generations.try_out(slot, bundle.number)
        self._spread(CANDIDATE, text, now)

    def _spread(self, gauge: str, text: str, now: float) -> None:
        self._spreading, self._spread_until = gauge, now + SPREAD_S
        self._last = self._last_with(text=text)
        self._say(busy=True)
        self._wake()

    def _wake(self) -> None:
        for wakeup in self._instance.pipes.wakeups:
            os.eventfd_write(wakeup, 1)

    def _look_at_children(self, now: float) -> None:
        generations = self._generations
        behind = lagging(self._instance)
        if not behind:
            self._spreading = ""
            tried = {"candidate": number} if (number := generations.candidate_number) else {}
            log.info("configuration in force in all processes", generation=generations.number, **tried)
            self._finish(successful=self._last.successful, text=self._last.text)
        elif now >= self._spread_until:
            why = f"processes in seats {behind} do not use it after {SPREAD_S:g} s"
            if self._spreading == GENERATION:
                self._go_back(why, now)
            elif self._tryout.number:
                self._take_back(why, now)
            else:  # they go on with a candidate that was withdrawn
                self._spreading = ""
                self._finish(successful=False, text=f"{self._last.text}; {why}")

    def _go_back(self, why: str, now: float, *, successful: bool = False) -> None:
        """Publishes the configuration before the present one, under a new number.

        `successful`: whether an operator asked for it. Otherwise the status shows a failed reload.
        """
        before, number = self._slots.before(), self._generations.number
        text = f"{'' if successful else 'error[rolled-back]: '}generation {number} is taken back: {why}"
        self._spreading, self._watched_until = "", 0.0
        offer = self._generations.offered(before[1]) if before is not None else None
        if before is None or offer is None or offer.bundle is None:
            self._stays = number
            text = f"error[no-generation]: generation {number} stays: there is no good one before it ({why})"
            self._finish(successful=False, text=text)
            return
        (log.info if successful else log.error)("configuration is taken back", generation=number, why=why)
        if self._attempt is not None:
            self._again = True
            if self._pid:
                self._kill()
        again, slot = self._slots.take()
        bundle = restored(offer.bundle, again, self._names)
        self._generations.offer(slot, Offer(os.getpid(), "", bundle))
        self._slots.kept = [kept for kept in self._slots.kept if kept[0] != number]
        self._publish(bundle, slot, text, now)
        self._watched_until = 0.0  # crashes do not count against a configuration that was good before
        self._last = self._last_with(successful=successful)

    def _take_back(self, why: str, now: float, *, successful: bool = False) -> None:
        """Withdraws the candidate. `successful`: whether an operator asked for it. Otherwise the status shows a failure."""
        text = self._no_longer(why)
        (log.info if successful else log.error)("candidate is taken back", generation=self._tryout.number, why=why)
        self._end_tryout()
        if successful:
            self._spread(CANDIDATE, text, now)
            return
        self._wake()
        self._finish(successful=False, text=f"error[rolled-back]: {text}")

    def _no_longer(self, text: str) -> str:
        return f"candidate {self._tryout.number} is taken back: {text}"

    def _end_tryout(self) -> None:
        self._generations.withdraw()
        self._tryout.end()
        self._slots.candidate = None
        if self._spreading == CANDIDATE:
            self._spreading = ""

    def _finish(self, *, successful: bool, text: str) -> None:
        """Says what has ended. It counts as the end of an attempt, unless the picker did it by itself during an attempt."""
        last = self._last_with(successful=successful, text=text)
        self._last = msgspec.structs.replace(last, finished=last.finished + (self._attempt is None), at=time.time())
        write = log.info if successful else log.error
        write(
            "reload", successful=successful, generation=self._generations.number, **({"findings": text} if text else {})
        )
        self._say(busy=self._attempt is not None)

    def _last_with(self, *, successful: bool = True, text: str | None = None) -> ReloadStatus:
        kept = self._last.text if text is None else text[:TEXT_MAX]
        return msgspec.structs.replace(self._last, successful=successful, text=kept)

    def _say(self, *, busy: bool = False) -> None:
        bundle = self._generations.current()
        self._last = msgspec.structs.replace(
            self._last,
            generation=bundle.number,
            hash=bundle.hash,
            source=bundle.source,
            since=bundle.at,
            busy=busy,
            tryout=self._tryout.status(),
        )
        self._status.write(0, reload_status.encode(self._last))


def restored(before: Bundle, number: int, names: Names) -> Bundle:
    """Returns an earlier configuration under a new number.

    `names`: the present names, because places in shared memory that later configurations have taken stay taken.
    """
    return Bundle(
        number,
        before.source,
        before.text,
        before.plugin_path,
        before.plugins,
        names,
        time.time(),
        followed=False,
    )


def lagging(instance: Instance) -> list[int]:
    """Returns the seats whose processes serve, but do not use what the words of `Generations` name."""
    lanes, generations = instance.memory.lanes, instance.generations
    wanted = [(generations.number, generations.candidate_number)] * instance.layout.seats
    wanted[SUPERVISOR] = generations.number, 0  # it uses no candidate
    used = zip(lanes.scalars(GENERATION), lanes.scalars(CANDIDATE), strict=True)
    return [seat for seat, pair in enumerate(used) if lanes.serving(seat) and pair != wanted[seat]]
