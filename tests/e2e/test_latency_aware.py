"""The latency-aware configuration with a predictor: decisions follow it while it answers, and no request fails while it does not."""

import asyncio
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from loadtest.load.proto import ext_proc_pb2 as pb
from tests.e2e.cluster import Cluster, Fleet, Picker, eventually
from tests.e2e.conftest import FAST
from tests.e2e.predictor import Behavior, Predictor
from tests.e2e.raw_streams import DESTINATION
from tests.faults.client import Gateway, framed

CONFIG = Path(__file__).resolve().parents[2] / "deploy" / "config" / "latency-aware.yaml"
SHIPPED_PATH = "/etc/epp/endpoints.yaml"
TIER = "- type: slo-headroom-tier-filter"
SERVERS = 3
OBJECTIVES = {"x-llm-d-slo-ttft-ms": "200", "x-llm-d-slo-tpot-ms": "100"}
EVENT = b'data: {"choices":[{"text":"hi"}]}\n\n'
LAST = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":5}}\n\ndata: [DONE]\n\n'
NUMBERS = itertools.count()  # makes every prompt unique, so that no server has it cached
WITHIN_S = 1.5  # time for an answer without the predictor: its timeout of 0.4 s, and slack for a busy machine


class Site(NamedTuple):
    """A picker with simulated servers and a predictor."""

    picker: Picker
    fleet: Fleet
    predictor: Predictor

    @property
    def addresses(self) -> list[str]:
        return [f"{host}:{port}" for host, port in self.fleet.addresses]


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with Predictor(SERVERS) as predictor, pytest.MonkeyPatch.context() as patch, Cluster() as cluster:
        patch.setenv("PREDICTION_SERVER_URL", predictor.url)
        patch.setenv("TRAINING_SERVER_URL", predictor.url)
        fleet = cluster.fleet(SERVERS, *FAST)
        text = CONFIG.read_text().replace(SHIPPED_PATH, str(fleet.file))
        assert TIER in text
        text = text.replace(TIER, f"{TIER}\n  parameters: {{epsilonExploreNeg: 0}}")  # without exploration the chosen server is certain
        picker = cluster.picker(fleet.file, workers=1, config_text=text)
        yield Site(picker, fleet, predictor)


@pytest.fixture(autouse=True)
def friendly(site: Site) -> Iterator[None]:
    """Waits before each test until the picker uses the predictor again."""
    site.predictor.behavior = Behavior.GOOD
    assert eventually(lambda: asyncio.run(predicted(site))), "the picker does not call the predictor"
    yield
    site.predictor.behavior = Behavior.GOOD


async def predicted(site: Site) -> bool:
    before = len(site.predictor.rows)
    await ask(site, 1)
    return len(site.predictor.rows) > before


def messages(number: int) -> bytes:
    """Encodes request headers with latency objectives, and a body."""
    head, body = pb.ProcessingRequest(), pb.ProcessingRequest()
    fields = {":method": "POST", ":path": "/v1/completions", "x-request-id": f"slo-{number}", **OBJECTIVES}
    for name, value in fields.items():
        head.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    body.request_body.body = json.dumps({"model": "sim-model", "prompt": f"{number} slo " * 20, "stream": True}).encode()
    body.request_body.end_of_stream = True
    return framed(head) + framed(body)


def streamed(*chunks: bytes) -> list[bytes]:
    """Encodes the messages of the model server's answer."""
    head = pb.ProcessingRequest()
    for name, value in ((":status", "200"), ("content-type", "text/event-stream")):
        head.response_headers.headers.headers.add(key=name, raw_value=value.encode())
    bodies = [
        pb.ProcessingRequest(response_body=pb.HttpBody(body=chunk, end_of_stream=at == len(chunks) - 1)) for at, chunk in enumerate(chunks)
    ]
    return [framed(message) for message in (head, *bodies)]


def destination(message: bytes) -> str:
    options = pb.ProcessingResponse.FromString(message).request_headers.response.header_mutation.set_headers
    return next((o.header.raw_value.decode() for o in options if o.header.key == DESTINATION), "")


async def exchange(gateway: Gateway, number: int) -> str:
    """Runs one request to the end of its streamed answer. Returns its endpoint."""
    stream = await gateway.stream()
    stream.send(messages(number))
    answers = await stream.take(2)
    assert len(answers) == 2, "refused"
    for message in streamed(EVENT, EVENT, LAST):
        stream.send(message)
        assert len(await stream.take(1)) == 1
    stream.send(b"", last=True)
    assert await stream.end() == "0"
    return destination(answers[0])


async def ask(site: Site, count: int) -> list[str]:
    """Runs `count` requests at once. Returns their endpoints."""
    gateway = Gateway(site.picker.grpc)
    try:
        return await asyncio.gather(*(exchange(gateway, next(NUMBERS)) for _ in range(count)))
    finally:
        await gateway.close()


def test_requests_go_to_the_endpoint_that_is_predicted_to_meet_their_objectives(site: Site) -> None:
    del site.predictor.rows[:]
    chosen = asyncio.run(ask(site, 20))
    assert set(chosen) == {site.addresses[0]}
    assert sum(map(len, site.predictor.rows)) == 20 * SERVERS
    assert len(site.predictor.rows) < 20, "requests share calls"


def test_measured_latencies_are_sent_to_the_training_server(site: Site) -> None:
    del site.predictor.entries[:]
    asyncio.run(ask(site, 5))

    def entries_with(column: str) -> list[dict[str, Any]]:
        return [entry for entry in site.predictor.entries if entry[column] > 0]

    assert eventually(lambda: len(entries_with("actual_ttft_ms")) >= 5 and len(entries_with("actual_tpot_ms")) >= 5)
    assert all(entry["actual_tpot_ms"] == 0 for entry in entries_with("actual_ttft_ms"))
    assert site.picker.page().count("llm_d_epp_request_predicted_ttft_seconds_bucket") > 0


@pytest.mark.parametrize("behavior", [Behavior.HANGING, Behavior.BROKEN, Behavior.CLOSING])
def test_a_predictor_that_does_not_answer_delays_requests_by_its_timeout_at_most(site: Site, behavior: Behavior) -> None:
    failures = site.picker.counter("producer_failures_total")
    site.predictor.behavior = behavior
    for _ in range(5):

        async def in_time() -> list[str]:
            async with asyncio.timeout(WITHIN_S):
                return await ask(site, 8)

        assert set(asyncio.run(in_time())) <= set(site.addresses)
    assert site.picker.counter("producer_failures_total") - failures == 40
    assert site.picker.counter("faults_total") == 0


def test_clients_that_leave_while_the_predictor_hangs_leave_nothing_in_flight(site: Site) -> None:
    site.predictor.behavior = Behavior.HANGING
    before = len(site.predictor.rows)

    async def leave() -> None:
        gateway = Gateway(site.picker.grpc)
        streams = [await gateway.stream() for _ in range(8)]
        for stream in streams:
            stream.send(messages(next(NUMBERS)))
        await asyncio.sleep(0.1)
        for stream in streams:
            stream.cancel()
        await gateway.close()

    asyncio.run(leave())
    assert len(site.predictor.rows) > before
    assert eventually(lambda: site.picker.gauge("streams_open") == [0.0])
    assert site.picker.in_flight() == []
    assert site.picker.counter("faults_total") == 0
