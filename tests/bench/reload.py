"""`make bench-reload`: streamed answers through Envoy while the configuration is reloaded again and again.

An open loop sends RATE requests per second. A reload is a file that is renamed over the configuration file, which the picker follows
(--config-watch), or an edited plugin file. Printed: failed requests, the time until all workers use the new configuration, the picker's
processing time of requests without and with reloads, and its memory before and after.

The configurations differ in weights, profiles, bands, and in whether there is flow control and a plugin of --plugin-path.
"""

import argparse
import asyncio
import contextlib
import os
import re
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import aiohttp

from loadtest.demo.stack import LOOPBACK
from shm import observe
from tests.e2e.cluster import CHAT, Cluster, Picker, chat
from workers.cli.reload import Watched

SERVERS = 4
WORKERS = 2
FLEET = ("--prefill-us-per-token", "1", "--decode-ms", "5", "--kv-blocks", "200000")
TOKENS = 8
BUCKET = re.compile(r'^llm_d_epp_request_processing_duration_seconds_bucket\{le="([^"]+)"\} (\S+)$', re.MULTILINE)
RESIDENT = re.compile(r'^llm_d_epp_process_resident_memory_bytes\{process="worker[^"]*"\} (\S+)$', re.MULTILINE)
APPLIED_S = 20.0
PLUGIN = """
import numpy as np
from epp.plugin import Candidates, Profile, Request, Scorer, Scores, plugin

@plugin("bench-scorer")
class Bench(Scorer):
    \"\"\"Version {version}.\"\"\"

    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores:
        return np.full(len(candidates), {version} % 2 / 2)
"""


def configurations(endpoints: Path) -> Iterator[str]:
    """Yields configurations without end. Each differs from the one before."""
    for number in range(1 << 30):
        flow, bands, second, foreign = number % 2, number % 3, number % 4 == 1, number % 5 < 2
        plugins = ["{type: queue-scorer}", "{type: kv-cache-utilization-scorer}", "{type: prefix-cache-scorer}"]
        members = [f"{{pluginRef: queue-scorer, weight: {1 + number % 7}}}", "{pluginRef: prefix-cache-scorer, weight: 2}"]
        if second:
            members.append("{pluginRef: kv-cache-utilization-scorer, weight: 1}")
        if foreign:
            plugins.append("{type: bench-scorer}")
            members.append("{pluginRef: bench-scorer, weight: 1}")
        plugins.append(f"{{type: file-discovery, parameters: {{path: {endpoints}}}}}")
        lines = ["apiVersion: llm-d.ai/v1", "kind: EndpointPickerConfig"]
        if flow:
            lines.append("featureGates: [flowControl]")
        lines += ["plugins:", *(f"- {plugin}" for plugin in plugins)]
        lines += ["schedulingProfiles:", "- name: default", "  plugins:", *(f"  - {member}" for member in members)]
        lines += ["dataLayer: {discovery: {endpoints: {pluginRef: file-discovery}}}"]
        if flow:
            lines += ["flowControl:", f"  maxRequests: {1000 + number}", "  priorityBands:"]
            lines += [f"  - {{priority: {10 * band}, maxRequests: {500 + number}}}" for band in range(bands + 1)]
        yield "\n".join(lines) + "\n"


class Load:
    """Sends requests at a fixed rate, whether or not earlier ones were answered. `failed`: what went wrong."""

    def __init__(self, port: int, rate: float) -> None:
        self._url = f"http://{LOOPBACK}:{port}{CHAT}"
        self._rate = rate
        self.sent = 0
        self.failed: list[str] = []
        self._open: set[asyncio.Task[None]] = set()

    async def run(self, over: asyncio.Event) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=60)) as session:
            began = time.monotonic()
            while not over.is_set():
                due = began + self.sent / self._rate
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                self.sent += 1
                task = asyncio.create_task(self._one(session, self.sent))
                self._open.add(task)
                task.add_done_callback(self._open.discard)
            await asyncio.gather(*self._open)

    async def _one(self, session: aiohttp.ClientSession, number: int) -> None:
        body = chat(f"Question {number % 50}: " + "word " * 40, stream=True, max_tokens=TOKENS)
        try:
            async with session.post(self._url, data=body, headers={"content-type": "application/json"}) as response:
                text = await response.read()
            if response.status != 200 or not text.rstrip().endswith(b"[DONE]"):
                self.failed.append(f"{response.status}: {text[:200]!r}")
        except (aiohttp.ClientError, TimeoutError, OSError) as problem:
            self.failed.append(f"{type(problem).__name__}: {problem}")


class Reloaded(NamedTuple):
    """The seconds of each reload until all workers used it, and the number of those that did not come into force."""

    seconds: list[float]
    missed: int


class Reloader:
    """Changes the configuration, and waits until all workers use it."""

    def __init__(self, watched: Watched, config: Path, plugin: Path, endpoints: Path) -> None:
        self._watched = watched
        self._config = config
        self._plugin = plugin
        self._texts = configurations(endpoints)
        next(self._texts)  # the picker began with it

    async def run(self, reloads: int, pause_s: float) -> Reloaded:
        seconds, missed = [], 0
        for number in range(reloads):
            await asyncio.sleep(pause_s)
            status = self._watched.status()
            before = status.generation if status is not None else 0
            begun = time.monotonic()
            if number % 10 == 9:
                replace(self._plugin, PLUGIN.format(version=number))
            else:
                replace(self._config, next(self._texts))
            while not self._in_force(before) and time.monotonic() - begun < APPLIED_S:
                await asyncio.sleep(0.002)
            took = time.monotonic() - begun
            seconds.append(took)
            missed += took >= APPLIED_S
            while (status := self._watched.status()) is not None and status.busy:
                await asyncio.sleep(0.01)
        return Reloaded(seconds, missed)

    def _in_force(self, before: int) -> bool:
        return all(number > before for number in self._watched.generations())


