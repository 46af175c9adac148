"""`python -m tests.faults.storm --workers-killed 100 --supervisors-killed 20`: kills the processes of a picker under load.

The test runs a real picker (`epp serve`), simulated model servers, and a small gateway (`tests.faults.client`) that keeps streams open all
the time. It kills workers and supervisors with SIGKILL in random order, and the parent at the end. Meanwhile it checks:

    a worker's death      only streams on its connections are lost, and a successor serves
    a supervisor's death  no request fails, no health probe (every 100 ms) is refused, scrapes continue, no counter decreases
    all the time          whenever load pauses, no load counts as in flight; the parent has the same number of descriptors
    the parent's death    open streams end normally, and then no process, segment, file or socket remains
"""

import argparse
import asyncio
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

from loadtest.demo.ports import is_free
from tests.e2e.cluster import Cluster, Picker
from tests.faults.client import Ending, Gateway
from tests.faults.pages import Prober, Scraper
from tests.faults.watch import SUPERVISOR, Watched, alive, descriptors

CLIENTS = 40
SERVERS = 4
HOLD_MAX_S = 0.25
STABLE_S = 2.1  # the parent delays the successor of a child that dies earlier, on purpose
SUCCESSOR_S = 30.0
SETTLE_S = HOLD_MAX_S + 0.1  # a held stream notices its loss when it wakes: count it for this kill, not for the next
PAUSE_EVERY = 10
QUIET_S = 20.0
END_S = 30.0


