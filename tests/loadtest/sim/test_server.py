"""Simulated servers over real loopback sockets."""

import asyncio
import hashlib
import json
from dataclasses import replace
from math import isnan

import pytest
from prometheus_client.parser import text_string_to_metric_families

from loadtest.sim.connection import UNREAD_MAX
from loadtest.sim.engine import EngineSettings
from loadtest.sim.fleet import Fleet
from tests.loadtest.sim.wire import QUICK, Answer, ask, connected, until, with_fleet

PROMPT = {"prompt": "once upon a time " * 20, "max_tokens": 4}
ENDLESS = {"prompt": "once upon a time", "max_tokens": 100_000}
COMPLETIONS = "/v1/completions"


def metrics(answer: Answer) -> dict[str, float]:
    """Sample values by sample name. Of the samples with one name the last one counts."""
    return {sample.name: sample.value for family in text_string_to_metric_families(answer.body.decode()) for sample in family.samples}


def test_an_answer_names_its_server_and_the_received_bytes() -> None:
    async def work(fleet: Fleet) -> None:
        for index, server in enumerate(fleet.servers):
            answer = await ask(server.port, COMPLETIONS, PROMPT)
            raw = json.dumps(PROMPT).encode()
            assert answer.status == 200
            assert answer.headers["x-sim-server"] == f"sim-{index}"
            assert answer.headers["x-sim-body-sha256"] == hashlib.sha256(raw).hexdigest()
            assert answer.headers["x-sim-body-bytes"] == str(len(raw))

    with_fleet(work, servers=3)


