"""Replays an hour of traffic: `python -m tests.bench.replay_hour`.

An hour of 100 requests per second with prompts of 8 KB is recorded in virtual time through the code of workers and supervisor
(`tests.bench.recorded`). Then `epp record replay` replays it in another process. Goals: at most 200 MB, and at most 60 s on one core.
"""

import argparse
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from epp.config.load import load
from epp.decision.decision import Decision, Usage
from epp.recording.records import Member
from epp.request import Request
from loadtest.demo.children import environment
from loadtest.replay.reading import Asked, Lifetime
from loadtest.replay.run import Replay, World, world
from loadtest.replay.servers import UNBOUNDED, Job, Speed
from tests.bench.recorded import Writer

RATE = 100.0
PROMPT_TOKENS = 2_048  # 8 KB
BLOCK_TOKENS = 64
BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS
PREFIXES, PREFIX_BLOCKS = 400, 16
OUTPUT_TOKENS = (20, 120)
SERVERS = 8
CACHE_TOKENS = 600_000
SPEED = Speed("steps", 0.004, 40e-6, 0.012, 0.004, 8192, UNBOUNDED, CACHE_TOKENS, 0, 0.0)
SCRAPE_S = 0.25  # as often as a recording gets new values here; the picker's default is 50 ms, but values rarely change


def requests(seconds: float, seed: int) -> list[Asked]:
    """Makes the traffic: half of a prompt is one of PREFIXES, the rest is its own."""
    rng = random.Random(seed)
    words = np.random.default_rng(seed)
    prefixes = words.integers(1 << 62, size=(PREFIXES, PREFIX_BLOCKS), dtype=np.uint64)
    at, made = 0.0, []
    while (at := at + rng.expovariate(RATE)) < seconds:
        own = words.integers(1 << 62, size=BLOCKS - PREFIX_BLOCKS, dtype=np.uint64)
        hashes = prefixes[rng.randrange(PREFIXES)].tobytes() + own.tobytes()
        output = rng.randint(*OUTPUT_TOKENS)
        made.append(
            Asked(
                at, "model", "", rng.randrange(1, 50), 0, None, True, 4 * PROMPT_TOKENS + 100, output, PROMPT_TOKENS, BLOCK_TOKENS, hashes,
                (), (), 0.0, PROMPT_TOKENS, output, 0, 0.0, 0.0, None, 0, True,
            )
        )  # fmt: skip
    return made


class Recorded(Replay):
    """A replay that is recorded, so that its recording has the sizes and times of real traffic."""

    def __init__(self, world: World, folder: Path) -> None:
        config = load(None, "default")
        super().__init__(config, world)
        self._writer = Writer(folder, self._fleet.candidates(None).snapshot.endpoints)
        self._writer.use(config.pipeline)
        self._numbers: dict[int, int] = {}
        self._at(SCRAPE_S, self._scraped, None)

    def run(self) -> Any:
        done = super().run()
        self._writer.end()
        return done

    def _send(self, number: int, request: Request, decision: Decision, now: float) -> None:
        self._numbers[number] = self._writer.decided(request, decision, self._run.at[number].item(), now)
        super()._send(number, request, decision, now)

    def _end(self, job: Job, at: float) -> None:
        run, number = self._run, job.number
        usage = Usage(job.prompt, job.output, job.cached)
        self._writer.ended(self._numbers.pop(number), int(run.target[number]), run.at[number].item(), run.first_s[number].item(), at, usage)
        super()._end(job, at)

    def _scraped(self, now: float, what: None) -> None:
        rows = [(s.running, len(s.waiting), CACHE_TOKENS) for s in self._fleet.servers]
        self._writer.scraped(now, rows, [1] * SERVERS)
        if self._open or self._arrivals.due < float("inf"):
            self._at(now + SCRAPE_S, self._scraped, None)


def record(folder: Path, seconds: float, seed: int) -> int:
    """Records the traffic. Returns the number of requests."""
    made = requests(seconds, seed)
    endpoints = [
        Lifetime(Member(0.0, True, slot, 0, "default", f"pod-{slot}", f"10.0.0.{slot + 1}:8000", {}), 0.0, float("inf"), ())
        for slot in range(SERVERS)
    ]
    Recorded(world(made, endpoints, [SPEED] * SERVERS, open=True, clients=0), folder).run()
    return len(made)


def main() -> int:
    parser = argparse.ArgumentParser(prog="replay_hour", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600.0, help="length of the recording (default 3600)")
    parser.add_argument("--keep", type=Path, help="write the recording here and keep it")
    parser.add_argument("--seconds-max", type=float, default=0.0, help="fail if the replay takes more CPU time")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        begun = time.process_time()
        count = record(folder, options.seconds, seed=1)
        size = sum(file.stat().st_size for file in folder.iterdir())
        print(f"{count:,} requests recorded in {size / 1e6:.1f} MB ({time.process_time() - begun:.0f} s of CPU)", flush=True)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "workers", "replay", str(folder)], env=environment(), check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"replayed in {seconds:.1f} s of CPU, {seconds / count * 1e6:.0f} us a request, {after.ru_maxrss / 1e3:.0f} MB")
    return int(bool(options.seconds_max) and seconds > options.seconds_max)


if __name__ == "__main__":
    sys.exit(main())
