"""Tests of sources: options and configuration decide where endpoints and objects come from."""

from pathlib import Path

import pytest

from epp.config.load import load
from tests.workers.instances import options
from workers.process.sources import Sources


@pytest.mark.parametrize(
    ("changes", "in_kubernetes", "asks_objects", "has_objects"),
    [
        ({}, False, False, False),
        ({"pool_given": True}, True, True, True),
        ({"endpoint_selector": "app=vllm"}, True, False, False),
        ({"endpoint_selector": "app=vllm", "objects_dir": "objects"}, True, False, True),
        ({"pool_given": True, "endpoints": "127.0.0.1:1"}, False, False, False),
        ({"endpoints": "127.0.0.1:1", "objects_dir": "objects"}, False, False, True),
    ],
)
def test_endpoints_and_objects_come_from_kubernetes_if_no_other_source_is_given(
    tmp_path: Path, changes: dict, in_kubernetes: bool, asks_objects: bool, has_objects: bool
) -> None:
    sources = Sources(options(tmp_path, **{"endpoints": "", **changes}), load(None, "test"))
    assert (sources.in_kubernetes, sources.asks_objects, sources.has_objects) == (
        in_kubernetes,
        asks_objects,
        has_objects,
    )
