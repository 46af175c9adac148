"""What reaches the picker through a real Envoy of the headers that steer it: nothing from outside, and what a trusted filter sets."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from epp.config.control_headers import CONTROL_HEADERS
from loadtest.demo.children import python
from loadtest.demo.envoy_config import PICKER_CLUSTER, SERVERS_CLUSTER
from loadtest.demo.stack import LOOPBACK, picker_config
from tests.e2e.cluster import COMPLETIONS, Cluster, Fleet, Picker, ask, completion, run
from tests.e2e.conftest import FAST
from tests.e2e.filters import TYPES, Json, changed

DEPLOY = Path(__file__).parents[2] / "deploy"
PLUGIN = """
from epp.plugin import RequestHeader, plugin

@plugin("header-names")
class HeaderNames(RequestHeader):
    def read(self, request):
        with open({path!r}, "a") as file:
            print(*("=".join(item) for item in request.headers.items() if item[0][0] != ":"), sep="\\x1f", file=file)
"""
CHART = {  # the chart's placeholders
    "@PORT@": "8080",
    "@METRICS_PORT@": "0",
    "@PICKER_PORT@": "9002",
    "@TRANSPORT_SOCKET@": "null",
    "@SERVERS_HTTP@": "http_protocol_options",
}


class Site:
    """A picker that writes down the headers of each request."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.fleet: Fleet = cluster.fleet(1, *FAST)
        self._seen = cluster.directory / "seen"
        plugins = cluster.directory / "plugins"
        plugins.mkdir()
        (plugins / "names.py").write_text(PLUGIN.format(path=str(self._seen)))
        config = yaml.safe_load(picker_config(self.fleet.file))
        config["plugins"].append({"type": "header-names"})
        self.picker: Picker = cluster.picker(
            self.fleet.file, f"--plugin-path={plugins}", "--trust-client-headers=gateway", workers=1, config_text=yaml.safe_dump(config)
        )

    def arriving(self, port: int, headers: dict[str, str]) -> dict[str, str]:
        """Sends a request through an Envoy. Returns the headers with which it arrives at the picker."""
        self._seen.unlink(missing_ok=True)
        answer = ask(port, COMPLETIONS, completion("hello", max_tokens=1), headers)
        assert answer.status == 200, answer.body
        (line,) = self._seen.read_text().splitlines()
        return dict(item.split("=", 1) for item in line.split("\x1f"))


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with Cluster() as cluster:
        yield Site(cluster)


def shipped(file: str, site: Site) -> Callable[[str], str]:
    """Returns a change that puts a shipped bootstrap in the place of the test's. It keeps the test's addresses and plaintext."""

    def change(text: str) -> str:
        test, written = yaml.safe_load(text), (DEPLOY / file).read_text()
        for placeholder, value in CHART.items():
            written = written.replace(placeholder, value)
        config = yaml.safe_load(written)
        mine, theirs = test["static_resources"], config["static_resources"]
        config["admin"] = test["admin"]
        theirs["listeners"] = theirs["listeners"][:1]
        theirs["listeners"][0]["address"] = mine["listeners"][0]["address"]
        theirs["clusters"] = [each for each in theirs["clusters"] if each["name"] in (PICKER_CLUSTER, SERVERS_CLUSTER)]
        picker, servers = theirs["clusters"]
        picker.pop("transport_socket", None)
        picker["load_assignment"] = mine["clusters"][0]["load_assignment"]
        if "load_assignment" in servers:
            at = {"socket_address": {"address": LOOPBACK, "port_value": site.fleet.addresses[0][1]}}
            servers["load_assignment"]["endpoints"] = [{"lb_endpoints": [{"endpoint": {"address": at}}]}]
        return yaml.safe_dump(config)

    return change


def istio(manager: Json, _picker: Json, _resources: Json) -> None:
    """Merges the patch of deploy/gateways/istio.yaml into the connection manager, which removes nothing before."""
    (patch,) = yaml.safe_load((DEPLOY / "gateways/istio.yaml").read_text())["spec"]["configPatches"]
    manager["early_header_mutation_extensions"] = patch["patch"]["value"]["typed_config"]["early_header_mutation_extensions"]


CLAIMS = {name.title(): f"{name}-claimed" for name in CONTROL_HEADERS}
BOOTSTRAPS = ("envoy.yaml", "envoy-retry.yaml", "helm/endpoint-picker/files/envoy.yaml")


def envoy(site: Site, file: str) -> int:
    change = changed(istio) if file == "istio" else shipped(file, site)
    return site.cluster.envoy(site.picker, threads=1, change=change)


@pytest.mark.parametrize("file", [*BOOTSTRAPS, "istio"])
def test_no_control_header_from_outside_reaches_the_picker(site: Site, file: str) -> None:
    port = envoy(site, file)
    arrived = site.arriving(port, {**CLAIMS, "x-own": "kept"})
    assert arrived["x-own"] == "kept"
    assert arrived.keys() & set(CONTROL_HEADERS) == set()
    assert not [value for value in arrived.values() if "claimed" in value]


def test_without_the_removal_they_arrive(site: Site) -> None:
    """The control: the test would see them."""

    def edit(manager: Json, _picker: Json, _resources: Json) -> None:
        del manager["early_header_mutation_extensions"]

    port = site.cluster.envoy(site.picker, threads=1, change=changed(edit))
    harmless = {"x-llm-d-inference-fairness-id": "t", "x-llm-d-inference-objective": "o", "x-prefiller-host-port": "a:1"}
    arrived = site.arriving(port, harmless)
    assert {name: arrived[name] for name in harmless} == harmless


def test_a_trusted_filter_may_set_what_was_removed(site: Site) -> None:
    """A gateway of your own: a filter after the removal names the tenant, whatever the client claims."""
    tenant = {"header": {"key": "x-llm-d-inference-fairness-id", "value": "tenant-of-the-token"}}
    trusted: dict[str, Any] = {
        "name": "tenants",
        "typed_config": {
            "@type": TYPES + "extensions.filters.http.header_mutation.v3.HeaderMutation",
            "mutations": {"request_mutations": [{"append": tenant}]},
        },
    }

    def edit(manager: Json, _picker: Json, _resources: Json) -> None:
        manager["http_filters"].insert(0, trusted)

    port = site.cluster.envoy(site.picker, threads=1, edge=True, change=changed(edit))
    arrived = site.arriving(port, CLAIMS)
    assert {name: arrived[name] for name in CONTROL_HEADERS if name in arrived} == {"x-llm-d-inference-fairness-id": "tenant-of-the-token"}


def test_a_shipped_set_up_has_no_finding_about_client_headers_and_a_default_one_has(site: Site) -> None:
    def rules(picker: Picker, *more: str) -> list[str]:
        where = (f"--run-dir={site.cluster.directory / 'run'}", f"--metrics-port={picker.metrics}")
        done = run(python("workers", "doctor", *where, "--json", *more))
        return [found["rule"] for found in json.loads(done.stdout)["findings"]]

    assert "client-headers" not in rules(site.picker)
    default = site.cluster.picker(site.fleet.file, workers=1)
    assert "client-headers" in rules(default)
    assert "client-headers" not in rules(default, f"--gateway-config={DEPLOY / 'envoy.yaml'}")
