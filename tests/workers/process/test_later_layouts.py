"""A later configuration fits into the memory of the first one: what has a place keeps it."""

from pathlib import Path

import numpy as np
import pytest

from epp.config.load import load
from tests.workers.instances import made
from workers.process import StartError
from workers.process.generations import Bundle
from workers.process.instance import Instance
from workers.process.layout import SPARE_COLUMNS
from workers.worker.plugin_handles import SeriesCount

HEAD = "apiVersion: llm-d.ai/v1\nkind: EndpointPickerConfig\n"
QUEUE = HEAD + "plugins: [{type: queue-scorer}]\n"
KV = HEAD + "plugins: [{type: kv-cache-utilization-scorer}, {type: lora-affinity-scorer}]\n"
SPLIT = (
    HEAD
    + """
plugins:
- {type: prefill-filter}
- {type: decode-filter}
- {type: always-disagg-pd-decider}
- {name: splits, type: disagg-profile-handler, parameters: {deciders: {prefill: always-disagg-pd-decider}}}
schedulingProfiles:
- {name: prefill, plugins: [{pluginRef: prefill-filter}]}
- {name: decode, plugins: [{pluginRef: decode-filter}]}
"""
)


def later(instance: Instance, text: str, number: int = 2) -> Instance:
    return instance.under(load(text, "test"), Bundle(number, "test", text, "", {}, instance.layout.names, 0.0))


def places(instance: Instance) -> dict[str, object]:
    return {segment: (plan.bytes, plan.offsets) for segment, plan in instance.layout.plans.items()}


def test_histograms_keep_their_places_and_counts_over_two_changes(tmp_path: Path) -> None:
    with made(tmp_path, QUEUE) as first:
        area = first.memory.areas.area(1)
        index = first.layout.timers["Scorer", "queue-scorer"]
        area.observe(index, 0.001)
        second = later(first, KV)
        assert ("Scorer", "queue-scorer") not in second.layout.timers
        second.memory.areas.area(1).observe(second.layout.timers["Scorer", "kv-cache-utilization-scorer"], 0.001)
        third = later(second, QUEUE, 3)
        assert third.layout.timers["Scorer", "queue-scorer"] == index
        key = third.layout.families[index].key
        assert sum(third.memory.areas.histograms()[key][0]) == 1
        assert places(third) == places(first)


def test_a_counter_that_a_later_plugin_declares_counts_in_a_spare_table(tmp_path: Path) -> None:
    with made(tmp_path, QUEUE) as first:
        second = later(first, SPLIT)
        group = second.layout.plugin_groups[0]
        plugin = second.config.pipeline.plugins["splits"]
        for _ in range(2):  # the second one is a successor
            writer = second.memory.series_writer(group, 0)
            writer.take_over()
            SeriesCount(writer, plugin, group.counters[0]).add("m", "decode-only")
        again = later(second, SPLIT, 3)
        rows = again.memory.series_reader(group).rows()
        labels = ("splits", "disagg-profile-handler", "m", "decode-only")
        assert [row[: len(labels)] for row in rows] == [labels]
        assert [values.counters for values in rows.values()] == [(2,)]


def test_columns_keep_their_places_and_a_retired_one_is_not_read(tmp_path: Path) -> None:
    with made(tmp_path, KV) as first:
        second = later(first, QUEUE)
        count = len(first.layout.table.columns)
        assert second.layout.table.columns[:count] == first.layout.table.columns
        assert second.layout.table.row_words == first.layout.table.row_words
        wanted = [column.name for column in second.layout.table_columns if column.type is not frozenset]
        assert len(wanted) == len(second.layout.table.columns)
        assert {column.name for column in second.config.pipeline.columns} <= {*wanted, *second.layout.names.columns}


def test_a_change_of_a_metric_under_its_name_is_refused(tmp_path: Path) -> None:
    with made(tmp_path, QUEUE) as first:
        names = first.layout.names
        family = names.families[0]
        other = family._replace(metric=family.metric._replace(buckets=(1.0, 2.0)))
        changed = Bundle(2, "test", QUEUE, "", {}, type(names)(names.columns, (other,), (), names.width, names.area_end), 0.0)
        with pytest.raises(StartError, match="other labels, buckets"):
            first.under(load(QUEUE, "test"), changed)


def test_more_columns_than_there_is_room_for_are_refused_with_the_limit(tmp_path: Path) -> None:
    with made(tmp_path, QUEUE) as first:
        columns = tuple(f"old {n}" for n in range(first.layout.names.width - 1))
        names = first.layout.names
        full = type(names)(columns, names.families, names.groups, names.width, names.area_end, names.own)
        with pytest.raises(StartError, match=f"a row has {names.width}"):
            first.under(load(KV, "test"), Bundle(2, "test", KV, "", {}, full, 0.0))
        assert names.width >= len(names.columns) + SPARE_COLUMNS


def test_a_precise_producer_needs_a_restart(tmp_path: Path) -> None:
    with made(tmp_path, QUEUE) as first, pytest.raises(StartError, match="restart the picker"):
        text = HEAD + "plugins: [{type: precise-prefix-cache-producer}, {type: prefix-cache-scorer, parameters: {}}]\n"
        later(first, text)


def test_a_private_copy_shows_the_values_and_hides_what_is_written_to_it(tmp_path: Path) -> None:
    with made(tmp_path, QUEUE) as first:
        first.memory.areas.area(1).add(0, 5)
        config = load(QUEUE, "test")
        copied = first.under(config, Bundle(2, "test", QUEUE, "", {}, first.layout.names, 0.0), copied=True)
        copied.memory.areas.area(1).add(0, 1)
        counts = [next(iter(i.memory.areas.counters().values())) for i in (first, copied)]
        assert counts == [5, 6]
        assert not np.shares_memory(first.memory.areas.area(1).words, copied.memory.areas.area(1).words)


def test_a_change_of_what_the_kv_events_process_uses_is_refused(tmp_path: Path) -> None:
    def precise(blocks: int) -> str:
        indexer = f"indexerConfig: {{kvBlockIndexConfig: {{inMemoryConfig: {{size: {blocks}}}}}}}"
        return f"{HEAD}plugins: [{{type: precise-prefix-cache-producer, parameters: {{{indexer}}}}}]\n"

    with made(tmp_path, precise(1000)) as first:
        assert later(first, precise(1000)).layout.kv_events is not None
        with pytest.raises(StartError, match="precise prefix producer change"):
            later(first, precise(2000))
