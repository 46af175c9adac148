"""KV events of several pools: one process follows the servers of all pools with a precise prefix producer, each with its own settings."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loadtest.demo.ports import free_ports, free_row
from tests.e2e.cluster import CHAT, Answer, Cluster, ask, eventually, run, serve
from tests.e2e.conftest import FAST
from tests.e2e.echo import gateway
from workers.host.exit_codes import ExitCode

SERVERS = 2
PRECISE = """
dataLayer: {{discovery: {{endpoints: {{pluginRef: file-discovery}}}}}}
plugins:
- {{type: file-discovery, parameters: {{path: {file}}}}}
- {{type: token-producer, parameters: {{modelName: sim-model, vllm: {{url: "http://{render}"}}}}}}
- type: precise-prefix-cache-producer
  parameters: {{kvEventsConfig: {{podDiscoveryConfig: {{socketPort: {port}, replaySocketPort: {replay}}}}}}}
- {{type: prefix-cache-scorer, parameters: {{prefixMatchInfoProducerName: precise-prefix-cache-producer}}}}
schedulingProfiles:
- {{name: default, plugins: [{{pluginRef: prefix-cache-scorer, weight: 2}}]}}
"""


class Site:
    """Three pools of two servers each: `one` and `two` are precise, with events at different ports, `plain` is not."""

    def __init__(self, cluster: Cluster) -> None:
        events = {name: free_row(2 * SERVERS) for name in ("one", "two")}
        fleets = {
            name: cluster.fleet(SERVERS, *FAST, "--kv-events-port", str(port), "--kv-replay-port", str(port + SERVERS))
            for name, port in events.items()
        }
        fleets["plain"] = cluster.fleet(SERVERS, *FAST)
        ports = dict(zip(fleets, free_ports(3), strict=True))
        self.addresses = {name: [f"{host}:{port}" for host, port in fleet.addresses] for name, fleet in fleets.items()}
        pools: list[dict[str, Any]] = [{"name": "plain", "port": ports["plain"], "endpoints": self.addresses["plain"]}]
        for name, port in events.items():
            # The names of the servers in the file tell which of the event ports they have.
            text = PRECISE.format(file=fleets[name].file, render=self.addresses[name][0], port=port, replay=port + SERVERS)
            pools.append({"name": name, "port": ports[name], "config": text})
        flags = (f"--state-dir={cluster.directory / 'state'}",)
        self.picker = cluster.picker(cluster.directory, *flags, workers=1, pools_text=json.dumps({"pools": pools}))
        self.ports = {name: gateway(cluster, port) for name, port in ports.items()}

    def chat(self, pool: str, text: str) -> Answer:
        body = {"model": "sim-model", "messages": [{"role": "user", "content": text}], "max_tokens": 1}
        return ask(self.ports[pool], CHAT, json.dumps(body).encode())

    def rows(self, metric: str) -> dict[tuple[str, str], float]:
        """Returns the values of a metric of the endpoints' streams, by pool and endpoint."""
        found = re.findall(rf'^llm_d_epp_{metric}\{{name="([^"]*)",pod_identifier="([^"]*)"\}} (\S+)$', self.picker.page(), re.MULTILINE)
        return {(pool, endpoint): float(value) for pool, endpoint, value in found}

    def held(self, pool: str) -> float:
        return sum(value for (name, _), value in self.rows("kv_cache_events_held_blocks").items() if name == pool)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with Cluster() as cluster:
        made = Site(cluster)
        for name in made.ports:  # a stream is precise from its first message on
            for number in range(8):
                assert made.chat(name, f"begin {number} " * 100).status == 200
        assert eventually(lambda: sum(made.rows("kv_cache_events_precise").values()) == 2 * SERVERS, 30.0)
        yield made


def test_blocks_are_known_at_the_servers_of_their_pool_only(site: Site) -> None:
    before = {pool: site.held(pool) for pool in ("one", "two")}
    assert site.chat("one", "only in pool one " * 200).status == 200
    assert eventually(lambda: site.held("one") > before["one"])
    assert site.held("two") == before["two"]
    assert {pool for pool, _ in site.rows("kv_cache_events_held_blocks")} == {"one", "two"}, "the pool plain has no events"


def test_a_prompt_goes_where_its_blocks_are_held_in_each_pool(site: Site) -> None:
    for pool in ("one", "two"):
        prompt, held = f"held in {pool} " * 200, site.held(pool)
        first = site.chat(pool, prompt)
        assert first.status == 200 and eventually(lambda held=held, pool=pool: site.held(pool) > held + 10)  # type: ignore[misc]
        cached = [site.chat(pool, prompt) for _ in range(6)]
        assert {answer.server for answer in cached} == {first.server}
        assert all(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 100 for answer in cached)
    assert site.chat("plain", "held nowhere " * 200).status == 200


def test_pools_whose_settings_of_the_common_process_differ_are_refused(tmp_path: Path) -> None:
    tiers = "indexerConfig: {kvCacheBackendConfigs: [{name: gpu, weight: 1.0}]}, "
    endpoints = tmp_path / "endpoints.yaml"
    endpoints.write_text("endpoints: [{name: a, address: 127.0.0.1, port: '1'}]\n")
    first = PRECISE.format(file=endpoints, render="127.0.0.1:1", port=5557, replay=5559)
    pools: list[dict[str, Any]] = [{"name": "a", "port": 9102, "config": first}]
    pools.append(pools[0] | {"name": "b", "port": 9103, "config": first.replace("parameters: {kvEvents", f"parameters: {{{tiers}kvEvents")})
    file = tmp_path / "pools.yaml"
    file.write_text(json.dumps({"pools": pools}))
    ended = run(serve(file, *free_ports(3), 1, tmp_path / "run", pools=True))
    assert ended.returncode == ExitCode.CONFIG, ended.stderr
    assert "error[one-pool]: pool 'b': one process follows the KV events of all pools" in ended.stderr
    assert "kvCacheBackendConfigs differs from that of pool 'a'" in ended.stderr
