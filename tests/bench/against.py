"""This tree against another commit, figure by figure: `make bench BASE=HEAD~3`, or `python -m tests.bench.against COMMIT`.

The other commit is extracted into a temporary directory (`git archive`, so the repository is only read). If its lock file differs, it
gets a new virtual environment. Then both trees run in turn, on this machine and under the same load:

    throughput   both pickers, each with its built-in configuration; the driver and the simulated servers are those of *this* tree;
                 the figures are medians over the rounds
    micro        the micro-benchmarks of each commit; for those that both commits have, the best of all rounds

A ratio below 1 means that this tree needs less. Compare HEAD with itself to see the machine's noise.
"""

import argparse
import contextlib
import io
import json
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from loadtest.demo.children import ChildFailed, environment
from loadtest.demo.ports import free_ports
from loadtest.load.driver import CASES
from tests.bench.throughput import NATIVE, ROOT, TABLE_WIDTH, Run, drive, machine, names, tell
from tests.e2e.cluster import Cluster, Picker

LOCK_FILE = "requirements-dev.txt"
MICRO, THROUGHPUT = "micro", "throughput"
PARTS = (MICRO, THROUGHPUT)
MICRO_S_MAX = 900.0
INSTALL_S_MAX = 600.0
CPU, PICK = "CPU / request (µs)", "pick p50 (ms)"
WORTH_SHOWING = 0.05  # micro figures with smaller changes are counted, not listed


class ComparisonError(Exception):
    """The trees cannot be compared. The text says why, and what to do."""


class Side(NamedTuple):
    """One of the two trees, and a Python interpreter with its dependencies."""

    name: str
    root: Path
    python: Path

    def command(self, *arguments: str) -> list[str]:
        """The command line `python ARGUMENTS` with this tree's packages first."""
        return ["env", "-C", str(self.root), f"PYTHONPATH={self.root}", str(self.python), "-P", *arguments]


class Figure(NamedTuple):
    """One figure, measured in both trees."""

    name: str
    base: float
    here: float

    @property
    def ratio(self) -> float:
        return self.here / self.base if self.base else 1.0


def git(*arguments: str, root: Path = ROOT) -> bytes:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, check=False)
    if done.returncode:
        raise ComparisonError(f"git {' '.join(arguments)}: {done.stderr.decode(errors='replace').strip() or 'failed'}")
    return done.stdout


def resolved(commit: str, root: Path = ROOT) -> str:
    """Returns the full hash of a commit. Raises ComparisonError."""
    try:
        return git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{commit}^{{commit}}", root=root).decode().strip()
    except ComparisonError:
        raise ComparisonError(
            f"'{commit}' names no commit of this repository: give a hash, a tag, a branch or HEAD~1 "
            "(in a shallow clone: git fetch --unshallow first)"
        ) from None


def here_name(root: Path = ROOT) -> str:
    """Names the commit of this tree, and says whether it has changes. Raises ComparisonError during a merge with conflicts."""
    if unmerged := git("diff", "--name-only", "--diff-filter=U", root=root).decode().split():
        raise ComparisonError(f"{unmerged[0]} has merge conflicts: resolve them first, because this tree cannot run now")
    head = git("rev-parse", "--short=10", "HEAD", root=root).decode().strip()
    return f"{head} with changes" if git("status", "--porcelain", root=root) else head


@contextlib.contextmanager
def extracted(commit: str, root: Path = ROOT) -> Iterator[Side]:
    """Extracts the other commit's files. Yields the tree with an interpreter for it. Raises ComparisonError."""
    with tempfile.TemporaryDirectory(prefix="epp-bench-") as directory:
        tree = Path(directory) / "tree"
        with tarfile.open(fileobj=io.BytesIO(git("archive", "--format=tar", commit, root=root))) as archive:
            archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.2 of Debian has no filters
            archive.extractall(tree)
        yield Side(commit[:10], tree, interpreter(tree, root, Path(directory) / "venv"))


def interpreter(tree: Path, root: Path, venv: Path) -> Path:
    """Returns this interpreter. If the other commit locks other dependencies, creates a virtual environment and returns its interpreter.

    Raises ComparisonError.
    """
    lock = tree / LOCK_FILE
    if not lock.exists() or lock.read_bytes() == (root / LOCK_FILE).read_bytes():
        return Path(sys.executable)
    tell(f"{LOCK_FILE} differs: installing the other commit's dependencies")
    python = venv / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in ([sys.executable, "-m", "venv", str(venv)], [*pip, "--require-hashes", "--no-deps", "-r", str(lock)]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S_MAX, check=False)
        if done.returncode:
            raise ComparisonError(f"installing the other commit's dependencies failed: {done.stderr.strip()[-500:]}")
    return python


