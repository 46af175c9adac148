"""Each configuration in deploy/config/ does its job behind a real gateway. `test_disagg` tests those for P/D and E/P/D."""

import contextlib
import http.client
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from loadtest.demo.stack import LOOPBACK, get
from tests.e2e.cluster import ANSWER_S, COMPLETIONS, Answer, Cluster, Fleet, Picker, ask, completion, eventually
from tests.e2e.predictor import Predictor

CONFIGS = Path(__file__).resolve().parents[2] / "deploy" / "config"
SHIPPED_PATH = "/etc/epp/endpoints.yaml"
SERVERS = {"sim-0", "sim-1", "sim-2"}
ADAPTERS = ("poet", "coder", "nurse")
SIMULATED = ("--prefill-us-per-token", "1", "--decode-ms", "10", "--loras", ",".join(ADAPTERS), "--max-loras", "1")
RESERVED = "sim-0"
OBJECTIVES = {"x-llm-d-slo-ttft-ms": "200", "x-llm-d-slo-tpot-ms": "100"}


class Site(NamedTuple):
    """A gateway in front of the servers, with one of the configurations."""

    port: int
    picker: Picker

    def ask(self, prompt: str, headers: Mapping[str, str] = {}, **more: Any) -> Answer:
        return ask(self.port, COMPLETIONS, completion(prompt, **{"max_tokens": 1, **more}), headers)

    @contextlib.contextmanager
    def long_answer(self, prompt: str, model: str) -> Iterator[str]:
        """Asks for an answer that lasts for minutes and yields the server that streams it. On exit the client leaves."""
        connection = http.client.HTTPConnection(LOOPBACK, self.port, timeout=ANSWER_S)
        with contextlib.closing(connection):
            connection.request("POST", COMPLETIONS, completion(prompt, model=model, max_tokens=30_000, stream=True))
            yield connection.getresponse().headers["x-sim-server"]


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def fleet(shared_cluster: Cluster) -> Fleet:
    """Starts three servers. The first one is reserved for one class of tenants."""
    fleet = shared_cluster.fleet(len(SERVERS), *SIMULATED)
    listed = yaml.safe_load(fleet.file.read_text())
    listed["endpoints"][0].setdefault("labels", {})["tenant-class"] = "reserved"
    assert listed["endpoints"][0]["name"] == RESERVED
    fleet.file.write_text(yaml.safe_dump(listed))
    return fleet


def site(cluster: Cluster, name: str, endpoints: Path, *flags: str, workers: int = 2, **changes: str) -> Site:
    """Starts a gateway with a shipped configuration. Replaces only the path of the endpoints file, and `changes`: old text -> new."""
    text = (CONFIGS / name).read_text()
    for old, new in {SHIPPED_PATH: str(endpoints), **changes}.items():
        assert old in text
        text = text.replace(old, new)
    picker = cluster.picker(endpoints, *flags, workers=workers, config_text=text)
    return Site(cluster.envoy(picker), picker)


def test_default_a_prompt_returns_to_the_server_that_cached_it_and_new_prompts_spread(shared_cluster: Cluster, fleet: Fleet) -> None:
    default = site(shared_cluster, "default.yaml", fleet.file)
    story = "once upon a time there was a king " * 100
    first = default.ask(story)

    def back() -> bool:  # an update of the prefix index reaches all workers within milliseconds
        return [default.ask(f"{story}{n}").server for n in range(4)] == [first.server] * 4

    assert eventually(back)
    assert {default.ask(f"{n} something new " * 50).server for n in range(40)} == SERVERS


def test_lora_requests_go_to_the_server_with_their_adapter_and_other_adapters_go_elsewhere(shared_cluster: Cluster, fleet: Fleet) -> None:
    lora = site(shared_cluster, "lora.yaml", fleet.file)

    def holders(adapter: str) -> set[str]:
        """Returns the servers that have loaded the adapter. Their metrics pages show it while a request uses it."""
        pages = [(get(port, "/metrics") or b"").decode() for _, port in fleet.addresses]
        return {f"sim-{n}" for n, page in enumerate(pages) if f'running_lora_adapters="{adapter}"' in page}

    with contextlib.ExitStack() as answers:
        places: dict[str, set[str]] = {}
        for adapter in ADAPTERS:
            places[adapter] = {answers.enter_context(lora.long_answer(f"a long answer by {adapter}", adapter))}
            assert eventually(lambda adapter=adapter: holders(adapter) == places[adapter])  # type: ignore[misc]
        assert set().union(*places.values()) == SERVERS, "each server has room for one adapter"
        for adapter in ADAPTERS:

            def follow(adapter: str = adapter) -> bool:  # all workers know after one scrape
                return {lora.ask(f"{n} more", model=adapter).server for n in range(4)} == places[adapter]

            assert eventually(follow)


