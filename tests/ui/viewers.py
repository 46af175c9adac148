"""What five viewers of the page cost at 1,000 endpoints, and how soon a browser can use it.

    python -m tests.ui.viewers                   five viewers of 1,000 endpoints, 10 s
    python -m tests.ui.viewers --endpoints 100 --seconds 5 --no-browser

It prints the CPU time of the supervisor with and without viewers (both with all scrapes), the scrapes that were skipped, the bytes of the
first frame and of a patch, and in chromium the bytes before the first paint and the time until the views can be used. It exits with
status 1 if a goal is missed: 1 % of a core per viewer, no scrape skipped because of viewers, 1 s, 150 KB.
"""

import argparse
import shutil
import statistics
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final

import psutil

from shm import observe
from tests.e2e.cluster import LOOPBACK, Cluster, Picker
from workers.supervisor.pages.state.history import SAMPLES, History
from workers.supervisor.pages.state.sampler import Sampler
from workers.supervisor.pages.state.source import Source

VIEWERS: Final = 5
CPU_SHARE_MAX: Final = 0.01  # per viewer
PAINT_BYTES_MAX: Final = 150_000
USABLE_S_MAX: Final = 1.0
ROUNDS: Final = 3
SETTLE_S: Final = 4.0
SERVERS_PER_PROCESS: Final = 250
SKIPPED: Final = "scrapes_skipped_total"
WAIT_MS: Final = 20_000


class Viewer:
    """Follows the stream in a thread, as a browser does, compressed. `frames`: sizes of the events in bytes, as they came."""

    def __init__(self, port: int) -> None:
        asked = urllib.request.Request(f"http://{LOOPBACK}:{port}/debug/state/stream", headers={"Accept-Encoding": "identity"})
        self._answer = urllib.request.urlopen(asked, timeout=30)
        self.frames: list[int] = []
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        size = 0
        try:
            for line in self._answer:
                size += len(line)
                if line == b"\n":
                    self.frames.append(size)
                    size = 0
        except (OSError, ValueError, AttributeError):
            return  # the viewer was closed

    def close(self) -> None:
        self._answer.close()


