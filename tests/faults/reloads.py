"""`python -m tests.faults.reloads --kills 300`: kills processes of a picker at random points of a reload.

Each round changes the configuration, waits for a random part of a reload's duration, and kills one process with SIGKILL: a worker, the
supervisor, or the trial child. Then all workers have to serve with one configuration, the old or the new.

In every tenth round, it is the parent of a picker of its own. The picker ends with it: meanwhile, each worker has the old configuration or
the new one, and afterwards no process, segment or file is left.

A process that is killed within 2 s of its start gets its successor late, on purpose. So a round takes only processes that are older.
"""

import argparse
import contextlib
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

from loadtest.demo.children import command_name, descendants
from tests.bench.reload import WORKERS, configurations, replace, started, watch
from tests.e2e.cluster import Cluster, Picker
from tests.faults.storm import STABLE_S
from tests.faults.watch import SUPERVISOR, Watched, alive
from workers.cli.reload import Watched as Reloads

DELAY_MAX_S = 0.8  # about the duration of a reload
LOOK_S = 0.005
END_S = 60.0
RELOAD_S = 60.0
PARENT_EVERY = 10


class Rounds:
    """Does the rounds, and measures after each kill how long it takes until all workers serve with one configuration."""

    def __init__(self, picker: Picker, reloads: Reloads, config: Path, endpoints: Path, rng: random.Random) -> None:
        self._watched = Watched(picker.child.pid, picker.instance, picker.grpc)
        self._reloads = reloads
        self._config = config
        self._texts = configurations(endpoints)
        next(self._texts)  # the picker began with it
        self._rng = rng
        self._since: dict[tuple[int, int], float] = {}  # (ordinal, pid) -> when it was first seen
        self.killed: Counter[str] = Counter()
        self.seconds: list[float] = []
        self.ends: Counter[str] = Counter()

    def run(self) -> None:
        """Does one round."""
        victims = self._ripe()
        status = self._reloads.status()
        assert status is not None
        replace(self._config, next(self._texts))
        time.sleep(self._rng.random() * DELAY_MAX_S)
        kind, ordinal, pid = self._victim(victims)
        starts = self._watched.generation(ordinal) if ordinal >= 0 else 0
        killed = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self.killed[kind] += 1
        while not (self.whole() and (ordinal < 0 or self._watched.up(ordinal, starts))):
            if time.monotonic() - killed > END_S:
                raise AssertionError(f"after the end of a {kind}: workers use {self._reloads.generations()}")
            time.sleep(LOOK_S)
        self.seconds.append(time.monotonic() - killed)
        self._settle(status.finished, killed)
        after = self._reloads.status()
        assert after is not None
        self.ends["new" if after.generation > status.generation and after.successful else "old"] += 1

    def whole(self) -> bool:
        """Returns whether all processes serve, and all workers use the same configuration."""
        used = self._reloads.generations()
        return len(used) == WORKERS and len(set(used)) == 1 and self._watched.areas.serving(SUPERVISOR)

    def _settle(self, finished: int, begun: float) -> None:
        """Waits until the reload has ended, and all workers use its result."""
        while True:
            status = self._reloads.status()
            done = status is not None and status.finished > finished and not status.busy and self.whole()
            if status is not None and done and set(self._reloads.generations()) == {status.generation}:
                return
            if time.monotonic() - begun > RELOAD_S:
                raise AssertionError(f"the reload has not ended: {status}, workers use {self._reloads.generations()}")
            time.sleep(LOOK_S)

    def _ripe(self) -> list[int]:
        """Waits for ordinals with processes that are old enough to be killed, and returns them."""
        while True:
            children = self._watched.children()
            now = time.monotonic()
            self._since = {child: self._since.get(child, now) for child in children.items()}
            ripe = [ordinal for (ordinal, _), since in self._since.items() if now - since > STABLE_S]
            if ripe:
                return ripe
            time.sleep(0.05)

    def _victim(self, ordinals: list[int]) -> tuple[str, int, int]:
        """Chooses the process to kill. Returns its kind, its ordinal (-1: it has none), and its pid."""
        trials = [pid for pid in descendants(self._watched.pid) if command_name(pid) == "epp: trial"]
        if trials and self._rng.random() < 1 / 3:
            return "trial", -1, trials[0]
        ordinal = self._rng.choice(ordinals)
        return "supervisor" if ordinal == SUPERVISOR else "worker", ordinal, self._watched.children()[ordinal]


def kill_parent(rng: random.Random) -> float:
    """Kills the parent of a new picker during a reload. Returns the seconds until nothing of the picker was left."""
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(Cluster())
        picker, config, _, endpoints = stack.enter_context(started(cluster))
        reloads = stack.enter_context(contextlib.closing(watch(cluster, picker)))
        texts = configurations(endpoints)
        next(texts)  # the picker began with it
        replace(config, next(texts))
        time.sleep(rng.random() * DELAY_MAX_S)
        pids = descendants(picker.child.pid)
        os.kill(picker.child.pid, signal.SIGKILL)
        killed = time.monotonic()
        picker.child.process.wait()
        while left := remains(pids, picker.instance, cluster.directory / "run"):
            assert set(reloads.generations()) <= {1, 2}, "a worker uses neither configuration"
            assert time.monotonic() - killed < END_S, f"{left} remain"
            time.sleep(LOOK_S)
        return time.monotonic() - killed


def remains(pids: list[int], instance: str, run_dir: Path) -> list[object]:
    """Returns the processes and files of a picker that still exist."""
    files = [file for folder in (run_dir, Path("/dev/shm")) for file in folder.iterdir() if instance in file.name]
    return [*(pid for pid in pids if alive(pid)), *files]


def run(kills: int, within_s: float, seed: int) -> int:
    """Does all rounds. Returns 0 if none took longer than `within_s`."""
    rng = random.Random(seed)
    parents = [kill_parent(rng) for _ in range(kills // PARENT_EVERY)]
    kills -= len(parents)
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(Cluster())
        picker, config, _, endpoints = stack.enter_context(started(cluster))
        reloads = stack.enter_context(contextlib.closing(watch(cluster, picker)))
        rounds = Rounds(picker, reloads, config, endpoints, rng)
        for number in range(1, kills + 1):
            rounds.run()
            if number % 20 == 0 or number == kills:
                print(f"{number:4} of {kills} killed, longest {max(rounds.seconds):.2f} s", flush=True)
    took = sorted(rounds.seconds)
    late = sum(seconds > within_s for seconds in took)
    print(f"killed            {', '.join(f'{kind} {count}' for kind, count in rounds.killed.items())}")
    print(f"afterwards        {', '.join(f'{kind} configuration {count}' for kind, count in rounds.ends.items())}")
    print(
        f"one configuration median {statistics.median(took):.2f} s, p99 {took[int(0.99 * (len(took) - 1))]:.2f} s, longest {took[-1]:.2f} s"
    )
    if parents:
        print(
            f"killed parents    {len(parents)}: nothing left after median {statistics.median(parents):.2f} s, longest {max(parents):.2f} s"
        )
    print(f"later than {within_s:g} s    {late}")
    return 1 if late else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.reloads", description=__doc__)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--within-s", type=float, default=2.0, help="how long workers may take")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    return run(given.kills, given.within_s, given.seed)


if __name__ == "__main__":
    sys.exit(main())
