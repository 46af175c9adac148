"""What the overload benchmarks run: simulated servers of a known size, a picker with a given flow control, an Envoy.

The servers are slow on purpose: an answer takes about a second, and all servers together do about thirty of them a second. At
four times that the machine (two cores) is far from its limit, so what is measured is what waits where, not how fast bytes move.
Under load a server behaves as vLLM does: requests join a batch at the end of a step, steps grow with the batch, KV blocks are
held to the end, and what does not fit waits in the server's own queue, first come, first served.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from epp.config import DEFAULT_TEXT
from tests.bench.overload_traffic import TOKENS
from tests.e2e.cluster import Cluster, Fleet, Picker
from workers.demo.stack import picker_config

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
    """A gateway in front of everything."""

    port: int
    picker: Picker
    fleet: Fleet


def estimate(servers: int = SERVERS) -> float:
    """Answers a second when all batches are full, by the engine's own arithmetic."""
    tokens = sum(TOKENS) / 2
    step_s = DECODE_MS / 1e3 * (1 + DECODE_GROWTH * (BATCH - 1))
    prefill_s = 18 * PREFILL_US / 1e6  # once an answer; it holds up the whole batch
    return servers * BATCH / (tokens * step_s + BATCH * prefill_s)


def flow_control(
    fairness: str, *, ttl: str = "3s", waiting_max: int = 150, weights: Mapping[str, float] | None = None, **more: Any
) -> dict[str, Any]:
    """Flow control that keeps batches full and server queues empty, and some places for what is important."""
    band = {"maxRequests": waiting_max, "fairnessPolicyRef": fairness}
    return {
        "featureGates": ["flowControl"],
        "filters": ["concurrency-detector"],  # the gate looks at the pool; this keeps each server at its own limit
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
    """The built-in default with endpoints from a file: with this flow control, with none ({}), or as it is (None)."""
    discovery = {"type": "file-discovery", "parameters": {"path": str(endpoints), "watchFile": True}}
    if flow is None:
        return picker_config(endpoints)
    own = {plugin["type"] for plugin in flow.get("plugins", ())}
    others = [plugin for plugin in DEFAULT["plugins"] if plugin["type"] not in own]
    document = {
        **{name: part for name, part in DEFAULT.items() if name not in ("featureGates", "flowControl")},
        **{name: part for name, part in flow.items() if name not in ("plugins", "filters")},
        "plugins": [*others, discovery, *flow.get("plugins", [])],
        "schedulingProfiles": [_profile(flow.get("filters", ()))],
        "dataLayer": {"discovery": {"pluginRef": "file-discovery"}},
    }
    return yaml.safe_dump(document, sort_keys=False)


def _profile(filters: Sequence[str]) -> dict[str, Any]:
    """The default one behind these filters."""
    (profile,) = DEFAULT["schedulingProfiles"]
    return {**profile, "plugins": [*({"pluginRef": name} for name in filters), *profile["plugins"]]}


def objectives(directory: Path, priorities: Mapping[str, int] = PRIORITIES) -> Path:
    """A directory for --objects-dir."""
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
) -> Site:
    """Started and ready."""
    fleet = cluster.fleet(servers, *engine)
    more = [
        f"--objects-dir={objectives(cluster.directory / 'objects')}",
        "--pool-name=pool",
        "--allow-experimental-plugins",
    ]
    picker = cluster.picker(fleet.file, *more, *flags, workers=WORKERS, config_text=config(fleet.file, flow))
    return Site(cluster.envoy(picker, threads=ENVOY_THREADS), picker, fleet)
