"""Budgets over replicas, in virtual time: how much they use together, and what they do while nobody is heard."""

from collections.abc import Sequence

import pytest

from epp.request.budget import Bucket, Budget
from shm.budgets import BudgetRow, BudgetsSchema, BudgetSums, Elsewhere
from tests.shm.memory import region_for
from workers.replicas.budgets import HEARD_MAX, ReplicaBudgets
from workers.replicas.wire import BUDGET, BUDGETS_MAX
from workers.worker.extproc.budgets import TenantAccount

KEY, RATE, SIZE, COST = 7, 1000.0, 5000.0, 100.0
LATE_S = 0.1  # until others hear; usual are some milliseconds
STEP_S = 0.01


def row(key: int, tokens: float, requests: float, in_flight: int, fills: float = 0.0) -> bytes:
    return BUDGET.pack(key, tokens, requests, in_flight, fills, 0.0)


class Replica:
    """A replica with one worker. `ahead`: how much later its monotonic clock is than that of the world."""

    def __init__(self, name: str, ahead: float = 0.0) -> None:
        self.name, self.life, self.ahead = name, (1, 1), ahead
        schema, serving = BudgetsSchema(1), [1]
        region = region_for(schema)
        self.worker = BudgetRow(schema, region, 0, serving)
        self.exchange = ReplicaBudgets(BudgetSums(schema, region, serving), BudgetRow(schema, region, 1, serving))
        self.account = TenantAccount(self.worker, KEY, Budget(Bucket(RATE, SIZE), None, 6), 0.25, 0.0)
        self.used = 0.0

    def ask(self, now: float, cost: float = COST) -> bool:
        now += self.ahead
        if not self.account.left(now).admits(cost):
            return False
        self.account.add(cost, 1, 0, now)
        self.used += cost
        return True

    def elsewhere(self) -> Elsewhere:
        return self.worker.elsewhere(KEY, 0)


class World:
    """Replicas that hear each other LATE_S after a turn, as long as there is a store."""

    def __init__(self, ahead: Sequence[float] = (0.0, 0.0, 0.0)) -> None:
        self.replicas = [Replica(f"r{number}", each) for number, each in enumerate(ahead)]
        self.now = 1e5
        self.store = True
        self.turns = 0

    def tell(self, *, whole: bool = False) -> None:
        for sender in self.replicas:
            rows = sender.exchange.rows(self.now + sender.ahead, whole=whole)
            for other in self.replicas:
                if other is not sender and self.store:
                    other.exchange.hear(sender.name, sender.life, rows, self.now + other.ahead, whole=whole)

    def run(self, seconds: float, askers: tuple[int, ...] = (0, 1, 2)) -> float:
        """Lets the tenant send as much as it can to some replicas. Returns what it may use."""
        before = sum(replica.used for replica in self.replicas)
        for _ in range(round(seconds / STEP_S)):
            self.now += STEP_S
            for number in askers:
                self.replicas[number].ask(self.now)
            self.turns += 1
            if self.turns % round(LATE_S / STEP_S) == 0:
                self.tell(whole=self.turns % 100 == 0)
            for replica in self.replicas:
                names = [other.name for other in self.replicas if other is not replica] if self.store else []
                replica.exchange.show(names, self.now + replica.ahead, connected=self.store)
        return sum(replica.used for replica in self.replicas) - before


def started(ahead: Sequence[float] = (0.0, 0.0, 0.0)) -> World:
    """Returns a world in which all replicas know each other, and the tenant."""
    world = World(ahead)
    for replica in world.replicas:
        replica.account.add(0.001, 0, 0, world.now + replica.ahead)
    world.tell(whole=True)
    return world


def test_three_replicas_share_a_budget_within_five_percent() -> None:
    world = started()
    used = world.run(60.0)
    assert used == pytest.approx(RATE * 60 + SIZE, rel=0.05)
    later = world.run(60.0)
    assert later == pytest.approx(RATE * 60, rel=0.02)


def test_replicas_whose_clocks_differ_share_a_budget_and_one_that_leaps_gives_away_one_burst() -> None:
    world = started((0.0, 5e6, -9e4))  # machines that were started at different times
    assert world.run(60.0) == pytest.approx(RATE * 60 + SIZE, rel=0.05)
    for replica in world.replicas:
        replica.ahead += 3600.0  # the machine was stopped, or its clock leaps
        assert RATE * 60 * 0.95 <= world.run(60.0) <= (RATE * 60 + SIZE) * 1.05
    assert world.run(60.0) == pytest.approx(RATE * 60, rel=0.05)


def test_a_tenant_that_goes_to_another_replica_does_not_find_a_full_bucket_there() -> None:
    world = started()
    world.run(60.0, (0,))
    assert world.run(10.0, (1,)) == pytest.approx(RATE * 10, rel=0.1)


def test_a_replica_that_joins_does_not_begin_with_a_full_bucket_either() -> None:
    world = started()
    world.run(60.0, (0,))
    world.replicas[1] = Replica("r1")
    world.replicas[1].life = (2, 2)
    world.tell(whole=True)
    assert world.run(10.0, (1,)) == pytest.approx(RATE * 10, rel=0.1)
    idle = Replica("r2")
    idle.exchange.hear("r0", (1, 1), row(KEY, 9.0, 9.0, 0, fills=2.0), 5.0, whole=True)
    assert idle.account.left(6.0).tokens == pytest.approx(SIZE - RATE)
    assert idle.account.left(7.5).tokens == pytest.approx(SIZE)


