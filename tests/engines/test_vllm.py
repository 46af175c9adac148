"""Two real vLLM servers behind a picker and an Envoy: what the picker reads of them, predicts of them and says of them."""

import contextlib
import json
import re
import socket
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from epp.metrics.computed import LEARNED_ERRORS, LEARNED_RECENT, LEARNED_SECONDS
from epp.plugins.producers.tokenizer import PIXEL
from loadtest.demo.stack import LOOPBACK
from tests.e2e.cluster import CHAT, COMPLETIONS, Cluster, ask, eventually
from tests.engines.conftest import Pool, Site
from tests.engines.conversations import converse, exact, mean_error, within
from tests.engines.servers import MODEL, Engine

# What differs between two answers to one request: names, times, and how much of the prompt was cached.
OF_ITS_OWN = re.compile(
    r'"(?:id|item_id|request_id)": ?"[^"]*"|"(?:created|created_at|completed_at)": ?[\d.]+'
    r'|"[a-z_]*(?:cache|input)[a-z_]*": ?(?:\d+|null|{[^}]*})'
)
SAID = re.compile(r'"(?:content|delta|text)": ?"((?:[^"\\]|\\.)*)"')
USAGE_APART = 0.02
REQUESTS = 300
BLOCK = 128  # vLLM's default on a CPU
HELLO = [{"role": "user", "content": "Tell me about endpoint pickers. " * 20}]
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CHOICE = {"type": "function", "function": {"name": "weather"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
IMAGE = {"type": "image_url", "image_url": {"url": PIXEL}}
DRAWN = {"temperature": 1, "seed": 1}
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": HELLO}),
    "streamed chat": (CHAT, {"messages": HELLO, "stream": True}),
    "streamed chat with usage": (
        CHAT,
        {"messages": HELLO, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "chat with two answers": (CHAT, {"messages": HELLO, "n": 2, **DRAWN}),
    "chat with log probabilities": (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 2}),
    "chat in parts": (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]}),
    "completion": (COMPLETIONS, {"prompt": "hello there " * 40}),
    "streamed completion with echo": (COMPLETIONS, {"prompt": "hello there", "echo": True, "stream": True}),
    "completion of token ids": (COMPLETIONS, {"prompt": list(range(300, 600))}),
    "completions of texts": (COMPLETIONS, {"prompt": ["hello there " * 60, "another prompt " * 60]}),
    "completions of token ids": (COMPLETIONS, {"prompt": [list(range(300, 500)), list(range(700, 900))]}),
    "response": (RESPONSES, {"input": "Tell me about endpoint pickers. " * 20, "max_output_tokens": 4}),
    "streamed response": (RESPONSES, {"input": "hello", "max_output_tokens": 4, "stream": True}),
    "message": (MESSAGES, {"messages": HELLO}),
    "streamed message": (MESSAGES, {"messages": HELLO, "stream": True}),
    "streamed chat with two answers": (CHAT, {"messages": HELLO, "n": 2, "stream": True, **DRAWN}),
    "several chats": (f"{CHAT}/batch", {"messages": [HELLO, HELLO]}),
    "generation": ("/inference/v1/generate", {"token_ids": list(range(300, 450)), "sampling_params": {"max_tokens": 4, "temperature": 0}}),
    "tokens of a text": ("/tokenize", {"prompt": "hello"}),
    "models": ("/v1/models", {}),
    "health": ("/health", {}),
}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "unknown model": (CHAT, {"messages": HELLO, "model": "nobody"}),
    "too long": (COMPLETIONS, {"prompt": "hello world " * 5000}),
    "negative max_tokens": (CHAT, {"messages": HELLO, "max_tokens": -3}),
    "messages of a wrong type": (CHAT, {"messages": "hello"}),
    "embeddings of a model that has none": ("/v1/embeddings", {"input": "hello"}),
    "ranks of a model that has none": ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    "chat that calls a tool": (CHAT, {"messages": HELLO, "max_tokens": 60, "tools": [TOOL], "tool_choice": CHOICE}),
    "tool of the model's choice": (CHAT, {"messages": HELLO, "tools": [TOOL], "tool_choice": "auto", "stream": True}),
    "image for a model without eyes": (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}),
    "schema of a wrong type": (CHAT, {"messages": HELLO, "response_format": SCHEMA}),
}


