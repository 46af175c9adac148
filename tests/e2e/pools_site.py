"""A picker of three pools with simulated servers behind Envoy, for tests of what people see of several pools."""

import json
import subprocess
from typing import Any

from loadtest.demo.children import python
from tests.e2e.cluster import COMPLETIONS, Cluster, ask, completion, run
from tests.e2e.conftest import FAST

NAMES = ("big", "small", "idle")
TEXT = """\
pools:
- {{name: big, models: ["big-*"], endpoints: {0}}}
- name: small
  models: ["small-*"]
  endpoints: {1}
  config: |
    plugins: [{{type: queue-scorer}}]
- {{name: idle, models: [idle], endpoints: {2}}}
"""
REQUESTS = {"big": 6, "small": 3}


class Site:
    """A picker of three pools. Two of them have got requests, and one a request that no pool serves."""

    def __init__(self, cluster: Cluster) -> None:
        self.directory = cluster.directory
        self.fleets = {name: cluster.fleet(2, *FAST, "--model", f"{name}-1") for name in NAMES}
        self.addresses = {name: [f"{host}:{port}" for host, port in fleet.addresses] for name, fleet in self.fleets.items()}
        self.picker = cluster.picker(cluster.directory, workers=2, pools_text=TEXT.format(*map(json.dumps, self.addresses.values())))
        self.where = (f"--run-dir={cluster.directory / 'run'}", f"--metrics-port={self.picker.metrics}")
        self.port = cluster.envoy(self.picker, edge=True)
        *_, self.gateway = sorted(cluster.directory.glob("envoy-*.yaml"), key=lambda file: file.stat().st_mtime_ns)
        for name, count in REQUESTS.items():
            for number in range(count):
                assert self.ask(f"{name}-1", f"{name}-{number}") == 200
        assert self.ask("none", "none-1") == 404

    def ask(self, model: str, request_id: str = "") -> int:
        headers = {"x-request-id": request_id} if request_id else {}
        return ask(self.port, COMPLETIONS, completion("hello " * 100, model=model, max_tokens=2), headers).status

    def run(self, command: str, *flags: str) -> subprocess.CompletedProcess[str]:
        return run(python("workers", command, *self.where, *flags))

    def json(self, command: str, *flags: str) -> Any:
        done = self.run(command, *flags, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)
