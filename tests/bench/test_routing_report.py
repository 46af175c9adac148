"""Selection, tables and chart of the routing benchmark."""

from xml.etree import ElementTree

import pytest

from tests.bench.routing import ORACLE, SMOKE_POLICIES, Cell, cells, chosen
from tests.bench.routing_chart import COLUMN, LEAST, MOST, PANEL_HEIGHT, chart
from tests.bench.routing_run import Outcome
from tests.bench.routing_servers import KINDS
from tests.bench.routing_table import digest, digest_text, markdown, summary, text
from tests.bench.routing_zoo import LINE

NAMES = ["oracle", "default", "default, precise", "random"]


@pytest.mark.parametrize(
    ("only", "names"),
    [
        ([], ["oracle", "random"]),
        (["//default"], ["default"]),  # a whole name
        (["//def"], ["default", "default, precise"]),
        (["//random", "//oracle"], ["oracle", "random"]),
        (["shared"], ["oracle", "random"]),
        (["shared/chats/"], ["oracle", "random"]),
        (["//default,"], ["default, precise"]),
        (["//nothing"], []),
    ],
)
def test_names_are_chosen_by_their_beginning(only: list[str], names: list[str]) -> None:
    assert chosen(NAMES, 2, only, ["oracle", "random"]) == names


def test_without_a_selection_all_models_run_all_usual_traffic_and_policies() -> None:
    todo = cells([], smoke=False)
    assert {kind for kind, *_ in todo} == {kind.name for kind in KINDS}
    assert len(todo) == 4 * 8
    assert all(cell.policies == tuple(LINE) for cell in todo)
    assert all(set(cell.policies) == {ORACLE, *SMOKE_POLICIES} for cell in cells([], smoke=True))


def test_the_oracle_runs_whatever_is_selected() -> None:
    assert cells(["slots/chats/random"], smoke=False) == [Cell("slots", "chats", (ORACLE, "random"))]


def outcome(mean: float, p95: float, errors: float = 0.0) -> Outcome:
    return Outcome(100.0, errors, 1.0, mean, p95, 0.5, 0.25, 1.0, astray=0.2 if errors else 0.0)


RUNS = [
    {"oracle": outcome(0.1, 0.2), "random": outcome(0.2, 0.8, errors=1.0)},
    {"oracle": outcome(0.2, 0.2), "random": outcome(0.2, 0.4, errors=4.0)},
]


def test_figures_are_divided_by_those_of_the_oracle_in_the_same_run() -> None:
    row = summary(RUNS, "oracle")["random"]
    assert (row.mean, row.mean_range, row.p95, row.p95_range) == (1.5, 0.5, 3.0, 1.0)
    assert (row.ttft_s, row.cached, row.duplicates, row.errors) == (0.2, 0.5, 0.25, 2.5)
    lines = text("shared, chats", summary(RUNS, "oracle")).splitlines()
    assert lines[2].split() == ["random", "1.50", "±", "0.50", "3.00", "±", "1.00", "200", "50.0", "25.0", "2.5", "20.0", "0", "1.00"]


def test_the_digest_counts_cells_near_the_oracle_and_behind_the_baselines() -> None:
    one = summary([{"oracle": outcome(1, 1), "round-robin": outcome(2, 2), "mine": outcome(1.04, 1.3)}], "oracle")
    other = summary([{"oracle": outcome(1, 1), "round-robin": outcome(1, 1), "mine": outcome(1.04, 1.1)}], "oracle")
    third = summary([{"oracle": outcome(1, 1), "round-robin": outcome(2, 2), "mine": outcome(4, 4)}], "oracle")
    tables = {"shared": {"chats": one, "bursts": other}, "slots": {"chats": third}}
    mine = digest(tables)["mine"]
    assert (mine.near, mine.behind, mine.worst, mine.where) == (1, 1, 4.0, "slots, chats")
    assert mine.mean == pytest.approx((1.04 * 1.04 * 4) ** (1 / 3))
    assert digest_text(tables).splitlines()[0].startswith("all 3 cells")


def test_the_documentation_has_the_digest_and_a_table_per_model_with_a_row_per_policy() -> None:
    table = summary(RUNS, "oracle")
    assert markdown({"shared": {"chats": table, "bursts": table}}).splitlines() == [
        "| policy | mean | p95 | worst mean | near | behind |",
        "|---|---|---|---|---|---|",
        "| oracle | 1.00 | 1.00 | 1.00 (shared, chats) | 2 | 0 |",
        "| random | 1.50 | 3.00 | 1.50 (shared, chats) | 0 | 0 |",
        "",
        "| `shared` | chats | bursts |",
        "|---|---|---|",
        "| oracle | 1.00 ± 0.00 / 1.00 | 1.00 ± 0.00 / 1.00 |",
        "| random | 1.50 ± 0.50 / 3.00, 2 errors, 20 % astray | 1.50 ± 0.50 / 3.00, 2 errors, 20 % astray |",
    ]


def test_the_chart_has_a_mark_per_figure_and_keeps_all_of_them_within_the_panel() -> None:
    table = summary([{"oracle": outcome(1, 1), "good": outcome(0.01, 1), "bad": outcome(1000, 1)}], "oracle")
    drawn = ElementTree.fromstring(chart({"shared": {"a & b": table, "c": table}, "slots": {"a & b": table}}))
    marks = [mark for mark in drawn.iter() if mark.tag.endswith("circle")]
    assert len(marks) == 3 * 3 + 3  # and those of the legend
    heights = {float(mark.attrib["cy"]) for mark in marks[:6]}
    assert max(heights) - min(heights) == PANEL_HEIGHT  # from the least to the most
    assert LEAST < 1 < MOST
    assert all(0 < float(mark.attrib["cx"]) < 2 * COLUMN + 200 for mark in marks)
    texts = [each.text for each in drawn.iter() if each.tag.endswith("text")]
    assert texts.count("a & b") == 2
