"""Several pools behind one picker and a real Envoy: routes to pools by port, by authority, by metadata and by model."""

import json
import os
import re
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from loadtest.demo.envoy_config import PICKER_CLUSTER, PICKER_FILTER
from loadtest.demo.ports import free_ports
from loadtest.demo.stack import LOOPBACK
from tests.e2e.cluster import COMPLETIONS, Answer, Cluster, ask, eventually, run, serve
from tests.e2e.echo import Server, gateway, servers
from tests.e2e.filters import TYPES, Json
from tests.e2e.test_warm import child_pid
from workers.host.exit_codes import ExitCode

POOLS = ("llama", "qwen", "small-models", "hidden")
EACH = 2  # endpoints of a pool
OWN = "llama-cluster"  # Envoy's cluster for the port of the pool llama
TEXT = """\
pools:
- name: llama
  port: {port}
  endpoints: {llama}
- name: qwen
  authorities: ["qwen-epp.*"]
  endpoints: {qwen}
  config: |
    plugins: [{{type: queue-scorer}}]
- name: small-models
  models: ["phi-*", gemma-2b]
  endpoints: {small-models}
- name: hidden
  endpoints: {hidden}
defaults: {{maxEndpoints: 8}}
"""


def routed(port: int) -> Any:
    """Returns the change of Envoy: a route to each pool, and metadata from the header x-pool, as a filter of the gateway may set them."""

    def change(manager: Json, resources: Json) -> None:
        (host,) = manager["route_config"]["virtual_hosts"]
        (usual,) = host["routes"]
        overrides = {
            "/by-port/": {"cluster_name": OWN},
            "/by-authority/": {"cluster_name": PICKER_CLUSTER, "authority": "QWEN-epp.default.svc:9002"},
        }
        host["routes"] = [
            {
                "match": {"prefix": prefix},
                "route": {**usual["route"], "prefix_rewrite": "/"},
                "typed_per_filter_config": {
                    PICKER_FILTER: {
                        "@type": TYPES + "extensions.filters.http.ext_proc.v3.ExtProcPerRoute",
                        "overrides": {"grpc_service": {"envoy_grpc": service}},
                    }
                },
            }
            for prefix, service in overrides.items()
        ] + [usual]
        (shared,) = [each for each in resources["clusters"] if each["name"] == PICKER_CLUSTER]
        own = json.loads(json.dumps(shared))
        own["name"] = own["load_assignment"]["cluster_name"] = OWN
        own["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]["address"]["socket_address"]["port_value"] = port
        resources["clusters"].append(own)
        (picker,) = [each for each in manager["http_filters"] if each["name"] == PICKER_FILTER]
        picker["typed_config"]["metadata_options"] = {"forwarding_namespaces": {"untyped": ["envoy.lb"]}}
        rule = {"header": "x-pool", "on_header_present": {"metadata_namespace": "envoy.lb", "key": "llm-d.ai/pool", "type": "STRING"}}
        manager["http_filters"].insert(
            0,
            {
                "name": "pool",
                "typed_config": {"@type": TYPES + "extensions.filters.http.header_to_metadata.v3.Config", "request_rules": [rule]},
            },
        )

    return change


def addresses(started: Sequence[Server]) -> list[str]:
    return [f"{LOOPBACK}:{server.server_port}" for server in started]


class Site:
    """Four pools of two servers each, a picker and an Envoy. Servers tell which one answered."""

    def __init__(self, cluster: Cluster, started: list[Server]) -> None:
        self.pools = {name: started[at * EACH : (at + 1) * EACH] for at, name in enumerate(POOLS)}
        (port,) = free_ports(1)
        text = TEXT.format(port=port, **{name: json.dumps(addresses(mine)) for name, mine in self.pools.items()})
        self.picker = cluster.picker(cluster.directory, workers=2, pools_text=text)
        self.port = gateway(cluster, self.picker.grpc, routed(port))

    def ask(self, prefix: str = "", model: str = "m", pool: str = "") -> Answer:
        body = json.dumps({"model": model, "prompt": "hello", "max_tokens": 1}).encode()
        return ask(self.port, prefix + COMPLETIONS, body, {"x-pool": pool} if pool else {})

    def pool_of(self, answer: Answer) -> str:
        """Returns the pool of the server that answered."""
        assert answer.status == 200, answer.body
        (name,) = [name for name, mine in self.pools.items() if answer.json()["server"] in {server.address for server in mine}]
        return name


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with Cluster() as cluster, servers(EACH * len(POOLS)) as started:
        yield Site(cluster, started)


@pytest.mark.parametrize(
    ("prefix", "model", "pool", "found"),
    [
        ("/by-port", "phi-4", "qwen", "llama"),
        ("/by-authority", "phi-4", "llama", "qwen"),
        ("", "phi-4", "hidden", "hidden"),
        ("", "phi-4", "llama", "llama"),
        ("", "phi-4", "", "small-models"),
        ("", "gemma-2b", "", "small-models"),
    ],
)
def test_port_authority_metadata_and_model_decide_in_this_order(site: Site, prefix: str, model: str, pool: str, found: str) -> None:
    assert {site.pool_of(site.ask(prefix, model, pool)) for _ in range(20)} == {found}


def test_many_requests_of_all_pools_at_once_reach_no_server_of_another_pool(site: Site) -> None:
    routes = [("/by-port", "m", "llama"), ("/by-authority", "m", "qwen"), ("", "phi-4", "small-models"), ("", "gemma-2b", "small-models")]
    before = {name: sum(server.requests for server in mine) for name, mine in site.pools.items()}
    with ThreadPoolExecutor(16) as threads:
        found = list(threads.map(lambda number: site.pool_of(site.ask(*routes[number % 4][:2])), range(200)))
    assert found == [routes[number % 4][2] for number in range(200)]
    grown = {name: sum(server.requests for server in mine) - before[name] for name, mine in site.pools.items()}
    assert grown == {"llama": 50, "qwen": 50, "small-models": 100, "hidden": 0}


@pytest.mark.parametrize(("model", "pool", "why"), [("llama-70b", "", "the model 'llama-70b'"), ("phi-4", "none", "no pool 'none'")])
def test_a_request_of_no_pool_gets_404_which_names_the_pools_there_are(site: Site, model: str, pool: str, why: str) -> None:
    answer = site.ask(model=model, pool=pool)
    error = answer.json()["error"]
    assert (answer.status, error["type"]) == (404, "NotFound")
    assert why in error["message"] and error["message"].endswith("pools: llama, qwen, small-models, hidden")


def test_a_port_of_several_pools_lists_the_models_of_all(site: Site) -> None:
    answer = ask(site.port, "/v1/models", None, method="GET")
    assert (answer.status, answer.json()["object"]) == (200, "list")
    assert {each["id"]: each["owned_by"] for each in answer.json()["data"]}["gemma-2b"] == "small-models"


def test_servers_of_a_pool_that_fail_do_not_disturb_the_other_pools(site: Site) -> None:
    for server in site.pools["small-models"]:
        server.broken = "503"
    try:
        assert eventually(lambda: site.ask(model="phi-4").status == 503)
        assert {site.pool_of(site.ask("/by-port")) for _ in range(10)} == {"llama"}
    finally:
        for server in site.pools["small-models"]:
            server.broken = ""
    assert eventually(lambda: site.ask(model="phi-4").status == 200, 30.0)


@pytest.mark.parametrize("child", ["worker 0", "worker 1", "supervisor"])
def test_the_successor_of_a_killed_process_serves_all_pools(site: Site, child: str) -> None:
    routes = [("/by-port", "m", "llama"), ("/by-authority", "m", "qwen"), ("", "phi-4", "small-models")]
    pid = child_pid(site.picker, child)
    os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: child_pid(site.picker, child) not in (0, pid) and site.picker.complete(2), 30.0)
    for prefix, model, pool in routes * 10:
        assert site.pool_of(site.ask(prefix, model)) == pool