def test_session_affinity_the_token_of_an_answer_leads_to_the_same_server(shared_cluster: Cluster, fleet: Fleet) -> None:
    sessions = site(shared_cluster, "session-affinity.yaml", fleet.file, "--allow-experimental-plugins")
    seen = set()
    for client in range(12):
        first = sessions.ask(f"client {client} says hello")
        token = first.headers["x-session-token"]
        seen.add(first.server)
        for turn in range(3):
            answer = sessions.ask(f"client {client}, turn {turn}", {"x-session-token": token})
            assert (answer.server, answer.headers["x-session-token"]) == (first.server, token)
    assert seen == SERVERS, "requests without a token spread"
    assert sessions.ask("an invented token", {"x-session-token": "bm9ib2R5"}).status == 200


def test_multi_tenant_the_class_decides_which_servers_are_candidates(shared_cluster: Cluster, fleet: Fleet) -> None:
    tenants = site(shared_cluster, "multi-tenant.yaml", fleet.file, "--allow-experimental-plugins")
    shared = {tenants.ask(f"{n} for all").server for n in range(20)}
    assert shared == {"sim-1", "sim-2"}
    assert {tenants.ask(f"{n} named", {"x-tenant-class": "shared"}).server for n in range(20)} == shared
    assert {tenants.ask(f"{n} reserved", {"x-tenant-class": "reserved"}).server for n in range(5)} == {RESERVED}
    refused = tenants.ask("an unknown class", {"x-tenant-class": "royal"})
    assert refused.status == 400
    assert b"royal" in refused.body


def test_latency_aware_a_request_goes_to_the_server_that_is_predicted_to_meet_its_objectives(shared_cluster: Cluster, fleet: Fleet) -> None:
    with Predictor(len(SERVERS)) as predictor, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREDICTION_SERVER_URL", predictor.url)
        patch.setenv("TRAINING_SERVER_URL", predictor.url)
        tier = "- type: slo-headroom-tier-filter"  # without exploration the chosen server is certain
        changes = {tier: f"{tier}\n  parameters: {{epsilonExploreNeg: 0}}"}
        latency = site(shared_cluster, "latency-aware.yaml", fleet.file, workers=1, **changes)
        assert eventually(lambda: latency.ask("is the predictor there?", OBJECTIVES).status == 200 and predictor.rows != [])
        answers = [latency.ask(f"{n} in a hurry", OBJECTIVES, stream=True, max_tokens=3) for n in range(10)]
        assert [answer.status for answer in answers] == [200] * 10
        assert {answer.server for answer in answers} == {"sim-0"}
        assert eventually(lambda: any(entry["actual_ttft_ms"] > 0 for entry in predictor.entries))


def test_a_shadow_profile_changes_no_answer_and_its_agreements_are_counted(shared_cluster: Cluster, fleet: Fleet) -> None:
    shadows = """schedulingProfiles:
- name: by-queue
  shadow: true
  plugins: [{pluginRef: queue-scorer}]
- name: nowhere
  shadow: true
  plugins: [{pluginRef: only-unicorns}, {pluginRef: queue-scorer}]
"""
    unicorns = "plugins:\n- {name: only-unicorns, type: label-selector-filter, parameters: {matchLabels: {kind: unicorn}}}\n"
    changes = {"schedulingProfiles:\n": shadows, "apiVersion: llm-d.ai/v1\n": ""}
    text = (CONFIGS / "token-load.yaml").read_text().replace(SHIPPED_PATH, str(fleet.file))
    text = text.replace("\nplugins:\n", f"\n{unicorns}", 1)
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    picker = shared_cluster.picker(fleet.file, workers=2, config_text=text)
    port = shared_cluster.envoy(picker)
    for n in range(10):
        assert ask(port, COMPLETIONS, completion(f"{n} for the shadows", max_tokens=1)).status == 200

    def counted(profile: str, outcome: str) -> float:
        start = f'llm_d_epp_shadow_decisions_total{{profile="{profile}",outcome="{outcome}"}} '
        return sum(float(line.removeprefix(start)) for line in picker.page().splitlines() if line.startswith(start))

    assert counted("nowhere", "differed") == 10
    assert counted("nowhere", "agreed") == 0
    assert counted("by-queue", "agreed") + counted("by-queue", "differed") == 10
    assert picker.counter("shadow_failures_total") == 0
