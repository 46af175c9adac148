"""Runs many inputs on many targets: one process per target, a few at once, under supervision.

A process without progress for HANG_S is killed, and its input is a finding. So is the input of a process that dies by a signal. A
successor with another seed runs the remaining inputs, so that one bad input does not end a campaign.
"""

import importlib.util
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.one import FINDINGS_MAX, save
from tests.fuzz.slot import Counts, Slot
from tests.fuzz.target import Target

HANG_S = 20.0
START_S = 120.0  # until the first input: modules are imported and instrumented
STARTS_MAX = 5  # starts of one target
LOOK_S = 0.2
SAY_S = 15.0


def engine_available() -> str:
    """`atheris` if it is installed, else `mutator`."""
    return "atheris" if importlib.util.find_spec("atheris") is not None else "mutator"


@dataclass
class Report:
    """The results of one target."""

    target: Target
    engine: str
    inputs: int = 0
    seconds: float = 0.0
    findings: int = 0
    slowest_s: float = 0.0
    ratio: float = 0.0
    deaths: list[str] = field(default_factory=list)

    def add(self, counts: Counts, seconds: float) -> None:
        self.inputs += counts.inputs
        self.seconds += seconds
        self.findings += counts.findings
        self.slowest_s = max(self.slowest_s, counts.slowest_s)
        self.ratio = max(self.ratio, counts.ratio)

    def line(self) -> list[str]:
        rate = self.inputs / self.seconds if self.seconds else 0.0
        return [
            self.target.name, f"{self.inputs:,}", f"{rate:,.0f}", str(self.findings), f"{self.slowest_s * 1e3:.1f} ms", f"{self.ratio:.1f}",
        ]  # fmt: skip


class Running:
    """A process that works on one target."""

    def __init__(self, report: Report, inputs: int, seconds: float, seed: int) -> None:
        self.report = report
        self._inputs = inputs
        self._until_s = seconds
        self._seed = seed
        self._folder = tempfile.TemporaryDirectory()
        path = Path(self._folder.name) / "slot"
        self._slot = Slot.create(path)
        work = Path(self._folder.name) / "found"
        work.mkdir()
        target = report.target
        command = [
            *(sys.executable, "-m", "tests.fuzz.one", target.name, "--slot", str(path), "--engine", report.engine),
            *("--inputs", str(inputs), "--seconds", str(seconds), "--seed", str(seed), "--folder", str(work)),
        ]
        self._log = (Path(self._folder.name) / "log").open("w+")
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=self._log)
        self._began = self._progress_at = time.monotonic()
        self._seen = -1

    def look(self) -> bool:
        """Whether the process still works. If not, the report is complete."""
        now = time.monotonic()
        done = self.inputs
        if done != self._seen:
            self._seen, self._progress_at = done, now
        code = self._process.poll()
        if code is None and now - self._progress_at < (HANG_S if done else START_S):
            return True
        if code is None:
            self._process.kill()
            self._process.wait()
            self._died(f"no progress for {HANG_S:g} s")
        elif code < 0 or (code > 0 and done):
            self._died(f"signal {-code}" if code < 0 else f"exit {code}")
        elif code > 0:
            self.report.deaths += ["it failed to start"] * STARTS_MAX
            self.report.findings += 1
        self.report.add(self._slot.counts(), now - self._began)
        self._print_log()
        self._slot.close()
        self._log.close()
        self._folder.cleanup()
        return False

    @property
    def inputs(self) -> int:
        return self._slot.counts().inputs

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def next(self) -> tuple[int, float, int]:
        """The remaining work for a successor: inputs, seconds, seed."""
        spent = time.monotonic() - self._began
        return self._inputs - self._seen, self._until_s - spent, self._seed + 1

    def _died(self, how: str) -> None:
        path = save(self.report.target, self._slot.input())
        self.report.deaths.append(how)
        self.report.findings += 1
        name = self.report.target.name
        print(f"{name}: {how}\nreplay: python -m tests.fuzz {name} --replay {path}", file=sys.stderr, flush=True)

    def _print_log(self) -> None:
        self._log.seek(0)
        text = self._log.read()
        if self.report.findings:
            print(text[-8000:], file=sys.stderr, flush=True)


def run(targets: Sequence[Target], *, inputs: int, seconds: float, seed: int, jobs: int, engine: str) -> Iterator[Report]:
    """Yields each report when its target finishes."""
    waiting = [(target, max(1, int(inputs * target.share)), seconds, seed, Report(target, engine)) for target in targets]
    running: list[Running] = []
    reported_at = time.monotonic()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                _, count, left, number, report = waiting.pop(0)
                running.append(Running(report, count, left, number))
            time.sleep(LOOK_S)
            for work in [w for w in running if not w.look()]:
                running.remove(work)
                report = work.report
                count, left, number = work.next()
                if report.deaths and count > 0 and left > 1 and len(report.deaths) < STARTS_MAX and report.findings < FINDINGS_MAX:
                    waiting.insert(0, (report.target, count, left, number, report))
                else:
                    yield report
            if running and time.monotonic() - reported_at > SAY_S:
                reported_at = time.monotonic()
                text = ", ".join(f"{w.report.target.name} {w.inputs:,}" for w in running)
                print(f"… {text}; {len(waiting)} targets wait", file=sys.stderr, flush=True)
    finally:
        for work in running:
            work.kill()


def table(reports: Sequence[Report]) -> str:
    head = ["target", "inputs", "inputs/s", "findings", "slowest", "allocated/byte"]
    lines = [head, *(report.line() for report in reports)]
    total = sum(report.inputs for report in reports)
    lines.append(["all", f"{total:,}", "", str(sum(report.findings for report in reports)), "", ""])
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(w) if c == 0 else cell.rjust(w) for c, (cell, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    )
