"""Tests of the last decisions of workers: question, answers and the page that shows them."""

import asyncio
import json
import tracemalloc
from collections import Counter
from collections.abc import Callable
from http import HTTPStatus
from itertools import islice
from typing import Any

import pytest

from shm.areas import Areas, AreaSchema
from shm.documents import DocumentReader, DocumentWriter
from shm.segment import Region
from tests.pair import Pair
from tests.waiting import turns
from tests.workers.worker.extproc.streams import BODY, pair
from workers.shared.decisions import KEPT, KEPT_MAX, KEPT_ROOM, SCALARS, DecisionsAsking, Publisher, Recent, Used, by_request, schema
from workers.supervisor.pages.decisions import DecisionsPage, decoded
from workers.supervisor.pages.page import Pause, Request


class Site:
    """A supervisor and two workers in one process. `woken` lists the workers that the supervisor woke up."""

    def __init__(self) -> None:
        area_schema = AreaSchema(4, SCALARS, (), (), areas=3)
        self.areas = Areas(area_schema, Region(memoryview(bytearray(area_schema.bytes))))
        self.documents = schema(2)
        self.region = Region(memoryview(bytearray(self.documents.bytes)))
        self.time = 1000.0
        self.woken: list[int] = []
        self.pairs = [pair(), pair()]
        self.publishers = [self.publisher(index, p) for index, p in enumerate(self.pairs)]
        for ordinal in (1, 2):
            self.areas.set_serving(ordinal, True)
        reader = DocumentReader(self.documents, self.region)
        self.asking = DecisionsAsking(self.areas.area(0), self.areas, reader, self.woken.append, lambda: self.time)

    def publisher(self, index: int, p: Pair) -> Publisher:
        recent = p.app.telemetry.recent = Recent(index, lambda: self.time)
        writer = DocumentWriter(self.documents, self.region)
        return Publisher(recent, self.areas, self.areas.area(index + 1), writer, index)

    def decide(self, index: int, request_id: str) -> None:
        self.pairs[index].time = self.time
        envoy = self.pairs[index].open()
        envoy.headers(**{"x-request-id": request_id})
        envoy.body(BODY)

    def answer(self, *indices: int) -> None:
        """Let these workers wake up and answer."""

        async def scenario() -> None:
            loop = asyncio.get_running_loop()
            for index in indices:
                self.publishers[index].woken(loop)
            await turns(2 * KEPT + 4)

        asyncio.run(scenario())


def test_a_question_wakes_all_workers_and_their_answers_come_newest_first() -> None:
    site = Site()
    site.decide(0, "old")
    site.time += 1
    site.decide(1, "middle")
    site.time += 1
    site.decide(0, "new")
    number = site.asking.ask()
    assert site.woken == [0, 1] and not site.asking.answered(number)
    site.answer(0)
    assert not site.asking.answered(number)
    site.answer(1)
    assert site.asking.answered(number)
    explanations = site.asking.read()
    assert [(e.request_id, e.worker, e.ago_s) for e in explanations] == [("new", 0, 0.0), ("middle", 1, 1.0), ("old", 0, 2.0)]
    middle = by_request(explanations, "middle")
    assert middle is not None and middle.targets == ["10.0.0.2:8000"]
    assert by_request(explanations, "unknown") is None


def test_a_worker_keeps_the_last_decisions_only() -> None:
    site = Site()
    for number in range(KEPT + 5):
        site.decide(0, str(number))
    site.asking.ask()
    site.answer(0, 1)
    assert [e.request_id for e in site.asking.read()] == [str(n) for n in range(KEPT + 4, 4, -1)]


class Of:
    """The pipeline of a decision as another pool has it."""

    def __init__(self, used: Used, pool: str) -> None:
        self.pipeline, self.left_out, self.pool = used.pipeline, used.left_out, pool


def decided(*pools: str) -> tuple[Site, Recent]:
    """A worker that has made a decision for each of these pools, one after the other."""
    site = Site()
    site.decide(0, "any")
    recent = site.pairs[0].app.telemetry.recent
    ((_, request, decision, _, used),) = recent.kept
    recent = site.publishers[0]._recent = Recent(0, lambda: site.time)
    for pool in pools:
        site.time += 1
        recent.add(site.time, request, decision, used=Of(used, pool))
    return site, recent


def kept(recent: Recent) -> Counter[str]:
    return Counter(entry[4].pool for entry in recent.kept)


def test_a_busy_pool_displaces_no_decision_of_a_quiet_one() -> None:
    _, recent = decided("quiet", *["busy"] * 1000)
    assert kept(recent) == {"quiet": 1, "busy": KEPT}


