"""Further pages of endpoints: what they add to the rows, and what happens when they fail."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from epp.data import KV_USAGE, WAITING, Column
from epp.plugins.extractors._pages import Extracted
from epp.plugins.extractors.dcgm import GPU_UTILIZATION, DcgmExtractor
from epp.plugins.extractors.metrics_source import DcgmDataSource, MetricsDataSource
from epp.plugins.extractors.models import SERVED_MODELS
from tests.reports import Reports
from workers.shared.scrape_pace import Pacing
from workers.supervisor.endpoints.discovery import EndpointSpec
from workers.supervisor.endpoints.further_pages import (
    FAILURES_TO_REPORT,
    KEPT_S_MIN,
    REPORT_EVERY_S,
    FurtherPages,
    kept_for,
    page_address,
    pod_of,
)
from workers.supervisor.endpoints.scrape import Failure

WANTED: tuple[Column[Any], ...] = (GPU_UTILIZATION, KV_USAGE, SERVED_MODELS, WAITING)  # numbers: GPU, KV, waiting
FIRST = Extracted((0.0, 0.5, 3.0), 0b110, {"active_models": frozenset("a")})
SPEC = EndpointSpec("default", "vllm-0-rank-1", "10.0.0.1", 8000, node="192.168.0.9")


def source(**parameters: Any) -> DcgmDataSource:
    return DcgmDataSource("dcgm", DcgmDataSource.Params(**parameters))


class World:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.reports = Reports()
        self.changed: list[object] = []
        self.pages = FurtherPages(
            loop, source(), DcgmExtractor("e", DcgmExtractor.Params()), wanted=WANTED, pacing=Pacing(1.0), tls=None,
            report=self.reports,
        )  # fmt: skip
        self.pages.changed = self.changed.append

    def gpu(self, tag: object, value: float, now: float) -> None:
        self.pages.scraped(tag, Extracted((value, 0.0, 0.0), 0b001, {}), 0, now)


def in_loop(scenario: Callable[[World], None]) -> None:
    async def run() -> None:
        scenario(World(asyncio.get_running_loop()))

    asyncio.run(run())


def test_the_columns_of_a_further_page_are_added_to_those_of_the_first() -> None:
    def scenario(world: World) -> None:
        world.pages.add("one", 0, SPEC)
        assert world.pages.overlay("one", FIRST) is FIRST, "nothing is known yet"
        world.gpu("one", 0.8, 1.0)
        assert world.pages.overlay("one", FIRST) == Extracted((0.8, 0.5, 3.0), 0b111, FIRST.names)

    in_loop(scenario)


def test_names_of_a_further_page_are_added_too() -> None:
    def scenario(world: World) -> None:
        world.pages.add("one", 0, SPEC)
        world.pages.scraped("one", Extracted((0.0, 0.0, 0.0), 0, {"served_models": frozenset("m")}), 0, 1.0)
        named = world.pages.overlay("one", FIRST)
        assert named.names == {"active_models": frozenset("a"), "served_models": frozenset("m")}
        assert named.values == FIRST.values and named.present == FIRST.present

    in_loop(scenario)


def test_the_row_is_written_again_only_when_a_value_has_changed() -> None:
    def scenario(world: World) -> None:
        world.pages.add("one", 0, SPEC)
        for value, now in ((0.8, 1.0), (0.8, 2.0), (0.9, 3.0)):
            world.gpu("one", value, now)
        assert world.changed == ["one", "one"]

    in_loop(scenario)


def test_values_stay_for_a_while_when_pages_fail_and_then_count_as_not_reported() -> None:
    def scenario(world: World) -> None:
        world.pages.add("one", 0, SPEC)
        world.gpu("one", 0.8, 10.0)
        world.pages.failed("one", Failure("closed", "gone"), 11.0)
        world.pages.sweep(10.0 + KEPT_S_MIN - 0.1)
        assert world.pages.overlay("one", FIRST).present == 0b111
        world.pages.sweep(10.0 + KEPT_S_MIN + 0.1)
        assert world.pages.overlay("one", FIRST) is FIRST
        assert world.changed == ["one", "one"]
        world.gpu("one", 0.8, 20.0)
        assert world.pages.overlay("one", FIRST).present == 0b111

    in_loop(scenario)


@pytest.mark.parametrize(("interval", "kept"), [(0.05, 5.0), (1.0, 5.0), (10.0, 40.0)])
def test_values_are_kept_for_four_intervals_and_at_least_five_seconds(interval: float, kept: float) -> None:
    assert kept_for(interval) == kept


def test_pages_that_keep_failing_are_reported_once_a_minute_with_their_number() -> None:
    def scenario(world: World) -> None:
        for tag in ("one", "two"):
            world.pages.add(tag, 0, SPEC)
        for turn in range(FAILURES_TO_REPORT + 3):
            for tag in ("one", "two"):
                world.pages.failed(tag, Failure("refused", "Connection refused", refused=True), float(turn))
        (report,) = world.reports
        assert report == ("data source cannot read the pages of endpoints source=dcgm count=1 last=10.0.0.1:9400 reason=Connection refused")
        world.pages.failed("two", Failure("refused", "Connection refused"), 10.0 + REPORT_EVERY_S)
        assert len(world.reports) == 2 and " count=2 " in world.reports[1]
        world.gpu("one", 0.1, 100.0)
        world.pages.remove("two")
        world.pages.failed("one", Failure("refused", "x"), 500.0)
        assert len(world.reports) == 2, "one failure after a good page is no report"

    in_loop(scenario)


def test_values_that_cannot_be_read_are_reported_when_a_cause_appears() -> None:
    bad = Extracted((0.8, 0.0, 0.0), 0b001, {}, {"gpu": "gpu: a value is not a finite number"})

    def scenario(world: World) -> None:
        world.pages.add("one", 0, SPEC)
        for now in (1.0, 2.0, 100.0):
            world.pages.scraped("one", bad, 0, now)
        assert world.reports == [
            "data source cannot read all values of pages source=dcgm count=1 last=10.0.0.1:9400 reason=gpu: a value is not a finite number"
        ]
        assert world.pages.overlay("one", FIRST).present == 0b111

    in_loop(scenario)


def test_an_endpoint_that_left_is_no_longer_scraped() -> None:
    def scenario(world: World) -> None:
        world.pages.add("one", 0, SPEC)
        world.pages.change("one", SPEC._replace(host="10.0.0.7"))
        assert len(world.pages.scraper) == 1
        world.pages.remove("one")
        assert len(world.pages.scraper) == 0

    in_loop(scenario)


@pytest.mark.parametrize(
    ("page_source", "spec", "expected"),
    [
        (source(), SPEC, ("10.0.0.1", 8000)),
        (source(use_node_address=True), SPEC, ("192.168.0.9", 8000)),
        (source(use_node_address=True), SPEC._replace(node=""), ("10.0.0.1", 8000)),
        (MetricsDataSource("m", MetricsDataSource.Params()), SPEC._replace(page=("10.9.9.9", 9)), ("10.9.9.9", 9)),
    ],
)
def test_where_the_page_of_an_endpoint_is(page_source: MetricsDataSource, spec: EndpointSpec, expected: tuple[str, int]) -> None:
    assert page_address(page_source, spec) == expected


@pytest.mark.parametrize(
    ("name", "pod"), [("vllm-0-rank-1", "vllm-0"), ("vllm-0", "vllm-0"), ("a-rank-x", "a-rank-x"), ("rank-1", "rank-1")]
)
def test_the_pod_of_an_endpoint_has_its_name_without_the_rank(name: str, pod: str) -> None:
    assert pod_of(SPEC._replace(name=name)) == pod