def test_the_shipped_file_serves_its_pools_at_their_ports(cluster: Cluster) -> None:
    text = (Path(__file__).parents[2] / "deploy" / "pools.yaml").read_text()
    (port,) = free_ports(1)
    text = text.replace("9102", str(port)).replace("127.0.0.1:8000", "127.0.0.1:1")  # anything may run at 8000 beside the tests
    picker = cluster.picker(cluster.directory, workers=1, pools_text=text)
    served = gateway(cluster, picker.grpc)
    refused = ask(served, COMPLETIONS, json.dumps({"model": "unknown", "prompt": "x"}).encode())
    assert (refused.status, refused.json()["error"]["message"].rpartition(";")[2]) == (404, " pools: llama, qwen, small-models")
    at_own_port = ask(gateway(cluster, port), COMPLETIONS, json.dumps({"model": "unknown", "prompt": "x"}).encode())
    assert at_own_port.status == 503  # no server of the sample runs


def test_the_metrics_page_has_the_figures_of_each_pool_under_its_name(site: Site) -> None:
    for prefix, model in (("/by-port", "m"), ("/by-authority", "m"), ("", "phi-4")):
        site.ask(prefix, model)

    def ready() -> list[tuple[str, str]]:
        return sorted(re.findall(r'^llm_d_epp_ready_endpoints\{name="([^"]+)"\} (\d)', site.picker.page(), re.MULTILINE))

    assert ready() == [(name, "0") for name in sorted(POOLS)], "these servers have no metrics"
    page = site.picker.page()
    assert 'inference_pool="llama"' in page
    for name in POOLS:
        assert f',pool="{name}",' in page
    assert page.count("# TYPE llm_d_epp_ready_endpoints ") == 1


