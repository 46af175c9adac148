"""Traces of real traffic in the routing benchmark."""

import gzip
import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bench.routing import ORACLE, Task, cells, run, with_traces
from tests.bench.routing_run import Outcome
from tests.bench.routing_servers import KINDS, PACES, Kind
from tests.bench.routing_table import summary, traces_text
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
    task = Task("slots", "trace", (ORACLE, "round-robin"), trace, 0.0, (), 1, 10.0, 0.05, 0.0, 0.0, 1.0, 0)
    found = run(task)
    assert found[ORACLE].requests == found["round-robin"].requests == 3
    assert 0.0 < found[ORACLE].work < 0.1


@pytest.mark.parametrize(("kind", "servers"), [*((kind, 8) for kind in KINDS), (KINDS[0], 32)])
def test_a_trace_is_scaled_until_its_requests_keep_all_servers_busy(tmp_path: Path, kind: Kind, servers: int) -> None:
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [f"2023-11-16 18:{at // 60:02}:{at % 60:02}.00,{500 + at % 7 * 100},{20 + at % 5 * 10}" for at in range(1200)]
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(lines))
    task = Task(kind.name, "trace", (ORACLE,), str(path), 0.5, (), 1, 1200.0, 0.05, 0.0, 0.25, 20.0, servers)
    found = run(task)[ORACLE]
    assert found.work == pytest.approx(0.5, rel=0.05)
    assert found.scale > 2.0
    assert found.load < 2.0  # each of the servers gets requests


def test_each_trace_is_a_cell_for_each_model_and_share_of_their_work() -> None:
    todo = with_traces(cells(["s//random"], smoke=False), ["/traces/chats.jsonl.gz", "code.csv"], [50.0, 95.0])
    assert len(todo) == 2 * 2 * 2
    assert todo[0] == ("shared", "chats, 50 %", (ORACLE, "random"), "/traces/chats.jsonl.gz", 0.5)
    assert [cell.workload for cell in with_traces(todo[:1], ["code.csv"], [])] == ["code"]


def test_the_cells_in_which_a_goal_for_traces_is_missed_are_named() -> None:
    oracle = Outcome(100.0, 0.0, 1.0, 1.0, 1.0, 0.5, 0.0, 1.0)
    near, late, uncached = (replace(oracle, **{name: value}) for name, value in (("ttft_mean", 1.04), ("ttft_p95", 1.2), ("cached", 0.4)))
    panel = {name: summary([{ORACLE: oracle, "default": each}], ORACLE) for name, each in zip("abc", (near, late, uncached), strict=True)}
    lines = traces_text({"slots": panel}, "default").splitlines()
    assert lines[0].startswith("default: 2 of 3 cells")
    assert [line.split() for line in lines[1:]] == [["slots,", "b", "1.00", "1.20", "1.00"], ["slots,", "c", "1.00", "1.00", "0.80"]]


def test_the_cold_table_has_servers_of_all_paces() -> None:
    todo = cells([], smoke=False, cold=True)
    assert {kind for kind, *_ in todo} == {kind.name for kind in PACES}
    assert len(PACES) == 16
    assert {cell.policies[0] for cell in todo} == {ORACLE}
