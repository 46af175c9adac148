"""The comparison with another commit resolves names, extracts trees, pairs figures and refuses bad input. No test runs a benchmark."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bench import against
from tests.bench.against import ComparisonError, Figure, Side, alternated, compared, extracted, here_name, micro, resolved

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Makes a repository with two commits of one benchmark. It prints two figures in the first commit, three in the second."""
    root = tmp_path / "repository"
    bench = root / "tests" / "bench"
    bench.mkdir(parents=True)
    (root / against.LOCK_FILE).write_text("# nothing is needed\n")
    git(root, "init", "--quiet", "--initial-branch=main")
    for commit in ({"hash": 2.0, "match": 8.0}, {"hash": 1.0, "match": 8.0, "scrape": 5.0}):
        (bench / "micro.py").write_text(f"print('''{json.dumps(commit)}''')\n")
        git(root, "add", ".")
        git(root, "commit", "--quiet", "--message", "a commit")
    return root


def git(root: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", str(root), *identity, *arguments], capture_output=True, text=True, check=False)
    if "unmerged" not in done.stdout and "CONFLICT" not in done.stdout:
        assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_name_that_is_not_a_commit_is_refused_with_valid_forms(repository: Path) -> None:
    assert resolved("HEAD~1", repository) == git(repository, "rev-parse", "HEAD~1")
    for name in ("nosuch", "--all", "", "HEAD:tests"):
        with pytest.raises(ComparisonError, match=r"names no commit.*give a hash"):
            resolved(name, repository)


def test_the_name_of_the_tree_has_its_commit_and_tells_of_changes(repository: Path) -> None:
    head = git(repository, "rev-parse", "--short=10", "HEAD")
    assert here_name(repository) == head
    (repository / "new.py").write_text("")
    assert here_name(repository) == f"{head} with changes"


def test_a_tree_with_merge_conflicts_is_not_measured(repository: Path) -> None:
    git(repository, "checkout", "--quiet", "-b", "other", "HEAD~1")
    (repository / "tests/bench/micro.py").write_text("print('{}')\n")
    git(repository, "commit", "--quiet", "--all", "--message", "another")
    git(repository, "merge", "main")
    with pytest.raises(ComparisonError, match=r"micro\.py has merge conflicts: resolve"):
        here_name(repository)


def test_the_other_commit_is_extracted_and_removed_afterwards(repository: Path) -> None:
    before = git(repository, "status", "--porcelain", "--ignored")
    with extracted(git(repository, "rev-parse", "HEAD~1"), repository) as side:
        assert "scrape" not in (side.root / "tests/bench/micro.py").read_text()
        assert side.python == Path(sys.executable)
        root = side.root
    assert not root.exists()
    assert git(repository, "status", "--porcelain", "--ignored") == before
    assert len(git(repository, "worktree", "list").splitlines()) == 1


def test_another_lock_file_gets_a_new_environment(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (repository / against.LOCK_FILE).write_text("# something is needed\n")
    ran: list[list[str]] = []

    def run(command: list[str], **_more: Any) -> Any:
        ran.append(command)
        return subprocess.CompletedProcess(command, 0, "", "")

    tree = repository.parent / "tree"
    tree.mkdir()
    (tree / against.LOCK_FILE).write_text("# nothing is needed\n")
    monkeypatch.setattr(against.subprocess, "run", run)
    venv = repository.parent / "venv"
    assert against.interpreter(tree, repository, venv) == venv / "bin" / "python"
    assert ran[0][1:] == ["-m", "venv", str(venv)]
    assert ran[1][-1] == str(tree / against.LOCK_FILE)


def test_each_side_runs_its_packages(tmp_path: Path) -> None:
    (tmp_path / "loadtest").mkdir()
    (tmp_path / "loadtest" / "__init__.py").write_text("print('the other tree')")
    side = Side("base", tmp_path, Path(sys.executable))
    done = subprocess.run(side.command("-c", "import loadtest"), capture_output=True, text=True, check=False)
    assert done.stdout == "the other tree\n"


def test_only_figures_of_both_trees_are_compared(repository: Path) -> None:
    with extracted(git(repository, "rev-parse", "HEAD~1"), repository) as base:
        sides = [base, Side("here", repository, Path(sys.executable))]
        figures = micro(sides, 2, smoke=False)
    assert figures == [Figure("hash", 2.0, 1.0), Figure("match", 8.0, 8.0)]
    assert [figure.ratio for figure in figures] == [0.5, 1.0]


def test_the_first_side_changes_from_round_to_round() -> None:
    sides = [Side(name, Path(), Path()) for name in ("a", "b")]
    assert ["".join(side.name for side in alternated(sides, number)) for number in range(3)] == ["ab", "ba", "ab"]


def row(cpu: float, *, not_ok: int = 0) -> dict[str, Any]:
    endings = {"ok": 10, **({"failed": not_ok} if not_ok else {})}
    figures = {"cpu_us_per_request": cpu, "requests_per_s": 100.0, "cores": 0.1, "memory_mib": 70.0}
    return {**figures, "pick_ms": {"p50": 1.0}, "endings": endings}


def test_medians_are_compared_and_the_ratio_of_each_round_is_shown() -> None:
    result = compared("short", [row(100), row(200), row(110)], [row(90), row(100), row(99, not_ok=2)])
    assert result["figures"][0] == Figure(against.CPU, 110, 99)
    assert result["cpu_ratio_of_rounds"] == [0.9, 0.5, 0.9]
    assert result["not_ok"] == [0, 2]


def test_an_idle_case_is_compared_by_its_cores() -> None:
    idle = {**row(0.0), "pick_ms": {}}
    result = compared("idle100", [idle], [{**idle, "cores": 0.2}])
    assert result["figures"][0] == Figure("cores", 0.1, 0.2)
    assert result["cpu_ratio_of_rounds"] == [2.0]
