"""Encode and prefill on other servers: the sidecar of a decode server, over real loopback sockets."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from loadtest.sim.engine import Engine, EngineSettings, Job
from loadtest.sim.fleet import Fleet
from loadtest.sim.request import ApiError
from loadtest.sim.server import ServerSettings, SimServer
from loadtest.sim.stages import Stages, address, media, one_token
from tests.loadtest.sim.wire import Answer, ask, connected, until, with_fleet

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ROLES = ("prefill", "decode", "encode", "encode")
PROMPT = {"prompt": "once upon a time " * 20, "max_tokens": 4}  # 340 bytes: 85 tokens, 5 blocks of 16
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def chat(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "look"}, *parts]}], "max_tokens": 2}


def disaggregated(prefill: SimServer | None, encode: Sequence[SimServer] = ()) -> list[str]:
    headers = [f"x-prefiller-host-port: 127.0.0.1:{prefill.port}"] if prefill else []
    named = ",".join(f"127.0.0.1:{server.port}" for server in encode)
    return headers + ([f"x-encoder-hosts-ports: {named}"] if named else [])


def test_a_decode_server_lets_a_prefill_server_compute_the_prompt_and_names_it() -> None:
    async def work(fleet: Fleet) -> None:
        prefill, decode, *_ = fleet.servers
        headers = disaggregated(prefill)
        answers = [await ask(decode.port, COMPLETIONS, PROMPT, headers=headers) for _ in range(2)]
        assert [answer.headers["x-sim-server"] for answer in answers] == ["sim-1", "sim-1"]
        assert [answer.headers["x-sim-prefiller"] for answer in answers] == ["sim-0", "sim-0"]
        cached = [answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
        assert cached == [0, 80]  # the count of the prefill server
        assert "kv_transfer_params" not in answers[0].json()
        assert (prefill.counts["requests"], prefill.counts["prefilled_for_others"]) == (2, 2)
        assert (decode.counts["requests"], decode.counts["prefilled_elsewhere"]) == (2, 2)
        assert decode.engine.seen.transferred == 85 + 5  # the second time the decode server holds 80 of 85 tokens already
        assert prefill.engine.seen.generation_tokens == 2
        page = (await ask(decode.port, "/metrics")).body.decode()
        assert 'vllm:external_prefix_cache_hits_total{engine="0",model_name="sim-model"} 90.0' in page

    with_fleet(work, servers=4, roles=ROLES)


def test_a_stream_is_decoded_after_prefill_and_has_all_its_tokens() -> None:
    async def work(fleet: Fleet) -> None:
        prefill, decode, *_ = fleet.servers
        body = PROMPT | {"stream": True, "stream_options": {"include_usage": True}}
        answer = await ask(decode.port, COMPLETIONS, body, headers=disaggregated(prefill))
        *tokens, usage, done = answer.events()
        assert (len(tokens), usage["usage"]["completion_tokens"], done) == (4, 4, "[DONE]")
        assert answer.headers["x-sim-prefiller"] == "sim-0"

    with_fleet(work, servers=4, roles=ROLES)


def test_every_image_goes_to_an_encoder_in_turn_before_prefill() -> None:
    async def work(fleet: Fleet) -> None:
        prefill, decode, *encode = fleet.servers
        answer = await ask(decode.port, CHAT, chat(IMAGE, IMAGE, IMAGE), headers=disaggregated(prefill, encode))
        assert answer.status == 200
        assert answer.headers["x-sim-encoders"] == "sim-2,sim-3,sim-2"
        assert answer.headers["x-sim-prefiller"] == "sim-0"
        assert [server.counts["requests"] for server in encode] == [2, 1]
        assert decode.counts["encoded_elsewhere"] == 3
        text_only = await ask(decode.port, CHAT, chat(), headers=disaggregated(None, encode))
        assert text_only.status == 200 and "x-sim-encoders" not in text_only.headers
        assert [server.counts["requests"] for server in encode] == [2, 1]

    with_fleet(work, servers=4, roles=ROLES)


@pytest.mark.parametrize("role", ["", "prefill", "encode"])
def test_a_server_that_does_not_decode_has_no_sidecar(role: str) -> None:
    async def work(fleet: Fleet) -> None:
        other, server = fleet.servers
        answer = await ask(server.port, COMPLETIONS, PROMPT, headers=disaggregated(other))
        assert answer.status == 200 and "x-sim-prefiller" not in answer.headers
        assert other.counts["requests"] == 0

    with_fleet(work, servers=2, roles=("prefill", role))


def test_the_error_of_a_stage_becomes_the_answer() -> None:
    async def work(fleet: Fleet) -> None:
        prefill, decode, *_ = fleet.servers
        body = PROMPT | {"model": "unknown"}
        assert (await ask(decode.port, COMPLETIONS, body, headers=disaggregated(prefill))).status == 404
        assert (await ask(decode.port, COMPLETIONS, PROMPT, headers=["x-prefiller-host-port: here"])).status == 400
        await ask(prefill.port, "/sim/fault", {"kind": "error"})
        refused = await ask(decode.port, COMPLETIONS, PROMPT, headers=disaggregated(prefill))
        assert refused.status == 500
        assert "a stage answered 500" in refused.json()["error"]["message"]
        unreachable = await ask(decode.port, COMPLETIONS, PROMPT, headers=["x-prefiller-host-port: 127.0.0.1:1"])
        assert unreachable.status == 502
        assert decode.counts["stage_errors"] == 2
        assert decode.engine.running == 0

    with_fleet(work, servers=4, roles=ROLES)


def test_prefill_is_cancelled_when_the_client_leaves() -> None:
    async def work(fleet: Fleet) -> None:
        prefill, decode, *_ = fleet.servers
        await ask(prefill.port, "/sim/fault", {"kind": "hang"})
        async with connected(decode.port) as client:
            client.send(COMPLETIONS, PROMPT, headers=disaggregated(prefill))
            await until(lambda: any(connection.busy for connection in prefill.connections))
        await until(lambda: not prefill.connections)
        assert decode.engine.running == decode.engine.waiting == 0

    with_fleet(work, servers=4, roles=ROLES)


def test_requests_on_one_connection_are_answered_in_order() -> None:
    async def work(fleet: Fleet) -> None:
        prefill, decode, *_ = fleet.servers
        async with connected(decode.port) as client:
            client.send(COMPLETIONS, PROMPT, headers=disaggregated(prefill))
            client.send(COMPLETIONS, PROMPT | {"max_tokens": 1})
            answers: list[Answer] = [await client.receive(), await client.receive()]
        assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [4, 1]
        assert ["x-sim-prefiller" in answer.headers for answer in answers] == [True, False]

    with_fleet(work, servers=4, roles=ROLES)


def test_blocks_from_another_server_cost_transfer_time_instead_of_compute_time() -> None:
    # 1,000 tokens: 1000 * 50 us to compute or 1000 * 1 us to move, and 20 ms for the step of the first token in both cases.
    took = []
    for transferred in (False, True):
        engine = Engine(EngineSettings())
        job = Job(list(range(62)), 1000, 1)
        job.transferred = transferred
        engine.submit(job, 0.0)
        due = engine.next_due()
        assert due is not None
        engine.advance(due)
        took.append(due)
    assert took == pytest.approx([0.070, 0.021])


def test_the_prefill_request_is_the_clients_request_for_one_unstreamed_token() -> None:
    body = {"model": "m", "max_tokens": 9, "max_completion_tokens": 9, "stream": True, "stream_options": {}, "seed": 1}
    expected = {"model": "m", "max_tokens": 1, "max_completion_tokens": 1, "stream": False, "seed": 1}
    assert one_token(body) == expected
    assert one_token({"messages": [1]}, [2]) == {"messages": [2], "stream": False, "max_tokens": 1}


@pytest.mark.parametrize(("text", "expected"), [(b"h:1", ("h", 1)), (b"[::1]:80", ("::1", 80)), (b" h:1 ", ("h", 1))])
def test_addresses_have_the_format_of_the_picker(text: bytes, expected: tuple[str, int]) -> None:
    assert address(text) == expected


def test_headers_with_an_invalid_address_or_too_many_are_refused() -> None:
    assert Stages.named({}) is None
    for wrong in (b"h", b"h:x", b":1", b"h:65536"):
        with pytest.raises(ApiError):
            address(wrong)
    with pytest.raises(ApiError, match="the limit is 64"):
        Stages.named({b"x-encoder-hosts-ports": b",".join([b"h:1"] * 65)})
    with pytest.raises(ApiError, match="the limit is 256"):
        media(json.loads(json.dumps(chat(*[IMAGE] * 257))))


def test_roles_are_one_for_all_servers_or_one_per_server() -> None:
    async def fleets() -> None:
        where = [("127.0.0.1", 0)] * 2
        assert [server.role for server in Fleet(where, ServerSettings(), ("decode",)).servers] == ["decode"] * 2
        assert [server.role for server in Fleet(where, ServerSettings(), ("a", "b")).servers] == ["a", "b"]

    asyncio.run(fleets())