@contextlib.contextmanager
def streams(site: Site, number: int) -> Iterator[list[socket.socket]]:
    """Clients of long streamed answers, which run at the engines. The clients go away at the end."""
    fields = {"model": MODEL, "messages": HELLO, "max_tokens": 3000, "ignore_eos": True, "stream": True}
    body = json.dumps(fields).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection((LOOPBACK, site.gateway), timeout=60)) for _ in range(number)]
        for client in clients:
            client.sendall(head.encode() + body)
        yield clients


def test_each_column_is_read_as_the_page_has_it_idle_and_under_load(approximate: Site) -> None:
    def is_read(engine: Engine, scraped: dict[str, float]) -> bool:
        (cache,) = engine.samples("vllm:cache_config_info")
        page = {
            "waiting_requests": engine.total("vllm:num_requests_waiting"),
            "running_requests": engine.total("vllm:num_requests_running"),
            "kv_cache_usage": engine.total("vllm:kv_cache_usage_perc"),
            "cache_block_size": float(cache.labels["block_size"]),
            "cache_num_blocks": float(cache.labels["num_gpu_blocks"]),
            "cache_tokens": float(cache.labels["kv_cache_size_tokens"]),
            "cache_ranks": 1.0,
        }
        assert scraped.keys() >= {"waiting_requests", "running_requests", "kv_cache_usage", "cache_block_size"}
        apart = abs(scraped["kv_cache_usage"] - page.pop("kv_cache_usage"))  # it grows with each token
        return apart < USAGE_APART and {**page, "kv_cache_usage": scraped["kv_cache_usage"]}.items() >= scraped.items()

    def all_read() -> bool:
        known = [each["scraped"] for each in approximate.endpoints()]
        return all(map(is_read, approximate.pool.engines, known))

    assert eventually(lambda: [each["state"] for each in approximate.endpoints()] == ["fresh", "fresh"])
    assert eventually(all_read), [each["scraped"] for each in approximate.endpoints()]
    with streams(approximate, 6):
        running = sum(engine.total(engine.RUNNING) for engine in approximate.pool.engines)
        assert eventually(lambda: sum(each["scraped"]["running_requests"] for each in approximate.endpoints()) == 6), running
        assert eventually(all_read), [each["scraped"] for each in approximate.endpoints()]
    assert approximate.becomes_quiet(), approximate.endpoints()


def test_answers_and_refusals_are_the_same_as_without_a_picker(precise: Site) -> None:
    def seen(port: int, path: str, fields: dict[str, Any]) -> tuple[int, str, str]:
        body = json.dumps({"model": MODEL, "max_tokens": 4, "temperature": 0, **fields}).encode()
        answer = ask(port, path, body) if fields else ask(port, path, None, method="GET")
        kind, text = answer.headers.get("content-type", ""), answer.body.decode()
        # One event may have several tokens, and events of several answers come in any order.
        said = "".join(sorted("".join(SAID.findall(text)))) if kind.startswith("text/event-stream") else OF_ITS_OWN.sub("", text)
        return answer.status, kind, said

    direct = precise.pool.engines[0].port
    for name, (path, fields) in CALLS.items():
        assert seen(precise.gateway, path, fields) == (expected := seen(direct, path, fields)), name
        assert expected[0] == 200, (name, expected)
    for name, (path, fields) in REFUSED.items():  # the picker refuses some of them itself, in its own words
        assert seen(precise.gateway, path, fields)[:2] == (expected := seen(direct, path, fields))[:2], name
        assert expected[0] != 200, (name, expected)
    assert precise.becomes_quiet(), precise.endpoints()


def test_no_load_is_left_by_clients_that_go_away(precise: Site) -> None:
    def running() -> float:
        return sum(engine.total(engine.RUNNING) for engine in precise.pool.engines)

    with streams(precise, 6) as clients:
        for client in clients[:3]:
            assert client.recv(100).startswith(b"HTTP/1.1 200")
        assert eventually(lambda: running() >= len(clients) / 2)
    assert precise.becomes_quiet(), precise.endpoints()


def test_approximate_predictions_are_within_a_block_of_what_is_reported(approximate: Site) -> None:
    turns = converse(approximate.gateway, approximate.picker, chats=10, turns=5)
    assert mean_error(turns) <= BLOCK / 2, turns
    assert within(turns, BLOCK) >= 0.9, turns


