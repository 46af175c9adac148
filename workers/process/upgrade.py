"""Does the parent's part of an upgrade in place: executes the installed program, which then takes over the children.

`handover` defines what one program passes to the next, `renewal` the order in which children are replaced.
"""

import os
import signal
import sys
import time
from collections.abc import Collection

import structlog

from workers.host.build import commit
from workers.process.handover import Handover, execute
from workers.process.instance import Instance
from workers.process.reload import Reloads
from workers.process.renewal import Renewal
from workers.process.reports import Report
from workers.process.restart import SUPERVISOR, Policy, seat_name
from workers.process.resumption import STATE, renewed

log = structlog.get_logger()


class Upgrade:
    """Upgrades one parent. `pids`: its children, pid -> seat. `reloads`: None if the parent can neither reload nor be upgraded."""

    def __init__(
        self,
        instance: Instance,
        policy: Policy,
        pids: dict[int, int],
        reloads: Reloads | None,
        caught: Collection[signal.Signals],
    ) -> None:
        """`caught`: the signals that the parent handles."""
        self._instance = instance
        self._policy = policy
        self._pids = pids
        self._reloads = reloads
        self._caught = caught
        self._renewal: Renewal | None = None
        # pids of the earlier program's children: they write to the old segments, so this program sees neither their heartbeats nor their
        # generation
        self._of_earlier: set[int] = set()

    def take_over(self, handover: Handover) -> set[int]:
        """Takes over the children of an earlier program of this process. Returns their seats."""
        instance, roll = self._instance, self._instance.roll
        pids = {seat: pid for seat in range(roll.seats) if (pid := roll.pid(seat))}
        self._pids.update((pid, seat) for seat, pid in pids.items())
        workers = [(pid, True) for seat, pid in pids.items() if self._is_worker(seat) and seat not in handover.leaving]
        others = [(pid, False) for seat, pid in pids.items() if not self._is_worker(seat)]
        self._policy.take_over({seat: seat in handover.leaving for seat in pids}, handover.workers, time.monotonic())
        anew = renewed(instance.layout, handover)
        self._of_earlier = set(pids.values()) if anew else set()
        self._count_earlier()
        self._renewal = Renewal([*others, *workers] if anew else [*workers, *others], overlaps=STATE in anew)
        log.info("another program goes on with the picker", commit=commit(), children=len(pids))
        return set(pids)

    def ignores(self, report: Report) -> bool:
        """Whether the parent ignores a report: it is about the configuration of a child that still uses an earlier program's memory."""
        return report.pid in self._of_earlier and (report.generation > 0 or report.changed)

    def excused(self, ages: list[float]) -> list[float]:
        """Returns the ages of beats by seat, with 0 for a process whose beat this program does not see.

        The parent calls this after it has reaped children and before it forks others, because new children may get the pids of reaped ones.
        """
        if not self._of_earlier <= self._pids.keys():
            self._of_earlier &= self._pids.keys()
            self._count_earlier()
        for pid in self._of_earlier:
            ages[self._pids[pid]] = 0.0
        return ages

    def _count_earlier(self) -> None:
        """Tells the supervisor how many workers of the earlier program serve: until their successors do, the picker stays ready."""
        workers = [pid for pid in self._of_earlier if self._is_worker(self._pids[pid])]
        self._instance.words.earlier_workers = len(workers)

    def look(self, now: float) -> None:
        """Replaces the next child of an earlier program. Executes the installed program after a trial has shown that it can take over."""
        reloads = self._reloads
        if reloads is None:
            return
        if self._renewal is not None:
            self._renew(self._renewal, reloads, now)
        if reloads.layouts is not None:
            self._execute(reloads)

    def _renew(self, renewal: Renewal, reloads: Reloads, now: float) -> None:
        step = renewal.next(now, self._pids, missing=self._policy.missing, crowded=self._policy.crowded)
        if step is not None:
            pid, is_worker = step
            seat = self._pids[pid]
            name = seat_name(seat, self._instance.layout.seats)
            log.info("child of the earlier program is replaced", child=name, child_pid=pid)
            os.kill(pid, signal.SIGTERM if is_worker else signal.SIGKILL)
            if is_worker:
                self._policy.leaving(seat, now)
        if renewal.over:
            self._renewal = None
            why = "error[exec]: a new process does not serve, so some of the earlier program stay; see the log"
            reloads.upgraded(successful=not renewal.failed, text=why if renewal.failed else "")

    def _is_worker(self, seat: int) -> bool:
        return SUPERVISOR < seat < self._instance.layout.seats

    def _execute(self, reloads: Reloads) -> None:
        """Replaces this program by the installed one. Returns only if the system refuses."""
        log.info("the program is replaced: its children go on")
        signal.pthread_sigmask(signal.SIG_BLOCK, self._caught)  # an exec keeps this: signals wait for the new program
        try:
            execute(reloads.handed_over(self._policy.workers))
        except OSError as refused:
            reloads.upgraded(successful=False, text=f"error[exec]: {sys.executable} cannot be executed: {refused}")
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self._caught)