def micro(sides: Sequence[Side], rounds: int, *, smoke: bool) -> list[Figure]:
    """Runs the micro-benchmarks of both trees. Returns the figures that both have, each the best of its rounds. Raises ComparisonError."""
    best: dict[str, dict[str, float]] = {side.name: {} for side in sides}
    for number in range(rounds):
        for side in alternated(sides, number):
            tell(f"{MICRO} {number + 1}/{rounds}, {side.name}")
            flags = ["--smoke"] if smoke else []
            command = side.command("-m", "tests.bench.micro", "--json", *flags)
            done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=MICRO_S_MAX, check=False)
            if done.returncode:
                raise ComparisonError(f"the micro-benchmarks of {side.name} failed: {done.stderr.strip()[-500:]}")
            figures = best[side.name]
            for name, value in json.loads(done.stdout).items():
                figures[name] = min(value, figures.get(name, value))
    base, here = (best[side.name] for side in sides)
    return [Figure(name, base[name], value) for name, value in here.items() if name in base]


def throughput(sides: Sequence[Side], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures both pickers. Returns one entry per case: the medians of both sides, and the ratio of each round."""
    entries = []
    for case in options.cases:
        rows: dict[str, list[dict[str, Any]]] = {side.name: [] for side in sides}
        for number in range(options.rounds):
            for side in alternated(sides, number):
                tell(f"{case} {number + 1}/{options.rounds}, {side.name}")
                rows[side.name].append(measure(side, Run(case, NATIVE, options.workers, options.tls), options))
        entries.append(compared(case, *(rows[side.name] for side in sides)))
    return entries


def measure(side: Side, run: Run, options: argparse.Namespace) -> dict[str, Any]:
    """Runs one tree's picker once, with its default configuration."""
    with Cluster() as cluster:
        addresses = cluster.fleet(CASES[run.case].endpoints).addresses
        grpc, health, metrics = free_ports(3)
        flags = {
            "endpoints": ",".join(f"{host}:{port}" for host, port in addresses),
            "workers": run.workers,
            "grpc-port": grpc,
            "grpc-health-port": health,
            "metrics-port": metrics,
            "secure-serving": str(run.tls).lower(),
            "run-dir": cluster.directory / "run",
        }
        serve = side.command("-m", "workers", "serve", *(f"--{name}={value}" for name, value in flags.items()))
        child = cluster.children.start(f"picker {side.name}", [*serve, *options.flag])
        cluster.wait(child, Picker(child, grpc, health, metrics).ready)
        return drive(run, options, child.pid, grpc)


def compared(case: str, base: Sequence[dict[str, Any]], here: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Computes the medians over the rounds, and the CPU ratio of each round."""
    cores = not any(row["pick_ms"] for row in (*base, *here))
    cpu = "cores" if cores else "cpu_us_per_request"
    pairs = [ours[cpu] / theirs[cpu] for theirs, ours in zip(base, here, strict=True) if theirs[cpu]]
    figures = {"cores" if cores else CPU: [[row[cpu] for row in rows] for rows in (base, here)]}
    if not cores:
        figures[PICK] = [[row["pick_ms"].get("p50", 0.0) for row in rows] for rows in (base, here)]
        figures["requests/s"] = [[row["requests_per_s"] for row in rows] for rows in (base, here)]
    figures["memory (MiB)"] = [[row["memory_mib"] for row in rows] for rows in (base, here)]
    return {
        "case": case,
        "figures": [Figure(name, *map(statistics.median, both)) for name, both in figures.items()],
        "cpu_ratio_of_rounds": [round(ratio, 3) for ratio in pairs],
        "not_ok": [sum(n for row in rows for name, n in row["endings"].items() if name != "ok") for rows in (base, here)],
    }


def alternated(sides: Sequence[Side], number: int) -> Sequence[Side]:
    """Reverses the order in every other round, so that slow drifts affect both sides equally."""
    return sides if number % 2 == 0 else [*sides][::-1]


def tables(base: str, here: str, small: Sequence[Figure], large: Sequence[dict[str, Any]]) -> Iterator[Table | str]:
    if large:
        table = titled("requests through a picker", base, here)
        table.add_column("CPU ratio of rounds", no_wrap=True)
        for case in large:
            for number, figure in enumerate(case["figures"]):
                spread = " ".join(f"{ratio:.2f}" for ratio in case["cpu_ratio_of_rounds"]) if number == 0 else ""
                table.add_row(*cells(figure._replace(name=f"{case['case']}: {figure.name}")), spread)
        yield table
    moved = [figure for figure in small if abs(figure.ratio - 1) >= WORTH_SHOWING]
    if small:
        table = titled("micro-benchmarks (µs)", base, here)
        for figure in sorted(moved, key=lambda figure: figure.ratio):
            table.add_row(*cells(figure))
        yield table
        middle = statistics.geometric_mean(max(figure.ratio, 1e-9) for figure in small)
        yield (
            f"{len(small)} micro-benchmarks in both, {len(small) - len(moved)} of them within {WORTH_SHOWING:.0%} and not "
            f"listed; geometric mean of all ratios {middle:.2f}"
        )


def titled(title: str, base: str, here: str) -> Table:
    table = Table(title=title)
    table.add_column("figure")
    for name in (base, here, "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    return table


def cells(figure: Figure) -> tuple[str, str, str, str]:
    return figure.name, f"{figure.base:,.2f}", f"{figure.here:,.2f}", f"{figure.ratio:.2f}"


def as_json(base: str, here: str, small: Sequence[Figure], large: Sequence[dict[str, Any]]) -> dict[str, Any]:
    def plain(figures: Sequence[Figure]) -> dict[str, dict[str, float]]:
        return {f.name: {"base": f.base, "here": f.here, "ratio": round(f.ratio, 3)} for f in figures}

    throughput = [{**case, "figures": plain(case["figures"])} for case in large]
    return {"base": base, "here": here, "machine": machine(), MICRO: plain(small), THROUGHPUT: throughput}


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(prog="against", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("commit", help="the commit to compare with: a hash, tag or branch")
    arguments.add_argument("--parts", type=names, default=list(PARTS), help=f"comma-separated: {', '.join(PARTS)} (default: both)")
    arguments.add_argument("--cases", type=names, default=["short", "chat-8k", "sse"], help=f"comma-separated: {', '.join(CASES)}")
    arguments.add_argument("--rounds", type=int, default=3, help="rounds of each case and of the micro-benchmarks")
    arguments.add_argument("--seconds", type=float, default=4.0, help="seconds of each run")
    arguments.add_argument("--workers", type=int, default=1)
    arguments.add_argument("--rate", type=float, default=0.0, help="open loop: requests per second")
    arguments.add_argument("--tls", action="store_true")
    arguments.add_argument("--flag", action="append", default=[], help="a flag of `epp serve` for both pickers")
    arguments.add_argument("--smoke", action="store_true", help="run everything once, shortened, to check that it works")
    arguments.add_argument("--json", action="store_true")
    arguments.set_defaults(profile="", driver=[])
    return arguments


def compare(options: argparse.Namespace) -> int:
    commit, here = resolved(options.commit), here_name()
    if commit.startswith(here):
        tell(f"{here} is the commit of this tree: the ratios show the machine's noise")
    with extracted(commit) as base:
        sides = [base, Side(f"{here} (here)", ROOT, Path(sys.executable))]
        large = throughput(sides, options) if THROUGHPUT in options.parts else []
        small = micro(sides, options.rounds, smoke=options.smoke) if MICRO in options.parts else []
    if options.json:
        json.dump(as_json(base.name, here, small, large), sys.stdout, indent=1)
    else:
        console = Console(highlight=False)
        console.width = max(console.width, TABLE_WIDTH)
        for part in tables(base.name, here, small, large):
            console.print(part)
    return 1 if any(sum(case["not_ok"]) for case in large) else 0


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the temporary directory and the children are removed
    options = parser().parse_args()
    unknown = {*options.cases} - CASES.keys() | {*options.parts} - {*PARTS}
    if unknown:
        parser().error(f"unknown: {', '.join(sorted(unknown))}; valid cases: {', '.join(CASES)}; valid parts: {', '.join(PARTS)}")
    if options.smoke:
        options.cases, options.seconds, options.rounds = ["short"], 0.5, 1
    try:
        return compare(options)
    except (ComparisonError, ChildFailed) as error:
        tell(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
