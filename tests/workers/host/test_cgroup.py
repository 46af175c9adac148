import os
from pathlib import Path

import pytest

from workers.host import cgroup


def group(root: Path, path: str, **files: str) -> None:
    folder = root / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("_", ".", 1)).write_text(content)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own").write_text("0::/a/b\n")
    return tmp_path / "own"


def test_without_a_limit_the_affinity_counts(tmp_path: Path, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    group(tmp_path, "a/b", cpu_max="max 100000\n")
    assert cgroup.available(tmp_path, own) == 3
    assert cgroup.available(tmp_path, tmp_path / "nothing") == 3


@pytest.mark.parametrize(("quota", "expected"), [("250000", 3), ("100000", 1), ("10000", 1), ("900000", 8)])
def test_the_limit_is_rounded_up_and_the_smaller_one_counts(
    tmp_path: Path, own: Path, monkeypatch: pytest.MonkeyPatch, quota: str, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    group(tmp_path, "a/b", cpu_max=f"{quota} 100000\n")
    assert cgroup.available(tmp_path, own) == expected


def test_a_parent_group_may_have_the_tighter_limit(tmp_path: Path, own: Path) -> None:
    group(tmp_path, "a/b", cpu_max="400000 100000")
    group(tmp_path, "a", cpu_max="150000 100000")
    group(tmp_path, "", cpu_max="max 100000")
    assert cgroup.cpu_limit(tmp_path, own) == 1.5


def test_version_1_groups_are_read(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("5:cpu,cpuacct:/x\n4:memory:/x\n")
    (tmp_path / "cpu" / "x").mkdir(parents=True)
    (tmp_path / "cpu" / "x" / "cpu.cfs_quota_us").write_text("50000")
    (tmp_path / "cpu" / "x" / "cpu.cfs_period_us").write_text("100000")
    assert cgroup.cpu_limit(tmp_path, tmp_path / "own") == 0.5
    (tmp_path / "cpu" / "x" / "cpu.cfs_quota_us").write_text("-1")
    assert cgroup.cpu_limit(tmp_path, tmp_path / "own") is None


@pytest.mark.parametrize(("allowed", "workers"), [(1, 1), (2, 1), (3, 2), (8, 7), (64, 8)])
def test_the_workers_leave_one_cpu_to_other_processes_and_are_not_very_many(allowed: int, workers: int) -> None:
    assert cgroup.default_workers(allowed) == workers
