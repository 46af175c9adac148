"""`epp size --trace`: the load of the busiest minute."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from epp.recording.imports import Arrival
from loadtest.sizing.command import command
from loadtest.sizing.trace_load import load_of
from tests.epp.recording.test_imports import AZURE, BURSTGPT, LLM_D, MOONCAKE, VLLM


def test_the_busiest_minute_counts() -> None:
    quiet = [Arrival(float(second), 1000, 10) for second in range(60)]
    busy = [Arrival(60 + second / 10, 1000, 20) for second in range(600)]
    found = load_of([*busy, *quiet])  # in any order
    assert (found.rps, found.chunk_rate, found.requests) == (10.0, 200.0, 660)
    assert found.prompt_kb == pytest.approx(4.2)


def test_a_short_trace_is_measured_over_its_own_time() -> None:
    assert load_of([Arrival(0.0, 4, 1), Arrival(2.0, 4, 1)]).rps == 1.0
    assert load_of([]).requests == 0


@pytest.mark.parametrize("text", [AZURE, BURSTGPT, LLM_D, MOONCAKE, VLLM])
def test_every_public_format_gives_a_size(tmp_path: Path, text: str) -> None:
    trace = tmp_path / "trace"
    trace.write_text(text)
    done = CliRunner().invoke(command, [f"--trace={trace}", "--json"])
    assert done.exit_code == 0 and "2 requests" in done.stderr, done.output
    load = json.loads(done.stdout)["load"]
    assert load["requests"] > 0 and load["prompt_kb"] > 0.2 and load["chunks"] > 0


def test_flags_win_over_the_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    trace.write_text(AZURE)
    done = CliRunner().invoke(command, [f"--trace={trace}", "--rps=77", "--prompt-kb=9", "--json"])
    load = json.loads(done.stdout)["load"]
    assert (load["requests"], load["prompt_kb"]) == (77, 9)


@pytest.mark.parametrize(("text", "why"), [("", "empty"), ("x", "no known format"), (AZURE[:40], "no request")])
def test_a_bad_trace_is_named(tmp_path: Path, text: str, why: str) -> None:
    trace = tmp_path / "trace"
    trace.write_text(text)
    done = CliRunner().invoke(command, [f"--trace={trace}"])
    assert done.exit_code == 1 and str(trace) in done.stderr and why in done.stderr


def test_a_load_is_needed_from_somewhere() -> None:
    assert CliRunner().invoke(command, []).exit_code == 2
