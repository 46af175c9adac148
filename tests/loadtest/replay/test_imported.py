"""Traces of public formats in `epp record replay` and `epp record tune`: servers are assumed."""

import gzip
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from loadtest.replay.command import command as replay
from loadtest.replay.servers import FORMS
from loadtest.tune.command import command as tune
from tests.loadtest.replay.recordings import RANDOM, write
from tests.loadtest.tune.test_search import PINNED


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Mooncake's format: prompts of ten kinds, whose first blocks are equal."""
    lines = [
        {"timestamp": 50 * n, "input_length": 1500, "output_length": 20, "hash_ids": [n % 10, 100 + n % 10, 1000 + n]} for n in range(300)
    ]
    file = tmp_path / "mooncake.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(file)


def config(tmp_path: Path, text: str) -> str:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    return str(file)


def test_a_public_trace_replays_on_assumed_servers(trace: str, tmp_path: Path) -> None:
    flags = [trace, "--endpoints=3", "--prefill-us=200", "--json", f"--config={config(tmp_path, RANDOM)}"]
    done = CliRunner().invoke(replay, flags)
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert len(told["servers"]) == 3 and told["servers"]["server-0"]["prefill_s"] == pytest.approx(200e-6)
    assert told["measured"] is None and told["fit"] is None
    (found,) = told["configs"].values()
    assert told["base"]["hit_rate"] > found["hit_rate"] > 0.3  # two of three blocks are shared


def test_a_public_trace_replays_on_servers_of_any_form(trace: str) -> None:
    Path(trace).write_text("".join(Path(trace).read_text().splitlines(keepends=True)[:60]))
    times = {}
    for form in FORMS:
        done = CliRunner().invoke(replay, [trace, "--endpoints=2", "--slots=2", f"--form={form}", "--json"])
        assert done.exit_code == 0, done.output
        told = json.loads(done.stdout)
        assert {server["form"] for server in told["servers"].values()} == {form}
        times[form] = told["base"]["ttft_mean"]
    assert len(set(times.values())) == len(FORMS)


def test_the_table_says_that_servers_are_assumed(trace: str) -> None:
    done = CliRunner().invoke(replay, [trace])
    assert done.exit_code == 0 and "the servers are assumed" in done.stdout and "measured" not in done.stdout


def test_a_public_trace_is_tuned(trace: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(tune, [trace, f"--base={config(tmp_path, PINNED)}", "--trials=2", "--endpoints=2"])
    assert done.exit_code == 0, done.output
    assert "2 configurations tried" in done.stdout


@pytest.mark.parametrize("option", ["--decode-ms=5", "--form=slots"])
def test_assumed_servers_of_a_recording_are_refused(tmp_path: Path, option: str) -> None:
    done = CliRunner().invoke(replay, [write(tmp_path / "rec", 30), option])
    assert done.exit_code == 1 and "servers are fitted to a recording" in done.output


def test_a_trace_that_is_none_is_refused_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("hello\n")
    done = CliRunner().invoke(replay, [str(file)])
    assert done.exit_code == 1 and str(file) in done.output and "convert the file" in done.output


@pytest.mark.parametrize(("cut", "why"), [(0, "rename the file"), (20, "cut off or damaged: copy it again")])
def test_a_packed_trace_that_cannot_be_unpacked_is_refused_with_what_to_do(tmp_path: Path, cut: int, why: str) -> None:
    text = b'{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [1]}\n'
    file = tmp_path / "trace.jsonl.gz"
    file.write_bytes(gzip.compress(text)[:cut] or text)
    done = CliRunner().invoke(replay, [str(file)])
    assert done.exit_code == 1 and f"{file}: " in done.output and why in done.output
