"""Tests of the layout: it is known before anything is created, and an instance has that layout."""

import os
from pathlib import Path

import pytest

from epp.config.load import load
from tests.workers.instances import made, options
from workers.process.layout import Layout
from workers.process.unit_bytes import unit_bytes


def test_the_need_for_shared_memory_is_known_before_it_is_created(tmp_path: Path) -> None:
    config = load(None, "test")
    needed = Layout(options(tmp_path), config).needs()
    assert os.listdir(tmp_path) == []
    with made(tmp_path) as instance:
        taken = {s.name.rpartition("-")[2]: os.stat(f"/dev/shm{s.name}").st_blocks * 512 for s in instance.memory.segments.values()}
    assert taken == needed


def test_every_call_of_a_plugin_has_its_own_histogram(tmp_path: Path) -> None:
    with made(tmp_path) as instance:
        points = instance.config.pipeline.timed_points()
        assert set(instance.layout.timers) == {(point, plugin.name) for point, plugin in points}
        labels = [instance.layout.families[place].labels for place in instance.layout.timers.values()]
        assert [label["extension_point"] for label in labels] == [point for point, _ in points]
        assert len(set(instance.layout.timers.values()) | set(instance.layout.measures.values())) == len(points) + 2


def test_unit_sizes_match_the_growth_of_the_segments(tmp_path: Path) -> None:
    config = load("featureGates: [flowControl]", "test")
    least = {"objects_dir": "objects", "max_endpoints": 1024, "index_entries": 1 << 16, "workers_max": 4}
    base = Layout(options(tmp_path, **least), config)
    unit = unit_bytes(len(base.table.columns))

    def growth(segment: str, **changes: int) -> int:
        grown = Layout(options(tmp_path, **(least | changes)), config)
        return grown.plans[segment].bytes - base.plans[segment].bytes

    assert growth("index", index_entries=1 << 17) == unit.entry << 16
    assert growth("state", max_endpoints=2048) == pytest.approx(1024 * unit.endpoint, rel=0.001)
    assert growth("areas", workers_max=8) == pytest.approx(4 * unit.worker, rel=0.02)
    fixed = base.plans["state"].bytes + base.plans["index"].bytes - 1024 * unit.endpoint - (unit.entry << 16)
    assert fixed <= unit.fixed < 1.05 * fixed, "the rest is room for histograms"
