"""`epp record tune` on a small recording."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from loadtest.tune import command as module
from loadtest.tune.command import command
from tests.loadtest.replay.recordings import RANDOM, write
from tests.loadtest.tune.test_search import PINNED


def run(*flags: str) -> Result:
    return CliRunner().invoke(command, flags)


@pytest.fixture
def recording(tmp_path: Path) -> str:
    return write(tmp_path / "rec", 300)


@pytest.fixture
def config(tmp_path: Path) -> str:
    file = tmp_path / "pinned.yaml"
    file.write_text(PINNED)
    return str(file)


def test_it_says_so_when_nothing_is_better(recording: str, config: str) -> None:
    """Servers are idle and prompts share nothing, so no weight matters."""
    done = run(recording, f"--base={config}", "--trials=3")
    assert done.exit_code == 0, done.output
    assert "nothing is better" in done.stdout and "+++" not in done.stdout


def test_a_better_configuration_is_printed_as_a_patch_and_written(
    recording: str, config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search and the verdict are those of the test, because no weight matters for this recording."""
    confirmed = module.confirm

    def found(search: Any, *_: object) -> object:
        return search._tried({search._space.knobs[-1].path: 3.0})

    monkeypatch.setattr(module.Search, "best", found)
    monkeypatch.setattr(module, "confirm", lambda *given: msgspec.structs.replace(confirmed(*given), better=True))
    output = tmp_path / "tuned.yaml"
    done = run(recording, f"--base={config}", f"--output={output}")
    assert done.exit_code == 0, done.output
    assert "+  - {pluginRef: active-request-scorer, weight: 3.0}" in done.stdout
    assert "weight: 3.0" in output.read_text()


def test_json_has_the_figures_of_both_parts(recording: str, config: str) -> None:
    told = json.loads(run(recording, f"--base={config}", "--trials=2", "--json").stdout)
    assert told["objective"] == "ttft_p95" and told["trials"] == 2 and told["better"] is False
    assert told["training"]["base"]["requests"] == 144


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--objective=speed"], "'speed' is no figure"),
        (["--objective=moved"], "neither good nor bad"),
        (["--subject-to=errors ="], "is no condition"),
        (["--open", "--clients=2"], "exclude each other"),
    ],
)
def test_a_wrong_option_is_refused(flags: list[str], why: str) -> None:
    done = run("nowhere", *flags)
    assert done.exit_code == 2 and why in done.output


def test_a_configuration_without_values_to_change_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "random.yaml"
    file.write_text(RANDOM)
    done = run("nowhere", f"--base={file}")
    assert done.exit_code == 1 and "nothing to tune" in done.output


def test_a_short_recording_is_refused(tmp_path: Path, config: str) -> None:
    done = run(write(tmp_path / "rec", 100), f"--base={config}")
    assert done.exit_code == 1 and "the recording has 100 requests; at least 251 are needed" in done.output
