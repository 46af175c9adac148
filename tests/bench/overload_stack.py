"""Starts the stack of the overload benchmarks: simulated servers of a known size, a picker with given flow control, and Envoy.

The servers are slow on purpose: an answer takes about a second, and all servers together complete about thirty answers per second. Four
times that load is far below the limit of the machine (two cores). So the benchmarks measure where requests wait, not how fast bytes move.
Under load a server behaves like vLLM: requests join a batch at the end of a step, steps grow with the batch, requests hold their KV
blocks to the end, and further requests wait in the server's queue, first come, first served.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from epp.config.load import DEFAULT_TEXT
from loadtest.demo.stack import picker_config
from tests.bench.overload_traffic import TOKENS
from tests.e2e.cluster import Cluster, Fleet, Picker

DEFAULT: dict[str, Any] = yaml.safe_load(DEFAULT_TEXT)
SERVERS = 4
WORKERS = 4
BATCH = 12
DECODE_MS = 25.0
DECODE_GROWTH = 0.01
PREFILL_US = 100.0
PRIORITIES = {"high": 10, "normal": 0, "low": -1}
ENGINE = (
    *("--max-running", str(BATCH), "--decode-ms", str(DECODE_MS), "--decode-growth", str(DECODE_GROWTH)),
    *("--prefill-us-per-token", str(PREFILL_US), "--kv-blocks", "2000"),
)  # fmt: skip
ENVOY_THREADS = 2

FAIR, STRICT = "token-weighted-fairness-policy", "global-strict-fairness-policy"


class Site(NamedTuple):
    """A gateway with its picker and servers."""

    port: int
    picker: Picker
    fleet: Fleet


def estimate(servers: int = SERVERS) -> float:
    """Computes the answers per second when all batches are full, with the engine's formula."""
    tokens = sum(TOKENS) / 2
    step_s = DECODE_MS / 1e3 * (1 + DECODE_GROWTH * (BATCH - 1))
    prefill_s = 18 * PREFILL_US / 1e6  # once per answer; it delays the whole batch
    return servers * BATCH / (tokens * step_s + BATCH * prefill_s)


def flow_control(
    fairness: str, *, ttl: str = "3s", waiting_max: int = 150, weights: Mapping[str, float] | None = None, **more: Any
) -> dict[str, Any]:
    """Returns a flow control that keeps batches full and server queues empty, and reserves some places for higher priorities.

    `more`: fields of the section `flowControl`. They replace those set here.
    """
    band = {"maxRequests": waiting_max, "fairnessPolicyRef": fairness}
    return {
        "featureGates": ["flowControl"],
        "filters": ["concurrency-detector"],  # the gate limits the pool; this filter limits each server
        "plugins": [
            {"type": fairness, **({"parameters": {"weights": dict(weights)}} if weights else {})},
            {"type": "concurrency-detector", "parameters": {"maxConcurrency": BATCH}},
            {"type": "priority-holdback-policy", "parameters": {"minCeiling": 0.85}},
        ],
        "flowControl": {
            "defaultRequestTTL": ttl,
            "defaultPriorityBand": band,
            "usageLimitPolicyPluginRef": "priority-holdback-policy",
            "saturationDetector": {"pluginRef": "concurrency-detector"},
            **more,
        },
    }


def config(endpoints: Path, flow: Mapping[str, Any] | None) -> str:
    """Returns the built-in configuration with endpoints from a file. `flow`: its flow control; {}: none; None: the built-in one."""
    discovery = {"type": "file-discovery", "parameters": {"path": str(endpoints), "watchFile": True}}
    if flow is None:
        return picker_config(endpoints)
    replaced = {plugin["type"] for plugin in flow.get("plugins", ())}
    kept = [plugin for plugin in DEFAULT["plugins"] if plugin["type"] not in replaced]
    document = {
        **{name: part for name, part in DEFAULT.items() if name not in ("featureGates", "flowControl")},
        **{name: part for name, part in flow.items() if name not in ("plugins", "filters")},
        "plugins": [*kept, discovery, *flow.get("plugins", [])],
        "schedulingProfiles": [_profile(flow.get("filters", ()))],
        "dataLayer": {"discovery": {"endpoints": {"pluginRef": "file-discovery"}}},
    }
    return yaml.safe_dump(document, sort_keys=False)


def _profile(filters: Sequence[str]) -> dict[str, Any]:
    """Returns the default profile with these filters before its plugins."""
    (profile,) = DEFAULT["schedulingProfiles"]
    return {**profile, "plugins": [*({"pluginRef": name} for name in filters), *profile["plugins"]]}


def objectives(directory: Path, priorities: Mapping[str, int] = PRIORITIES) -> Path:
    """Writes the objectives into a directory for --objects-dir."""
    directory.mkdir(exist_ok=True)
    documents = [
        {
            "apiVersion": "llm-d.ai/v1alpha2",
            "kind": "InferenceObjective",
            "metadata": {"name": name},
            "spec": {"priority": priority, "poolRef": {"name": "pool"}},
        }
        for name, priority in priorities.items()
    ]
    (directory / "objectives.yaml").write_text(yaml.safe_dump_all(documents))
    return directory


def site(
    cluster: Cluster,
    flow: Mapping[str, Any] | None,
    *flags: str,
    servers: int = SERVERS,
    engine: tuple[str, ...] = ENGINE,
    workers: int = WORKERS,
) -> Site:
    """Starts servers, picker and Envoy. Returns when they are ready."""
    fleet = cluster.fleet(servers, *engine)
    more = [f"--objects-dir={objectives(cluster.directory / 'objects')}", "--pool-name=pool", "--allow-experimental-plugins"]
    picker = cluster.picker(fleet.file, *more, *flags, workers=workers, config_text=config(fleet.file, flow))
    return Site(cluster.envoy(picker, threads=ENVOY_THREADS), picker, fleet)