def test_precise_predictions_are_exact(precise: Site) -> None:
    turns = converse(precise.gateway, precise.picker, chats=10, turns=5)
    assert exact(turns) >= 0.98, [turn for turn in turns if turn.error]


def test_precise_predictions_stay_exact_when_the_servers_drop_their_caches(precise: Site) -> None:
    converse(precise.gateway, precise.picker, chats=4, turns=2)
    for engine in precise.pool.engines:
        engine.forget()
    turns = converse(precise.gateway, precise.picker, chats=14, turns=4)
    assert turns[0].reported == 0
    assert exact(turns) >= 0.98, [turn for turn in turns if turn.error]


@pytest.mark.parametrize("kind", ["approximate", "precise"])
def test_the_doctor_has_no_finding_on_healthy_servers(kind: str, request: pytest.FixtureRequest) -> None:
    site: Site = request.getfixturevalue(kind)
    converse(site.gateway, site.picker, chats=4, turns=3)
    last: list[Any] = []

    def silent() -> bool:
        last[:] = site.findings()
        return not last

    assert eventually(silent), last


def learned(site: Site, name: str, **labels: str) -> list[Sample]:
    """Returns some series of the learned latency model."""
    series = (sample for family in text_string_to_metric_families(site.picker.page()) for sample in family.samples)
    named = (sample for sample in series if sample.name == f"llm_d_epp_{name}")
    return [sample for sample in named if labels.items() <= sample.labels.items()]


def errors(site: Site) -> Counter[float]:
    """Returns upper bound -> number of predictions, of all endpoints, whose error is at most that."""
    counted: Counter[float] = Counter()
    for sample in learned(site, f"{LEARNED_ERRORS.name}_bucket"):
        counted[float(sample.labels["le"])] += int(sample.value)
    return counted


def median(counted: Counter[float]) -> float:
    """Returns the median of a histogram, as PromQL's `histogram_quantile` does."""
    half = max(counted.values()) / 2
    bounds = [0.0, *sorted(counted)]
    at = next(number for number, bound in enumerate(bounds) if counted[bound] >= half)
    below, bound = bounds[at - 1], bounds[at]
    return below + (bound - below) * (half - counted[below]) / (counted[bound] - counted[below])


def question(number: int, tokens: int = 8) -> bytes:
    """Returns the body of a request. Its prompt has up to 3,000 tokens and shares no block with another one's."""
    text = f"{number} " + "Tell me about endpoint pickers. " * (number % 40 * 12)
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": tokens, "stream": True}).encode()


def unsteadiness(engine: Engine) -> float:
    """Returns the median distance of an engine's times from their median, as a part of that: each for a prompt of the same length."""
    times = []
    for number in range(20):
        began = time.perf_counter()
        assert ask(engine.port, CHAT, question(1_000_030 + 40 * number, tokens=1)).status == 200
        times.append(time.perf_counter() - began)
    middle = statistics.median(times)
    return statistics.median(abs(each - middle) / middle for each in times)


def test_two_equal_servers_are_learned_alike_and_share_a_burst(cluster: Cluster, pair: Pool) -> None:
    site = Site(cluster, pair, "")
    for number in range(REQUESTS):
        assert ask(site.gateway, CHAT, question(number)).status == 200
    names = [f"engine-rank-{rank}" for rank in range(len(pair.engines))]
    costs = [learned(site, LEARNED_SECONDS.name, model_server_endpoint=name, term="per_uncached_token")[0].value for name in names]
    assert 0 < max(costs) <= 1.3 * min(costs), costs
    before = errors(site)
    for number in range(REQUESTS, REQUESTS + 100):
        assert ask(site.gateway, CHAT, question(number)).status == 200
    assert median(errors(site) - before) <= 0.2 + unsteadiness(pair.engines[0])
    by_model, by_mean = (learned(site, LEARNED_RECENT.name, predicted_by=by)[0].value for by in ("model", "mean"))
    assert by_model < by_mean
    assert site.becomes_quiet()
    with streams(site, 40):
        assert eventually(lambda: sum(each["in_flight"] for each in site.endpoints()) == 40)
        assert min(each["in_flight"] for each in site.endpoints()) >= 14, site.endpoints()
    assert site.becomes_quiet()
