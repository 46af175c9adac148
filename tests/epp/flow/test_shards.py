"""Several shards over one board: limits, displacement and order among them, and the effects of a shard's death."""

import pytest

from epp.flow.gate import PoolGate
from epp.flow.ports import Elsewhere
from epp.flow.shard_order import ELSEWHERE_REST_S, ELSEWHERE_REST_S_MAX, ELSEWHERE_S, PATIENCE_S, REPEAT_S, YIELDING_S, ShardOrder
from epp.plugin import Ledger, NoParams
from epp.plugins.fairness.token_weighted import TokenWeighted
from epp.request.flows import FlowView
from tests.epp.flow.policies import InTurn, ToTheCeiling, Turns, band, plan
from tests.epp.flow.shards import Board, BoardPeers, Clock, FakePool, Shard


def shards(count: int = 2, made: object = None, **pool: int) -> tuple[list[Shard], FakePool]:
    """Shards with one clock and one pool. The pool takes one request by default."""
    board, clock = Board(count), Clock()
    servers = FakePool(board, **{"pods": 1, "each": 1, **pool})
    made = made or plan(band(-1), band(5))

    def gate() -> PoolGate:
        return PoolGate(servers, ToTheCeiling(), "detector", now=clock, report=lambda name, problem: None)

    return [Shard(made, board=board, number=i, gate=gate(), clock=clock) for i in range(count)], servers  # type: ignore[arg-type]


def full(pool: FakePool) -> None:
    pool.inflight[0] = pool.pods * pool.each


def free(pool: FakePool, places: int = 1) -> None:
    pool.inflight[0] -= places


def wakes(shard: Shard) -> list[int]:
    board = shard.board
    woken, board.wakes = board.wakes, []
    return woken


def test_the_limit_of_a_band_counts_all_shards() -> None:
    (one, two), pool = shards(made=plan(band(0, max_requests=3)))
    full(pool)
    calls = [one.call(), two.call(), one.call()]
    assert [call.outcome for call in calls] == ["", "", ""]
    assert one.call().outcome == two.call().outcome == "RejectedCapacity"


def test_the_limits_over_all_bands_count_all_shards() -> None:
    (one, two), pool = shards(made=plan(band(5), max_bytes=40))
    full(pool)
    one.call(priority=5)
    two.call(priority=5, size=20)
    assert one.call(priority=5, size=11).outcome == "RejectedCapacity"
    assert one.call(priority=5).outcome == ""


def test_the_victims_of_an_arrival_are_displaced_in_the_shard_that_holds_them() -> None:
    (one, two), pool = shards(made=plan(band(-1), band(5), max_requests=3))
    full(pool)
    low = [two.call(priority=-1) for _ in range(3)]
    high = one.call(priority=5)
    assert high.outcome == "", "it is queued at once"
    assert wakes(one) == [1]
    two.controller.woken()
    assert [call.outcome for call in low] == ["", "", "EvictedDisplaced"]
    assert one.board.outstanding(1, -1) == (0, 0)
    two.controller.woken()
    assert [call.outcome for call in low].count("") == 2, "demanded once, done once"


def test_what_is_already_demanded_is_not_demanded_again() -> None:
    (one, two, three), pool = shards(3, plan(band(-1), band(5), max_requests=2))
    full(pool)
    low = [two.call(priority=-1), two.call(priority=-1)]
    assert one.call(priority=5).outcome == ""
    assert three.call(priority=5).outcome == ""
    assert one.call(priority=5).outcome == "RejectedCapacity", "both victims are already demanded"
    two.controller.woken()
    assert [call.outcome for call in low] == ["EvictedDisplaced"] * 2


def test_nothing_is_displaced_in_any_shard_if_all_lower_bands_are_not_enough() -> None:
    (one, two), pool = shards(made=plan(band(-1), band(5), max_bytes=100))
    full(pool)
    low, own = two.call(priority=-1, size=30), one.call(priority=-1, size=30)
    one.call(priority=5, size=40)
    assert one.call(priority=5, size=61).outcome == "RejectedCapacity"
    two.controller.woken()
    assert (low.outcome, own.outcome) == ("", "")


def test_the_lowest_band_of_any_shard_gives_way_before_the_next() -> None:
    (one, two), pool = shards(made=plan(band(-1), band(-7), band(5), max_requests=2))
    full(pool)
    own, elsewhere = one.call(priority=-1), two.call(priority=-7)
    one.call(priority=5)
    two.controller.woken()
    assert (own.outcome, elsewhere.outcome) == ("", "EvictedDisplaced")


