"""Requests that wait for a producer, and plugins that see only the first chunk of an answer."""

from typing import Any

import pytest

from epp.candidates import Candidates
from epp.data import Datum
from epp.decision.decision import Decision, Response
from epp.decision.pipeline import WiredProfile, Wiring, compile_pipeline
from epp.plugin import DataProducer, NoParams, Plugin, ResponseComplete, ResponseStreaming, Services, Waiting
from epp.plugins.parsers.openai import OpenAI
from epp.plugins.pickers.max_score import MaxScore
from epp.plugins.profiles import SingleProfile
from epp.request import Request
from tests.fakes import FakePool, FakeServices, candidates
from tests.pair import Pair
from tests.workers.worker.extproc.streams import BODY, USAGE

FACT = Datum("fact", str)


class Asks(DataProducer):
    """A producer that waits for a server."""

    produces = (FACT,)

    def start(self, services: Services) -> None:
        self.services = services
        self.requests: list[Request] = []

    def produce(self, request: Request, candidates: Candidates) -> Waiting:
        self.requests.append(request)
        return self.services.spawn(self.ask(request), 0.4)

    async def ask(self, request: Request) -> None:
        answer = await self.services.http("GET", "http://facts/", timeout_s=0.3)
        request[FACT] = answer.body.decode()


class First(ResponseStreaming, ResponseComplete):
    """A plugin that sees the first chunk and the end."""

    first_chunk_only = True

    def __init__(self) -> None:
        super().__init__("first", NoParams())
        self.at: list[float] = []
        self.ended: list[tuple[float, float, bool]] = []

    def response_streaming(self, request: Request, decision: Decision) -> None:
        self.at.append(request.now)

    def response_complete(self, request: Request, decision: Decision, response: Response) -> None:
        self.ended.append((request.sent_at, request.now, response.whole))


class Every(ResponseStreaming):
    """A plugin that sees every chunk."""

    def __init__(self) -> None:
        super().__init__("every", NoParams())
        self.count = 0

    def response_streaming(self, request: Request, decision: Decision) -> None:
        self.count += 1


class Site:
    def __init__(self, *plugins: Plugin) -> None:
        self.services = FakeServices()
        self.pool = FakePool(candidates({"waiting_requests": [0, 0]}))
        picker = MaxScore("m", MaxScore.Params())
        pipeline = compile_pipeline(
            Wiring(
                plugins=(*plugins, picker),
                parsers=(OpenAI("o", NoParams()),),
                handler=SingleProfile("h", NoParams()),
                profiles=(WiredProfile("default", ((picker, 1.0),)),),
                producers=tuple(p for p in plugins if isinstance(p, DataProducer)),
            )
        )
        pipeline.start(self.services)
        self.pair = Pair(pipeline, self.pool)

    def asked(self) -> tuple[Any, Any]:
        """A stream that has sent its request, and the answers so far."""
        envoy = self.pair.open()
        envoy.headers()
        return envoy, envoy.body(BODY)


def test_a_request_waits_until_its_producer_has_its_result() -> None:
    asks = Asks("asks", NoParams())
    site = Site(asks)
    envoy, answers = site.asked()
    assert answers == []
    (call,) = site.services.asked
    call.answer(b"water is wet")
    assert [a.WhichOneof("response") for a in envoy.answers()] == ["request_headers", "request_body"]
    assert asks.requests[0][FACT] == "water is wet"
    assert site.pool.failures == []


@pytest.mark.parametrize("ending", ["lost", "lost after the half-close", "local reply"])
def test_when_the_client_leaves_the_producers_work_is_cancelled_and_nothing_is_left(ending: str) -> None:
    site = Site(Asks("asks", NoParams()))
    envoy, _ = site.asked()
    (call,), (work,) = site.services.asked, site.services.works
    if ending == "local reply":
        envoy.response_headers("504")
    else:
        if ending == "lost after the half-close":
            envoy.handler.half_closed()
            assert not work.left and envoy.stream.ended is None
        envoy.handler.closed()
    assert work.left and call.left
    assert sum(site.pair.inflight) == 0 and site.pair.faults == []


def test_a_request_that_waits_is_answered_after_the_half_close_and_then_its_stream_ends() -> None:
    site = Site(Asks("asks", NoParams()))
    envoy, _ = site.asked()
    envoy.handler.half_closed()
    assert envoy.stream.ended is None
    (call,) = site.services.asked
    call.answer(b"water is wet")
    assert [a.WhichOneof("response") for a in envoy.answers()] == ["request_headers", "request_body"]
    assert envoy.stream.ended == (0, "")
    assert sum(site.pair.inflight) == 0 and site.pair.faults == []


def test_a_producer_that_takes_too_long_fails_open() -> None:
    asks = Asks("asks", NoParams())
    site = Site(asks)
    envoy, _ = site.asked()
    (work,) = site.services.works
    work.expire()
    assert envoy.answers()[0].WhichOneof("response") == "request_headers"
    assert asks.requests[0][FACT] is None
    assert site.pool.failures == [("asks", "Asks.ask: not done within 0.4 s")]


def test_after_the_first_chunk_that_is_not_empty_plugins_see_no_chunks() -> None:
    first = First()
    site = Site(first)
    envoy, _ = site.asked()
    envoy.response_headers(kind="text/event-stream")
    assert not envoy.handler.passing
    envoy.response_body(b"", last=False)
    assert first.at == []
    envoy.response_body(b"data: x\n\n", last=False)
    assert len(first.at) == 1 and envoy.handler.passing
    envoy.response_body(b"data: x\n\n", last=False)
    envoy.response_body(USAGE)
    assert len(first.at) == 1
    ((sent, ended, whole),) = first.ended
    assert 0.0 < sent <= ended and whole


def test_a_plugin_for_every_chunk_sees_them_all_beside_one_for_the_first_chunk() -> None:
    first, every = First(), Every()
    envoy, _ = Site(first, every).asked()
    envoy.response_headers(kind="text/event-stream")
    for _ in range(3):
        envoy.response_body(b"data: x\n\n", last=False)
    assert (len(first.at), every.count) == (1, 3)


def test_an_answer_that_is_cut_short_is_not_complete() -> None:
    first = First()
    envoy, _ = Site(first).asked()
    envoy.response_headers(kind="text/event-stream")
    envoy.response_body(b"data: x\n\n", last=False)
    envoy.handler.closed()
    assert [whole for _, _, whole in first.ended] == [False]
