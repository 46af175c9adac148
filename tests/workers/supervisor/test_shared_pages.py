"""Replicas that share pages: one of them reads a page, all know it. Each finds out itself whether a server is alive."""

import random

import pytest

from tests.workers.supervisor.sharing import COLUMNS, World
from workers.replicas.endpoint_places import PagePlaces
from workers.replicas.pages import Page
from workers.replicas.wire import PAGES_MAX, page_row
from workers.supervisor.endpoints.endpoint_log import Condition

GAP_S = 1.5  # of a page of 15 ms
LONG_S = 30 * GAP_S


@pytest.fixture(autouse=True)
def seeded() -> None:
    random.seed(1)


def world_of(count: int) -> World:
    """Replicas that have read a few pages."""
    world = World(count)
    world.run(4 * GAP_S)
    return world


@pytest.mark.parametrize("count", [2, 3, 8])
def test_replicas_together_read_as_many_pages_as_one(count: int) -> None:
    alone = world_of(1).run(LONG_S)
    assert world_of(count).run(LONG_S) <= 1.1 * alone


def test_the_values_of_a_page_are_in_the_rows_of_all_replicas_with_its_time_and_the_requests_in_flight_then() -> None:
    world = world_of(3)
    world.server.waiting = 9.0
    world.run(2 * GAP_S)
    world.server.waiting = 4.0
    for replica in world.replicas:
        replica.inflight = 5
    while not world.run(0.005):
        pass
    world.run(0.05)
    rows = [replica.row() for replica in world.replicas]
    assert [waiting for waiting, _, _ in rows] == [4.0] * 3
    assert [at for _, at, _ in rows] == pytest.approx([rows[0][1]] * 3, abs=0.02)
    assert [inflight for _, _, inflight in rows] == [5.0] * 3


def test_every_row_is_fresh_all_the_time() -> None:
    world = world_of(3)
    oldest: list[float] = []
    world.run(LONG_S, lambda: oldest.append(max(world.now - replica.row()[1] for replica in world.replicas)))
    assert max(oldest) < 1.2 * GAP_S
    assert [replica.member.condition for replica in world.replicas] == [Condition.FRESH] * 3


def test_without_a_store_each_replica_reads_itself_and_with_it_one_does_again() -> None:
    alone = world_of(1).run(LONG_S)
    world = world_of(3)
    world.store = False
    world.run(2 * GAP_S)
    assert world.run(LONG_S) == pytest.approx(3 * alone, rel=0.1)
    world.store = True
    world.run(2 * GAP_S)
    assert world.run(LONG_S) <= 1.1 * alone


def test_another_replica_goes_on_reading_when_the_one_that_reads_is_gone() -> None:
    alone = world_of(1).run(LONG_S)
    world = world_of(3)
    reader = next(replica for replica in world.replicas if not replica.member.target.pace.spare_s)
    reader.running = False
    rest = [replica for replica in world.replicas if replica is not reader]
    oldest: list[float] = []
    world.run(3 * GAP_S, lambda: oldest.append(max(world.now - replica.row()[1] for replica in rest)))
    assert max(oldest) < 1.5 * GAP_S
    assert world.run(LONG_S) <= 1.1 * alone


def test_a_quiet_server_is_read_once_in_2_s_and_its_first_request_asks_for_one_page() -> None:
    world = world_of(3)
    world.server.waiting = 0.0
    for replica in world.replicas:
        replica.inflight = 0
    world.run(3.0)
    assert world.run(20.0) == pytest.approx(10, abs=1)
    world.run(0.7)
    for replica in world.replicas:
        replica.inflight = 1
    assert world.run(0.45) == 1


def test_servers_that_close_idle_connections_get_no_pages_for_that() -> None:
    world = world_of(3)

    def close_idle() -> None:
        for replica in world.replicas:
            if replica.member.target.pace.spare_s and world.ticks % 100 == 0:
                replica.lose_connection()

    before = world.server.pages
    world.run(LONG_S, close_idle)
    world.run(0.1)
    assert world.server.pages - before <= 1.1 * 30
    assert all(len(replica.net.open) == 1 for replica in world.replicas)


def test_each_replica_notices_itself_that_a_server_is_dead_and_that_it_is_back() -> None:
    world = world_of(3)
    world.kill_server()
    world.run(0.11)
    assert [replica.member.is_down for replica in world.replicas] == [True] * 3
    world.server.alive = True
    world.run(0.2)
    assert [replica.member.is_down for replica in world.replicas] == [False] * 3


