"""Flows get tokens in proportion to their weights, over all workers, and no flow waits for long."""

import math
import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.decision.decision import Usage
from epp.flow.ports import Held
from epp.plugin import FairnessPolicy
from epp.plugins.fairness.global_strict import GlobalStrict
from epp.plugins.fairness.token_weighted import TOLERANCE, TokenWeighted, Turns
from epp.plugins.ordering import FirstCome
from epp.prefix.match import APPROXIMATE, PrefixMatch, prefix_match
from tests.contract.waiting import Band, Waits, asking, made
from tests.epp.flow.shards import Board, BoardPeers
from tests.epp.plugins.fairness import Fleet, Tokens, answer, band, jain, names, p95
from tests.examples import examples


@given(
    sizes=st.lists(st.integers(0, 4000), min_size=60, max_size=60),
    weights=st.tuples(*[st.sampled_from([0.5, 1.0, 2.0, 5.0])] * 3),
    quantum=st.sampled_from([1, 100, 512, 5000]),
)
@examples(60)
def test_two_backlogged_flows_stay_within_the_bound_at_every_moment(sizes: list[int], weights: tuple[float, ...], quantum: int) -> None:
    """Estimates are exact: no usage is reported, and a body has 4 bytes per token. The bound is checked for every period."""
    weight = dict(zip("abc", weights, strict=True))
    b = band(TokenWeighted, weights=weight, quantumTokens=quantum, expectedOutputTokens=0)
    for name in "abc":
        for size in sizes:
            b.offer(Waits(name, bytes=size * 4))
    most = max(1, *sizes)
    got = [dict.fromkeys("abc", 0.0)]
    while all(len(flow) for flow in b.known.values()):
        item = b.dispatch(0.0)
        assert item is not None
        got.append({**got[-1], item.flow.fairness_id: got[-1][item.flow.fairness_id] + max(1, item.bytes / 4)})
    for one, other in ("ab", "ac", "bc"):
        ahead = [at[one] / weight[one] - at[other] / weight[other] for at in got if at[one] and at[other]]
        assert max(ahead, default=0) - min(ahead, default=0) <= 2 * quantum + most / weight[one] + most / weight[other] + 1e-6


def test_flows_get_tokens_in_proportion_to_their_weights() -> None:
    b = band(TokenWeighted, weights={"gold": 3}, defaultWeight=1)
    for name in ("gold", "iron"):
        for _ in range(400):
            b.offer(Waits(name, bytes=1000))
    served = Counter(item.flow.fairness_id for _ in range(400) if (item := b.dispatch(0.0)) is not None)
    assert served["gold"] == pytest.approx(300, abs=6)


def test_a_flow_with_large_requests_has_fewer_turns() -> None:
    b = band(TokenWeighted, expectedOutputTokens=0)
    for _ in range(900):
        b.offer(Waits("long", bytes=40_000))
        b.offer(Waits("short", bytes=4_000))
    served = Counter(item.flow.fairness_id for _ in range(880) if (item := b.dispatch(0.0)) is not None)
    assert served["short"] == pytest.approx(800, abs=12)


def test_answers_that_cost_more_than_estimated_are_charged_later() -> None:
    """Requests have the same size, but one flow's answers are a hundred times as long. Both flows still get the same tokens."""
    policy = made(TokenWeighted)
    b = Band(policy, made(FirstCome))
    tokens: Counter[str] = Counter()
    for _ in range(3000):
        for name in ("terse", "chatty"):
            if len(b.known.get(name, ())) < 5:
                b.offer(asking(name, bytes=400))
        item = b.dispatch(0.0)
        assert item is not None
        name = item.flow.fairness_id
        output = 10 if name == "terse" else 1000
        tokens[name] += 100 + output
        answer(policy, item, 0.0, Usage(100, output, 0))
    assert jain(list(tokens.values())) > 0.999


