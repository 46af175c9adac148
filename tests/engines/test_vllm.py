"""Two real vLLM servers behind a picker and an Envoy: what the picker reads of them, predicts of them and says of them."""

import json
import socket
from typing import Any

import pytest

from loadtest.demo.stack import LOOPBACK
from tests.e2e.cluster import CHAT, COMPLETIONS, ask, eventually
from tests.engines.conftest import Site
from tests.engines.conversations import converse, exact, mean_error, within
from tests.engines.servers import MODEL, Engine

BLOCK = 128  # vLLM's default on a CPU
HELLO = [{"role": "user", "content": "Tell me about endpoint pickers. " * 20}]
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": HELLO}),
    "streamed chat": (CHAT, {"messages": HELLO, "stream": True}),
    "streamed chat with usage": (
        CHAT,
        {"messages": HELLO, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "chat with two answers": (CHAT, {"messages": HELLO, "n": 2}),
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
}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "unknown model": (CHAT, {"messages": HELLO, "model": "nobody"}),
    "too long": (COMPLETIONS, {"prompt": "hello world " * 5000}),
    "negative max_tokens": (CHAT, {"messages": HELLO, "max_tokens": -3}),
    "messages of a wrong type": (CHAT, {"messages": "hello"}),
    "embeddings of a model that has none": ("/v1/embeddings", {"input": "hello"}),
}


def test_each_column_is_read_as_the_page_has_it(approximate: Site) -> None:
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
        return scraped.items() <= page.items()

    def all_read() -> bool:
        known = [each["scraped"] for each in approximate.endpoints()]
        return all(map(is_read, approximate.pool.engines, known))

    assert eventually(lambda: [each["state"] for each in approximate.endpoints()] == ["fresh", "fresh"])
    assert eventually(all_read), [each["scraped"] for each in approximate.endpoints()]


def test_answers_and_refusals_are_the_same_as_without_a_picker(precise: Site) -> None:
    def seen(port: int, path: str, fields: dict[str, Any]) -> tuple[int, str]:
        answer = ask(port, path, json.dumps({"model": MODEL, "max_tokens": 4, **fields}).encode())
        return answer.status, answer.headers["content-type"]

    direct = precise.pool.engines[0].port
    for name, (path, fields) in {**CALLS, **REFUSED}.items():
        assert seen(precise.gateway, path, fields) == (expected := seen(direct, path, fields)), name
        assert (expected[0] == 200) == (name in CALLS), (name, expected)
    assert precise.becomes_quiet(), precise.endpoints()


def test_no_load_is_left_by_clients_that_go_away(precise: Site) -> None:
    body = json.dumps(
        {"model": MODEL, "messages": HELLO, "max_tokens": 3000, "ignore_eos": True, "stream": True}
    ).encode()

    def running() -> float:
        return sum(engine.total("vllm:num_requests_running") for engine in precise.pool.engines)

    clients = [socket.create_connection((LOOPBACK, precise.gateway), timeout=60) for _ in range(6)]
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    for client in clients:
        client.sendall(head.encode() + body)
    for client in clients[:3]:
        assert client.recv(100).startswith(b"HTTP/1.1 200")
    assert eventually(lambda: running() >= len(clients) / 2)
    for client in clients:
        client.close()
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
    turns = converse(precise.gateway, precise.picker, chats=4, turns=2)
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
