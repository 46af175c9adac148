"""`epp replay` on a small recording: fit, figures, what if, exit codes."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from epp.recording.records import VERSION, Batch, Decided, Ended, Member, Opened, Roster, batch, frame
from workers.cli.replay.command import command
from workers.shared.recording.files import RecordFiles
from workers.shared.recording.limits import Frame, Limits

OVERHEAD_S, PREFILL_S, DECODE_S = 0.02, 0.0001, 0.01
TOKENS = 64
RANDOM = """\
plugins:
- {type: random-picker}
schedulingProfiles:
- {name: default, plugins: [{pluginRef: random-picker}]}
"""


def _ints(*values: int) -> bytes:
    return b"".join(value.to_bytes(8, "little") for value in values)


def _request(number: int) -> list[Decided | Ended]:
    """One request to an idle server, with a prompt that no other request shares."""
    blocks = 1 + number % 5
    hashes = _ints(*(1000 * number + block for block in range(blocks)))
    first = OVERHEAD_S + blocks * TOKENS * PREFILL_S
    decided = Decided(
        number, 0, float(number), 0.001, 1, "m", "", 0, 0, 0, None, True, 100, 11, blocks * TOKENS, TOKENS, hashes, 1,
        None, b"", None, None, [], [number % 2], "",
    )  # fmt: skip
    ended = Ended(number, 200, number % 2, first, first + 10 * DECODE_S, True, True, 100, blocks * TOKENS, 0, 11)
    return [decided, ended]


def write(folder: Path, count: int) -> str:
    members = [Member(0.0, True, slot, 0, "default", f"pod-{slot}", f"10.0.0.{slot + 1}:8000", {}) for slot in range(2)]
    requests = [record for number in range(1, count + 1) for record in _request(number)]
    worker = [Batch(1, 0), Roster(1, _ints(0, 1), _ints(0, 0)), *requests]
    files = RecordFiles(str(folder), "epp", Limits())
    files.put(Frame(1, frame([batch([Opened(VERSION, "", 1, 5000.0, 0.0, 1), *members]), batch(worker)]), 1))
    files.end()
    return str(folder)


@pytest.fixture
def recording(tmp_path: Path) -> str:
    return write(tmp_path / "rec", 100)


def run(*flags: str) -> Result:
    return CliRunner().invoke(command, flags)


def test_the_fit_finds_the_speeds_and_the_replay_gives_the_measured_times(recording: str) -> None:
    done = run(recording, "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    for server in told["servers"].values():
        assert server["prefill_s"] == pytest.approx(PREFILL_S)
        assert server["overhead_s"] == pytest.approx(OVERHEAD_S)
        assert server["decode_s"] == pytest.approx(DECODE_S)
    assert told["fit"]["ttft_p95"] == pytest.approx(told["measured"]["ttft_p95"])


def test_a_condition_that_holds_sets_the_exit_code_and_names_the_configuration(recording: str, tmp_path: Path) -> None:
    config = tmp_path / "random.yaml"
    config.write_text(RANDOM)
    assert run(recording, f"--config={config}", "--fail-if=ttft_p95 > 2 * base").exit_code == 0
    done = run(recording, f"--config={config}", "--fail-if=ttft_p95 > 0.5 * base")
    assert done.exit_code == 1 and f"holds for {config}" in done.output


def test_fewer_endpoints_slots_and_a_higher_rate_make_requests_wait(recording: str) -> None:
    told = json.loads(run(recording, "--json", "--endpoints=1", "--slots=1", "--rate=20").stdout)
    assert told["base"]["ttft_p95"] > 2 * told["fit"]["ttft_p95"]


def test_a_wrong_condition_is_refused_before_anything_is_read() -> None:
    done = run("nowhere", "--fail-if=speed > base")
    assert done.exit_code == 2 and "'speed' is no figure; allowed: requests" in done.output


def test_a_recording_with_too_few_answers_is_refused(tmp_path: Path) -> None:
    done = run(write(tmp_path / "rec", 5))
    assert done.exit_code == 1 and "at least 20 are needed" in done.output
