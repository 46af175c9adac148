"""The folder of the small recording."""

import tempfile
from types import SimpleNamespace
from typing import Any

import pytest

from workers.supervisor.record_keeper import recent_folder


def options(**values: str) -> Any:
    return SimpleNamespace(**({"record_dir": "", "state_dir": "", "instance": "epp-9002", "run_dir": "/run/epp"} | values))


def test_it_is_in_the_state_folder_or_a_temporary_one_and_nowhere_beside_another_recording() -> None:
    assert recent_folder(options(state_dir="/state")) == "/state/recent"
    assert recent_folder(options()).startswith(f"{tempfile.gettempdir()}/epp-recent-epp-9002-")
    assert recent_folder(options(record_dir="/recorded")) == recent_folder(options(record_dir="none")) == ""


def test_pickers_of_one_name_that_run_beside_each_other_have_folders_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    first = recent_folder(options())
    assert recent_folder(options()) == first
    assert recent_folder(options(run_dir="/elsewhere")) != first
    monkeypatch.setattr("os.getuid", lambda: 4321)
    assert recent_folder(options()) != first


def test_a_picker_on_a_read_only_disk_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    assert recent_folder(options()) == ""