@contextmanager
def viewers(port: int, count: int) -> Iterator[Sequence[Viewer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(_closing(Viewer(port))) for _ in range(count)]


@contextmanager
def _closing(viewer: Viewer) -> Iterator[Viewer]:
    try:
        yield viewer
    finally:
        viewer.close()


def supervisor(picker: Picker) -> psutil.Process:
    """Returns the supervisor: the first child of the parent."""
    return min(psutil.Process(picker.child.pid).children(), key=lambda child: child.pid)


def used(process: psutil.Process, source: Source, seconds: float) -> tuple[float, float]:
    """Returns the share of a core that a process uses, and the skipped scrapes per second."""
    times, skipped = process.cpu_times(), source.areas.counters()[SKIPPED]
    begun = time.monotonic()
    time.sleep(seconds)
    after, passed = process.cpu_times(), time.monotonic() - begun
    spent = after.user + after.system - times.user - times.system
    return spent / passed, (source.areas.counters()[SKIPPED] - skipped) / passed


def browse(port: int) -> tuple[int, float, float]:
    """Returns the bytes before the first paint, and the seconds until scripts have run and until the views can be used.

    The scripts run after the first paint, so the bytes are an upper bound.
    """
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page()
        session = page.context.new_cdp_session(page)
        session.send("Network.enable")
        sizes: list[int] = []
        session.on("Network.dataReceived", lambda event: sizes.append(event["encodedDataLength"]))
        begun = time.monotonic()
        page.goto(f"http://{LOOPBACK}:{port}/ui", wait_until="domcontentloaded")
        loaded_s, painted = time.monotonic() - begun, sum(sizes)
        page.wait_for_selector("nav a", timeout=WAIT_MS)
        usable_s = time.monotonic() - begun
        browser.close()
    return painted, loaded_s, usable_s


def sampling(source: Source) -> None:
    """Prints what a sample of the history costs, without viewers, and what the whole history takes."""
    sampler, history = Sampler(source), History()
    begun = time.process_time()
    for number in range(SAMPLES):
        history.add(sampler.sample(float(number)))
    spent = time.process_time() - begun
    print(f"history: a sample takes {1e3 * spent / SAMPLES:.2f} ms per second; 15 minutes take {history.bytes / 2**20:.2f} MiB")


def main() -> int:
    line = argparse.ArgumentParser(prog="tests.ui.viewers", description=(__doc__ or "").split("\n")[0])
    line.add_argument("--endpoints", type=int, default=1000)
    line.add_argument("--seconds", type=float, default=10.0)
    line.add_argument("--no-browser", action="store_true")
    options = line.parse_args()
    with Cluster() as cluster:
        picker = started(cluster, options.endpoints)
        run_dir = str(cluster.directory / "run")
        source = Source(observe.find(run_dir, metrics_port=picker.metrics), run_dir)
        sampling(source)
        wrong = measured(picker, source, options.seconds)
        source.close()
        if not options.no_browser:
            painted, loaded_s, usable_s = browse(picker.metrics)
            print(f"first paint after {painted / 1e3:.0f} KB; loaded after {loaded_s:.2f} s, usable after {usable_s:.2f} s")
            wrong += [f"{painted} bytes before the first paint"] if painted > PAINT_BYTES_MAX else []
            wrong += [f"usable after {usable_s:.2f} s"] if usable_s > USABLE_S_MAX else []
    for each in wrong:
        print(f"missed: {each}")
    return int(bool(wrong))


def started(cluster: Cluster, endpoints: int) -> Picker:
    """Starts simulated servers and a picker with all of them."""
    fleets = [cluster.fleet(min(SERVERS_PER_PROCESS, endpoints - first)) for first in range(0, endpoints, SERVERS_PER_PROCESS)]
    file = cluster.directory / "all.yaml"
    addresses = [address for fleet in fleets for address in fleet.addresses]
    rows = "".join(f'- {{name: server-{n}, address: "{h}", port: "{p}"}}\n' for n, (h, p) in enumerate(addresses))
    file.write_text(f"endpoints:\n{rows}")
    picker = cluster.picker(file, "--refresh-metrics-interval=1s", workers=2, ready=False)
    cluster.wait(picker.child, picker.ready)
    time.sleep(SETTLE_S)
    return picker


def measured(picker: Picker, source: Source, seconds: float) -> list[str]:
    """Prints the cost of viewers, in ROUNDS interleaved pairs of spans with and without them. Returns the goals that were missed."""
    process = supervisor(picker)
    costs, skips, frames = [], [], list[int]()
    for _ in range(ROUNDS):
        alone, skipped_alone = used(process, source, seconds)
        with viewers(picker.metrics, VIEWERS) as watching:
            time.sleep(2.0)
            shared, skipped = used(process, source, seconds)
            frames = [size for viewer in watching for size in viewer.frames[1:]]
            whole = max(viewer.frames[0] for viewer in watching if viewer.frames)
        costs.append((shared - alone) / VIEWERS)
        skips.append(skipped - skipped_alone)
        skipping = f"skipped scrapes/s: {skipped_alone:.2f}, {skipped:.2f}"
        print(f"supervisor: {alone:.3f} cores alone, {shared:.3f} with {VIEWERS} viewers; {skipping}", flush=True)
    cost, skip = statistics.median(costs), statistics.median(skips)
    sizes = f"state {whole / 1e3:.0f} KB, patch {statistics.median(frames) / 1e3:.1f} KB (not compressed)"
    print(f"per viewer {100 * cost:.2f} % of a core; {sizes}")
    wrong = [f"{100 * cost:.2f} % of a core per viewer"] if cost > CPU_SHARE_MAX else []
    return wrong + ([f"{skip:.2f} scrapes/s skipped because of viewers"] if skip > 0.5 else [])


if __name__ == "__main__":
    sys.exit(main())
