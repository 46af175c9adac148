"""Starts the engines once for all tests. Tests of this folder are collected only if the command line names it: `make test-engines`."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from loadtest.demo.children import python
from loadtest.demo.ports import free_row
from loadtest.demo.stack import LOOPBACK, get
from tests.e2e.cluster import Cluster, Picker, eventually, run
from tests.e2e.test_doctor import findings
from tests.engines.servers import MODEL, Engine, vllm

HERE = Path(__file__).parent
PAIR = 2
FOLLOWED = r"^llm_d_epp_kv_cache_events_precise\{.*\} 1(?:\.0)?$"
PRECISE = """
- {{type: token-producer, parameters: {{modelName: {model}, vllm: {{url: "http://{host}:{port}"}}}}}}
- type: precise-prefix-cache-producer
  parameters:
    indexerConfig: {{kvBlockIndexConfig: {{enableMetrics: true}}}}
    kvEventsConfig: {{podDiscoveryConfig: {{socketPort: {events}{replay}}}}}
- {{type: prefix-cache-scorer, parameters: {{prefixMatchInfoProducerName: precise-prefix-cache-producer}}}}
- {{type: queue-scorer}}
"""
APPROXIMATE = """
- {{type: approx-prefix-cache-producer}}
- {{type: prefix-cache-scorer}}
- {{type: queue-scorer}}
"""
CONFIG = """
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
plugins:
- {{type: file-discovery, parameters: {{path: {endpoints}}}}}
{plugins}
schedulingProfiles:
- name: default
  plugins: [{{pluginRef: prefix-cache-scorer, weight: 2}}, {{pluginRef: queue-scorer}}{scorers}]
dataLayer: {{discovery: {{endpoints: {{pluginRef: file-discovery}}}}}}
"""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves this folder out of a run of all tests, because the engines take minutes to start."""
    named = [(config.invocation_params.dir / argument.partition("::")[0]).resolve() for argument in config.args]
    return None if any(path == HERE or HERE in path.parents for path in named) else True


class Pool(NamedTuple):
    """Engines of one kind. `events`, `replay`: the ports of the first one; each next one has the next ports. `replay`: 0: it has none."""

    engines: list[Engine]
    events: int
    replay: int = 0


class Site:
    """A picker and a gateway in front of a pool. The prefix caches of its engines are empty at first.

    `plugins`: the producers and scorers; "": those of the default configuration. `scorers`: further ones. `section`: of the configuration.
    """

    def __init__(self, cluster: Cluster, pool: Pool, plugins: str, *flags: str, scorers: Sequence[str] = (), section: str = "") -> None:
        self.cluster = cluster
        self.pool = pool
        for engine in pool.engines:
            engine.forget()
        endpoints = cluster.directory / "endpoints.yaml"
        listed = [
            {"name": f"engine-rank-{rank}", "address": LOOPBACK, "port": str(engine.port)} for rank, engine in enumerate(pool.engines)
        ]
        endpoints.write_text(json.dumps({"endpoints": listed}))
        filled = plugins.format(
            model=MODEL,
            host=LOOPBACK,
            port=pool.engines[0].port,
            events=pool.events,
            replay=f", replaySocketPort: {pool.replay}" if pool.replay else "",
        )
        filled += "".join(f"- {{type: {scorer}}}\n" for scorer in scorers)
        more = "".join(f", {{pluginRef: {scorer}}}" for scorer in scorers)
        config = CONFIG.format(endpoints=endpoints, plugins=filled.strip(), scorers=more) + section if plugins else ""
        self.picker: Picker = cluster.picker(endpoints, *flags, workers=2, config_text=config)
        self.gateway = cluster.envoy(self.picker, edge=True)

    def endpoints(self) -> Sequence[dict[str, Any]]:
        """Returns what the picker knows of each engine, in the order of the pool."""
        found = json.loads(get(self.picker.metrics, "/debug/state") or b"{}").get("endpoints", {}).values()
        by_port = {each["address"].rpartition(":")[2]: each for each in found}
        return [by_port[str(engine.port)] for engine in self.pool.engines if str(engine.port) in by_port]

    def is_quiet(self) -> bool:
        """Returns whether neither the picker nor an engine counts a request."""
        names = ("in_flight", "tokens_in_flight")
        counted = [each[name] for each in self.endpoints() for name in names]
        running = [engine.total(engine.RUNNING) for engine in self.pool.engines]
        return not any(counted) and not any(running) and not self.picker.in_flight()

    def is_precise(self) -> bool:
        """Returns whether the picker follows the KV events of all engines."""
        return len(re.findall(FOLLOWED, self.picker.page(), re.MULTILINE)) == len(self.pool.engines)

    def findings(self) -> list[Any]:
        """Returns what the doctor finds."""
        *_, gateway = sorted(self.cluster.directory.glob("envoy-*.yaml"), key=lambda file: file.stat().st_mtime_ns)
        return findings(self.cluster, self.picker, gateway)

    def explained(self) -> str:
        """Returns what the picker says of its last decision, as JSON."""
        return run(python("workers", "explain", f"--url=http://{LOOPBACK}:{self.picker.metrics}", "--last", "--json")).stdout

    def becomes_quiet(self) -> bool:
        return eventually(self.is_quiet, 30)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pool]:
    """Two vLLM servers that publish KV events and replay them."""
    with Cluster() as cluster:
        row = free_row(2 * PAIR)
        engines = [vllm(cluster, events=(row + rank, row + PAIR + rank)) for rank in range(PAIR)]
        yield Pool(engines, row, row + PAIR)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def approximate(cluster: Cluster, pair: Pool) -> Site:
    return Site(cluster, pair, APPROXIMATE)


@pytest.fixture
def precise(cluster: Cluster, pair: Pool) -> Site:
    site = Site(cluster, pair, PRECISE)
    assert eventually(site.is_precise), site.endpoints()
    return site
