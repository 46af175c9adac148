"""Traces of real traffic in the routing benchmark."""

import gzip
import random
from pathlib import Path

import pytest

from tests.bench.routing import ORACLE, Task, cells, run
from tests.bench.routing_servers import PACES
from tests.bench.routing_traces import traced
from tests.bench.routing_traffic import BLOCK_TOKENS

MOONCAKE = """\
{"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [7, 8]}
{"timestamp": 2000, "input_length": 1300, "output_length": 9, "hash_ids": [7, 8, 9]}
{"timestamp": 4000, "input_length": 600, "output_length": 3, "hash_ids": [7, 10]}
"""


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(MOONCAKE.encode()))
    return str(path)


def test_prompts_have_the_lengths_and_the_prefixes_of_the_trace(trace: str) -> None:
    sessions = traced(trace, 2.0).make(random.Random(1), 10.0, 1.0)
    first, second, third = (session.turns[0] for session in sessions)
    assert [session.at for session in sessions] == [0.0, 1.0, 2.0]
    assert [turn.tokens for turn in (first, second, third)] == [1000, 1300, 600]
    assert [turn.output for turn in (first, second, third)] == [5, 9, 3]
    whole = 1000 // BLOCK_TOKENS
    assert first.hashes[:whole] == second.hashes[:whole]
    assert third.hashes[: 512 // BLOCK_TOKENS] == first.hashes[: 512 // BLOCK_TOKENS]
    assert third.hashes[-1] != first.hashes[len(third.hashes) - 1]


def test_a_trace_that_is_longer_than_the_run_is_played_in_part(trace: str) -> None:
    make = traced(trace, 1.0).make
    parts = {len(make(random.Random(seed), 1.0, 1.0)) for seed in range(20)}
    assert parts <= {0, 1}


def test_a_trace_is_played_on_the_models_of_servers(trace: str) -> None:
    task = Task("slots", "trace", (ORACLE, "round-robin"), (), 1, 10.0, 0.05, 0.0, 0.0, trace, 1.0)
    found = run(task)
    assert found[ORACLE].requests == found["round-robin"].requests == 3
    assert 0.0 < found[ORACLE].work < 0.1


def test_the_cold_table_has_servers_of_all_paces() -> None:
    todo = cells([], smoke=False, cold=True)
    assert {kind for kind, _, _ in todo} == {kind.name for kind in PACES}
    assert len(PACES) == 16
    assert {policies[0] for _, _, policies in todo} == {ORACLE}
