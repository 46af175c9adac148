"""One process that fuzzes one target: python -m tests.fuzz.one TARGET --slot FILE ...; started by `tests.fuzz.campaign`.

Two engines make the inputs. `mutator` is ours, for wherever Python runs. `atheris` adds libFuzzer's search, guided by the branches of the
target's modules, and calls our mutator for half of its inputs. Either ends after so many inputs or seconds, whichever comes first.
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
from tests.fuzz.target import Target, measured

TRACED_EVERY = 64
CLOCK_EVERY = 256
FINDINGS_MAX = 20  # of one process: further ones are mostly the same
ADDRESS_SPACE_MAX = 8 << 30
CRASHES = Path(__file__).parent / "crashes"


class Session:
    """Runs inputs, keeps the slot, saves findings: one file for each place where a run failed."""

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
            cost = measured(self.target, data, traced=number % TRACED_EVERY == 0)
            slowest, ratio = max(slowest, cost.seconds), max(ratio, cost.ratio)
        except Exception as problem:
            findings += self._found(data, problem)
        self.counts = Counts(number + 1, 0, findings, slowest, ratio)

    def over(self) -> bool:
        number = self.counts.inputs
        if number >= self._inputs or self.counts.findings >= FINDINGS_MAX:
            return True
        return number % CLOCK_EVERY == 0 and time.monotonic() > self._until

    def finish(self) -> None:
        self._slot.note(self.counts, b"")

    def _found(self, data: bytes, problem: Exception) -> bool:
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
    """Keep an input that was a finding."""
    CRASHES.mkdir(exist_ok=True)
    path = CRASHES / f"{target.name}-{hashlib.sha256(data).hexdigest()[:12]}"
    path.write_bytes(data)
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def mutate(session: Session, mutator: Mutator) -> None:
    """Our own engine: mutations of seeds, and now and then of its own inputs."""
    while not session.over():
        session.run(mutator.fresh())
    session.finish()


def guided(session: Session, mutator: Mutator, seeds: list[bytes], seed: int, folder: str) -> None:
    """libFuzzer's engine. It ends the process."""
    atheris: Any = importlib.import_module("atheris")
    for number, data in enumerate(seeds):
        (Path(folder) / f"seed{number}").write_bytes(data)

    def test_one(data: bytes) -> None:
        session.run(data)
        if session.over():
            session.finish()
            sys.stderr.flush()
            os._exit(0)  # the engine takes any other way out for a finding

    def custom(data: bytes, bytes_max: int, number: int) -> bytes:
        if number & 1:
            return bytes(atheris.Mutate(data, bytes_max))
        return mutator.mutated(data)[:bytes_max]

    options = [
        f"-seed={seed or 1}",
        f"-max_len={session.target.bytes_max}",
        "-timeout=60",
        "-verbosity=0",
        "-rss_limit_mb=6000",
    ]
    atheris.Setup([sys.argv[0], *options, folder], test_one, custom_mutator=custom)
    atheris.Fuzz()


def loaded(name: str, *, instrumented: bool) -> Target:
    """The target; with branches counted in the modules that it is about."""
    if not instrumented:
        return target_named(name)
    atheris: Any = importlib.import_module("atheris")
    with atheris.instrument_imports(
        include=["epp", "workers.transport", "workers.server", "workers.http_client", "workers.bus"]
    ):
        return target_named(name)


def target_named(name: str) -> Target:
    found: Target = importlib.import_module("tests.fuzz.targets").TARGETS[name]
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("--slot", type=Path, required=True)
    parser.add_argument("--engine", choices=("mutator", "atheris"), default="mutator")
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", default="")
    given = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_MAX, ADDRESS_SPACE_MAX))
    is_guided = given.engine == "atheris"
    target = loaded(given.target, instrumented=is_guided)
    corpus: Callable[[Target], dict[str, bytes]] = importlib.import_module("tests.fuzz.targets").corpus
    seeds = list({**target.seeds(), **corpus(target)}.values())
    target.run(seeds[0])  # what is made once counts for no input
    session = Session(target, Slot(given.slot), given.inputs, given.seconds)
    mutator = Mutator(target, random.Random(given.seed), seeds)
    if is_guided:
        guided(session, mutator, seeds, given.seed, given.folder)
    else:
        mutate(session, mutator)


if __name__ == "__main__":
    main()
