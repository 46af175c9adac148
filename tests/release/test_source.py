"""What is released is a commit, and its version stands in one place."""

import shutil
import subprocess
from pathlib import Path

import pytest

from release.errors import Refused
from release.source import ROOT, checked_out, version

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "pyproject.toml").write_text('[project]\nversion = "1.2.3"\n')
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    for command in (["init", "--quiet"], ["add", "."], [*identity, "commit", "--quiet", "--message", "First"]):
        subprocess.run(["git", *command], cwd=folder, check=True)
    return folder


def test_a_release_has_the_files_the_version_and_the_time_of_the_commit(repository: Path, tmp_path: Path) -> None:
    into = tmp_path / "tree"
    into.mkdir()
    source = checked_out(into, repository)
    asked = subprocess.run(["git", "log", "-1", "--format=%H %ct"], cwd=repository, capture_output=True, text=True)
    assert f"{source.commit} {source.epoch}\n" == asked.stdout
    assert source.version == "1.2.3"
    assert source.environment["SOURCE_DATE_EPOCH"] == str(source.epoch)
    assert [path.name for path in into.iterdir()] == ["pyproject.toml"]


@pytest.mark.parametrize("name", ["pyproject.toml", "new.txt"])
def test_a_tree_with_changes_is_refused_and_they_are_named(repository: Path, tmp_path: Path, name: str) -> None:
    (repository / name).write_text("changed")
    with pytest.raises(Refused, match=f"no commit has; commit or stash them:\n.*{name}"):
        checked_out(tmp_path, repository)


def test_a_folder_without_git_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="a release is made from a Git checkout"):
        checked_out(tmp_path, tmp_path)


@pytest.mark.parametrize("number", ["1.2", "1.2.3.dev1", "v1.2.3"])
def test_a_version_has_three_numbers(tmp_path: Path, number: str) -> None:
    (tmp_path / "pyproject.toml").write_text(f'[project]\nversion = "{number}"\n')
    with pytest.raises(Refused, match=f"the version is '{number}'; write three numbers"):
        version(tmp_path)


def test_this_tree_has_such_a_version() -> None:
    assert version(ROOT)
