"""The configurations of deploy/config/ behind a real gateway, each doing what it is for. P/D and E/P/D: see `test_disagg`."""

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.e2e.cluster import COMPLETIONS, Answer, Cluster, Fleet, Picker, ask, completion, eventually
from tests.e2e.predictor import Predictor
from workers.demo.stack import get

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


@pytest.fixture(scope="module")
def own() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def fleet(own: Cluster) -> Fleet:
    """Three servers, the first of which is reserved for one class of tenants."""
    fleet = own.fleet(len(SERVERS), *SIMULATED)
    listed = yaml.safe_load(fleet.file.read_text())
    listed["endpoints"][0].setdefault("labels", {})["tenant-class"] = "reserved"
    assert listed["endpoints"][0]["name"] == RESERVED
    fleet.file.write_text(yaml.safe_dump(listed))
    return fleet


def site(cluster: Cluster, name: str, endpoints: Path, *flags: str, workers: int = 2, **changes: str) -> Site:
    """The shipped file as it is, but for where the endpoints stand."""
    text = (CONFIGS / name).read_text()
    for old, new in {SHIPPED_PATH: str(endpoints), **changes}.items():
        assert old in text
        text = text.replace(old, new)
    picker = cluster.picker(endpoints, *flags, workers=workers, config_text=text)
    return Site(cluster.envoy(picker), picker)


def test_default_a_prompt_goes_back_to_the_server_that_has_it_and_new_ones_spread(own: Cluster, fleet: Fleet) -> None:
    default = site(own, "default.yaml", fleet.file)
    story = "once upon a time there was a king " * 100
    first = default.ask(story)

    def back() -> bool:  # what was learned of the first request travels to all workers within milliseconds
        return [default.ask(f"{story}{n}").server for n in range(4)] == [first.server] * 4

    assert eventually(back)
    assert {default.ask(f"{n} something new " * 50).server for n in range(40)} == SERVERS


def test_lora_requests_go_where_their_adapter_is_and_other_adapters_go_elsewhere(own: Cluster, fleet: Fleet) -> None:
    lora = site(own, "lora.yaml", fleet.file)
    held: dict[str, Answer] = {}

    def hold(adapter: str) -> None:
        held[adapter] = lora.ask(f"a long answer by {adapter}", model=adapter, max_tokens=600)

    def holders(adapter: str) -> set[str]:
        """Servers that have it: they say so while it has a request."""
        pages = [(get(port, "/metrics") or b"").decode() for _, port in fleet.addresses]
        return {f"sim-{n}" for n, page in enumerate(pages) if f'running_lora_adapters="{adapter}"' in page}

    threads = [threading.Thread(target=hold, args=(adapter,)) for adapter in ADAPTERS]
    for thread, adapter in zip(threads, ADAPTERS, strict=True):
        thread.start()
        assert eventually(lambda adapter=adapter: len(holders(adapter)) == 1)  # type: ignore[misc]
    places = {adapter: holders(adapter) for adapter in ADAPTERS}
    assert set().union(*places.values()) == SERVERS, "each server has room for one adapter"
    for adapter in ADAPTERS:

        def follow(adapter: str = adapter) -> bool:  # all workers know within a scrape
            return {lora.ask(f"{n} more", model=adapter).server for n in range(4)} == places[adapter]

        assert eventually(follow)
    for thread in threads:
        thread.join()
    assert {adapter: {answer.server} for adapter, answer in held.items()} == places


def test_session_affinity_the_token_of_an_answer_brings_the_client_back(own: Cluster, fleet: Fleet) -> None:
    sessions = site(own, "session-affinity.yaml", fleet.file, "--allow-experimental-plugins")
    seen = set()
    for client in range(12):
        first = sessions.ask(f"client {client} says hello")
        token = first.headers["x-session-token"]
        seen.add(first.server)
        for turn in range(3):
            answer = sessions.ask(f"client {client}, turn {turn}", {"x-session-token": token})
            assert (answer.server, answer.headers["x-session-token"]) == (first.server, token)
    assert seen == SERVERS, "without a token requests spread"
    assert sessions.ask("an invented token", {"x-session-token": "bm9ib2R5"}).status == 200


def test_multi_tenant_the_class_decides_which_servers_there_are(own: Cluster, fleet: Fleet) -> None:
    tenants = site(own, "multi-tenant.yaml", fleet.file, "--allow-experimental-plugins")
    shared = {tenants.ask(f"{n} of everybody").server for n in range(20)}
    assert shared == {"sim-1", "sim-2"}
    assert {tenants.ask(f"{n} named", {"x-tenant-class": "shared"}).server for n in range(20)} == shared
    assert {tenants.ask(f"{n} reserved", {"x-tenant-class": "reserved"}).server for n in range(5)} == {RESERVED}
    nobody = tenants.ask("a class that is none", {"x-tenant-class": "royal"})
    assert nobody.status == 400
    assert b"royal" in nobody.body


def test_latency_aware_a_request_with_objectives_goes_where_they_are_predicted_to_be_kept(
    own: Cluster, fleet: Fleet
) -> None:
    with Predictor(len(SERVERS)) as predictor, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREDICTION_SERVER_URL", predictor.url)
        patch.setenv("TRAINING_SERVER_URL", predictor.url)
        tier = "- type: slo-headroom-tier-filter"  # no exploration: which server is certain
        changes = {tier: f"{tier}\n  parameters: {{epsilonExploreNeg: 0}}"}
        latency = site(own, "latency-aware.yaml", fleet.file, workers=1, **changes)
        assert eventually(
            lambda: latency.ask("is the predictor there?", OBJECTIVES).status == 200 and predictor.rows != []
        )
        answers = [latency.ask(f"{n} in a hurry", OBJECTIVES, stream=True, max_tokens=3) for n in range(10)]
        assert [answer.status for answer in answers] == [200] * 10
        assert {answer.server for answer in answers} == {"sim-0"}
        assert eventually(lambda: any(entry["actual_ttft_ms"] > 0 for entry in predictor.entries))


def test_a_shadow_profile_beside_the_default_one_changes_no_answer_and_its_agreements_are_counted(
    own: Cluster, fleet: Fleet
) -> None:
    shadows = """schedulingProfiles:
- name: by-queue
  shadow: true
  plugins: [{pluginRef: queue-scorer}]
- name: nowhere
  shadow: true
  plugins: [{pluginRef: only-unicorns}, {pluginRef: queue-scorer}]
"""
    unicorns = (
        "plugins:\n- {name: only-unicorns, type: label-selector-filter, parameters: {matchLabels: {kind: unicorn}}}\n"
    )
    changes = {"schedulingProfiles:\n": shadows, "apiVersion: llm-d.ai/v1alpha1\n": ""}
    text = (CONFIGS / "default.yaml").read_text().replace(SHIPPED_PATH, str(fleet.file))
    text = text.replace("\nplugins:\n", f"\n{unicorns}", 1)
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    picker = own.picker(fleet.file, workers=2, config_text=text)
    port = own.envoy(picker)
    for n in range(10):
        assert ask(port, COMPLETIONS, completion(f"{n} for the shadows", max_tokens=1)).status == 200

    def counted(profile: str, outcome: str) -> float:
        start = f'llm_d_epp_shadow_decisions_total{{profile="{profile}",outcome="{outcome}"}} '
        return sum(float(line.removeprefix(start)) for line in picker.page().splitlines() if line.startswith(start))

    assert counted("nowhere", "differed") == 10
    assert counted("nowhere", "agreed") == 0
    assert counted("by-queue", "agreed") + counted("by-queue", "differed") == 10
    assert picker.counter("shadow_failures_total") == 0
