"""`helm upgrade` from the chart of each earlier version, with a real helm and API server, while requests go through picker and Envoy.

There is no kubelet: the test starts the pod of each revision from the Deployment that the API server has, and moves the traffic from one
pod to the other as a Service does.
"""

import json
import signal
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from loadtest.demo.children import python
from loadtest.demo.ports import free_ports
from loadtest.demo.stack import envoy_path
from tests.deploy.built.test_applied import ACCOUNT, SERVER, ready, space, started  # noqa: F401 (space is a fixture)
from tests.deploy.cases import values
from tests.deploy.renderers import CHART, POOL, helm_program, parsed
from tests.e2e.cluster import COMPLETIONS, Cluster, completion
from tests.kube.control_plane import TOKEN, ControlPlane
from tests.kube.objects import pod, status
from tests.kube.world import page
from tests.upgrades import samples

Json = dict[str, Any]
PORTS = ("grpc", "health", "metrics", "http", "status", "admin")
ADMIN = 9901  # Envoy's admin port in the chart
REQUESTS_EACH = 20  # before, during and after the upgrade


class Release:
    """A release of the chart in the API server."""

    def __init__(self, kubeconfig: Path, namespace: str, case: Json) -> None:
        self._command = [helm_program(), "--kubeconfig", str(kubeconfig), "--namespace", namespace]
        self._case = json.dumps(case)

    def run(self, *words: str) -> str:
        command = [*self._command, *words]
        done = subprocess.run(command, input=self._case, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def manifests(self) -> list[Json]:
        return parsed(self.run("get", "manifest", POOL))


class Pod:
    """The containers of the chart's pod: a picker and an Envoy. `ports`: its own in place of those of the chart."""

    def __init__(self, cluster: Cluster, name: str, manifests: list[Json], kubeconfig: Path, ports: Mapping[int, int]) -> None:
        folder = cluster.directory / name
        folder.mkdir()
        flags, variables = started(manifests, folder, {"--run-dir": folder})
        (config,) = [one["data"]["envoy.yaml"] for one in manifests if one["metadata"]["name"] == f"{POOL}-envoy"]
        for old, new in ports.items():
            flags = [flag.replace(str(old), str(new)) for flag in flags]
            config = config.replace(str(old), str(new))
        (folder / "envoy.yaml").write_text(config)
        _, _, metrics, self.port, envoy_status, _ = ports.values()
        variables["KUBECONFIG"] = str(kubeconfig)
        command = ["env", *(f"{key}={value}" for key, value in variables.items()), *python("workers", "serve", *flags)]
        self.picker = cluster.children.start(f"picker {name}", command)
        cluster.wait(self.picker, lambda: ready(metrics))
        command = [envoy_path(), "-c", str(folder / "envoy.yaml"), "--concurrency", "1", "--disable-hot-restart"]
        envoy = cluster.children.start(f"envoy {name}", command)
        cluster.wait(envoy, lambda: page(envoy_status, "/ready")[0] == 200)


class Traffic:
    """Sends one request after the other to the pod that `port` names, until `end`."""

    def __init__(self, port: int) -> None:
        self.port, self.answered, self.failures = port, 0, []
        self._ending = threading.Event()
        self._more = threading.Condition()
        self._thread = threading.Thread(target=self._send)
        self._thread.start()

    def wait(self, requests: int) -> None:
        """Waits until so many more requests were answered."""
        with self._more:
            wanted = self.answered + requests
            assert self._more.wait_for(lambda: self.answered >= wanted or self.failures, 60)

    def end(self) -> None:
        self._ending.set()
        self._thread.join()

    def _send(self) -> None:
        while not self._ending.is_set():
            url = f"http://127.0.0.1:{self.port}{COMPLETIONS}"
            try:
                with urllib.request.urlopen(urllib.request.Request(url, completion("a prompt", max_tokens=2)), timeout=30) as answer:
                    answer.read()
            except OSError as failure:
                self.failures.append(failure)
            with self._more:
                self.answered += 1
                self._more.notify_all()


@pytest.mark.parametrize("version", samples.versions())
def test_a_chart_of_an_earlier_version_is_upgraded_under_traffic(version: str, plane: ControlPlane, space: str) -> None:  # noqa: F811
    kube = plane.kube()
    first, second, (target,) = free_ports(len(PORTS)), free_ports(len(PORTS)), free_ports(1)
    grpc, health, metrics, http_port, status_port, _ = first
    case = values(
        mode="standalone",
        metricsPort=metrics,
        epp={"extProcPort": grpc, "grpcHealthPort": health},
        proxy={"port": http_port, "metricsPort": status_port},
        modelServers={"targetPorts": [{"number": target}]},
    )
    labels = case["router"]["modelServers"]["matchLabels"]
    kube.patch(kube.create(pod(space, "server-0", labels)), status(SERVER), status=True)
    with Cluster() as cluster:
        release = Release(plane.kubeconfig(cluster.directory / "admin", TOKEN), space, case)
        release.run("install", POOL, str(samples.FOLDER / version / "chart.tgz"), "--values", "-")
        account = plane.kubeconfig(cluster.directory / "account", kube.token(space, ACCOUNT))
        server = cluster.children.start("server", python("loadtest.sim.main", "--addresses", f"{SERVER}:{target}"))
        cluster.wait(server, lambda: "ready" in server.text())
        chart_ports = (*first[:-1], ADMIN)
        old = Pod(cluster, "old", release.manifests(), account, dict(zip(chart_ports, first, strict=True)))
        traffic = Traffic(old.port)
        try:
            traffic.wait(REQUESTS_EACH)
            release.run("upgrade", POOL, str(CHART), "--values", "-")
            new = Pod(cluster, "new", release.manifests(), account, dict(zip(chart_ports, second, strict=True)))
            traffic.wait(REQUESTS_EACH)
            traffic.port = new.port
            traffic.wait(REQUESTS_EACH)
            old.picker.signal(signal.SIGTERM)
            assert old.picker.process.wait(30) == 0
            cluster.forget(old.picker)
            traffic.wait(REQUESTS_EACH)
        finally:
            traffic.end()
        assert not traffic.failures
        revisions = json.loads(release.run("history", POOL, "--output", "json"))
        assert [one["status"] for one in revisions] == ["superseded", "deployed"]
    plane.close()
