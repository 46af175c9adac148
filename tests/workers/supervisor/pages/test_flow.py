"""Flow control on the metrics page: bands, limits, saturation by stage, and older names."""

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace

from prometheus_client.parser import text_string_to_metric_families as parse_text

from epp.metrics import PREFIX
from epp.metrics.flow_control import FLOW_CYCLE, FLOW_GROUPS, FLOW_OLDEST, FLOW_SATURATION, FLOW_STALE
from epp.metrics.older_names import TWINS
from shm.documents import DocumentReader
from shm.table import TableReader
from tests.waiting import until
from tests.workers.flow_world import World, world
from workers.shared.documents import EndpointsView
from workers.supervisor.pages.exposition import SeriesText
from workers.supervisor.pages.flow import FlowFigures, figures_of
from workers.supervisor.pages.metrics import Content, IndexFigures, MetricsPage, Readings
from workers.supervisor.pages.page import Request
from workers.supervisor.pages.pool_gauges import PoolGauges
from workers.supervisor.pages.sections import Sections


def figures(w: World) -> FlowFigures:
    found = figures_of(w.instance)
    assert found is not None
    return found


def rows(shown: FlowFigures) -> dict[str, dict[tuple[str, ...], float]]:
    return {metric.name: dict(rows) for metric, _, rows in shown.families()}


def test_bands_show_their_use_over_all_workers_and_the_age_of_the_oldest_request(tmp_path: Path) -> None:
    async def test() -> None:
        section = "maxRequests: 10, priorityBands: [{priority: 5, maxRequests: 4, maxBytes: 1000}]"
        async with world(tmp_path, section, objectives={"high": 5, "low": -1}, shards=2) as w:
            held = w.shards[0].ask("held")
            assert held.sent
            for shard in w.shards:
                shard.ask("high", "high", body=b'{"model": "m", "prompt": "x"}')
            found = rows(figures(w))
            assert found["flow_control_capacity_utilization_requests"] == {("5", "epp"): 0.5, ("0", "epp"): 0.0, ("-1", "epp"): 0.0}
            assert found["flow_control_capacity_utilization_bytes"]["5", "epp"] == 0.058
            assert found["flow_control_global_capacity_utilization_requests"] == {("epp",): 0.2}
            assert "flow_control_global_capacity_utilization_bytes" not in found
            assert found["flow_control_oldest_age_seconds"]["5", "epp"] > 0
            assert found["flow_control_oldest_age_seconds"]["0", "epp"] == 0
            assert found["flow_control_pool_saturation"] == {("epp", "decode"): 1.0, ("epp", "effective"): 1.0}
            assert found["flow_control_reclaim_target"] == {("epp",): 0.0}

    asyncio.run(test())


def test_saturation_is_shown_by_stage_and_the_fullest_stage_is_the_effective_one(tmp_path: Path) -> None:
    async def test() -> None:
        async with world(tmp_path) as w:
            prefill = w.endpoint("p", **{"llm-d.ai/role": "prefill"})
            w.endpoint("e", **{"llm-d.ai/role": "encode"})
            w.shards[0].worker.area.inflight[prefill.slot] = 2
            shown = rows(figures(w))["flow_control_pool_saturation"]
            assert shown == {("epp", "prefill"): 2.0, ("epp", "decode"): 0.0, ("epp", "effective"): 2.0}

    asyncio.run(test())


def test_a_pool_without_endpoints_is_full_and_shows_no_stage(tmp_path: Path) -> None:
    async def test() -> None:
        async with world(tmp_path) as w:
            shown = figures(w)
            w.remove_all()
            await until(lambda: rows(shown)["flow_control_pool_saturation"] == {("epp", "effective"): 1.0})

    asyncio.run(test())


def test_every_series_of_flow_control_also_appears_under_its_older_name(tmp_path: Path) -> None:
    async def test() -> None:
        async with world(tmp_path, "maxRequests: 1") as w:
            (shard,) = w.shards
            shard.ask("held")
            shard.ask("waits")
            shard.ask("refused")
            names = set()
            for group in FLOW_GROUPS:
                text = SeriesText(group, w.instance.memory.series_reader(group), legacy=True)
                *_, totals = text.reading()
                assert totals is not None
                for line in text.lines(totals, openmetrics=False):
                    if line.startswith("# TYPE"):
                        names.add(line.split()[2])
                    elif line.startswith("# HELP"):
                        names.add(line.splitlines()[1].split()[2])
            of_pages = {FLOW_SATURATION.name, FLOW_CYCLE.name}
            twins = {twin.name for name, twin in TWINS.items() if name.startswith("flow_control_") and name not in of_pages}
            assert twins <= names

    asyncio.run(test())


def test_computed_values_and_cycles_are_on_the_page_under_both_names(tmp_path: Path) -> None:
    async def test() -> None:
        async with world(tmp_path) as w:
            (shard,) = w.shards
            shard.ask("held")
            shard.ask("waits")
            families = (FLOW_SATURATION, FLOW_CYCLE, FLOW_STALE, FLOW_OLDEST)
            found = {sample.name: sample for family in parse_text(page(w)) for sample in family.samples}
            for metric in families:
                suffix = "_count" if metric is FLOW_CYCLE else ""
                assert f"{PREFIX}{metric.name}{suffix}" in found
                if (twin := TWINS.get(metric.name)) is not None:
                    assert found[twin.name + suffix].value == found[f"{PREFIX}{metric.name}{suffix}"].value > 0
            assert found[f"{PREFIX}{FLOW_STALE.name}"].labels == {"detector": "concurrency-detector"}

    asyncio.run(test())


def page(w: World) -> str:
    """The metrics page as the supervisor serves it."""
    instance = w.instance
    endpoints = EndpointsView(DocumentReader(instance.layout.documents, instance.memory.documents))
    metrics = MetricsPage(
        instance.memory.areas,
        Content(instance.layout.families, [(group, instance.memory.series_reader(group)) for group in instance.layout.groups]),
        [PoolGauges(TableReader(instance.layout.table, instance.memory.table), endpoints, name="epp", fresh_for_s=1.0)],
        IndexFigures(SimpleNamespace(size=lambda: 0, evictions=0, dropped=0, freed=dict), lambda: 0),
        Readings([("source", "extractor")]),
        Sections(flow=[figures(w)]),
        now=time.monotonic,
    )
    return b"".join(metrics.page(Request("GET", "/metrics", "")).body).decode()


def test_without_flow_control_there_are_no_figures(tmp_path: Path) -> None:
    async def test() -> None:
        async with world(tmp_path, gate=False) as w:
            assert figures_of(w.instance) is None

    asyncio.run(test())