def test_a_demand_that_is_no_longer_needed_evicts_nothing() -> None:
    (one, two), pool = shards(made=plan(band(-1), band(5), max_requests=2))
    full(pool)
    low = [two.call(priority=-1), two.call(priority=-1)]
    high = one.call(priority=5)
    high.leave()
    two.controller.woken()
    assert [call.outcome for call in low] == ["", ""]
    assert one.board.outstanding(1, -1) == (0, 0)


def test_a_shard_that_dies_frees_its_share_of_the_limits_and_its_demands() -> None:
    (one, two), pool = shards(made=plan(band(-1), band(5), max_requests=2))
    full(pool)
    two.call(priority=-1)
    two.call(priority=-1)
    one.call(priority=5)
    one.board.die(1)
    assert one.call(priority=5).outcome == ""
    one.board.successor(1)
    assert one.board.outstanding(1, -1) == (0, 0), "the successor has no demand for requests that it never had"
    assert one.call(priority=5).outcome == "RejectedCapacity"


def test_a_request_does_not_take_the_fast_path_while_others_wait_elsewhere() -> None:
    (one, two), pool = shards()
    full(pool)
    early = two.call()
    one.clock.now += 1.0
    free(pool)
    late = one.call()
    assert late.outcome == "", "the room is left to the request that waits longer"
    assert wakes(one) == [1]
    two.controller.woken()
    assert early.outcome == "Dispatched"


def test_priorities_minus_one_zero_and_five_in_three_shards_go_by_rank_whichever_shard_looks_first() -> None:
    made, pool = shards(3)
    full(pool)
    calls = [shard.call(priority=priority) for shard, priority in zip(made, (-1, 0, 5), strict=True)]
    for expected in (2, 1, 0):
        free(pool)
        for shard in made:  # the least important looks first
            shard.controller.woken()
        assert [call.outcome for call in calls].count("Dispatched") == 3 - expected
        assert calls[expected].outcome == "Dispatched"
        made[expected].controller.settled(placed=True)
        pool.inflight[0] += 1
        made[0].clock.now += 0.001


def test_a_shard_that_does_not_move_is_ignored_after_ten_milliseconds() -> None:
    (one, two), pool = shards()
    full(pool)
    low, high = one.call(priority=-1), two.call(priority=5)
    free(pool)
    one.controller.woken()
    assert low.outcome == ""
    one.clock.now += PATIENCE_S * 0.6
    one.controller.woken()
    assert low.outcome == ""
    one.clock.now += PATIENCE_S * 0.6
    one.controller.woken()
    assert (low.outcome, high.outcome) == ("Dispatched", "")


@pytest.mark.parametrize("recovers", [True, False])
def test_a_shard_that_yields_to_a_stuck_shard_has_time_to_find_that_out(recovers: bool) -> None:
    (low, middle, stuck), pool = shards(3, made=plan(band(-1), band(0), band(5)))
    full(pool)
    lowest, next_one = low.call(priority=-1), middle.call(priority=0)
    stuck.call(priority=5)
    free(pool)
    low.controller.woken()
    low.clock.now += PATIENCE_S * 1.1
    low.controller.woken()  # now it ignores the stuck shard and waits for the middle one
    low.clock.now += PATIENCE_S * 0.1
    middle.controller.woken()
    low.clock.now += PATIENCE_S
    low.controller.woken()
    assert (lowest.outcome, next_one.outcome) == ("", "")
    if recovers:
        low.clock.now += PATIENCE_S * 0.1
        middle.controller.woken()
        assert (lowest.outcome, next_one.outcome) == ("", "Dispatched")
    else:
        low.clock.now += YIELDING_S - PATIENCE_S
        low.controller.woken()
        assert (lowest.outcome, next_one.outcome) == ("Dispatched", "")


def test_room_is_left_to_a_more_important_band_in_another_replica_for_fifty_milliseconds() -> None:
    (one,), pool = shards(1, made=plan(band(-1), band(0), band(5)), each=2)
    full(pool)
    one.board.elsewhere = Elsewhere(0, 1)
    low, same, high = one.call(priority=-1), one.call(priority=0), one.call(priority=5)
    free(pool)
    one.controller.woken()
    free(pool)
    one.controller.woken()
    assert (low.outcome, same.outcome, high.outcome) == ("", "Dispatched", "Dispatched")
    free(pool)
    one.controller.woken()
    one.clock.now += ELSEWHERE_S * 0.9
    one.board.elsewhere = Elsewhere(0, 2)  # it has let a request through
    one.controller.woken()
    one.clock.now += ELSEWHERE_S * 0.9
    one.controller.woken()
    assert low.outcome == ""
    one.clock.now += ELSEWHERE_S * 0.2
    one.controller.woken()
    assert low.outcome == "Dispatched"


