"""Tests of a worker's share of memory, of the memory that it uses, and of the order in which workers leave."""

from pathlib import Path

import pytest

from workers.host import memory
from workers.host.memory import (
    AGE_MIN_S,
    BURST_BYTES,
    BURST_EVERY_S,
    LOOK_S,
    TRIM_EVERY_S,
    Bursts,
    Leaving,
    MemoryUsage,
    MemoryWatch,
    cgroup_limit,
    share,
)

GIB = 1 << 30
LIMIT = 100 << 20
PAGE = 4096


def group(root: Path, path: str, **files: str) -> None:
    folder = root / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content)


def own(tmp_path: Path, *lines: str) -> Path:
    file = tmp_path / "own"
    file.write_text("\n".join(lines) + "\n")
    return file


def test_the_tightest_cgroup_up_to_the_root_counts(tmp_path: Path) -> None:
    group(tmp_path, "a", memory__max=f"{GIB}\n")
    group(tmp_path, "a/b", memory__max="max\n")
    group(tmp_path, "a/b/c", memory__max=f"{2 * GIB}\n")
    assert cgroup_limit(tmp_path, own(tmp_path, "0::/a/b/c")) == GIB


def test_version_1_has_another_file_and_another_value_for_no_limit(tmp_path: Path) -> None:
    group(tmp_path, "memory/pod", memory__limit_in_bytes=f"{GIB}\n")
    group(tmp_path, "memory", memory__limit_in_bytes="9223372036854771712\n")
    group(tmp_path, "cpu/pod", memory__limit_in_bytes="1\n")
    lines = ("4:memory:/pod", "2:cpu,cpuacct:/pod", "0::/elsewhere")
    assert cgroup_limit(tmp_path, own(tmp_path, *lines)) == GIB
    assert cgroup_limit(tmp_path, own(tmp_path, "4:memory:/")) is None


def test_without_a_cgroup_limit_there_is_no_limit(tmp_path: Path) -> None:
    assert cgroup_limit(tmp_path, own(tmp_path, "0::/", "torn")) is None
    assert cgroup_limit(tmp_path, tmp_path / "none") is None


@pytest.mark.parametrize(
    ("given", "cgroup", "workers", "bytes_"),
    [(None, 5 * GIB, 4, int(0.8 * GIB)), (None, None, 4, 0), (LIMIT, 5 * GIB, 4, LIMIT), (0, 5 * GIB, 4, 0)],
)
def test_a_share_is_the_flag_or_four_fifths_of_the_limit_divided_by_the_workers_plus_one(
    given: int | None, cgroup: int | None, workers: int, bytes_: int
) -> None:
    assert share(given, cgroup, workers) == bytes_


class Files:
    """The files statm and smaps_rollup. `exact` counts the reads of the second."""

    def __init__(self, tmp_path: Path) -> None:
        self.statm, self.rollup = tmp_path / "statm", tmp_path / "rollup"
        self.usage = MemoryUsage(self.statm, self.rollup, PAGE)

    def say(self, resident: int, proportional: int | None) -> None:
        self.statm.write_text(f"999 {resident // PAGE} 5 1 0 7 0\n")
        self.rollup.unlink(missing_ok=True)
        if proportional is not None:
            self.rollup.write_text(f"00-ff ---p 00000000 00:00 0 [rollup]\nRss: 1 kB\nPss: {proportional >> 10} kB\nPss_Anon: 9 kB\n")


def test_shared_pages_count_in_proportion(tmp_path: Path) -> None:
    files = Files(tmp_path)
    files.say(2 * LIMIT, LIMIT - 1024)
    assert files.usage.over(LIMIT) == 0
    files.say(4 * LIMIT, LIMIT + 1024)
    assert files.usage.over(LIMIT) == LIMIT + 1024


def test_the_exact_figure_is_not_read_while_it_cannot_matter(tmp_path: Path) -> None:
    files = Files(tmp_path)
    files.say(LIMIT, 9 * LIMIT)  # if it were read, the exact figure would exceed the limit
    assert files.usage.over(LIMIT) == 0
    files.say(2 * LIMIT, LIMIT - (10 << 20))
    assert files.usage.over(LIMIT) == 0
    files.say(2 * LIMIT + (10 << 20), 9 * LIMIT)
    assert files.usage.over(LIMIT) == 0  # it grew by the 10 MiB that were left
    files.say(2 * LIMIT + (11 << 20), LIMIT + (1 << 20))
    assert files.usage.over(LIMIT) == LIMIT + (1 << 20)


def test_without_the_exact_figure_all_resident_pages_count(tmp_path: Path) -> None:
    files = Files(tmp_path)
    files.say(LIMIT + PAGE, None)
    assert files.usage.over(LIMIT) == LIMIT + PAGE


def test_this_process_has_a_size() -> None:
    assert MemoryUsage().over(1 << 20) > 1 << 20
    memory.trim()


