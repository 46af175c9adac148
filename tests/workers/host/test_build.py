"""The version and the commit of the running program."""

import importlib.metadata
import sys
from pathlib import Path

import pytest

from workers.host import build
from workers.host.build import RECORDED, commit, version

A, B = "a" * 40, "b" * 40


@pytest.fixture(autouse=True)
def from_no_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_installed", lambda: "")


def checkout(root: Path, head: str, **files: str) -> Path:
    (root / ".git/refs/heads").mkdir(parents=True)
    (root / ".git/HEAD").write_text(head)
    for name, text in files.items():
        (root / ".git" / name.replace("__", "/").replace("_", "-")).write_text(text)
    return root


@pytest.mark.parametrize(
    ("head", "files", "expected"),
    [
        ("ref: refs/heads/main\n", {"refs__heads__main": f"{A}\n"}, A),
        ("ref: refs/heads/main\n", {"packed_refs": f"# pack-refs\n{B} refs/heads/other\n{A} refs/heads/main\n"}, A),
        ("ref: refs/heads/main\n", {"refs__heads__main": A, "packed_refs": f"{B} refs/heads/main\n"}, A),
        (f"{A}\n", {}, A),
        ("ref: refs/heads/unborn\n", {}, ""),
        ("not a commit", {}, ""),
    ],
)
def test_a_checkout_names_its_commit(tmp_path: Path, head: str, files: dict[str, str], expected: str) -> None:
    assert commit({}, checkout(tmp_path, head, **files)) == expected


def test_the_image_comes_before_the_checkout_and_nothing_is_an_empty_commit(tmp_path: Path) -> None:
    assert commit({}, tmp_path) == ""
    assert commit({"EPP_COMMIT": B}, checkout(tmp_path, A)) == B


@pytest.mark.parametrize(
    ("origin", "expected"),
    [(f'{{"url": "u", "vcs_info": {{"vcs": "git", "commit_id": "{A}"}}}}', A), ('{"dir_info": {}}', ""), (None, ""), ("{", "")],
)
def test_an_installation_from_a_repository_names_its_commit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, origin: str | None, expected: str
) -> None:
    monkeypatch.undo()
    folder = tmp_path / "endpoint_picker-1.2.3.dist-info"
    folder.mkdir()
    if origin is not None:
        (folder / "direct_url.json").write_text(origin)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "none"), str(tmp_path)])
    assert commit({}, tmp_path) == expected
    assert version() == "1.2.3"


def test_a_source_tree_has_no_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert version() == ""


def test_the_version_is_the_one_that_the_standard_library_finds() -> None:
    try:
        expected = importlib.metadata.version("endpoint-picker")
    except importlib.metadata.PackageNotFoundError:
        expected = ""
    assert version() == expected


def test_what_the_build_recorded_comes_before_the_checkout(tmp_path: Path) -> None:
    (checkout(tmp_path, A) / RECORDED).parent.mkdir(parents=True)
    (tmp_path / RECORDED).write_text(f"{B}\n")
    assert commit({}, tmp_path) == B
