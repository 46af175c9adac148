"""`epp doctor` is silent about a healthy picker of each kind, with its servers and its gateway. Unit tests cause each finding."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from loadtest.demo.children import python
from loadtest.demo.ports import free_ports
from tests.e2e.cluster import CHAT, COMPLETIONS, Cluster, Picker, ask, completion, eventually, run
from tests.e2e.conftest import FAST
from tests.e2e.precise_world import SimWorld
from tests.e2e.replica_site import ReplicaSite, know_each_other, store_in
from tests.redis_server import needs_redis
from tests.workers.supervisor.kube.fake import PODS, POOLS, FakeApi, pod, pool

PD = Path(__file__).resolve().parents[2] / "deploy/config/pd.yaml"
SHIPPED_PATH = "/etc/epp/endpoints.yaml"
REQUESTS = 8


def default(cluster: Cluster) -> Picker:
    return cluster.picker(cluster.fleet(3, *FAST).file, workers=2)


def prefill_and_decode(cluster: Cluster) -> Picker:
    fleet = cluster.fleet(4, "--role", "prefill,prefill,decode,decode", *FAST)
    config = PD.read_text().replace(SHIPPED_PATH, str(fleet.file))
    return cluster.picker(fleet.file, workers=1, config_text=config)


def precise(cluster: Cluster) -> Picker:
    world = SimWorld(cluster, 2)
    for n in range(REQUESTS):
        assert world.chat(f"{n} hello " * 50).status == 200
    assert eventually(world.all_precise)
    return world.picker


KINDS: Mapping[str, Callable[[Cluster], Picker]] = {"default": default, "prefill and decode": prefill_and_decode, "precise": precise}


def findings(cluster: Cluster, picker: Picker, gateway: Path) -> list[Any]:
    where = (f"--run-dir={cluster.directory / 'run'}", f"--metrics-port={picker.metrics}")
    done = run(python("workers", "doctor", *where, f"--gateway-config={gateway}", "--json"))
    found: list[Any] = json.loads(done.stdout)["findings"]
    return found


def is_silent(cluster: Cluster, picker: Picker) -> None:
    port = cluster.envoy(picker, edge=True)
    *_, gateway = sorted(cluster.directory.glob("envoy-*.yaml"), key=lambda file: file.stat().st_mtime_ns)
    chat = json.dumps({"model": "sim-model", "messages": [{"role": "user", "content": "hi " * 200}], "max_tokens": 4})
    for n in range(REQUESTS):
        assert ask(port, COMPLETIONS, completion(f"{n} hello")).status == 200
        assert ask(port, CHAT, chat.encode()).status == 200
    last: list[Any] = []

    def silent() -> bool:
        last[:] = findings(cluster, picker, gateway)
        return not last

    # A worker may be late for a moment, on a machine that tests keep busy.
    assert eventually(silent), last


@pytest.mark.parametrize("kind", KINDS)
def test_a_healthy_picker_has_no_finding(cluster: Cluster, kind: str) -> None:
    is_silent(cluster, KINDS[kind](cluster))


def test_a_healthy_picker_of_a_pool_in_kubernetes_has_no_finding(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    kubernetes_of = pytest.importorskip("tests.e2e.test_kubernetes")
    ports = free_ports(2)
    kubernetes = kubernetes_of.HttpApi(ports[0])
    try:
        kubernetes.start()
        addresses = ",".join(f"{ip}:{ports[1]}" for ip in kubernetes_of.SERVERS)
        servers = cluster.children.start("servers", python("loadtest.sim.main", "--addresses", addresses))
        cluster.wait(servers, lambda: "ready" in servers.text())

        def fill(api: FakeApi) -> None:
            api.put(POOLS, "pool", pool(ports[1]))
            for number, ip in enumerate(kubernetes_of.SERVERS):
                api.put(PODS, f"p{number}", pod(ip))

        kubernetes.act(fill)
        picker = kubernetes_of.following(cluster, kubernetes, cluster.directory)
        assert eventually(picker.ready)
        monkeypatch.setenv("KUBECONFIG", str(cluster.directory / "kubeconfig"))
        is_silent(cluster, picker)
    finally:
        kubernetes.close()


@needs_redis
def test_a_healthy_replica_has_no_finding(cluster: Cluster) -> None:
    with store_in(cluster) as store:
        site = ReplicaSite(cluster, cluster.fleet(2, *FAST), store.url, count=2)
        assert eventually(lambda: know_each_other(site.remotes(), 2))
        is_silent(cluster, site.pickers[0])