class Process:
    """Bursts, with a resident size that the test sets. A trim halves it."""

    def __init__(self) -> None:
        self.resident = LIMIT
        self.trims = 0
        self.bursts = Bursts(lambda: self.resident, self.trim, 0.0)

    def trim(self) -> None:
        self.trims += 1
        self.resident //= 2

    def look(self, now: float, resident: int) -> int:
        self.resident = resident
        self.bursts.look(now)
        return self.trims


def test_memory_is_given_back_once_a_burst_grows_no_more() -> None:
    process, much = Process(), LIMIT + BURST_BYTES + 1
    assert process.look(2, LIMIT + BURST_BYTES) == process.look(4, LIMIT + BURST_BYTES) == 0  # no burst
    assert process.look(6, much) == 0  # it still grows
    assert process.look(8, much) == 1
    assert process.look(10, much // 2) == process.look(12, much // 2) == 1


def test_a_process_that_needs_its_memory_is_trimmed_rarely() -> None:
    process, much = Process(), 4 * LIMIT
    process.look(2, much)
    assert process.look(4, much) == 1
    assert process.look(6, much) == process.look(4 + BURST_EVERY_S - 1, much) == 1
    assert process.look(4 + BURST_EVERY_S, much) == 2


class Worker:
    """A watch, with areas that the test owns."""

    def __init__(self, ordinal: int, areas: dict[int, int], used: int = LIMIT + 1) -> None:
        self.ordinal, self.areas, self.used = ordinal, areas, used
        self.now = 0.0
        self.after_trim: int | None = None
        areas[ordinal] = Leaving.STAYS
        self.watch = MemoryWatch(
            ordinal,
            now=0.0,
            over=lambda limit: self.used if self.used > limit else 0,
            trim=self.trim,
            say=self.say,
            others=lambda: {other: state for other, state in self.areas.items() if other != ordinal},
        )

    def trim(self) -> None:
        if self.after_trim is not None:
            self.used = self.after_trim

    def say(self, state: Leaving) -> None:
        self.areas[self.ordinal] = state

    def look(self, limit: int = LIMIT) -> int:
        self.now += LOOK_S
        return self.watch.look(self.now, limit)

    def aged(self) -> "Worker":
        self.now = AGE_MIN_S
        return self


def test_a_worker_over_its_limit_publishes_that_it_waits_and_leaves_at_the_next_look() -> None:
    worker = Worker(1, {}).aged()
    assert worker.look() == 0
    assert worker.areas[1] == Leaving.WAITS
    assert worker.look() == LIMIT + 1
    assert worker.areas[1] == Leaving.LEAVES


def test_a_worker_within_its_limit_or_without_a_limit_stays() -> None:
    worker = Worker(1, {}, used=LIMIT).aged()
    assert [worker.look() for _ in range(5)] == [0] * 5
    worker.used = 9 * LIMIT
    assert [worker.look(0) for _ in range(5)] == [0] * 5
    assert worker.areas[1] == Leaving.STAYS


def test_no_worker_leaves_in_its_first_minute() -> None:
    worker = Worker(1, {})
    looks = int(AGE_MIN_S / LOOK_S) - 1
    assert [worker.look() for _ in range(looks)] == [0] * looks
    assert worker.areas[1] == Leaving.STAYS


def test_a_worker_that_uses_less_again_stays() -> None:
    worker = Worker(1, {}).aged()
    worker.look()
    worker.used = LIMIT
    assert worker.look() == 0
    assert worker.areas[1] == Leaving.STAYS


def test_freed_memory_is_returned_before_a_worker_leaves_but_not_at_every_look() -> None:
    worker = Worker(1, {}).aged()
    worker.after_trim = LIMIT - 1
    assert worker.look() == 0
    assert worker.areas[1] == Leaving.STAYS
    worker.used, worker.after_trim = LIMIT + 1, 0
    worker.look()
    assert worker.look() == LIMIT + 1, f"trimmed again within {TRIM_EVERY_S} s"


def test_while_a_worker_leaves_the_others_wait() -> None:
    areas: dict[int, int] = {}
    worker = Worker(1, areas).aged()
    areas[2] = Leaving.LEAVES
    assert [worker.look() for _ in range(3)] == [0] * 3
    del areas[2]
    assert [worker.look() for _ in range(2)] == [0, LIMIT + 1]


@pytest.mark.parametrize("first", [1, 2, 3])
def test_if_several_workers_want_to_leave_at_the_same_moment_exactly_one_leaves(first: int) -> None:
    areas: dict[int, int] = {}
    workers = [Worker(ordinal, areas).aged() for ordinal in (1, 2, 3)]
    for worker in workers:  # each one checks before another one has published its state
        worker.areas = {}
        worker.look()
    for worker in workers:
        areas[worker.ordinal] = worker.areas[worker.ordinal]
        worker.areas = areas
    order = sorted(workers, key=lambda worker: (worker.ordinal != first, worker.ordinal))
    left = []
    for _ in range(4):
        left += [worker.ordinal for worker in order if worker.ordinal not in left and worker.look()]
    assert left == [1]
    del areas[1]  # it was reaped; its successor is within its limit
    for _ in range(4):
        left += [worker.ordinal for worker in order if worker.ordinal not in left and worker.look()]
    assert len(left) == 2
