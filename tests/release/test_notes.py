"""The notes say what changed in exactly this version."""

from pathlib import Path

import pytest

from release import notes
from release.errors import Refused
from release.source import ROOT, Source, version

HEAD = "# Changelog\n\n## [Unreleased]\n\n"


def test_before_a_version_has_a_section_its_changes_are_the_unreleased_ones() -> None:
    assert notes.changes(f"{HEAD}- new\n\n## [0.1.0] - 2026-01-01\n\n- old\n", "0.2.0") == "- new"


def test_the_changes_of_a_version_end_at_the_version_before() -> None:
    text = f"{HEAD}## [0.2.0] - 2026-02-02\n\n- new\n\n## [0.1.0] - 2026-01-01\n\n- old\n"
    assert notes.changes(text, "0.2.0") == "- new"
    assert notes.changes(text, "0.1.0") == "- old"


def test_unreleased_changes_in_a_released_version_are_refused() -> None:
    with pytest.raises(Refused, match=r"0\.1\.0 is released, but \[Unreleased\] has entries: set the next version"):
        notes.changes(f"{HEAD}- new\n\n## [0.1.0]\n\n- old\n", "0.1.0")


def test_a_version_without_changes_is_refused() -> None:
    with pytest.raises(Refused, match=r"no section \[0\.2\.0\], and \[Unreleased\] is empty"):
        notes.changes(f"{HEAD}## [0.1.0]\n\n- old\n", "0.2.0")


def test_the_versions_of_the_tests_come_from_the_files_that_pin_them() -> None:
    named = dict(notes.tested(ROOT))
    assert {"Envoy", "Helm", "Kubernetes API server", "gRPC for Go", "gRPC for Node", "NumPy"} <= named.keys()
    assert all(named.values())


def test_the_notes_say_what_was_made_and_what_was_not(tmp_path: Path) -> None:
    (tmp_path / "a.whl").write_bytes(b"x" * 1500)
    text = notes.text(Source(ROOT, version(ROOT), "c" * 40, 0), [tmp_path / "a.whl"], ["It is small."], ["image: no tool"])
    assert "| a.whl | 2 |\n\n- It is small.\n\nNot made:\n\n- image: no tool\n" in text