@pytest.mark.parametrize("pools", [1, 3, 4, 5, 10, 90, 300])
def test_decisions_of_all_pools_are_limited_and_the_pools_with_the_most_lose_theirs(pools: int) -> None:
    names = [f"p{number}" for number in range(pools)]
    _, recent = decided("quiet", "quiet", *(name for _ in range(40) for name in names))
    found = kept(recent)
    assert found.total() <= KEPT_MAX and max(found.values()) <= KEPT
    if pools <= 90:
        least = min(2, KEPT_ROOM // (pools + 1))
        assert found["quiet"] >= least and all(found[name] >= least for name in names)
    assert recent.kept == sorted(recent.kept, key=lambda entry: entry[0])
    assert found[names[-1]] >= 1, "the newest is there"


def test_the_newest_decision_of_each_pool_is_explained_first() -> None:
    site, recent = decided("quiet", *["busy"] * 40, "other", "busy")
    assert [each.pool for each in islice(recent.explained(), 4)] == ["quiet", "busy", "other", "busy"]
    site.asking.ask()
    site.answer(0, 1)
    found = site.asking.read()
    assert {each.pool for each in found} == {"quiet", "busy", "other"}
    assert [each.ago_s for each in found] == sorted(each.ago_s for each in found)


def test_refusals_are_kept_with_their_cause() -> None:
    site = Site()
    envoy = site.pairs[0].open()
    envoy.headers(**{"x-request-id": "r"})
    envoy.body(b"{")
    site.asking.ask()
    site.answer(0, 1)
    (refused,) = site.asking.read()
    assert refused.refused.startswith("invalid-body") and refused.targets == []


@pytest.mark.parametrize("wrong", ["no endpoint", "no model", "no JSON"])
def test_a_refused_request_is_kept_without_its_body(wrong: str) -> None:
    site = Site()
    end = {"no endpoint": b'","model":"m"}', "no model": b'"}', "no JSON": b""}[wrong]
    tracemalloc.start()
    try:
        envoy = site.pairs[0].open()
        envoy.headers()
        (answer,) = envoy.body(b'{"prompt":"' + b"p" * 1_000_000 + end, subset=[])
        assert answer.immediate_response.status.code >= 400
        del envoy
        assert len(site.pairs[0].app.telemetry.recent.kept) == 1
        assert tracemalloc.get_traced_memory()[0] < 100_000
    finally:
        tracemalloc.stop()


def test_the_supervisor_does_not_wait_for_a_worker_that_does_not_serve() -> None:
    site = Site()
    site.areas.set_serving(2, False)
    number = site.asking.ask()
    site.answer(0)
    assert site.asking.answered(number) and site.woken == [0]


def test_a_second_question_during_an_answer_is_answered_too() -> None:
    site = Site()
    site.decide(0, "a")

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        site.asking.ask()
        site.publishers[0].woken(loop)
        number = site.asking.ask()
        site.publishers[0].woken(loop)
        site.areas.set_serving(2, False)
        await turns(10)
        assert site.asking.answered(number)

    asyncio.run(scenario())


def test_a_successor_of_the_supervisor_asks_with_a_new_number() -> None:
    site = Site()
    first = site.asking.ask()
    site.answer(0, 1)
    site.areas.area(0).take_over()
    site.time += 5
    second = site.asking.ask()
    assert second > first and not site.asking.answered(second)


def page(site: Site, *, answers: Callable[[], None] = lambda: None, **request: Any) -> Any:
    decisions_page = DecisionsPage(site.asking, lambda: site.time)
    defaults = {"method": "GET", "path": "/debug/decisions", "peer": "127.0.0.1"}
    answer = decisions_page(Request(**(defaults | request)))
    if isinstance(answer.body, bytes):
        return answer
    body = b""
    for turn, piece in enumerate(answer.body):
        body += b"" if isinstance(piece, Pause) else piece
        if turn == 2:
            answers()
        site.time += 0.01
    return answer._replace(body=body)


def test_the_page_waits_for_the_workers_and_shows_their_explanations() -> None:
    site = Site()
    site.decide(0, "a")
    site.decide(1, "b")
    answer = page(site, answers=lambda: site.answer(0, 1))
    assert answer.content_type == "application/json"
    assert {e.request_id for e in decoded(answer.body)} == {"a", "b"}
    answer = page(site, query="request_id=b", answers=lambda: site.answer(0, 1))
    assert [e["request_id"] for e in json.loads(answer.body)["decisions"]] == ["b"]
    assert len(decoded(page(site, query="n=1", answers=lambda: site.answer(0, 1)).body)) == 1


def test_the_page_omits_a_worker_that_hangs() -> None:
    site = Site()
    site.decide(0, "a")
    answer = page(site, answers=lambda: site.answer(0))
    assert [e.request_id for e in decoded(answer.body)] == ["a"]


def test_a_limit_that_is_not_a_number_is_refused() -> None:
    assert page(Site(), query="n=x").status == HTTPStatus.BAD_REQUEST
