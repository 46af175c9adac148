"""A file that changes all the time is named with its rate, once in a while, and each change counts."""

from typing import Any

from workers.supervisor.configured_endpoints import MANY, REPORT_EVERY_S, WHY, WINDOW_S, Churn
from workers.supervisor.endpoints.endpoints_file import File


class World:
    def __init__(self) -> None:
        self.now = 1000.0
        self.counted = 0
        self.reports: list[tuple[str, dict[str, Any]]] = []
        self.churn = Churn("pool.yaml", self.report, self.count, lambda: self.now)

    def report(self, event: str, **fields: Any) -> None:
        self.reports.append((event, fields))

    def count(self) -> None:
        self.counted += 1

    def changes(self, times: int, every_s: float) -> None:
        for _ in range(times):
            self.now += every_s
            self.churn.changed()


def test_many_changes_within_seconds_are_reported_with_file_and_rate() -> None:
    world = World()
    world.changes(MANY, 0.2)
    fields = {"file": "pool.yaml", "reads": MANY, "seconds": round((MANY - 1) * 0.2, 1), "why": WHY}
    assert world.reports == [("the endpoints file changes often", fields)]
    assert world.counted == MANY


def test_a_file_that_changes_without_end_gets_one_line_a_minute() -> None:
    world = World()
    world.changes(int(4 * REPORT_EVERY_S), 0.5)
    assert len(world.reports) == 2
    assert world.counted == int(4 * REPORT_EVERY_S)


def test_a_file_that_changes_now_and_then_gets_no_line() -> None:
    world = World()
    for _ in range(20):
        world.changes(MANY - 1, 0.1)
        world.now += WINDOW_S
    assert world.reports == [] and world.counted == 20 * (MANY - 1)


def test_each_changed_content_of_a_file_counts_once_even_if_it_is_bad(tmp_path) -> None:
    path, changes = tmp_path / "pool.yaml", []
    path.write_text("endpoints: []\n")
    file = File(str(path), lambda event, **fields: None, on_change=lambda: changes.append(1))
    file.load()
    file.reload()
    assert changes == []
    for text in ("endpoints: []\n# again\n", "{broken", "{broken"):
        path.write_text(text)
        file.reload()
    assert len(changes) == 2
