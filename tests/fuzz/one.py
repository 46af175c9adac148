"""One process that fuzzes one target: python -m tests.fuzz.one TARGET --slot FILE ...; `tests.fuzz.campaign` starts it.

Two engines make the inputs. `mutator` is part of this project and runs everywhere. `atheris` adds libFuzzer's search, guided by the
branches of the target's modules, and uses the mutator for half of its inputs. Both end after `--inputs` or `--seconds`, whichever is first.
"""

import argparse
import hashlib
import importlib
import os
import random
import resource
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fuzz.mutate import Mutator
from tests.fuzz.slot import Counts, Slot
from tests.fuzz.target import Target, measure

TRACED_EVERY = 64
CLOCK_EVERY = 256
FINDINGS_MAX = 20  # of one process: further ones are usually the same
ADDRESS_SPACE_MAX = 8 << 30
CRASHES = Path(__file__).parent / "crashes"


class Session:
    """Runs inputs, updates the slot, and saves findings: one file for each source line that failed."""

    def __init__(self, target: Target, slot: Slot, inputs: int, seconds: float) -> None:
        self.target = target
        self.counts = Counts()
        self._slot = slot
        self._inputs = inputs
        self._until = time.monotonic() + seconds
        self._places: set[str] = set()

    def run(self, data: bytes) -> None:
        counts = self.counts
        self._slot.note(counts, data)
        number = counts.inputs
        slowest, ratio, findings = counts.slowest_s, counts.ratio, counts.findings
        try:
            cost = measure(self.target, data, traced=number % TRACED_EVERY == 0)
            slowest, ratio = max(slowest, cost.seconds), max(ratio, cost.ratio)
        except Exception as problem:
            findings += self._record(data, problem)
        self.counts = Counts(number + 1, 0, findings, slowest, ratio)

    def over(self) -> bool:
        number = self.counts.inputs
        if number >= self._inputs or self.counts.findings >= FINDINGS_MAX:
            return True
        return number % CLOCK_EVERY == 0 and time.monotonic() > self._until

    def finish(self) -> None:
        self._slot.note(self.counts, b"")

    def _record(self, data: bytes, problem: Exception) -> bool:
        frames = traceback.extract_tb(problem.__traceback__)
        place = f"{type(problem).__name__}:{frames[-1].filename}:{frames[-1].lineno}"
        if place in self._places:
            return False
        self._places.add(place)
        path = save(self.target, data)
        last = "".join(traceback.format_exception(problem, limit=-3))
        print(f"{last}\nreplay: python -m tests.fuzz {self.target.name} --replay {path}", file=sys.stderr, flush=True)
        return True


def save(target: Target, data: bytes) -> Path:
    """Saves the input of a finding. Returns its path."""
    CRASHES.mkdir(exist_ok=True)
    path = CRASHES / f"{target.name}-{hashlib.sha256(data).hexdigest()[:12]}"
    path.write_bytes(data)
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def mutate(session: Session, mutator: Mutator) -> None:
    """Runs the mutator engine: mutations of seeds."""
    while not session.over():
        session.run(mutator.fresh())
    session.finish()


def guided(session: Session, mutator: Mutator, seeds: list[bytes], seed: int, folder: str) -> None:
    """Runs libFuzzer's engine. It ends the process."""
    atheris: Any = importlib.import_module("atheris")
    for number, data in enumerate(seeds):
        (Path(folder) / f"seed{number}").write_bytes(data)

    def test_one(data: bytes) -> None:
        session.run(data)
        if session.over():
            session.finish()
            sys.stderr.flush()
            os._exit(0)  # the engine treats every other exit as a finding

    def custom(data: bytes, bytes_max: int, number: int) -> bytes:
        if number & 1:
            return bytes(atheris.Mutate(data, bytes_max))
        return mutator.mutated(data)[:bytes_max]

    options = [f"-seed={seed or 1}", f"-max_len={session.target.bytes_max}", "-timeout=60", "-verbosity=0", "-rss_limit_mb=6000"]
    atheris.Setup([sys.argv[0], *options, folder], test_one, custom_mutator=custom)
    atheris.Fuzz()


def loaded(name: str, *, instrumented: bool) -> Target:
    """The target. With `instrumented`, the branches of its modules are counted."""
    if not instrumented:
        return target_named(name)
    atheris: Any = importlib.import_module("atheris")
    with atheris.instrument_imports(
        include=["epp", "workers.transport", "workers.worker.extproc", "workers.supervisor.endpoints.http_answer", "workers.shared.bus"]
    ):
        return target_named(name)


def target_named(name: str) -> Target:
    target: Target = importlib.import_module("tests.fuzz.targets").TARGETS[name]
    return target


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("--slot", type=Path, required=True)
    parser.add_argument("--engine", choices=("mutator", "atheris"), default="mutator")
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", default="")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_MAX, ADDRESS_SPACE_MAX))
    is_guided = options.engine == "atheris"
    target = loaded(options.target, instrumented=is_guided)
    corpus: Callable[[Target], dict[str, bytes]] = importlib.import_module("tests.fuzz.targets").corpus
    seeds = list({**target.seeds(), **corpus(target)}.values())
    target.run(seeds[0])  # work that is done only once does not count for an input
    session = Session(target, Slot(options.slot), options.inputs, options.seconds)
    mutator = Mutator(target, random.Random(options.seed), seeds)
    if is_guided:
        guided(session, mutator, seeds, options.seed, options.folder)
    else:
        mutate(session, mutator)


if __name__ == "__main__":
    main()
