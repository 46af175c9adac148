"""Pickers whose children import modules slowly, as on a starved CPU, with each source of data: each becomes ready, and none of its event
loops imports anything afterwards, which could make its process count as hung.
"""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("kubernetes_asyncio")

from loadtest.demo.children import command_name, descendants, python
from loadtest.demo.ports import free_row
from loadtest.demo.stack import get
from tests.e2e.cluster import CHAT, COMPLETIONS, Cluster, Picker, ask, chat, completion, eventually, run
from tests.e2e.precise_world import CONFIG
from tests.e2e.replica_site import store_in
from tests.e2e.test_kubernetes import HttpApi, following, kubernetes, status
from tests.redis_server import needs_redis
from tests.workers.supervisor.kube.fake import PODS, POOLS, pod, pool

__all__ = ["kubernetes"]  # a fixture

SLOW_S = "0.05"  # per module: a client of Kubernetes has 200 of them, and a loop that stands still for 3 s counts as hung
SMALL = {"grpc._utilities"}  # one module, which grpc imports at the first stream
PAGES = ("/metrics", "/debug/state", "/debug/state/history", "/debug/decisions", "/ui", "/readyz")
REPORTER = """
- type: request-attribute-reporter
  parameters: {attributes: [{key: {name: cost}, expression: usage.total_tokens}]}
"""


class Starved:
    """Runs one picker with slow imports."""

    def __init__(self, cluster: Cluster, *settings: str) -> None:
        """`settings`: environment variables of the picker."""
        self.cluster = cluster
        self._listed = cluster.directory / "imports"
        self.under = ["env", *settings, *python("tests.faults.slow_imports", str(self._listed), SLOW_S)]

    def look_at(self, picker: Picker) -> None:
        """Uses every page and command."""
        for page in PAGES:
            assert eventually(lambda page=page: get(picker.metrics, page) is not None), page  # type: ignore[misc]
        self.command(picker, "explain", "--last")
        self.command(picker, "top", "--once", "--json")
        self.command(picker, "record", "start", "--seconds=1", f"--folder={self.cluster.directory / 'recorded'}")

    def command(self, picker: Picker, *words: str) -> None:
        done = run(python("workers", *words, f"--metrics-port={picker.metrics}", f"--run-dir={self.run_dir}"))
        assert done.returncode == 0, done.stderr

    @property
    def run_dir(self) -> Path:
        return self.cluster.directory / "run"

    def check(self, picker: Picker) -> None:
        """Asserts that no event loop imported anything and no process was killed for hanging."""
        assert set(self._listed.read_text().split()) <= SMALL
        assert "SIGABRT" not in picker.child.log.read_text()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


def test_with_host_names_grpcio_and_traces_on_the_console(cluster: Cluster) -> None:
    starved = Starved(cluster, "OTEL_TRACES_EXPORTER=console")
    fleet = cluster.fleet(1)
    picker = cluster.picker(
        fleet.file,
        f"--endpoints=localhost:{fleet.addresses[0][1]}",
        "--transport=grpcio",
        "--metrics-client-ca-file=",
        workers=1,
        config_text="plugins: [{type: queue-scorer}]\n",
        under=starved.under,
    )
    assert ask(cluster.envoy(picker), COMPLETIONS, completion("hello")).status == 200
    starved.look_at(picker)
    starved.check(picker)


def test_with_a_renderer_kv_events_cel_and_a_reload(cluster: Cluster) -> None:
    starved = Starved(cluster)
    port = free_row(2)
    fleet = cluster.fleet(1, "--kv-events-port", str(port), "--kv-replay-port", str(port + 1))
    host, serving = fleet.addresses[0]
    text = CONFIG.format(endpoints=fleet.file, render=f"{host}:{serving}", port=port, replay=f", replaySocketPort: {port + 1}")
    text = text.replace("dataLayer:", REPORTER.lstrip() + "dataLayer:")
    picker = cluster.picker(fleet.file, workers=1, config_text=text, under=starved.under)
    gateway = cluster.envoy(picker)
    assert eventually(lambda: ask(gateway, CHAT, chat("hello")).status == 200, 30.0)
    starved.look_at(picker)
    starved.command(picker, "reload")
    assert ask(gateway, CHAT, chat("hello again")).status == 200
    starved.check(picker)


@needs_redis
def test_with_a_replica_store_and_traces_for_a_collector(cluster: Cluster) -> None:
    starved = Starved(cluster, "OTEL_TRACES_EXPORTER=otlp", "OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:9")
    fleet = cluster.fleet(1)
    with store_in(cluster) as store:
        url = f"--replica-store=redis://127.0.0.1:{store.port}"
        picker = cluster.picker(fleet.file, url, "--replica-name=one", workers=1, under=starved.under)
        assert ask(cluster.envoy(picker), COMPLETIONS, completion("hello")).status == 200
        starved.look_at(picker)
        starved.check(picker)


def test_with_kubernetes_also_after_the_supervisor_was_killed(cluster: Cluster, kubernetes: HttpApi) -> None:
    starved = Starved(cluster)
    (host, port), *_ = cluster.fleet(1).addresses
    kubernetes.start()
    kubernetes.act(lambda api: (api.put(POOLS, "pool", pool(port)), api.put(PODS, "p0", pod(host))))  # type: ignore[func-returns-value]
    picker = following(cluster, kubernetes, cluster.directory, starved.under, metrics_endpoint_auth="true")
    assert eventually(picker.ready, 40.0)
    assert status(picker.metrics, "/metrics") == 401
    (supervisor,) = [pid for pid in descendants(picker.child.pid) if "super" in command_name(pid)]
    os.kill(supervisor, signal.SIGKILL)
    assert eventually(lambda: times_ready(picker.child.log, "supervisor") == 2)
    assert eventually(picker.ready, 40.0)
    assert ask(cluster.envoy(picker), COMPLETIONS, completion("hello")).status == 200
    starved.check(picker)


def times_ready(log: Path, child: str) -> int:
    """Counts how often a child reported ready."""
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return sum(line.get("event") == "child ready" and line.get("child") == child for line in lines)