def test_cached_prompt_tokens_cost_nothing_whether_reported_or_matched() -> None:
    policy = made(TokenWeighted)
    share = policy.share(lambda item: item.arrival)
    assert isinstance(share, Turns)
    b = Band(policy, made(FirstCome))
    spent, blocks = [], np.array([0.0, 9.0])
    held = blocks * 100
    for usage, match in (
        (Usage(1000, 10, 900), None),
        (Usage(1000, 10), PrefixMatch(blocks, np.zeros(10, dtype=np.uint64), 100)),
        (Usage(1000, 10), PrefixMatch(blocks, np.zeros(10, dtype=np.uint64), 100, held=held, weighted=held * 0.8)),
        (Usage(1000, 10), None),
    ):
        item = b.offer(asking("a"))
        b.dispatch(0.0)
        if match is not None:
            item.request[prefix_match(APPROXIMATE)] = match
        charge = item.request[policy.keeps[0]]
        answer(policy, item, 0.0, usage)
        spent.append(charge.prompt + charge.output - charge.account.owed)
    assert spent == pytest.approx([110, 110, 110, 1010])


def test_the_output_limit_of_a_request_bounds_its_estimate() -> None:
    policy = made(TokenWeighted, expectedOutputTokens=500)
    b = Band(policy, made(FirstCome))
    item = b.offer(asking("a", max_tokens=16))
    b.dispatch(0.0)
    assert item.request[policy.keeps[0]].output == 16


@pytest.mark.parametrize("status", [0, 400, 503])
def test_failed_answers_cost_nothing_but_win_no_extra_turns(status: int) -> None:
    policy = made(TokenWeighted)
    b = Band(policy, made(FirstCome))
    served: Counter[str] = Counter()
    for _ in range(1000):
        for name in ("broken", "sound"):
            if len(b.known.get(name, ())) < 5:
                b.offer(asking(name, bytes=400))
        item = b.dispatch(0.0)
        assert item is not None
        served[item.flow.fairness_id] += 1
        if item.flow.fairness_id == "broken":
            answer(policy, item, 0.0, None, status)
        else:
            answer(policy, item, 0.0, Usage(100, 256, 0))
    assert served["sound"] >= 300


def test_a_flow_that_asks_for_little_is_served_within_two_dispatches() -> None:
    b = band(TokenWeighted)
    for number in range(1000):
        b.offer(asking(f"big{number % 100}", bytes=100_000))
    for _ in range(500):
        b.dispatch(0.0)
    for _ in range(3):
        small = b.offer(asking("small", bytes=100))
        assert any(b.dispatch(0.0) is small for _ in range(2))


@pytest.mark.parametrize("bytes", [100, 1000, 20_000])
def test_any_number_of_new_flows_leaves_the_other_flows_their_rounds(bytes: int) -> None:
    """At each dispatch there are three new flows, more than can be served. The old flow gets as many tokens as all of them."""
    b = band(TokenWeighted, expectedOutputTokens=0)
    for _ in range(600):
        b.offer(Waits("old", bytes=bytes))
    b.dispatch(0.0)
    served: Counter[bool] = Counter()
    for number in range(1000):
        for each in range(3):
            b.offer(Waits(f"new{number}-{each}", bytes=bytes))
        item = b.dispatch(0.0)
        assert item is not None
        served[item.flow.fairness_id == "old"] += 1
    rounds = max(1.0, bytes / 4 / 512)  # the number of quanta that one of its requests costs
    assert served[True] >= 0.95 * 1000 / (rounds + 1)


def test_a_flow_that_keeps_coming_back_gets_its_share_of_tokens_and_no_more() -> None:
    """It is fresh for each of its large requests. The other flow has small requests waiting all the time."""
    b = band(TokenWeighted, expectedOutputTokens=0)
    tokens: Counter[str] = Counter()
    for _ in range(3000):
        while len(b.known.get("steady", ())) < 5:
            b.offer(Waits("steady", bytes=200))
        if not len(b.known.get("drip", ())):
            b.offer(Waits("drip", bytes=2000))
        item = b.dispatch(0.0)
        assert item is not None
        tokens[item.flow.fairness_id] += item.bytes
    assert tokens["drip"] == pytest.approx(tokens["steady"], rel=0.05)


def test_time_without_requests_is_not_saved_up() -> None:
    """The flow was away for a thousand rounds. From now on it gets only its share."""
    b = band(TokenWeighted, expectedOutputTokens=0)
    b.offer(Waits("away", bytes=2000))
    for _ in range(3000):
        b.offer(Waits("busy", bytes=2000))
    for _ in range(1000):
        b.dispatch(0.0)
    for _ in range(200):
        b.offer(Waits("away", bytes=2000))
    served = Counter(item.flow.fairness_id for _ in range(200) if (item := b.dispatch(0.0)) is not None)
    assert served["away"] == pytest.approx(100, abs=4)


