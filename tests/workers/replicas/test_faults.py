"""An exchange over links that fail or lie."""

import asyncio
import time
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.waiting import until
from tests.workers.replicas.fake_link import FakeLink, links
from tests.workers.replicas.live import Replica, running
from tests.workers.replicas.messages import message
from workers.replicas.exchange import REFUSED_MAX_S, RETRY_MAX_S, RETRY_MIN_S, retry_delay
from workers.replicas.pages import Page
from workers.replicas.reading import decode
from workers.replicas.store import ANSWER_S

X, Y = "10.0.0.1:8000", "10.0.0.2:8000"
BACK = "the replica store is back"


def over(*made: FakeLink, name: str = "a", **options: Any) -> Replica:
    replica = Replica("unix:///none", name, {X: 0}, **options)
    replica.exchange.parts = replica.exchange.parts._replace(open_link=links(*made))
    return replica


@pytest.mark.parametrize("why", ["full", "read-only", "error"])
def test_a_store_that_cannot_count_still_passes_messages_on(why: str) -> None:
    async def test() -> None:
        link = FakeLink(refusing=why)
        a = over(link)
        async with running(a):
            await until(lambda: a.exchange.others.echo > 0)
        assert a.exchange.failures[why] == 1
        assert a.exchange.others.life[0] == 1

    asyncio.run(test())


def test_a_fault_in_what_comes_is_counted_and_the_exchange_goes_on() -> None:
    async def test() -> None:
        bad, good = FakeLink(), FakeLink()
        bad.fault = RecursionError("deep")
        a = over(bad, good)
        async with running(a):
            await until(lambda: good.published)
        assert a.exchange.failures["error"] == 1
        assert "deep" in a.reports[0]

    asyncio.run(test())


def test_a_store_is_back_only_after_it_has_accepted_a_whole_message() -> None:
    async def test() -> None:
        refusing, good = FakeLink(unsettled="denied"), FakeLink()
        a = over(refusing, good)
        with capture_logs() as lines:
            async with running(a):
                await until(lambda: a.exchange.failures["denied"])
                assert (a.exchange.connected, a.exchange.connections) == (False, 0)
                assert decode(refusing.published[0][1]).whole
                assert not [line for line in lines if line["event"] == BACK]
                await until(lambda: a.exchange.connected)
        assert [line["event"] for line in lines] == [BACK]
        assert a.exchange.connections == 1

    asyncio.run(test())


def test_while_the_store_does_not_answer_areas_fade_and_follow_the_endpoints() -> None:
    async def silent(_: str) -> Any:
        await asyncio.Event().wait()

    async def test() -> None:
        a = Replica("unix:///none", "a", {X: 0, Y: 0})  # Y gets the slot of X
        a.know(X)
        a.exchange.parts = a.exchange.parts._replace(open_link=silent)
        a.exchange.parts.places.refresh()
        (key,) = a.exchange.parts.places.slots
        a.exchange.others.receive(message("b", 1, {key: (3, 30)}), time.monotonic())
        async with running(a):
            await until(lambda: a.of_others(X) == (3, 30))
            a.know(Y)
            await until(lambda: a.of_others(Y) == (0, 0))
            a.know(X)
            await until(lambda: not a.exchange.others.live)
            assert a.of_others(X) == (0, 0)

    asyncio.run(test())


def test_a_number_below_those_of_others_is_replaced_once() -> None:
    async def test() -> None:
        link = FakeLink()
        a = over(link)
        async with running(a):
            await until(lambda: a.exchange.connected)
            link.says(message("b", 1, epoch=40))
            await until(lambda: a.exchange.others.life[0] == 41)
            link.says(message("b", 1, epoch=50))  # it has joined later
            await until(lambda: a.exchange.others.highest == 50)
        assert link.numbers == [1, 41]
        assert a.remote.epoch == 41

    asyncio.run(test())


def test_a_successor_of_the_supervisor_takes_a_number_above_that_of_its_predecessor() -> None:
    async def test() -> None:
        a = over(FakeLink())
        a.remote.epoch = 7
        async with running(a):
            await until(lambda: a.exchange.connected)
        assert a.exchange.others.life[0] == a.remote.epoch == 8

    asyncio.run(test())


def test_the_lag_is_that_of_the_last_whole_message_and_a_replay_does_not_count() -> None:
    async def test() -> None:
        link = FakeLink(echoes=False)
        a = over(link)
        async with running(a):
            await until(lambda: link.published)
            own = decode(link.published[0][1])
            for sequence in (1 << 60, own.sequence + 1):
                link.says(message("a", sequence, epoch=own.epoch, origin=own.origin))
            await until(lambda: a.exchange.others.echo == own.sequence + 1)
            assert a.exchange.lag_s == 0.0

    asyncio.run(test())


def test_a_page_that_one_replica_has_read_is_in_its_next_message_and_is_used_by_another_one() -> None:
    async def test() -> None:
        here, there = FakeLink(), FakeLink()
        a, b = over(here), over(there, name="b")
        b.slots[X] = 3
        b.know(X)
        used: list[tuple[int, int, Page]] = []
        for replica in (a, b):
            replica.pages.share(7, 2, lambda *page: used.append(page) is None)
        async with running(a, b):
            await until(lambda: a.exchange.connected and b.exchange.connected)
            begun = time.monotonic()
            a.pages.read(a.owners[X], Page(begun, 4, (1.0, 0.5), 3))
            await until(lambda: any(decode(data).pages for _, data in here.published))
            there.says(next(data for _, data in here.published if decode(data).pages))
            await until(lambda: used)
        ((slot, owner, page),) = used
        assert (slot, owner, page.inflight, page.values, page.present) == (3, b.owners[X], 4, (1.0, 0.5), 3)
        assert begun <= page.at <= time.monotonic()
        assert b.pages.used == 1

    asyncio.run(test())


def test_the_delay_between_attempts_doubles_up_to_a_limit_and_is_random() -> None:
    longest = [max(retry_delay(attempts, refused=False) for _ in range(200)) for attempts in range(4)]
    for attempts, limit in enumerate((RETRY_MIN_S, 2 * RETRY_MIN_S, RETRY_MAX_S, RETRY_MAX_S)):
        assert 0.75 * limit < longest[attempts] <= limit
    assert REFUSED_MAX_S / 2 <= retry_delay(1000, refused=True) <= REFUSED_MAX_S
    assert len({retry_delay(3, refused=False) for _ in range(10)}) > 1


def test_an_attempt_with_a_silent_store_and_the_next_delay_last_less_than_a_second() -> None:
    assert ANSWER_S + RETRY_MAX_S < 1.0
    assert REFUSED_MAX_S < 1.0, "a store that refuses answers at once"


def test_more_loaded_endpoints_than_a_message_can_name_are_reported() -> None:
    a = Replica("unix:///none", "a", {X: 0, Y: 1}, rows_max=1)
    a.serve(X, 1)
    a.serve(Y, 2)
    a.exchange._message(0.0)
    assert "too many endpoints have load" in a.reports[0]
