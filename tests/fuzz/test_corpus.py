"""The corpus and a few thousand mutations of it on every target: no run raises, hangs or allocates too much."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.mutate import Mutator
from tests.fuzz.one import Session
from tests.fuzz.slot import Counts, Slot
from tests.fuzz.target import ALLOCATED_PER_BYTE, ALLOWANCE, Finding, Target, measure
from tests.fuzz.targets import CORPUS, TARGETS, corpus

ROUND = 300  # mutations per target
CORPUS_BYTES_MAX = 300_000
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", TARGETS)
def test_no_input_of_the_corpus_is_a_finding(name: str) -> None:
    target = TARGETS[name]
    kept = corpus(target)
    assert {*target.seeds()} <= {*kept}, "seeds are missing: python -m tests.fuzz --write-corpus"
    for data in [b"", *kept.values()]:
        measure(target, data, traced=False)
    for data in kept.values():
        measure(target, data, traced=True)


@pytest.mark.parametrize("name", TARGETS)
def test_no_mutation_of_a_round_is_a_finding(name: str) -> None:
    target = TARGETS[name]
    mutator = Mutator(target, random.Random(7), list(corpus(target).values()))
    for number in range(max(20, int(ROUND * target.share))):
        measure(target, mutator.fresh(), traced=number % 50 == 49)


def test_the_corpus_is_small_and_every_folder_has_a_target() -> None:
    assert {path.name for path in CORPUS.iterdir()} == {*TARGETS}
    assert sum(path.stat().st_size for path in CORPUS.glob("*/*")) < CORPUS_BYTES_MAX


def raises(data: bytes) -> None:
    if b"!" in data:
        raise ZeroDivisionError


def hoards(data: bytes) -> None:
    kept = bytes(ALLOWANCE + ALLOCATED_PER_BYTE * len(data) + 1000)
    del kept


def toy(run: object) -> Target:
    return Target("toy", run, lambda: {"one": b"abc"})  # type: ignore[arg-type]


def test_a_run_that_allocates_too_much_is_a_finding() -> None:
    with pytest.raises(Finding, match="allocated for an input of 3"):
        measure(toy(hoards), b"abc", traced=True)


def test_a_finding_is_saved_once_per_source_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fuzz.one.CRASHES", tmp_path / "crashes")
    slot = Slot.create(tmp_path / "slot")
    session = Session(toy(raises), slot, 10, 60.0)
    for data in (b"a", b"b!", b"c!", b"d"):
        session.run(data)
    session.finish()
    assert slot.counts()[:3] == Counts(4, 0, 1)[:3]
    (saved,) = (tmp_path / "crashes").iterdir()
    assert saved.read_bytes() == b"b!"
    slot.close()


def test_the_supervisor_can_read_the_current_input(tmp_path: Path) -> None:
    slot = Slot.create(tmp_path / "slot")
    supervisor = Slot(tmp_path / "slot")
    slot.note(Counts(7, 0, 1, 0.5, 2.0), b"this one")
    assert supervisor.input() == b"this one"
    assert supervisor.counts() == Counts(7, 8, 1, 0.5, 2.0)
    slot.close()
    supervisor.close()


@pytest.mark.timeout(60)
def test_a_campaign_prints_its_table_and_an_input_can_be_replayed() -> None:
    command = [sys.executable, "-m", "tests.fuzz", "bus"]
    ran = subprocess.run([*command, "--inputs", "500", "--engine", "mutator"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "bus" in ran.stdout and "500" in ran.stdout
    replay = subprocess.run([*command, "--replay", str(CORPUS / "bus" / "single")], cwd=ROOT, capture_output=True, text=True, check=True)
    assert replay.stdout.startswith("no finding")