# Bad input

AT = "port: 9102, endpoints: ['127.0.0.1:1']"
MANY = "".join(f"- {{name: p{number}, models: [m{number}]}}\n" for number in range(2000))


@pytest.mark.parametrize(
    ("pools", "why"),
    [
        (" []", "pools.yaml:1:8: error[missing-field]: pools: the list is empty"),
        (" [{name: a}, {name: a}]", "error[duplicate-name]: duplicate pool name 'a'; first in line 1"),
        ("\n- {name: a, port: 9102}\n- {name: b, port: 9102}", "3:19: error[two-pools]: pool 'b' has port 9102, as pool 'a' in line 2"),
        ("\n- {name: a, models: [m]}\n- {name: b, models: [m]}", "3:22: error[two-pools]: the model 'm' of pool 'b' is that of pool 'a'"),
        ("\n- {name: a, models: ['m*']}\n- {name: b, models: ['mm*']}", "error[never-matched]: the model 'mm*' of pool 'b' never"),
        (" [{name: a, port: 9102, configFile: none.yaml}]", "error[unreadable]: pool 'a': the file"),
        (f" [{{name: a, {AT}, config: 'plugins: [{{type: queue-scrorer}}]'}}]", "error[unknown-type]: plugin type 'queue-scrorer'"),
        (
            f"\n- name: a\n  {AT.replace(', ', chr(10) + '  ')}\n  config: |\n    plugins: {{}}",
            "pools.yaml:6:10: error[wrong-type]: plugins",
        ),
        (" [{name: a, port: 9102}]", "pool 'a': error[no-discovery]: there is no source of endpoints"),
        (f"\n{MANY}", "error[too-many-pools]: pools: 2000 pools"),
    ],
)
def test_a_wrong_pools_file_is_refused_before_the_picker_serves(tmp_path: Path, pools: str, why: str) -> None:
    file = tmp_path / "pools.yaml"
    file.write_text(f"pools:{pools}")
    ended = run(serve(file, *free_ports(3), 1, tmp_path / "run", pools=True))
    assert ended.returncode == ExitCode.CONFIG, ended.stderr
    assert f"{file.parent}/" in ended.stderr and why in ended.stderr


def test_a_pool_with_the_port_of_a_flag_is_refused(tmp_path: Path) -> None:
    file, (grpc, health, metrics) = tmp_path / "pools.yaml", free_ports(3)
    for port, flag in ((grpc, "--grpc-port"), (health, "--grpc-health-port"), (metrics, "--metrics-port")):
        file.write_text(f"pools: [{{name: a, port: {port}}}, {{name: b, models: [m]}}]")
        ended = run(serve(file, grpc, health, metrics, 1, tmp_path / "run", pools=True))
        assert ended.returncode == ExitCode.CONFIG, ended.stderr
        assert f"error[two-pools]: pool 'a': port {port} is that of {flag}, too" in ended.stderr


@pytest.mark.parametrize("flag", ["config-file=x", "config-text=x", "endpoints=127.0.0.1:1", "pool-name=x", "transport=grpcio"])
def test_flags_of_one_pool_are_refused_beside_a_pools_file(tmp_path: Path, flag: str) -> None:
    file = tmp_path / "pools.yaml"
    file.write_text(f"pools: [{{name: a, {AT}}}]")
    ended = run([*serve(file, *free_ports(3), 1, tmp_path / "run", pools=True), f"--{flag}"])
    assert ended.returncode == ExitCode.CONFIG, ended.stderr
    assert f"--pools-file and --{flag.partition('=')[0]}" in ended.stderr
