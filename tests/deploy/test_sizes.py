"""Sizes in rendered objects: workers by CPU request, and enough shared memory but not much more."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from epp.config.load import DEFAULT_TEXT, load
from loadtest.sizing.model import shared_memory_mib
from tests.deploy.cases import CASES, values
from tests.deploy.objects import CONFIGS, EXAMPLE, Json, pod, refused, variables
from tests.deploy.renderers import ours
from tests.workers.instances import options
from workers.cli.manifests.layers import BadValues
from workers.process.layout import Layout


@pytest.mark.parametrize(
    ("quantity", "workers"), [("2", 2), (8, 8), ("0.5", 1), ("500m", 1), ("2500m", 3), (1.1, 2), ("1000m", 1), ("2.0", 2)]
)
def test_there_is_one_worker_per_requested_cpu_rounded_up(quantity: Any, workers: int) -> None:
    case = values(epp={"resources": {"requests": {"cpu": quantity, "memory": "1Gi"}}})
    (shm,) = (volume for volume in pod(ours(case))["volumes"] if volume["name"] == "shm")
    assert shm["emptyDir"]["sizeLimit"] == f"{shared_memory_mib(workers, {})}Mi"


def test_the_pod_takes_its_workers_from_its_cpu_request() -> None:
    source = variables(ours(CASES["gateway"]))["EPP_WORKERS"]["valueFrom"]["resourceFieldRef"]
    assert source == {"containerName": "epp", "resource": "requests.cpu", "divisor": "1"}


@pytest.mark.parametrize(
    "flags",
    [
        {"workers": 1},
        {"workers": 4},
        {"workers": 2, "workers-max": 12},
        {"workers": 2, "max-endpoints": 8192},
        {"workers": 3, "max-endpoints": 64, "index-entries": 1 << 16},
        {"workers": 1, "index-entries": 1 << 22},
    ],
    ids=str,
)
def test_dev_shm_is_large_enough_for_the_picker_and_not_much_larger(tmp_path: Path, flags: dict[str, int]) -> None:
    changes = {"max_endpoints": 1024, "index_entries": 1 << 19} | {k.replace("-", "_"): v for k, v in flags.items()}
    needed = _needed_mib(tmp_path, DEFAULT_TEXT, objects_dir=str(tmp_path), **changes)
    size = shared_memory_mib(flags["workers"], flags)
    assert needed * 1.1 <= size <= needed * 1.3 + 20


@pytest.mark.parametrize(
    "flags",
    [
        {"workers": 3, "workers-max": 5},
        {"workers": 1, "max-endpoints": 5000, "index-entries": 123_456},
        {"workers": 2, "kv-index-blocks": 3_000_000},
    ],
    ids=str,
)
def test_the_chart_and_the_package_compute_the_same_size_of_dev_shm(flags: dict[str, int]) -> None:
    (shm,) = (volume for volume in pod(ours(values(epp={"flags": flags})))["volumes"] if volume["name"] == "shm")
    assert shm["emptyDir"]["sizeLimit"] == f"{shared_memory_mib(flags['workers'], flags)}Mi"


@pytest.mark.parametrize("ports", [{"serverPorts": [5556]}, {"bindPort": 5557}], ids=str)
def test_with_ports_of_kv_events_dev_shm_has_room_for_the_index_of_held_blocks(tmp_path: Path, ports: Json) -> None:
    (shm,) = (volume for volume in pod(ours(values(kvEvents=ports)))["volumes"] if volume["name"] == "shm")
    mib = shared_memory_mib(2, {}, kv_events=True)
    assert shm["emptyDir"]["sizeLimit"] == f"{mib}Mi"
    text = yaml.safe_load(EXAMPLE.read_text())["router"]["epp"]["pluginsCustomConfig"]["precise-prefix.yaml"]
    needed = _needed_mib(tmp_path, text, workers=2, max_endpoints=1024, index_entries=1 << 19)
    assert needed * 1.1 <= mib <= needed * 1.3 + 20


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_dev_shm_is_large_enough_for_every_shipped_configuration(tmp_path: Path, config: Path) -> None:
    needed = _needed_mib(tmp_path, config.read_text(), workers=4, max_endpoints=1024, index_entries=1 << 19)
    assert needed * 1.1 <= shared_memory_mib(4, {})


@pytest.mark.parametrize(
    ("quantity", "mib"),
    [("2Gi", 2048), ("1.5Gi", 1536), (1 << 30, 1024), ("1G", 953), ("500M", 476), ("262144Ki", 256), ("1e9", None), ("1Pi", None)],
)
def test_memory_limits_are_parsed_in_all_usual_forms(quantity: Any, mib: int | None) -> None:
    limits = {"resources": {"limits": {"memory": quantity}}, "flags": {"index-entries": 1 << 29}}
    if mib is None:
        assert ours(values(epp=limits))  # a form that the chart does not compare
        return
    with pytest.raises(BadValues, match=rf"^router.epp.resources.limits.memory: {re.escape(str(quantity))} is less than"):
        refused(values(epp=limits))


def _needed_mib(tmp_path: Path, config_text: str, **changes: Any) -> float:
    """The size that the picker computes."""
    config = load(config_text, "test", allow_experimental=True)
    return sum(Layout(options(tmp_path, **changes), config).needs().values()) / (1 << 20)