def test_while_the_store_is_away_each_replica_goes_on_with_its_share_and_refuses_nobody_for_it() -> None:
    world = started()
    world.run(60.0)
    world.store = False
    assert world.run(60.0) == pytest.approx(RATE * 60, rel=0.1)
    each = [replica.used for replica in world.replicas]
    assert max(each) < 1.2 * min(each)
    world.store = True
    assert world.run(60.0) == pytest.approx(RATE * 60, rel=0.1)


def test_a_tenant_of_one_replica_keeps_its_rate_without_a_store_and_has_an_equal_share_elsewhere() -> None:
    world = started()
    world.run(60.0, (0,))
    world.store = False
    assert world.run(60.0, (0,)) == pytest.approx(RATE * 60, rel=0.05)
    assert world.run(60.0, (1,)) >= RATE * 60 / 3


def test_what_was_assumed_is_taken_back_when_others_are_heard_again() -> None:
    world = started()
    world.run(30.0)
    known = world.replicas[0].elsewhere().tokens
    world.store = False
    world.run(10.0, ())
    assert world.replicas[0].elsewhere().tokens > known + 1000.0
    world.store = True
    world.tell(whole=True)
    assert world.replicas[0].elsewhere().tokens == pytest.approx(known, abs=500.0)


def test_totals_from_before_a_replica_was_heard_do_not_count_and_lost_or_repeated_messages_change_nothing() -> None:
    one, other = Replica("a"), Replica("b")
    for tokens in (900.0, 900.0, 1000.0, 1300.0, 1300.0):  # the message with 1100 is lost
        one.exchange.hear("b", (1, 1), row(KEY, tokens, tokens / 100, 2), 1.0, whole=True)
    one.exchange.show(["b"], 1.0, connected=True)
    assert one.elsewhere()[:3] == (400.0, 4.0, 2)
    one.exchange.hear("b", (2, 1), row(KEY, 50.0, 1.0, 1), 2.0, whole=True)  # it has started again
    one.exchange.hear("b", (2, 1), row(KEY, 60.0, 2.0, 1) + row(8, 5.0, 1.0, 0), 2.0, whole=True)
    one.exchange.show(["b"], 2.0, connected=True)
    assert one.elsewhere()[:3] == (410.0, 5.0, 1)
    assert one.worker.elsewhere(8, 0)[:2] == (5.0, 1.0)  # a tenant that came later
    one.exchange.show([], 3.0, connected=True)
    assert one.elsewhere()[:3] == (410.0, 5.0, 0)  # what a silent replica has in flight counts no more
    assert other.exchange.rows(1.0, whole=True) == b""


def test_totals_count_from_the_first_whole_message_of_a_life_also_if_it_is_empty() -> None:
    one = Replica("a")
    one.exchange.hear("b", (1, 1), row(8, 1e9, 1e6, 0), 1.0, whole=False)  # how much of it is new cannot be known
    one.exchange.hear("b", (1, 1), b"", 1.0, whole=True)
    one.exchange.hear("b", (1, 1), row(KEY, 300.0, 3.0, 1), 1.1, whole=False)
    assert one.elsewhere().tokens == 300.0
    assert one.worker.elsewhere(8, 0).tokens == 0.0
    one.exchange.hear("b", (2, 1), row(KEY, 310.0, 4.0, 1), 1.2, whole=False)
    one.exchange.hear("b", (2, 1), row(KEY, 320.0, 5.0, 1), 1.3, whole=True)
    one.exchange.hear("b", (2, 1), row(KEY, 330.0, 6.0, 1), 1.4, whole=False)
    assert one.elsewhere().tokens == 310.0


def test_what_others_have_in_flight_counts_as_before_while_the_store_is_away_up_to_their_share() -> None:
    one = Replica("a")
    one.exchange.hear("b", (1, 1), row(KEY, 0.0, 0.0, 6), 1.0, whole=True)
    one.exchange.hear("b", (1, 1), row(KEY, 1.0, 1.0, 6), 1.0, whole=True)
    one.exchange.show(["b"], 1.0, connected=True)
    assert not one.account.left(1.0).admits(1.0)
    one.exchange.show([], 2.5, connected=False)
    assert one.elsewhere().in_flight == 3
    assert one.account.left(2.5).admits(1.0)


def test_a_message_says_what_is_new_and_a_whole_one_says_all() -> None:
    one = Replica("a")
    one.account.add(5.0, 1, 1, 1.0)
    first = one.exchange.rows(1.0, whole=True)
    assert [found[:4] for found in BUDGET.iter_unpack(first)] == [(KEY, 5.0, 1.0, 1)]
    assert (one.exchange.rows(1.2, whole=False), one.exchange.rows(1.2, whole=True)) == (b"", first)
    one.account.add(5.0, 1, 1, 1.2)
    assert one.exchange.rows(1.21, whole=False) == b""  # later: not at each turn
    assert [found[:4] for found in BUDGET.iter_unpack(one.exchange.rows(1.3, whole=False))] == [(KEY, 10.0, 2.0, 2)]


def test_liars_take_bounded_memory() -> None:
    one = Replica("a")
    for number in range(2 * HEARD_MAX):
        one.exchange.hear(f"liar-{number}", (1, 1), row(KEY, 1.0, 1.0, 1), 1.0, whole=True)
    for start in range(1, 3 * BUDGETS_MAX, BUDGETS_MAX):
        for tokens in (0.0, 1.0):
            rows = b"".join(row(key, tokens, 1.0, 1) for key in range(start, start + BUDGETS_MAX))
            one.exchange.hear("liar", (start, 1), rows, 1.0, whole=True)
    assert len(one.exchange._heard) == HEARD_MAX
    assert len(one.exchange._tenants) <= BUDGETS_MAX