def replace(file: Path, text: str) -> None:
    """Replaces a file by renaming, so that no reader gets a part of it."""
    written = file.with_suffix(".new")
    written.write_text(text)
    os.replace(written, file)


def buckets(picker: Picker) -> dict[float, float]:
    """Reads the histogram of the picker's processing times: upper bound in seconds -> cumulative count."""
    return {float(bound): float(count) for bound, count in BUCKET.findall(picker.page())}


def p99(before: dict[float, float], after: dict[float, float]) -> float:
    """Returns the 99th percentile of the values between two readings, by linear interpolation in its bucket."""
    counts = [(bound, after[bound] - before.get(bound, 0.0)) for bound in sorted(after)]
    wanted = 0.99 * counts[-1][1]
    low, below = 0.0, 0.0
    for bound, count in counts:
        if count >= wanted:
            return low if bound == float("inf") else low + (bound - low) * (wanted - below) / max(count - below, 1e-9)
        low, below = bound, count
    return low


def resident(picker: Picker) -> float:
    """Returns the resident memory of all workers in MiB."""
    return sum(map(float, RESIDENT.findall(picker.page()))) / (1 << 20)


class Figures(NamedTuple):
    """The figures of one run. Times are in seconds, memory is in MiB."""

    sent: int
    failed: list[str]
    reloads: Reloaded
    p99_before: float
    p99_during: float
    memory_before: float
    memory_after: float

    def lines(self) -> list[str]:
        took = sorted(self.reloads.seconds)
        return [
            f"requests          {self.sent}, {len(self.failed)} failed",
            f"reloads           {len(took)}, {self.reloads.missed} not in force within {APPLIED_S:g} s",
            f"in force after    median {1e3 * statistics.median(took):.0f} ms, longest {1e3 * took[-1]:.0f} ms",
            f"processing p99    {1e3 * self.p99_before:.2f} ms without reloads, {1e3 * self.p99_during:.2f} ms with",
            f"memory of workers {self.memory_before:.0f} MiB before, {self.memory_after:.0f} MiB after",
        ]


async def measured(port: int, picker: Picker, reloader: Reloader, rate: float, reloads: int, warm_s: float) -> Figures:
    """Sends load, first alone and then with reloads."""
    load, over = Load(port, rate), asyncio.Event()
    sending = asyncio.create_task(load.run(over))
    await asyncio.sleep(warm_s)
    memory_before, first = resident(picker), buckets(picker)
    await asyncio.sleep(warm_s)
    second = buckets(picker)
    done = await reloader.run(reloads, pause_s=0.05)
    third = buckets(picker)
    await asyncio.sleep(warm_s)
    over.set()
    await sending
    return Figures(load.sent, load.failed, done, p99(first, second), p99(second, third), memory_before, resident(picker))


@contextlib.contextmanager
def started(cluster: Cluster, *flags: str) -> Iterator[tuple[Picker, Path, Path, Path]]:
    """Starts a picker that follows its files. Yields the picker, its configuration file, its plugin file, its endpoints file."""
    fleet = cluster.fleet(SERVERS, *FLEET)
    folder = cluster.directory / "plugins"
    folder.mkdir()
    plugin = folder / "bench.py"
    plugin.write_text(PLUGIN.format(version=0))
    text = next(configurations(fleet.file))
    run_dir = cluster.directory / "run"
    picker = cluster.picker(
        fleet.file, "--config-watch", f"--plugin-path={folder}", *flags, workers=WORKERS, config_text=text, run_dir=run_dir
    )
    (config,) = cluster.directory.glob("config-*.yaml")
    yield picker, config, plugin, fleet.file


def watch(cluster: Cluster, picker: Picker) -> Watched:
    """Returns the reader of a picker's reload state."""
    run_dir = str(cluster.directory / "run")
    return Watched(observe.find(run_dir, name=picker.instance))


def run(rate: float, reloads: int, warm_s: float) -> Figures:
    """Starts everything and measures once."""
    with Cluster() as cluster, started(cluster) as (picker, config, plugin, endpoints):
        port = cluster.envoy(picker)
        with contextlib.closing(watch(cluster, picker)) as watched:
            reloader = Reloader(watched, config, plugin, endpoints)
            return asyncio.run(measured(port, picker, reloader, rate, reloads, warm_s))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests.bench.reload", description=__doc__)
    parser.add_argument("--rate", type=float, default=500.0, help="requests per second")
    parser.add_argument("--reloads", type=int, default=200)
    parser.add_argument("--warm-s", type=float, default=5.0, help="seconds without reloads, three times")
    parser.add_argument("--smoke", action="store_true", help="10 reloads at 50 requests per second")
    given = parser.parse_args(arguments)
    figures = run(50.0, 10, 1.0) if given.smoke else run(given.rate, given.reloads, given.warm_s)
    print(*figures.lines(), sep="\n")
    for problem in figures.failed[:5]:
        print("failed:", problem)
    return 1 if figures.failed or figures.reloads.missed else 0


if __name__ == "__main__":
    sys.exit(main())