def test_a_chunked_body_arrives_unchanged() -> None:
    async def work(fleet: Fleet) -> None:
        raw = json.dumps(PROMPT).encode()
        async with connected(fleet.servers[0].port) as client:
            client.writer.write(b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
            for byte in raw:
                client.writer.write(b"1\r\n%c\r\n" % byte)
            client.writer.write(b"0\r\n\r\n")
            answer = await client.receive()
        assert answer.headers["x-sim-body-sha256"] == hashlib.sha256(raw).hexdigest()

    with_fleet(work)


def test_a_prompt_gets_the_same_text_from_every_server_and_is_cached_the_second_time() -> None:
    async def work(fleet: Fleet) -> None:
        one, two = fleet.servers
        answers = [await ask(port, COMPLETIONS, PROMPT) for port in (one.port, one.port, two.port)]
        texts = {answer.json()["choices"][0]["text"] for answer in answers}
        cached = [answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
        assert len(texts) == 1
        assert cached == [0, 80, 0]

    with_fleet(work, servers=2)


def test_a_stream_sends_the_tokens_one_by_one_and_ends_with_done() -> None:
    async def work(fleet: Fleet) -> None:
        port = fleet.servers[0].port
        whole = (await ask(port, COMPLETIONS, PROMPT)).json()
        streamed = await ask(port, COMPLETIONS, PROMPT | {"stream": True})
        *events, done = streamed.events()
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert done == "[DONE]"
        assert len(events) == 4
        texts = [event["choices"][0]["text"] for event in events]
        assert "".join(texts) == whole["choices"][0]["text"]
        assert [event["choices"][0]["finish_reason"] for event in events] == [None] * 3 + ["length"]
        assert all(event["usage"] is None for event in events)

    with_fleet(work)


def test_servers_with_slots_stream_the_same_answers_and_have_the_same_pages() -> None:
    async def work(fleet: Fleet) -> None:
        port = fleet.servers[0].port
        whole, streamed = (await ask(port, COMPLETIONS, PROMPT)).json(), await ask(port, COMPLETIONS, PROMPT | {"stream": True})
        *events, done = streamed.events()
        assert (len(events), done) == (4, "[DONE]")
        assert "".join(event["choices"][0]["text"] for event in events) == whole["choices"][0]["text"]
        assert metrics(await ask(port, "/metrics"))["vllm:generation_tokens_total"] == 8

    with_fleet(work, slots=True)


def test_a_stream_ends_with_usage_on_request() -> None:
    async def work(fleet: Fleet) -> None:
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        body |= {"stream_options": {"include_usage": True}}
        answer = await ask(fleet.servers[0].port, "/v1/chat/completions", body)
        *_, usage, done = answer.events()
        assert usage["usage"]["completion_tokens"] == 16
        assert done == "[DONE]"

    with_fleet(work)


def test_embeddings_and_responses_are_answered() -> None:
    async def work(fleet: Fleet) -> None:
        async with connected(fleet.servers[0].port) as client:
            vectors = await client.ask("/v1/embeddings", {"input": "x"})
            whole = await client.ask("/v1/responses", {"input": "x"})
            stream = await client.ask("/v1/responses", {"input": "x", "stream": True})
        assert vectors.json()["data"][0]["embedding"]
        text = whole.json()["output"][0]["content"][0]["text"]
        deltas = [event["delta"] for event in stream.events() if "delta" in event]
        assert "".join(deltas) == text
        assert stream.events()[-1]["type"] == "response.completed"

    with_fleet(work)


def test_an_invalid_request_gets_its_status_and_the_connection_stays_open() -> None:
    async def work(fleet: Fleet) -> None:
        async with connected(fleet.servers[0].port) as client:
            for path, body, status in (
                (COMPLETIONS, b"{nope", 400),
                (COMPLETIONS, {"model": "unknown", "prompt": "x"}, 404),
                (COMPLETIONS, {"prompt": "x", "max_tokens": 10**9}, 400),
                (COMPLETIONS, None, 405),
                ("/metrics", b"", 405),
                ("/elsewhere", None, 404),
                ("/sim/elsewhere", None, 404),
                ("/health", None, 200),
            ):
                assert (await client.ask(path, body)).status == status, path
            models = (await client.ask("/v1/models")).json()["data"]
        assert [model["id"] for model in models] == ["base", "lora"]

    with_fleet(work, models=("base",), loras=("lora",))


def test_bytes_that_are_not_http_get_an_error_and_the_connection_ends() -> None:
    async def work(fleet: Fleet) -> None:
        async with connected(fleet.servers[0].port) as client:
            client.writer.write(b"nonsense\r\n\r\n")
            answer = await client.receive()
            assert answer.status == 400
            assert answer.headers["connection"] == "close"
            assert await client.reader.read() == b""

    with_fleet(work)


def test_a_client_can_ask_to_close_and_http_1_0_gets_a_stream_without_chunks() -> None:
    async def work(fleet: Fleet) -> None:
        port = fleet.servers[0].port
        closing = ["Connection: close"]
        answer = await ask(port, COMPLETIONS, PROMPT | {"stream": True}, headers=closing)
        assert answer.headers["connection"] == "close"
        old = await ask(port, COMPLETIONS, PROMPT | {"stream": True}, version="1.0")
        assert "transfer-encoding" not in old.headers
        assert [event["choices"] for event in old.events()[:-1]] == [event["choices"] for event in answer.events()[:-1]]
        async with connected(port) as client:
            await client.ask("/health", headers=closing)
            assert await client.reader.read() == b""

    with_fleet(work)


def test_pipelined_requests_are_answered_in_order() -> None:
    async def work(fleet: Fleet) -> None:
        async with connected(fleet.servers[0].port) as client:
            for n in range(5):
                client.send(COMPLETIONS, {"prompt": "x", "max_tokens": n + 1})
                client.send("/health")
            for n in range(5):
                answer = await client.receive()
                assert answer.json()["usage"]["completion_tokens"] == n + 1
                assert (await client.receive()).body == b""

    with_fleet(work)


def test_the_server_stops_reading_from_a_client_that_pipelines_too_much_and_loses_nothing() -> None:
    async def work(fleet: Fleet) -> None:
        (server,) = fleet.servers
        async with connected(server.port) as client:
            client.send(COMPLETIONS, {"prompt": "x", "max_tokens": 400})
            client.send(COMPLETIONS, {"prompt": "y" * (2 * UNREAD_MAX), "max_tokens": 1})
            await until(lambda: any(one.stalled for one in server.connections))
            assert (await client.receive()).status == 200
            assert (await client.receive()).json()["usage"]["prompt_tokens"] == UNREAD_MAX // 2

    with_fleet(work, engine=replace(QUICK, kv_blocks=100_000, prefill_s_per_token=0.0))


def test_a_client_with_expect_gets_100_continue() -> None:
    async def work(fleet: Fleet) -> None:
        async with connected(fleet.servers[0].port) as client:
            client.writer.write(b"POST /v1/completions HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 14\r\n\r\n")
            assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            client.writer.write(b'{"prompt":"x"}')
            assert (await client.receive()).status == 200

    with_fleet(work)


def test_a_client_that_leaves_frees_its_blocks_at_once() -> None:
    async def work(fleet: Fleet) -> None:
        (server,) = fleet.servers
        for body in (ENDLESS, ENDLESS | {"stream": True}):
            async with connected(server.port) as client:
                client.send(COMPLETIONS, body)
                await until(lambda: server.engine.running == 1)
                assert server.engine.pool.in_use > 6_000
            await until(lambda: server.engine.running == 0)
            assert server.engine.pool.in_use == 0
        assert server.stats()["aborted"] == 2

    with_fleet(work)


def test_load_shows_on_the_metrics_page_and_in_the_stats() -> None:
    async def work(fleet: Fleet) -> None:
        (server,) = fleet.servers
        async with connected(server.port) as one, connected(server.port) as two:
            one.send(COMPLETIONS, ENDLESS | {"model": "a"})
            two.send(COMPLETIONS, ENDLESS | {"model": "b"})
            await until(lambda: server.engine.waiting == 1)
            page = await ask(server.port, "/metrics")
            stats = (await ask(server.port, "/sim/stats")).json()
        values = metrics(page)
        assert page.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert values["vllm:num_requests_running"] == 1
        assert values["vllm:num_requests_waiting"] == 1
        assert 0.1 < values["vllm:kv_cache_usage_perc"] <= 1
        assert b'running_lora_adapters="a,b",waiting_lora_adapters="a,b"' in page.body
        assert (stats["running"], stats["waiting"], stats["loras"]) == (1, 1, ["a"])

    engine = replace(QUICK, max_loras=1)
    with_fleet(work, engine=engine, loras=("a", "b"))


def test_stats_of_all_servers_come_at_once() -> None:
    async def work(fleet: Fleet) -> None:
        await ask(fleet.servers[1].port, COMPLETIONS, PROMPT)
        answers = (await ask(fleet.servers[0].port, "/sim/stats?all")).json()
        assert [stats["server"] for stats in answers] == ["sim-0", "sim-1", "sim-2"]
        assert [stats["served"] for stats in answers] == [0, 1, 0]

    with_fleet(work, servers=3)


def test_time_can_run_faster() -> None:
    async def work(fleet: Fleet) -> None:
        answer = await ask(fleet.servers[0].port, COMPLETIONS, PROMPT | {"max_tokens": 3000})
        assert answer.json()["usage"]["completion_tokens"] == 3000
        seen = fleet.servers[0].engine.seen
        assert seen.end_to_end.sum >= 60.0  # engine seconds, more than the test may take

    with_fleet(work, engine=EngineSettings(), time_scale=1000.0)


def test_a_full_queue_answers_unavailable() -> None:
    async def work(fleet: Fleet) -> None:
        (server,) = fleet.servers
        async with connected(server.port) as one, connected(server.port) as two:
            for client in (one, two):
                client.send(COMPLETIONS, ENDLESS)
            await until(lambda: server.engine.waiting == 1)
            answer = await ask(server.port, COMPLETIONS, PROMPT)
        assert answer.status == 503
        assert server.stats()["refused"] == 1

    with_fleet(work, engine=replace(QUICK, max_running=1, waiting_max=1))


async def order(fleet: Fleet, kind: str, server: int = 0, **fields: object) -> None:
    answer = await ask(fleet.servers[server].port, "/sim/fault", {"kind": kind} | fields)
    assert answer.status == 200, answer.body


def test_a_hanging_server_answers_only_orders() -> None:
    async def work(fleet: Fleet) -> None:
        (server,) = fleet.servers
        await order(fleet, "hang")
        for path, body in ((COMPLETIONS, PROMPT), ("/metrics", None), ("/health", None)):
            async with connected(server.port) as client:
                client.send(path, body)
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(client.receive(), 0.05)
        await order(fleet, "none")
        assert (await ask(server.port, "/health")).status == 200

    with_fleet(work)


def test_a_failing_server_answers_500_and_keeps_its_metrics() -> None:
    async def work(fleet: Fleet) -> None:
        port = fleet.servers[0].port
        await order(fleet, "error")
        answer = await ask(port, COMPLETIONS, PROMPT)
        assert answer.status == 500
        assert answer.json()["error"]["type"] == "InternalServerError"
        assert (await ask(port, "/metrics")).status == 200

    with_fleet(work)


def test_a_fault_ends_after_its_seconds() -> None:
    async def work(fleet: Fleet) -> None:
        (server,) = fleet.servers
        await order(fleet, "error", seconds=0.4)
        assert (await ask(server.port, COMPLETIONS, PROMPT)).status == 500
        await until(lambda: server.active_fault().value == "none")
        assert (await ask(server.port, COMPLETIONS, PROMPT)).status == 200

    with_fleet(work)


def test_a_slow_server_submits_requests_late() -> None:
    async def work(fleet: Fleet) -> None:
        (server,) = fleet.servers
        await order(fleet, "slow", delay=0.2)
        async with connected(server.port) as client:
            client.send(COMPLETIONS, PROMPT)
            await until(lambda: server.counts["requests"] == 1)
            assert server.engine.running == 0
            assert (await client.receive()).status == 200
            client.send(COMPLETIONS, {"prompt": "x", "max_tokens": 10**9})
            assert (await client.receive()).status == 400  # also refused late
            client.send(COMPLETIONS, PROMPT)
            await until(lambda: server.counts["requests"] == 3)
        await until(lambda: not server.connections)
        await asyncio.sleep(0.25)
        assert server.engine.seen.served == 1  # a client that left during the delay is never submitted

    with_fleet(work)


def test_garbage_metrics_are_not_text_and_depend_on_the_seed() -> None:
    pages = []

    async def work(fleet: Fleet) -> None:
        await order(fleet, "garbage-metrics")
        answer = await ask(fleet.servers[0].port, "/metrics")
        assert answer.status == 200
        pages.append(answer.body)

    for seed in (1, 1, 2):
        with_fleet(work, seed=seed)
    assert pages[0] == pages[1] != pages[2]
    with pytest.raises(UnicodeDecodeError):
        pages[0].decode()


def test_an_endless_page_continues_until_the_fault_ends() -> None:
    async def work(fleet: Fleet) -> None:
        await order(fleet, "endless-metrics")
        async with connected(fleet.servers[0].port) as client:
            client.send("/metrics")
            data = await client.reader.readexactly(100_000)
            assert b"vllm:endless_bucket" in data
            await order(fleet, "none")
            with pytest.raises(asyncio.IncompleteReadError):
                await client.reader.readexactly(100_000_000)

    with_fleet(work)


def test_an_endless_page_stops_for_a_client_that_does_not_read() -> None:
    async def work(fleet: Fleet) -> None:
        (server,) = fleet.servers
        await order(fleet, "endless-metrics")
        async with connected(server.port) as client:
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            client.send("/metrics")
            await until(lambda: any(one.stuffed for one in server.connections))
            client.writer.transport.abort()

    with_fleet(work)


def test_a_slow_page_is_sent_in_pieces_and_is_whole_at_the_end() -> None:
    async def work(fleet: Fleet) -> None:
        (server,) = fleet.servers
        await order(fleet, "slow-metrics", delay=0.05)
        async with connected(server.port) as client:
            client.send("/metrics")
            client.send("/health")
            began = asyncio.get_running_loop().time()
            assert "vllm:num_requests_running" in metrics(await client.receive())
            assert asyncio.get_running_loop().time() - began >= 0.04
            assert (await client.receive()).status == 200

    with_fleet(work)


def test_nan_metrics_are_a_page_with_nan_gauges() -> None:
    async def work(fleet: Fleet) -> None:
        await order(fleet, "nan-metrics")
        values = metrics(await ask(fleet.servers[0].port, "/metrics"))
        assert isnan(values["vllm:num_requests_waiting"])
        assert values["vllm:prompt_tokens_total"] == 0

    with_fleet(work)


def test_half_a_page_ends_in_the_middle() -> None:
    async def work(fleet: Fleet) -> None:
        await order(fleet, "half-page")
        async with connected(fleet.servers[0].port) as client:
            client.send("/metrics")
            with pytest.raises(asyncio.IncompleteReadError) as short:
                await client.receive()
            assert len(short.value.partial) == (short.value.expected or 0) // 2 > 5_000

    with_fleet(work)


def test_a_vanished_server_drops_all_requests_and_returns_with_a_cold_cache() -> None:
    async def work(fleet: Fleet) -> None:
        (server,) = fleet.servers
        await ask(server.port, COMPLETIONS, PROMPT)
        assert server.engine.pool.idle == 5
        async with connected(server.port) as client:
            client.send(COMPLETIONS, ENDLESS | {"stream": True})
            await client.reader.readuntil(b"data: ")
            await order(fleet, "vanish", seconds=0.6)
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await client.receive()
        with pytest.raises(ConnectionError):
            await ask(server.port, "/health")
        assert (server.engine.running, server.engine.pool.in_use) == (0, 0)
        await until(lambda: server._listener is not None)
        answer = await ask(server.port, COMPLETIONS, PROMPT)
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0

    with_fleet(work)


def test_a_server_that_vanished_without_end_returns_by_an_order_to_another_server() -> None:
    async def work(fleet: Fleet) -> None:
        gone = fleet.servers[1]
        await order(fleet, "vanish", server=1)
        await until(lambda: gone._listener is None)
        answer = await ask(fleet.servers[0].port, "/sim/fault", {"kind": "none", "server": "sim-1"})
        assert answer.json()["server"] == "sim-1"
        await until(lambda: gone._listener is not None)
        assert (await ask(gone.port, "/health")).status == 200

    with_fleet(work, servers=2)


def test_an_invalid_order_is_refused() -> None:
    async def work(fleet: Fleet) -> None:
        port = fleet.servers[0].port
        for body, word in (({"kind": "explode"}, b"vanish"), ({"kind": "hang", "server": 9}, b"no server 9")):
            answer = await ask(port, "/sim/fault", body)
            assert answer.status == 400
            assert word in answer.body

    with_fleet(work)


def test_a_request_can_ask_for_a_fault_of_its_answer() -> None:
    async def work(fleet: Fleet) -> None:
        port = fleet.servers[0].port

        async def faulty(fault: str, **body: object) -> Answer:
            return await ask(port, COMPLETIONS, PROMPT | body, headers=[f"x-sim-fault: {fault}"])

        assert (await faulty("error")).status == 500
        assert (await faulty("explode")).status == 400
        assert (await faulty("none")).status == 200
        assert (await faulty("slow;delay=0.01")).status == 200
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(faulty("hang"), 0.05)
        for stream in (False, True):
            with pytest.raises(asyncio.IncompleteReadError):
                await faulty("cut", stream=stream)
        assert (await ask(port, COMPLETIONS, PROMPT)).status == 200

    with_fleet(work)


def test_a_cut_stream_ends_after_half_of_its_tokens() -> None:
    async def work(fleet: Fleet) -> None:
        async with connected(fleet.servers[0].port) as client:
            client.send(COMPLETIONS, PROMPT | {"stream": True}, headers=["x-sim-fault: cut"])
            data = await client.reader.read(-1)
        assert data.count(b"data: ") == 2
        assert not data.endswith(b"0\r\n\r\n")

    with_fleet(work)