def test_a_replica_that_is_stuck_is_ignored_at_first_until_it_lets_a_request_through() -> None:
    (one,), pool = shards(1)
    one.board.elsewhere = Elsewhere(5, 1)
    first = one.call(priority=-1)
    assert first.outcome == "", "it waits, although there is room"
    one.clock.now += ELSEWHERE_S * 1.1
    one.controller.woken()
    assert first.outcome == "Dispatched"
    full(pool)
    one.controller.settled(placed=True)
    second, third = one.call(priority=-1), one.call(priority=-1)
    free(pool)
    one.controller.woken()
    assert second.outcome == "Dispatched"
    full(pool)
    one.controller.settled(placed=True)
    one.board.elsewhere = Elsewhere(5, 2)
    free(pool)
    one.controller.woken()
    assert third.outcome == ""
    one.board.elsewhere = None
    one.controller.woken()
    assert third.outcome == "Dispatched"


def test_a_replica_that_stays_stuck_goes_first_again_after_rests_that_become_longer() -> None:
    board = Board(1)
    board.elsewhere = Elsewhere(5, 1)
    order, now, changes = ShardOrder(BoardPeers(board)), 0.0, list[float]()
    before = False
    while now < 20 * ELSEWHERE_REST_S_MAX:
        ahead = order.ahead(-1, 0.0, 0.0, now)
        if ahead != before:
            changes.append(now)
        before, now = ahead, now + 0.001
    gone_first = [end - begin for begin, end in zip(changes[::2], changes[1::2], strict=False)]
    rests = [begin - end for end, begin in zip(changes[1::2], changes[2::2], strict=False)]
    assert gone_first == pytest.approx([ELSEWHERE_S] * len(gone_first), abs=0.002)
    assert rests[:3] == pytest.approx([ELSEWHERE_REST_S, 2 * ELSEWHERE_REST_S, 4 * ELSEWHERE_REST_S], abs=0.002)
    assert rests[-1] == pytest.approx(ELSEWHERE_REST_S_MAX, abs=0.002)
    board.elsewhere = Elsewhere(5, 2)
    assert order.ahead(-1, 0.0, 0.0, now), "it has let a request through"


def test_patience_starts_again_after_a_time_without_room() -> None:
    (one, two), pool = shards()
    full(pool)
    low = one.call(priority=-1)
    two.call(priority=5)
    free(pool)
    one.controller.woken()
    full(pool)
    one.clock.now += PATIENCE_S
    one.controller.woken()
    free(pool)
    one.controller.woken()
    assert low.outcome == "", "the other shard had no room either"


def test_a_shard_without_a_heartbeat_is_not_waited_for() -> None:
    (one, two), pool = shards()
    full(pool)
    low = one.call(priority=-1)
    two.call(priority=5)
    one.board.areas[1].fresh = False
    free(pool)
    one.controller.woken()
    assert low.outcome == "Dispatched"


def test_a_wake_is_not_repeated_while_it_is_not_answered() -> None:
    (one, two), pool = shards()
    full(pool)
    one.call(priority=-1)
    two.call(priority=5)
    free(pool)
    for _ in range(5):
        one.controller.woken()
    assert wakes(one) == [1]
    one.clock.now += REPEAT_S * 1.1
    one.controller.woken()
    assert wakes(one) == [1]


def test_a_response_that_ends_where_nothing_waits_wakes_the_shard_with_the_best_claim() -> None:
    (one, two, three), pool = shards(3)
    full(pool)
    two.call(priority=0)
    three.call(priority=5)
    free(pool)
    one.controller.released()
    assert wakes(one) == [2]


def test_a_shard_with_nothing_left_wakes_another_one() -> None:
    (one, two), pool = shards(each=2)
    full(pool)
    high, low = one.call(priority=5), two.call(priority=-1)
    free(pool, 2)
    one.controller.woken()
    assert high.outcome == "Dispatched"
    assert wakes(one) == [1]
    two.controller.woken()
    assert low.outcome == "Dispatched"


@pytest.mark.parametrize("isolates", [True, False])
def test_within_a_band_the_older_claim_goes_first_with_a_tolerance(isolates: bool) -> None:
    (one, two), pool = shards()
    for shard in (one, two):
        for each in shard.controller._registry.order:
            each.plan.fairness.isolates = isolates
    full(pool)
    older = two.call()
    one.clock.now += 0.015
    newer = one.call()
    free(pool)
    one.controller.woken()
    assert newer.outcome == "Dispatched", "15 ms are within the tolerance"
    one.controller.settled(placed=True)
    full(pool)
    one.clock.now += 0.010
    newest = one.call()
    free(pool)
    one.controller.woken()
    assert newest.outcome == ""
    two.controller.woken()
    assert older.outcome == "Dispatched"


