"""Several replicas in one process, and a real store."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop

from tests.redis_server import RedisServer, needs_redis
from tests.waiting import until
from tests.workers.replicas.live import HASHES, Replica, running
from tests.workers.replicas.messages import message
from workers.replicas import exchange
from workers.replicas.address import secret_of
from workers.replicas.taught import BACKLOG_BYTES, Taught

pytestmark = needs_redis
X, Y = "10.0.0.1:8000", "10.0.0.2:8000"


def run(test: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(test)


def pair(url: str) -> tuple[Replica, Replica]:
    return Replica(url, "a", {X: 0, Y: 1}), Replica(url, "b", {Y: 2, X: 5})


def test_load_in_flight_is_visible_to_others_and_ends_there_too(tmp_path: Path) -> None:
    async def test(server: RedisServer) -> None:
        a, b = pair(server.unix_url)
        async with running(a, b):
            a.serve(X, 3, 300)
            b.serve(Y, 1, 10)
            await until(lambda: b.of_others(X) == (3, 300) and a.of_others(Y) == (1, 10))
            assert (a.of_others(X), b.of_others(Y)) == ((0, 0), (0, 0))
            a.serve(X, 0)
            await until(lambda: b.of_others(X) == (0, 0))

    with RedisServer(tmp_path) as server:
        run(test(server))


def test_an_endpoint_that_is_found_later_has_the_load_of_others_at_once(tmp_path: Path) -> None:
    async def test(server: RedisServer) -> None:
        a, b = pair(server.unix_url)
        b.know(Y)
        async with running(a, b):
            a.serve(X, 3)
            a.serve(Y, 1)
            await until(lambda: b.of_others(Y) == (1, 0))
            b.know(X, Y)
            await until(lambda: b.of_others(X) == (3, 0))
            b.know(X)
            await until(lambda: b.of_others(Y) == (0, 0))

    with RedisServer(tmp_path) as server:
        run(test(server))


def test_a_replica_that_ends_stops_counting(tmp_path: Path) -> None:
    async def test(server: RedisServer) -> None:
        a, b = pair(server.unix_url)
        async with running(b):
            async with running(a):
                a.serve(X, 3)
                await until(lambda: b.of_others(X) == (3, 0))
            await until(lambda: b.of_others(X) == (0, 0))
            assert b.remote.replicas == 0

    with RedisServer(tmp_path) as server:
        run(test(server))


def test_without_the_store_each_goes_on_alone_and_recovers_when_it_is_back(tmp_path: Path) -> None:
    async def test(server: RedisServer) -> None:
        a, b = pair(server.unix_url)
        async with running(a, b):
            a.serve(X, 3)
            await until(lambda: b.of_others(X) == (3, 0))
            server.kill()
            await until(lambda: b.of_others(X) == (0, 0))
            assert not b.exchange.connected
            server.start()
            await until(lambda: b.of_others(X) == (3, 0))
            assert len(b.reports) == 1, b.reports
            assert b.exchange.failures["unreachable"] >= 1

    with RedisServer(tmp_path) as server:
        run(test(server))


def test_a_store_that_hangs_is_given_up_and_used_again(tmp_path: Path) -> None:
    async def test(server: RedisServer) -> None:
        a, b = pair(server.unix_url)
        async with running(a, b):
            a.serve(X, 3)
            await until(lambda: b.of_others(X) == (3, 0))
            server.pause()
            await until(lambda: b.of_others(X) == (0, 0))
            a.serve(X, 4)
            server.resume()
            await until(lambda: b.of_others(X) == (4, 0))

    with RedisServer(tmp_path) as server:
        run(test(server))


def test_a_full_store_still_passes_messages_on(tmp_path: Path) -> None:
    async def test(server: RedisServer) -> None:
        a, b = pair(server.unix_url)
        async with running(a, b):
            a.serve(X, 3)
            await until(lambda: b.of_others(X) == (3, 0))
            assert a.exchange.failures["full"] == 1

    with RedisServer(tmp_path, "maxmemory 1kb", "maxmemory-policy noeviction") as server:
        run(test(server))


def test_what_one_replica_teaches_its_index_the_others_learn(tmp_path: Path) -> None:
    async def test(server: RedisServer) -> None:
        a, b = pair(server.unix_url)
        async with running(a, b):
            await until(lambda: a.exchange.others.live and b.exchange.others.live)
            a.teach(X)
            await until(lambda: b.holds(X) == a.holds(X) > 0)
            assert b.holds(Y) == 0
            before = b.holds(X)
            a.taught.forget(HASHES[:3], a.owners[X])
            await until(lambda: b.holds(X) == a.holds(X) < before)

    with RedisServer(tmp_path) as server:
        run(test(server))


def test_blocks_under_another_secret_are_not_learned(tmp_path: Path) -> None:
    async def test(server: RedisServer) -> None:
        a, _ = pair(server.unix_url)
        b = Replica(server.unix_url, "b", {Y: 2, X: 5}, secret=2)
        async with running(a, b):
            await until(lambda: a.exchange.others.live and b.exchange.others.live)
            a.teach(X)
            await until(lambda: b.exchange.foreign_blocks == 1)
            assert b.holds(X) == 0
            assert "different secrets" in b.reports[0]

    with RedisServer(tmp_path) as server:
        run(test(server))


def test_a_store_that_comes_back_empty_gets_the_secret_of_block_hashes_again(tmp_path: Path) -> None:
    async def test(server: RedisServer) -> None:
        a = Replica(server.unix_url, "a", {X: 0}, secret=7)
        async with running(a):
            await until(lambda: secret_of(7) in server.command("GET", "p:1:secret"))
            server.kill()
            server.start()
            await until(lambda: secret_of(7) in server.command("GET", "p:1:secret"))

    with RedisServer(tmp_path) as server:
        run(test(server))


def test_a_store_that_is_emptied_meanwhile_gets_the_secret_and_the_count_of_replicas_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "KEEP_S", 0.05)
    monkeypatch.setattr(exchange, "SETTLED_S", 0.05)

    async def test(server: RedisServer) -> None:
        server.command("SET", "p:1:epoch", "41")
        a = Replica(server.unix_url, "a", {X: 0}, secret=7)
        async with running(a):
            await until(lambda: a.exchange.connected)
            server.command("FLUSHALL")
            await until(lambda: secret_of(7) in server.command("GET", "p:1:secret"))
            await until(lambda: b"42" in server.command("GET", "p:1:epoch"))
            assert a.exchange.connections == 1
            server.command("SET", "p:1:secret", secret_of(8))
            await until(lambda: a.exchange.foreign)
            assert "different secrets" in a.reports[0]
            server.command("SET", "p:1:secret", secret_of(7))
            await until(lambda: not a.exchange.foreign)

    with RedisServer(tmp_path) as server:
        run(test(server))


def test_replicas_in_different_databases_of_one_store_do_not_hear_each_other(tmp_path: Path) -> None:
    async def test(server: RedisServer) -> None:
        a, b = Replica(server.unix_url, "a", {X: 0}), Replica(server.unix_url + "?db=1", "b", {X: 0})
        c = Replica(server.unix_url + "?db=1", "c", {X: 0})
        async with running(a, b, c):
            await until(lambda: b.exchange.others.live and c.exchange.others.live and a.exchange.others.echo)
            assert (list(a.exchange.others.live), list(b.exchange.others.live)) == ([], ["c"])

    with RedisServer(tmp_path) as server:
        run(test(server))


@pytest.mark.parametrize(("held", "why"), [(secret_of(8), "different secrets"), (b"other", "no secret")])
def test_a_replica_reports_a_store_with_another_secret_and_leaves_it(tmp_path: Path, held: bytes, why: str) -> None:
    async def test(server: RedisServer) -> None:
        server.command("SET", "p:1:secret", held)
        a = Replica(server.unix_url, "a", {X: 0}, secret=7)
        async with running(a):
            await until(lambda: a.reports)
            assert why in a.reports[0]
            await until(lambda: a.exchange.connected)
            assert held in server.command("GET", "p:1:secret")

    with RedisServer(tmp_path) as server:
        run(test(server))


def test_the_earlier_of_two_replicas_with_one_name_reports_it_and_is_silent(tmp_path: Path) -> None:
    async def test(server: RedisServer) -> None:
        first, second = Replica(server.unix_url, "a", {X: 0}), Replica(server.unix_url, "a", {X: 0})
        third = Replica(server.unix_url, "c", {X: 0})
        async with running(first, third):
            first.serve(X, 1)
            await until(lambda: third.of_others(X) == (1, 0))
            second.serve(X, 5)
            async with running(second):
                await until(lambda: third.of_others(X) == (5, 0))
                await until(lambda: first.reports)
                assert "started later: this one is silent" in first.reports[0]
            await until(lambda: third.of_others(X) == (1, 0))

    with RedisServer(tmp_path) as server:
        run(test(server))


def test_a_store_that_lies_leaves_the_picker_running(tmp_path: Path) -> None:
    async def test(server: RedisServer) -> None:
        a, b = pair(server.unix_url)
        async with running(a, b):
            await until(lambda: b.exchange.others.live)
            lies = [b"", b"\xff" * 100, b"\x91\x63", b"x" * ((1 << 20) + 1), message("a", 1 << 60), message("z", 1, {1: (0, 5)})]
            for lie in lies:
                await asyncio.to_thread(server.command, "PUBLISH", "p:1:all", lie)
            a.serve(X, 2)
            await until(lambda: b.of_others(X) == (2, 0))
            assert {"malformed", "form", "long"} <= b.exchange.others.refused.keys()

    with RedisServer(tmp_path) as server:
        run(test(server))


def test_updates_that_nobody_takes_are_bounded_and_the_oldest_are_dropped() -> None:
    a = Replica("unix:///none", "a", {X: 0})
    a.exchange.parts.places.refresh()
    many = np.arange(1, BACKLOG_BYTES // 2, dtype=np.uint64) << np.uint64(20)
    for part in np.array_split(many, 3):
        a.taught.insert(part, np.full(len(part), a.owners[X], np.uint16), 1)
    taken = b""
    while (part := a.taught.take()[0]) is not None:
        taken += part.hashes
    assert 0 < len(taken) <= BACKLOG_BYTES
    assert a.taught.dropped > 0
    assert taken == many[-(len(taken) // 8) :].tobytes()
    assert isinstance(a.taught, Taught)


def test_replicas_that_join_at_once_get_copies_of_the_index(tmp_path: Path) -> None:
    async def test(server: RedisServer) -> None:
        a, b = pair(server.unix_url)
        c = Replica(server.unix_url, "c", {X: 3, Y: 4})
        a.exchange.joining.wants = b.exchange.joining.wants = False  # both have run for long
        async with running(a, b):
            await until(lambda: a.exchange.others.live and b.exchange.others.live)
            a.teach(X)
            await until(lambda: b.holds(X) == a.holds(X))
            d = Replica(server.unix_url, "d", {X: 5})
            async with running(c, d):
                await until(lambda: c.holds(X) == d.holds(X) == a.holds(X) > 0)
                assert c.holds(Y) == 0
                assert c.index.size() == a.index.size()

    with RedisServer(tmp_path) as server:
        run(test(server))


def test_what_waits_in_a_band_counts_in_the_same_band_of_others(tmp_path: Path) -> None:
    async def test(server: RedisServer) -> None:
        a = Replica(server.unix_url, "a", {X: 0}, priorities=(0, 5))
        b = Replica(server.unix_url, "b", {X: 0}, priorities=(-1, 0, 5))  # other places
        async with running(a, b):
            area = a.flow.area(0)
            area.publish(1, 3, 300, 1.0)
            await until(lambda: b.remote.band(2) == (3, 300))
            assert (b.remote.band(1), b.remote.waiting()) == ((0, 0), (3, 300))
            assert b.remote.head() == (2, 0)
            area.publish(1, 0, 0, 0.0)
            await until(lambda: b.remote.waiting() == (0, 0))
            assert b.remote.head() is None

    with RedisServer(tmp_path) as server:
        run(test(server))
