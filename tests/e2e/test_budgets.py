"""Budgets of tenants through a real Envoy: who gets 429, what its headers say, and what two workers and two replicas count together."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from loadtest.demo.children import python
from loadtest.demo.stack import LOOPBACK
from tests.e2e.cluster import COMPLETIONS, Answer, Cluster, Picker, ask, completion, run, write_endpoints
from tests.e2e.echo import Server, gateway, servers
from tests.redis_server import RedisServer, needs_redis

CONFIG = """\
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
featureGates: [flowControl]
plugins:
- {{type: queue-scorer}}
- {{type: file-discovery, parameters: {{path: {file}}}}}
dataLayer: {{discovery: {{endpoints: {{pluginRef: file-discovery}}}}}}
tenants:
  from: [{{header: x-tenant, trusted: true}}]
  budget: {{tokensPerMinute: 1, burst: 300}}
  perTenant:
    often: {{budget: {{requests: 60}}}}
    quick: {{budget: {{tokensPerMinute: 6k, burst: 100}}}}
    patient: {{budget: {{tokensPerMinute: 1, burst: 1, mode: queue}}}}
    free: {{budget: {{mode: none}}}}
"""
PROMPT = completion("x" * 200, max_tokens=1)  # some 60 tokens


def picker_of(cluster: Cluster, started: Sequence[Server], workers: int, *flags: str) -> Picker:
    file: Path = cluster.directory / "servers.yaml"
    write_endpoints(file, [(LOOPBACK, server.server_port) for server in started])
    return cluster.picker(file, *flags, workers=workers, config_text=CONFIG.format(file=file))


@contextmanager
def entrances(cluster: Cluster, workers: int = 2, *flags: str, pickers: int = 1) -> Iterator[Sequence[int]]:
    """Yields the port of an Envoy for each picker."""
    with servers(1) as started:
        made = [picker_of(cluster, started, workers, *flags) for _ in range(pickers)]
        yield [gateway(cluster, picker.grpc) for picker in made]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with Cluster() as cluster, entrances(cluster) as (port,):
        yield port


def send(port: int, tenant: str, body: bytes = PROMPT) -> Answer:
    return ask(port, COMPLETIONS, body, {"x-tenant": tenant})


def test_a_tenant_gets_429_with_the_headers_of_openai_once_its_tokens_are_used_up_in_all_workers(port: int) -> None:
    answers = [send(port, "acme") for _ in range(12)]
    statuses = [answer.status for answer in answers]
    assert statuses == sorted(statuses) and {200, 429} == set(statuses)
    assert 2 <= statuses.count(200) <= 6  # two workers that each had a budget would let 10 through
    refused = answers[-1]
    assert int(refused.headers["retry-after"]) > 60
    assert refused.headers["x-ratelimit-limit-tokens"] == "1"
    assert "m" in refused.headers["x-ratelimit-reset-tokens"]
    assert refused.headers["x-llm-d-request-dropped-reason"] == "rejected-over-budget"
    assert refused.json()["error"]["message"].endswith("the budget of this tenant is used up: tokens per minute")
    assert send(port, "another").status == 200


def test_requests_per_minute_are_counted_and_say_what_is_left(port: int) -> None:
    admitted = 0
    while (answer := send(port, "often")).status == 200:
        admitted += 1
    assert 60 <= admitted <= 120  # one more each second
    assert answer.status == 429 and answer.headers["x-ratelimit-remaining-requests"] == "0"
    assert "x-ratelimit-limit-tokens" not in answer.headers


def test_a_client_that_obeys_retry_after_is_served(port: int) -> None:
    for _ in range(5):
        while (answer := send(port, "quick")).status == 429:
            wait_s = int(answer.headers["retry-after"])
            assert 1 <= wait_s <= 3
            time.sleep(wait_s)  # as clients do: the point of the test
        assert answer.status == 200


def test_an_idle_pool_refuses_nobody_whose_budget_queues_and_a_tenant_may_have_none(port: int) -> None:
    assert {send(port, tenant).status for tenant in ("patient", "free") for _ in range(12)} == {200}


def test_epp_tenants_lists_who_used_what(cluster: Cluster) -> None:
    with servers(1) as started:
        picker = picker_of(cluster, started, 2)
        port = gateway(cluster, picker.grpc)
        statuses = [send(port, "acme").status for _ in range(8)]
        assert send(port, "free").status == 200
        listed = run(python("workers", "tenants", f"--url=http://{LOOPBACK}:{picker.metrics}", "--json"))
        assert listed.returncode == 0, listed.stderr
        used = {each["tenant"]: each["hour"] for each in json.loads(listed.stdout)["tenants"]}
        assert (used["acme"]["requests"], used["acme"]["over_budget"]) == (statuses.count(200), statuses.count(429))
        assert (used["free"]["requests"], used["free"]["refused"]) == (1, 0)
        assert f'llm_d_epp_tenant_over_budget_total{{fairness_id="acme"}} {statuses.count(429)}' in picker.page()


@needs_redis
def test_two_replicas_count_a_budget_together_and_refuse_nobody_because_their_store_is_away(cluster: Cluster, tmp_path: Path) -> None:
    flags = ("--replica-store-prefix=budgets",)
    with RedisServer(tmp_path) as store, entrances(cluster, 1, f"--replica-store={store.url}", *flags, pickers=2) as ports:
        statuses = []
        for number in range(14):
            statuses.append(send(ports[number % 2], "acme").status)
            time.sleep(0.2)  # nothing shows when the other replica has heard of a request
        assert 2 <= statuses.count(200) <= 6
        store.kill()
        assert {send(port, "another").status for port in ports} == {200}
        assert {send(port, "acme").status for port in ports} == {429}
