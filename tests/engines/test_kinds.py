"""One vLLM server of a special kind behind a picker: adapters, data-parallel ranks, a window of attention, and events of another kind."""

import json
from typing import Any

import pytest

from epp.prefix.streams import NOT_CONNECTED, OTHER_TOPIC, PARTLY_REUSED, of_ranks
from loadtest.demo.ports import free_ports, free_row
from tests.e2e.cluster import Cluster, ask, eventually
from tests.engines.conftest import APPROXIMATE, PRECISE, Pool, Site
from tests.engines.conversations import converse, exact
from tests.engines.servers import MODEL, vllm
from tests.engines.setup import MODELS
from tests.engines.test_vllm import RESPONSES

LORAS = [f"{name}={MODELS / name}" for name in ("poems", "sql")]
CACHE_BLOCKS = 34  # of 128 tokens: a little more than the longest prompt that vLLM accepts
KINDS = {"ranks": ("tiny", ["--data-parallel-size=2"], of_ranks(2.0)), "window": ("window", [], PARTLY_REUSED)}


def test_predictions_of_adapters_and_salts_are_exact(cluster: Cluster) -> None:
    port = free_row(1)
    engine = vllm(cluster, "--enable-lora", "--max-loras=2", "--max-lora-rank=8", "--lora-modules", *LORAS, events=(port,))
    site = Site(cluster, Pool([engine], port), PRECISE, scorers=["lora-affinity-scorer"])
    turns = [
        turn
        for model in ("tiny", "poems", "sql")
        for salt in ("a", "b")
        for turn in converse(site.gateway, site.picker, chats=3, turns=3, model=model, cache_salt=salt)
    ]
    assert site.endpoints()[0]["scraped"]["max_lora"] == 2
    assert exact(turns) >= 0.98, turns
    assert site.becomes_quiet()
    assert eventually(lambda: not site.findings()), site.findings()


def test_predictions_stay_exact_while_blocks_are_evicted_and_after_a_restart(cluster: Cluster) -> None:
    row = free_row(2)
    ports, flag = (row, row + 1), f"--num-gpu-blocks-override={CACHE_BLOCKS}"
    engine = vllm(cluster, flag, events=ports)
    site = Site(cluster, Pool([engine], *ports), PRECISE)
    turns = converse(site.gateway, site.picker, chats=14, turns=5)
    assert exact(turns) >= 0.98, [turn for turn in turns if turn.error]
    assert site.picker.counter("kv_cache_index_evictions_total") > CACHE_BLOCKS / 2
    engine.kill(cluster)
    vllm(cluster, flag, port=engine.port, events=ports)
    assert eventually(lambda: not site.endpoints()[0]["not_precise"]), site.endpoints()
    turns = converse(site.gateway, site.picker, chats=14, turns=4)
    assert turns[0].reported == 0
    assert {turn.known_by for turn in turns} == {"precise"}
    assert exact(turns) >= 0.98, turns


@pytest.mark.parametrize("kind", KINDS)
def test_an_endpoint_that_is_not_exact_says_why(cluster: Cluster, kind: str) -> None:
    model, flags, why = KINDS[kind]
    row = free_row(4)
    engine = vllm(cluster, *flags, model=model, events=(row, row + 2))
    site = Site(cluster, Pool([engine], row, row + 2), PRECISE)
    converse(site.gateway, site.picker, chats=6, turns=4)
    (endpoint,) = site.endpoints()
    assert endpoint["scraped"]["cache_tokens"] == sum(
        int(sample.labels["kv_cache_size_tokens"]) for sample in engine.samples("vllm:cache_config_info")
    )
    assert endpoint["not_precise"] == why
    assert f"approximate: {why}" in site.explained()
    assert not site.is_precise()
    assert site.becomes_quiet()
    assert eventually(lambda: not site.findings()), site.findings()


def found_by(site: Site, rule: str) -> str:
    """Waits for a finding of the doctor. Returns its evidence, or all findings if it does not come."""
    converse(site.gateway, site.picker, chats=2, turns=2)
    response = json.dumps({"model": MODEL, "input": "hello", "max_output_tokens": 2})
    assert ask(site.gateway, RESPONSES, response.encode()).status == 200
    last: list[dict[str, Any]] = []

    def is_named() -> bool:
        last[:] = site.findings()
        return any(each["rule"] == rule for each in last)

    return " ".join(each["evidence"] for each in last if each["rule"] == rule) if eventually(is_named) else str(last)


def test_events_without_a_topic_are_read_and_those_of_another_topic_are_named(cluster: Cluster) -> None:
    """vLLM publishes without a topic unless it is told to use one."""
    row = free_row(4)
    engines = [vllm(cluster, events=(row + n, row + 2 + n), topic=topic) for n, topic in enumerate(("", "events"))]
    pool = Pool(engines, row, row + 2)
    site = Site(cluster, pool, PRECISE)
    assert OTHER_TOPIC in found_by(site, "kv-events")
    assert [each["not_precise"] for each in site.endpoints()] == ["", OTHER_TOPIC]
    assert [each["rule"] for each in site.findings()] == ["kv-events"]
    wrong_model = Site(cluster, pool, PRECISE.replace("{model}", "another"))
    assert "404 from /v1/chat/completions/render" in found_by(wrong_model, "tokens")


def test_the_doctor_names_what_is_wrong_with_tokens_and_events(cluster: Cluster) -> None:
    row, (nowhere,) = free_row(2), free_ports(1)
    engine = vllm(cluster, "--no-enable-scale-out", events=(row, row + 1))
    pool = Pool([engine], row, row + 1)
    for evidence, rule, seen in (
        ("403 from /v1/responses/render", "tokens", pool),
        (NOT_CONNECTED, "kv-events", pool._replace(events=nowhere)),
        ("1 replay without an answer", "kv-replay", pool._replace(replay=nowhere)),
    ):
        assert evidence in found_by(Site(cluster, seen, PRECISE), rule)


def test_the_doctor_names_a_server_that_ended_because_a_rank_has_died(cluster: Cluster) -> None:
    """vLLM ends the whole server if one of its ranks dies."""
    engine = vllm(cluster, "--data-parallel-size=2")
    site = Site(cluster, Pool([engine], 0), APPROXIMATE)
    assert len(engine.samples("vllm:cache_config_info")) == 2
    assert eventually(lambda: not site.findings()), site.findings()
    engine.kill_rank(1)
    assert eventually(lambda: site.endpoints()[0]["state"] == "down", 30), site.endpoints()
    (finding,) = site.findings()
    assert finding["rule"] == "endpoints-down"
    assert "Connection refused" in finding["evidence"]
