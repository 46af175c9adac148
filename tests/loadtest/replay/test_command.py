"""`epp record replay` on a small recording: fit, figures, what if, report, exit codes."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from loadtest.replay.command import command
from tests.loadtest.replay.recordings import DECODE_S, PREFILL_S, RANDOM, write
from workers.host.exit_codes import ExitCode
from workers.shared.recording.framing import MARK


@pytest.fixture
def recording(tmp_path: Path) -> str:
    return write(tmp_path / "rec", 60)


@pytest.fixture
def config(tmp_path: Path) -> str:
    file = tmp_path / "random.yaml"
    file.write_text(RANDOM)
    return str(file)


def run(*flags: str) -> Result:
    return CliRunner().invoke(command, flags)


def test_the_fit_finds_the_speeds_and_the_replay_gives_the_measured_times(recording: str) -> None:
    done = run(recording, "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    for server in told["servers"].values():
        assert server["prefill_s"] == pytest.approx(PREFILL_S, rel=0.05)
        assert server["decode_s"] == pytest.approx(DECODE_S, rel=0.02)
    assert told["fit"]["ttft_p95"] == pytest.approx(told["measured"]["ttft_p95"], rel=0.02)
    assert told["fit"]["latency_p50"] == pytest.approx(told["measured"]["latency_p50"], rel=0.02)


def test_a_condition_that_holds_sets_the_exit_code_and_names_the_configuration(recording: str, config: str) -> None:
    assert run(recording, f"--config={config}", "--fail-if=ttft_p95 > 2 * base", "--fail-if=errors > base").exit_code == 0
    done = run(recording, f"--config={config}", "--fail-if=errors > base", "--fail-if=ttft_p95 > 0.5 * base")
    assert done.exit_code == 1 and f"'ttft_p95 > 0.5 * base' holds for {config}" in done.output


def test_fewer_endpoints_slots_and_a_higher_rate_make_requests_wait(recording: str) -> None:
    told = json.loads(run(recording, "--json", "--endpoints=1", "--slots=1", "--rate=20").stdout)
    assert told["base"]["ttft_p95"] > 2 * told["fit"]["ttft_p95"]


def test_more_endpoints_than_recorded_take_requests(recording: str) -> None:
    told = json.loads(run(recording, "--json", "--endpoints=3").stdout)
    assert len(told["servers"]) == 3 and told["base"]["load"] < 1.4  # at least 1.5 if one of three gets nothing


def test_the_table_has_a_row_per_configuration_and_the_error_of_the_model(recording: str, config: str) -> None:
    done = run(recording, f"--config={config}", f"--config={config}")
    assert done.exit_code == 0, done.output
    assert f"{config[-24:]} (2)" in done.stdout and "the model's error under the recorded configuration: p50" in done.stdout


def test_the_report_loads_nothing_from_elsewhere_and_runs_no_script(recording: str, config: str, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    assert run(recording, f"--config={config}", f"--html={file}").exit_code == 0
    page = file.read_text()
    assert "<script" not in page and not re.search(r"(src|href)=|url\(|@import", page)
    assert "prefers-color-scheme: dark" in page
    for title in ("Time to the first token", "Hit rate", "in flight per endpoint", "by band", "would go elsewhere"):
        assert title in page


def test_a_report_that_cannot_be_written_is_named(recording: str) -> None:
    done = run(recording, "--html=/nowhere/report.html")
    assert done.exit_code == 1 and "/nowhere/report.html: No such file or directory" in done.output


def test_a_wrong_condition_is_refused_before_anything_is_read() -> None:
    done = run("nowhere", "--fail-if=speed > base")
    assert done.exit_code == 2 and "'speed' is no figure; allowed: requests" in done.output


def test_clients_and_open_exclude_each_other() -> None:
    done = run("nowhere", "--clients=3", "--open")
    assert done.exit_code == 2 and "exclude each other" in done.output


def test_a_recording_with_too_few_answers_is_refused(tmp_path: Path) -> None:
    done = run(write(tmp_path / "rec", 5))
    assert done.exit_code == 1 and "at least 20 are needed" in done.output


def test_a_cut_file_is_replayed_up_to_the_cut_and_says_so(recording: str) -> None:
    (file,) = Path(recording).iterdir()
    file.write_bytes(file.read_bytes() + MARK.pack(0, 0, b"", 0, 0)[:10])
    done = run(recording)
    assert done.exit_code == 0 and "cut off at byte" in done.output


@pytest.mark.parametrize(("content", "why"), [(b"", "the file is empty"), (b"PK\x03\x04" * 20, "not a recording")])
def test_a_foreign_file_is_refused(tmp_path: Path, content: bytes, why: str) -> None:
    file = tmp_path / "foreign.epprec"
    file.write_bytes(content)
    done = run(str(file))
    assert done.exit_code == 1 and str(file) in done.output and why in done.output


def test_a_configuration_with_an_error_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text("plugins: [{type: no-such-scorer}]\n")
    done = run("nowhere", f"--config={file}")
    assert done.exit_code == ExitCode.CONFIG and "no-such-scorer" in done.output