def test_with_isolated_flows_a_backlog_elsewhere_does_not_delay_another_tenant() -> None:
    (one, two), pool = shards()
    full(pool)
    backlog = [one.call("greedy") for _ in range(5)]
    one.clock.now += 10.0
    free(pool)
    one.controller.woken()
    assert backlog[0].outcome == "Dispatched"
    one.controller.settled(placed=True)
    full(pool)
    small = two.call("small")  # the backlog is 10 s old, but its flow was just served
    free(pool)
    two.controller.woken()
    assert small.outcome == "Dispatched"
    assert backlog[1].outcome == ""


class Named(InTurn):
    """Ranks flows by name over all shards: the first in the alphabet goes first."""

    ranks = True
    tolerance = 0.5

    def share(self, key: object) -> "NamedTurns":
        return NamedTurns()


class NamedTurns(Turns):
    def meet(self, ledger: Ledger) -> None:
        """Names need no ledger."""

    def pick(self, now: float) -> FlowView | None:
        return min(self.waiting.values(), key=self.claim, default=None)

    def claim(self, flow: FlowView) -> float:
        return float(ord(flow.key.fairness_id))


def test_a_policy_that_ranks_decides_over_all_shards_whatever_the_age_of_the_requests() -> None:
    (one, two), pool = shards(made=plan(band(0, fairness=Named("named", NoParams()))))
    full(pool)
    early = one.call("b")
    one.clock.now += 10.0
    late = two.call("a")
    free(pool)
    one.controller.woken()
    assert early.outcome == ""
    two.controller.woken()
    assert late.outcome == "Dispatched"


def test_a_new_flow_with_an_earlier_claim_is_shown_at_once() -> None:
    (one, two), pool = shards(made=plan(band(0, fairness=Named("named", NoParams()))))
    full(pool)
    two.call("c")
    first = two.call("a")
    second = one.call("b")
    free(pool)
    one.controller.woken()
    assert (first.outcome, second.outcome) == ("", ""), "the room is left to the earlier claim"
    two.controller.woken()
    assert first.outcome == "Dispatched"


@pytest.mark.parametrize("broken", ["claim", "meet"])
def test_a_policy_that_fails_to_rank_is_counted_and_its_band_is_dispatched(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*_: object) -> float:
        raise RuntimeError("a bug")

    monkeypatch.setattr(NamedTurns, broken, raises)
    (one, two), pool = shards(made=plan(band(0, fairness=Named("named", NoParams()))))
    full(pool)
    calls = [shard.call(name) for shard in (one, two) for name in "ab"]
    free(pool)
    for _ in range(20):
        for shard in (one, two):
            shard.controller.woken()
            if shard.peers.area.pending:
                shard.controller.settled(placed=True)
        one.clock.now += 0.005
    assert [call.outcome for call in calls] == ["Dispatched"] * 4
    assert {name for name, _ in (*one.seen.failures, *two.seen.failures)} == {"named"}


def test_a_claim_that_is_not_a_number_is_a_failure_of_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NamedTurns, "claim", lambda self, flow: float("nan"))
    (one, two), pool = shards(made=plan(band(0, fairness=Named("named", NoParams()))))
    full(pool)
    one.call("a"), two.call("a")
    free(pool)
    one.controller.woken()
    assert one.seen.failures[0] == ("named", "a claim is not a number")


def test_a_tenant_in_one_shard_gets_as_many_tokens_as_one_in_all_of_them() -> None:
    tokens = TokenWeighted("tokens", TokenWeighted.Params())
    made, pool = shards(4, plan(band(0, fairness=tokens)))
    full(pool)
    for shard in made:
        for _ in range(60):
            shard.call("big", size=2000)
    small = [made[2].call("small", size=2000) for _ in range(60)]
    for _ in range(100):
        free(pool)
        before = pool.dispatched()
        for shard in [*made, *made]:  # a shard that yielded looks again
            if pool.dispatched() == before:
                shard.controller.woken()
        for shard in made:
            if shard.peers.area.pending:
                shard.controller.settled(placed=True)
        full(pool)
        made[0].clock.now += 0.001
    assert pool.dispatched() == 100
    assert sum(call.outcome == "Dispatched" for call in small) == pytest.approx(50, abs=3)