def test_a_flow_that_empties_between_requests_has_no_advantage() -> None:
    b = band(TokenWeighted, expectedOutputTokens=0)
    for _ in range(3000):
        b.offer(Waits("steady", bytes=2000))
    served: Counter[str] = Counter()
    for _ in range(1000):
        if "drip" not in b.known or not len(b.known["drip"]):
            b.offer(Waits("drip", bytes=2000))
        item = b.dispatch(0.0)
        assert item is not None
        served[item.flow.fairness_id] += 1
    assert served["drip"] <= 520


def test_debts_end_with_the_busy_period_of_the_band() -> None:
    b = band(TokenWeighted)
    b.offer(Waits("a", bytes=10**7))
    assert b.dispatch(0.0) is not None  # now the band is empty
    for name in "ab":
        for _ in range(10):
            b.offer(Waits(name, bytes=100))
    assert set(names(b, 4)) == {"a", "b"}


class Workers:
    """The bands of several workers that see each other. As in the controller, the smallest claim goes first."""

    def __init__(self, count: int, **parameters: Any) -> None:
        self.board = Board(count)
        self.bands = [
            Band(made(TokenWeighted, **parameters), made(FirstCome), ledger=BoardPeers(self.board, n).ledger(0)) for n in range(count)
        ]

    def offer(self, worker: int, *items: Waits) -> None:
        for item in items:
            self.bands[worker].offer(item)
        self._show(worker)

    def dispatch(self) -> Waits | None:
        turns = [(b.share.claim(flow), n) for n, b in enumerate(self.bands) if (flow := b.share.pick(0.0)) is not None]
        if not turns:
            return None
        _, worker = min(turns)
        item = self.bands[worker].dispatch(0.0)
        self.board.areas[worker].progress += 1
        self._show(worker)
        return item

    def names(self, dispatches: int) -> str:
        return "".join(item.flow.fairness_id for _ in range(dispatches) if (item := self.dispatch()) is not None)

    def _show(self, worker: int) -> None:
        self.board.areas[worker].bands[0] = Held(len(self.bands[worker]))


@given(
    places=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.integers(0, 4000)), min_size=150, max_size=150),
    weights=st.tuples(*[st.sampled_from([0.5, 1.0, 2.0, 5.0])] * 3),
)
@examples(40)
def test_the_bound_holds_over_workers_wherever_the_flows_wait(places: list[tuple[str, int, int]], weights: tuple[float, ...]) -> None:
    weight = dict(zip("abc", weights, strict=True))
    workers = Workers(4, weights=weight, quantumTokens=100, expectedOutputTokens=0)
    left = Counter(name for name, _, _ in places)
    for name, worker, size in places:
        workers.offer(worker, Waits(name, bytes=size * 4))
    got = [dict.fromkeys("abc", 0.0)]
    while all(left[name] for name in "abc"):
        item = workers.dispatch()
        assert item is not None
        name = item.flow.fairness_id
        left[name] -= 1
        got.append({**got[-1], name: got[-1][name] + max(1, item.bytes / 4)})
    for one, other in ("ab", "ac", "bc"):
        ahead = [at[one] / weight[one] - at[other] / weight[other] for at in got if at[one] and at[other]]
        most = max(1, *(size for _, _, size in places))
        assert (
            max(ahead, default=0) - min(ahead, default=0)
            <= 2 * 100 + most / weight[one] + most / weight[other] + most / min(weights) + TOLERANCE * 100
        )


def test_a_flow_in_many_workers_gets_no_more_than_a_flow_in_one_worker() -> None:
    workers = Workers(4)
    for worker in range(4):
        workers.offer(worker, *(Waits("big", bytes=2000) for _ in range(200)))
    workers.offer(1, *(Waits("small", bytes=2000) for _ in range(200)))
    served = Counter(item.flow.fairness_id for _ in range(200) if (item := workers.dispatch()) is not None)
    assert served["small"] == pytest.approx(100, abs=2)