class Storm:
    """Does one run: makes the load, kills processes, and collects what goes wrong."""

    def __init__(self, picker: Picker, run_dir: Path, rng: random.Random) -> None:
        self.picker = picker
        self.run_dir = run_dir
        self.rng = rng
        self.watched = Watched(picker.child.pid, picker.instance, picker.grpc)
        self.gateway = Gateway(picker.grpc)
        self.scraper, self.prober = Scraper(picker.metrics), Prober(picker.health)
        self.endings: Counter[Ending] = Counter()
        self.lost_on: list[int] = []  # ports of lost streams since the last kill
        self.delays: dict[str, list[float]] = {"worker": [], "supervisor": []}
        self.wrong: list[str] = []
        self.pauses = 0
        self._since: dict[int, float] = {}
        self._run = asyncio.Event()
        self._busy = 0
        self._numbers = iter(range(1 << 40))

    async def run(self, workers_killed: int, supervisors_killed: int) -> None:
        self._run.set()
        load = [asyncio.create_task(self._client()) for _ in range(CLIENTS)]
        watching = [asyncio.create_task(self.scraper.run()), asyncio.create_task(self.prober.run())]
        tasks = [*load, *watching]
        await asyncio.sleep(1)
        before = descriptors(self.watched.pid)
        kills = ["worker"] * workers_killed + ["supervisor"] * supervisors_killed
        self.rng.shuffle(kills)
        for number, kind in enumerate(kills, 1):
            await self._kill(kind)
            if number % PAUSE_EVERY == 0 or number == len(kills):
                await self._pause()
                self._say(number, len(kills))
            self._check_tasks(tasks)
        if (after := descriptors(self.watched.pid)) != before:
            self.wrong.append(f"the parent had {before} descriptors and now has {after}")
        for task in watching:
            task.cancel()
        await self._kill_parent()
        await self.gateway.close()
        for task in load:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _client(self) -> None:
        while True:
            await self._run.wait()
            self._busy += 1
            hold_s = self.rng.random() * HOLD_MAX_S
            ending, stream = await self.gateway.exchange(next(self._numbers), hold_s=hold_s)
            self._busy -= 1
            self.endings[ending] += 1
            if ending is Ending.LOST:
                self.lost_on.append(stream.connection.port)

    async def _kill(self, kind: str) -> None:
        ordinal = await self._victim(kind)
        await asyncio.sleep(self.rng.random() * 0.1)
        children = self.watched.children()
        spared = set().union(*(self.watched.client_ports(pid) for s, pid in children.items() if s not in (ordinal, SUPERVISOR)))
        generation, killed = self.watched.generation(ordinal), time.monotonic()
        os.kill(children[ordinal], signal.SIGKILL)
        while not self.watched.up(ordinal, generation):
            if time.monotonic() - killed > SUCCESSOR_S:
                raise AssertionError(f"no successor for the {kind} in ordinal {ordinal} within {SUCCESSOR_S:g} s")
            await asyncio.sleep(0.002)
        self._since[ordinal] = time.monotonic()
        self.delays[kind].append(self._since[ordinal] - killed)
        await asyncio.sleep(SETTLE_S)
        lost, self.lost_on = self.lost_on, []
        if kind == "supervisor" and lost:
            self.wrong.append(f"{len(lost)} streams lost when a supervisor was killed")
        if unrelated := [port for port in lost if port in spared]:
            self.wrong.append(f"{len(unrelated)} streams lost on connections of workers that were not killed")

    async def _victim(self, kind: str) -> int:
        """Waits for an ordinal with a child that has served long enough, and returns it."""
        while True:
            ordinals = [SUPERVISOR] if kind == "supervisor" else self.watched.serving()
            ripe = [s for s in ordinals if time.monotonic() - self._since.setdefault(s, 0.0) > STABLE_S]
            if ripe:
                return self.rng.choice(ripe)
            await asyncio.sleep(0.02)

    async def _pause(self) -> None:
        """Stops the load for a moment, and checks that all counts are exact."""
        self._run.clear()
        await self._wait(lambda: self._busy == 0, "streams did not end when load paused")
        watched = self.watched
        quiet = lambda: watched.in_flight() == 0 and sum(watched.gauges("streams")) == 0  # noqa: E731
        await self._wait(quiet, "counts are not 0 without load")
        self.pauses += 1
        self._run.set()

    async def _kill_parent(self) -> None:
        """Kills the parent under load. The load then ends by itself."""
        pids = [self.watched.pid, *self.watched.children().values()]
        bad = self.endings[Ending.LOST] + self.endings[Ending.REFUSED]
        os.kill(self.watched.pid, signal.SIGKILL)
        self.picker.child.process.wait()
        await asyncio.sleep(0.2)
        self._run.clear()
        await self._wait(lambda: self._busy == 0, "streams did not end after the parent was killed")
        if (failed := self.endings[Ending.LOST] + self.endings[Ending.REFUSED] - bad) > 0:
            self.wrong.append(f"{failed} streams failed when the parent was killed")
        await self._wait(lambda: not any(map(alive, pids)), "processes remain", END_S)
        for left in (*Path("/dev/shm").glob(f"{self.picker.instance}-*"), *self.run_dir.iterdir()):
            self.wrong.append(f"{left} remains")
        for port in (self.picker.grpc, self.picker.health, self.picker.metrics):
            if not is_free(port, "0.0.0.0"):
                self.wrong.append(f"port {port} is still bound")

    async def _wait(self, happened, what: str, seconds: float = QUIET_S) -> None:
        end = time.monotonic() + seconds
        while not happened():
            if time.monotonic() > end:
                self.wrong.append(f"{what}: not within {seconds:g} s")
                return
            await asyncio.sleep(0.01)

    def _check_tasks(self, tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            if task.done():
                task.result()

    def _say(self, number: int, total: int) -> None:
        print(
            f"{number:4} of {total} killed: {self.endings[Ending.OK]} streams ok, {self.endings[Ending.LOST]} lost, "
            f"{self.scraper.pages} scrapes, {len(self.wrong)} findings",
            flush=True,
        )

    def verdict(self) -> int:
        """Prints the table. Returns the exit code."""
        answers = self.prober.answers
        if refused := {name: n for name, n in answers.items() if name not in ("serving", "cut")}:
            self.wrong.append(f"health probes: {refused}")
        self.wrong += [f"scrape failed: {text}" for text in self.scraper.failed[:5]]
        self.wrong += [f"counter fell: {text}" for text in self.scraper.fallen[:5]]
        if self.gateway.refused:
            self.wrong.append(f"{self.gateway.refused} connections refused")
        if self.endings[Ending.REFUSED]:
            self.wrong.append(f"{self.endings[Ending.REFUSED]} requests refused")
        rows = [
            ("streams", ", ".join(f"{ending.value} {n}" for ending, n in self.endings.items())),
            *((f"{kind}s killed", _delays(delays)) for kind, delays in self.delays.items()),
            ("pauses with exact counts", str(self.pauses)),
            ("health probes", ", ".join(f"{name} {n}" for name, n in answers.items())),
            ("scrapes", f"{self.scraper.pages}, {self.scraper.cut} cut by a kill and repeated"),
            ("findings", str(len(self.wrong))),
        ]
        print("\n".join(f"{name:26} {text}" for name, text in rows))
        for text in self.wrong:
            print(f"WRONG: {text}")
        return 1 if self.wrong else 0


def _delays(delays: list[float]) -> str:
    if not delays:
        return "0"
    most = sorted(delays)
    middle, high = statistics.median(most), most[min(len(most) - 1, int(len(most) * 0.99))]
    return f"{len(most)}; a successor served after {middle * 1e3:.0f} ms (median), {high * 1e3:.0f} ms (p99)"


def storm(workers_killed: int, supervisors_killed: int, *, workers: int = 4, seed: int = 0) -> int:
    """Runs the whole test. Returns 0 if nothing goes wrong."""
    with Cluster() as cluster:
        run_dir = cluster.directory / "run"
        fleet = cluster.fleet(SERVERS)
        picker = cluster.picker(fleet.file, workers=workers, run_dir=run_dir)
        running = Storm(picker, run_dir, random.Random(seed))
        try:
            asyncio.run(running.run(workers_killed, supervisors_killed))
        except BaseException:
            print(picker.child.tail(), file=sys.stderr)
            raise
        finally:
            if not alive(picker.child.pid):
                cluster.forget(picker.child)
        return running.verdict()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.storm", description=__doc__)
    parser.add_argument("--workers-killed", type=int, default=100)
    parser.add_argument("--supervisors-killed", type=int, default=20)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    return storm(options.workers_killed, options.supervisors_killed, workers=options.workers, seed=options.seed)


if __name__ == "__main__":
    sys.exit(main())
