"""Starts a picker that follows the KV events of simulated servers. The servers also render its prompts to token ids."""

import json
import re
from pathlib import Path
from typing import Any

from loadtest.demo.children import python
from loadtest.demo.ports import free_row
from tests.e2e.cluster import CHAT, Answer, Cluster, Picker, ask, run
from tests.e2e.conftest import FAST

CONFIG = """
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
plugins:
- {{type: file-discovery, parameters: {{path: {endpoints}}}}}
- {{type: token-producer, parameters: {{modelName: sim-model, vllm: {{url: "http://{render}"}}}}}}
- type: precise-prefix-cache-producer
  parameters:
    indexerConfig: {{kvBlockIndexConfig: {{enableMetrics: true}}}}
    kvEventsConfig: {{podDiscoveryConfig: {{socketPort: {port}{replay}}}}}
- {{type: prefix-cache-scorer, parameters: {{prefixMatchInfoProducerName: precise-prefix-cache-producer}}}}
dataLayer: {{discovery: {{endpoints: {{pluginRef: file-discovery}}}}}}
schedulingProfiles:
- {{name: default, plugins: [{{pluginRef: prefix-cache-scorer, weight: 2}}]}}
"""


class SimWorld:
    """Starts `servers` simulated servers that publish KV events, and a picker with `workers` workers that follows them.

    `render`: the address of the server that renders; "": the first simulated server.
    """

    def __init__(self, cluster: Cluster, servers: int, *flags: str, workers: int = 1, replays: bool = True, render: str = "") -> None:
        self.cluster = cluster
        self.servers = servers
        self.port = free_row(2 * servers)
        ports = ["--kv-events-port", str(self.port)]
        ports += ["--kv-replay-port", str(self.port + servers)] if replays else []
        self.fleet = cluster.fleet(servers, *FAST, *ports, *flags)
        host, port = self.fleet.addresses[0]
        self.config_text = CONFIG.format(
            endpoints=self.fleet.file,
            render=render or f"{host}:{port}",
            port=self.port,
            replay=f", replaySocketPort: {self.port + servers}" if replays else "",
        )
        self.picker = cluster.picker(Path("unused"), workers=workers, config_text=self.config_text)
        self.gateway = cluster.envoy(self.picker)

    def chat(self, *texts: str, **more: object) -> Answer:
        """Sends a chat through the gateway."""
        messages = [{"role": "user", "content": text} for text in texts]
        body = {"model": "sim-model", "messages": messages, "max_tokens": 1, **more}
        return ask(self.gateway, CHAT, json.dumps(body).encode())

    def fault(self, server: int, kind: str) -> None:
        """Lets a server misbehave."""
        order = json.dumps({"kind": kind, "server": server}).encode()
        assert ask(self.fleet.addresses[(server + 1) % self.servers][1], "/sim/fault", order).status == 200

    def precise(self, picker: Picker | None = None) -> list[bool]:
        """Returns for each server whether its prefix matches are precise."""
        return [value == 1 for value in self._per_server("precise", picker)]

    def all_precise(self, picker: Picker | None = None) -> bool:
        return self.precise(picker) == [True] * self.servers

    def held(self, picker: Picker | None = None) -> list[float]:
        """Returns for each server the number of blocks that it holds, as the picker knows it."""
        return self._per_server("held_blocks", picker)

    def top(self) -> list[dict[str, Any]]:
        """Returns the endpoints in `epp top`, in the order of their names."""
        flags = (f"--metrics-port={self.picker.metrics}", f"--run-dir={self.cluster.directory / 'run'}")
        done = run(python("workers", "top", "--once", "--json", "--interval=100ms", *flags))
        assert done.returncode == 0, done.stderr
        endpoints: list[dict[str, Any]] = json.loads(done.stdout)["endpoints"]
        return endpoints

    def cached(self) -> list[float]:
        """Returns for each server the number of blocks that it really holds. Call it while no request runs."""
        return [stats["kv_blocks_idle"] for stats in self.fleet.stats()]

    def _per_server(self, name: str, picker: Picker | None) -> list[float]:
        page = (picker or self.picker).page()
        found = re.findall(rf'^llm_d_epp_kv_cache_events_{name}\{{.*pod_identifier="sim-rank-(\d+)"\}} (\S+)$', page, re.MULTILINE)
        return [float(value) for _, value in sorted(found, key=lambda pair: int(pair[0]))]