def test_a_page_of_another_replica_does_not_bring_back_a_server_that_this_one_cannot_reach() -> None:
    world = world_of(2)
    cut = world.replicas[0]
    cut.cut = True
    cut.lose_connection()
    world.run(LONG_S)
    assert cut.member.is_down
    assert not world.replicas[1].member.is_down


def test_a_page_that_is_asked_for_at_once_is_read_at_once_by_any_replica() -> None:
    for number in range(3):
        world = world_of(3)
        world.run(GAP_S / 2)
        world.replicas[number].member.target.pace.hasten(world.now)
        assert world.run(0.1) == 1


def test_a_page_with_other_values_than_the_last_own_one_is_read_by_each_replica() -> None:
    world = world_of(2)
    world.server.page = lambda: _count(world)  # type: ignore[method-assign]
    world.run(3 * GAP_S)
    assert [replica.member.page[0].present for replica in world.replicas if replica.member.page] == [1, 1]
    assert all("kv_cache_usage" in str(replica.member.problems) for replica in world.replicas)


def _count(world: World) -> bytes:
    world.server.pages += 1
    return b"vllm:num_requests_waiting 2\n"


@pytest.mark.parametrize(
    "page",
    [
        lambda at, now: Page(at, 0, (1.0, 0.1), 3),
        lambda at, now: Page(at - 0.5, 0, (1.0, 0.1), 3),
        lambda at, now: Page(now, 0, (1.0, 0.1), 1),
    ],
    ids=["the same time", "older", "other values"],
)
def test_pages_that_are_no_newer_or_have_other_values_change_nothing(page) -> None:
    (replica,) = world_of(1).replicas
    before = replica.row()
    assert replica.member.page is not None
    at = replica.member.page[2]
    assert not replica.sharing.told(replica.member.handle.slot, replica.member.owner, page(at, replica.world.now))
    assert not replica.sharing.told(replica.member.handle.slot, replica.member.owner + 1, Page(at + 1, 0, (1.0, 0.1), 3))
    assert replica.row() == before


@pytest.mark.parametrize("values", [(-1.0, 0.5), (1.0, -0.5), (1e300, 0.5), (1.0, 1.5)])
def test_a_page_of_another_replica_with_a_value_that_no_server_has_changes_nothing(values: tuple[float, float]) -> None:
    (replica,) = world_of(1).replicas
    before = replica.row()
    told = Page(replica.world.now, 0, values, 3)
    assert not replica.sharing.told(replica.member.handle.slot, replica.member.owner, told)
    assert replica.row() == before
    assert replica.sharing.told(replica.member.handle.slot, replica.member.owner, told._replace(values=(1.0, 0.5)))


def test_replicas_that_read_other_columns_share_no_pages_and_count_them() -> None:
    world = world_of(2)
    world.replicas[1].pages.share(COLUMNS + 1, 2, world.replicas[1].sharing.told)
    world.run(2 * GAP_S)
    used = [replica.pages.used for replica in world.replicas]
    assert world.run(LONG_S) == pytest.approx(60, abs=3)
    assert [replica.pages.used for replica in world.replicas] == used
    assert all(replica.pages.foreign >= 29 for replica in world.replicas)


def test_a_message_has_a_bounded_number_of_pages_and_the_next_one_has_the_rest() -> None:
    (replica,) = world_of(1).replicas
    pages = replica.pages
    pages._places.pages = PagePlaces({}, {}, {owner: owner for owner in range(300)})
    for owner in range(300):
        pages.read(owner, Page(100.0, 1, (1.0, 0.5), 3))
    taken = []
    while (rows := pages.take(100.1)) is not None:
        taken.append(len(rows.rows) // page_row(2).size)
    assert taken == [PAGES_MAX, PAGES_MAX, 300 - 2 * PAGES_MAX]


def test_pages_that_waited_too_long_and_those_of_endpoints_that_left_are_not_published() -> None:
    (replica,) = world_of(1).replicas
    replica.pages.read(replica.member.owner, Page(100.0, 1, (1.0, 0.1), 3))
    assert replica.pages.take(102.1) is None
    replica.pages.read(999, Page(100.0, 1, (1.0, 0.1), 3))
    assert replica.pages.take(100.1) is None
    replica.pages.share(0, 0, replica.sharing.told)
    replica.pages.read(replica.member.owner, Page(100.0, 1, (), 0))
    assert replica.pages.take(100.1) is None