@pytest.mark.parametrize("cancelled", [0, 100])
def test_new_flows_in_another_worker_leave_half_of_the_capacity_to_the_others(cancelled: int) -> None:
    workers = Workers(3, expectedOutputTokens=0)
    workers.offer(0, *(Waits("old", bytes=2000) for _ in range(800)))
    gone = [Waits(f"gone{number}", bytes=2000) for number in range(cancelled) for _ in range(3)]
    workers.offer(2, *gone)
    for _ in range(cancelled + 1):
        workers.dispatch()
    for item in gone:
        if id(item) in workers.bands[2].handles:
            workers.bands[2].remove(item)
    served: Counter[bool] = Counter()
    for number in range(1000):
        workers.offer(1, *(Waits(f"new{number}-{each}", bytes=2000) for each in range(3)))
        item = workers.dispatch()
        assert item is not None
        served[item.flow.fairness_id == "old"] += 1
    assert served[True] >= 0.47 * 1000


def test_debts_last_as_long_as_a_request_waits_in_any_worker() -> None:
    workers = Workers(2)
    workers.offer(1, *(Waits("b", bytes=10_000) for _ in range(100)))
    workers.offer(0, Waits("a", bytes=10**6))
    while (item := workers.dispatch()) is not None and item.flow.fairness_id != "a":
        pass
    workers.offer(0, *(Waits("a", bytes=100) for _ in range(5)))  # its worker was empty in the meantime
    assert workers.names(20) == "b" * 20
    while workers.dispatch() is not None:
        pass
    workers.offer(1, *(Waits("b", bytes=100) for _ in range(5)))
    workers.offer(0, *(Waits("a", bytes=100) for _ in range(5)))
    assert set(workers.names(2)) == {"a", "b"}


def test_answers_to_short_requests_do_not_make_long_ones_cost_more_than_a_token_per_byte() -> None:
    policy = made(TokenWeighted, expectedOutputTokens=0)
    b = Band(policy, made(FirstCome))
    for _ in range(50):
        item = b.offer(asking("a", bytes=60))
        b.dispatch(0.0)
        answer(policy, item, 0.0, Usage(60 + 1024, 1, 0))
    item = b.offer(asking("a", bytes=100_000))
    b.dispatch(0.0)
    assert item.request[policy.keeps[0]].prompt <= 100_000


@pytest.mark.parametrize("tokens", [-5, 10**30])
def test_a_server_that_reports_nonsense_neither_locks_a_flow_out_nor_gives_it_the_pool(tokens: int) -> None:
    policy = made(TokenWeighted)
    b = Band(policy, made(FirstCome))
    for name in "ab":
        for _ in range(200):
            b.offer(asking(name))
    for _ in range(50):
        item = b.dispatch(0.0)
        assert item is not None
        if item.flow.fairness_id == "a":
            answer(policy, item, 0.0, Usage(tokens, tokens, tokens))
    assert math.isfinite(sum(account.position for account in b.share._accounts.values()))  # type: ignore[attr-defined]
    while b.dispatch(0.0) is not None:
        pass


@pytest.mark.parametrize(
    "parameters",
    [{"weights": {"a": 0}}, {"weights": {"a": 1001}}, {"defaultWeight": 0}, {"quantumTokens": 0}, {"weights": [1]}, {"quantum": 1}],
)
def test_weights_that_are_not_above_0_or_too_large_are_refused(parameters: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        made(TokenWeighted, **parameters)


RATES = {"small": 8.0, "big": 80.0}  # requests per second; the fleet can serve about 14


def tokens_of(rng: random.Random) -> Tokens:
    return lambda name: (rng.randrange(100, 900), rng.randrange(10, 1000))


def overloaded(cls: type[FairnessPolicy], rates: Mapping[str, float] = RATES, seconds: float = 60.0) -> Fleet:
    fleet = Fleet(made(cls), tokens_of(random.Random(5)))
    fleet.arrivals(rates, seconds)
    fleet.run(seconds)
    return fleet


def test_flows_with_arrivals_of_ten_to_one_get_equal_tokens() -> None:
    fleet = overloaded(TokenWeighted)
    assert jain([fleet.served[name] for name in RATES]) >= 0.99


def test_global_strict_does_not_share_tokens_equally() -> None:
    fleet = overloaded(GlobalStrict)
    assert jain([fleet.served[name] for name in RATES]) < 0.65


def test_a_small_tenant_waits_almost_as_if_it_were_alone() -> None:
    """A tenant within its share waits for the next answer to end, but not for a backlog."""
    shared = overloaded(TokenWeighted, {"small": 2.0, "big": 80.0})
    strict = overloaded(GlobalStrict, {"small": 2.0, "big": 80.0})
    assert p95(shared.waits["small"]) < 0.4  # about 14 answers end per second
    assert p95(strict.waits["small"]) > 10
