"""Whose turn it is among the flows of a band."""

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping
from heapq import heappop, heappush
from itertools import count
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.decision import Decision, ProfileRun, Response, Usage
from epp.flow.ports import Held
from epp.plugin import FairnessPolicy
from epp.plugins.fairness.global_strict import GlobalStrict
from epp.plugins.fairness.program_aware import EXACT_MAX, REFRESH_S, ProgramAware, Scores
from epp.plugins.fairness.round_robin import RoundRobin
from epp.plugins.fairness.token_weighted import TOLERANCE, TokenWeighted, Turns
from epp.plugins.ordering.edf import EarliestDeadline
from epp.plugins.ordering.fcfs import FirstCome
from epp.prefix.match import APPROXIMATE, PrefixMatch, prefix_match
from tests.contract.waiting import Band, Waits, asking, made
from tests.epp.flow.shards import Board, BoardPeers
from tests.fakes import FakeServices, candidates, request

Tokens = Callable[[str], tuple[int, int]]  # of a flow's next request: input, output


def decision() -> Decision:
    plain = candidates({"waiting_requests": [0.0, 0.0]})
    run = ProfileRun(plain, plain.zeros(), [1])
    return Decision(run.targets, {"default": run}, "default")


def answer(policy: Any, item: Waits, now: float, usage: Usage | None, status: int = 200) -> None:
    item.request.now = now
    response = Response(status)
    response.usage = usage
    policy.response_complete(item.request, decision(), response)


def names(band: Band, dispatches: int) -> str:
    served = (band.dispatch(1.0) for _ in range(dispatches))
    return "".join(item.flow.fairness_id for item in served if item is not None)


def band(cls: type[FairnessPolicy], ordering: Any = FirstCome, **parameters: Any) -> Band:
    return Band(made(cls, **parameters), made(ordering))


class Fleet:
    """Servers that serve so many requests at once, each for as long as its tokens take; flows send as they please.

    Everything that arrives waits in one band; what is freed goes to whose turn it is.
    """

    def __init__(self, policy: FairnessPolicy, tokens: Tokens, slots: int = 8, seed: int = 1) -> None:
        self.band = Band(policy, made(FirstCome))
        self.policy = policy
        self.tokens = tokens
        self.free = slots
        self.rng = random.Random(seed)
        self.served: Counter[str] = Counter()
        self.waits: dict[str, list[float]] = {}
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()

    def arrivals(self, rates: Mapping[str, float], until: float) -> None:
        for name, rate in rates.items():
            now = self.rng.expovariate(rate)
            while now < until:
                self._at(now, lambda at, name=name: self._arrive(name, at))
                now += self.rng.expovariate(rate)

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            now, _, act = heappop(self._events)
            act(now)
            while self.free:
                item = self.band.dispatch(now)
                if item is None:
                    break
                self._serve(item, now)

    def _at(self, when: float, act: Callable[[float], None]) -> None:
        heappush(self._events, (when, next(self._order), act))

    def _arrive(self, name: str, now: float) -> None:
        self.band.offer(asking(name, arrival=now, bytes=2000))

    def _serve(self, item: Waits, now: float) -> None:
        name = item.flow.fairness_id
        self.free -= 1
        self.waits.setdefault(name, []).append(now - item.arrival)
        prompt, output = self.tokens(name)
        if hasattr(self.policy, "before_send"):
            item.request.now = now
            self.policy.before_send(item.request, decision())
        self._at(now + (prompt + 10 * output) / 10_000, lambda at: self._end(item, at, prompt, output))

    def _end(self, item: Waits, now: float, prompt: int, output: int) -> None:
        self.free += 1
        self.served[item.flow.fairness_id] += prompt + output
        if hasattr(self.policy, "response_complete"):
            answer(self.policy, item, now, Usage(prompt, output, 0))


def jain(values: list[float]) -> float:
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


def p95(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.95)]


# Global strict


def test_global_strict_is_one_line_for_all() -> None:
    b = band(GlobalStrict)
    for name, arrival in (("b", 2), ("a", 1), ("a", 4), ("b", 3)):
        b.offer(asking(name, arrival=arrival))
    assert names(b, 9) == "abba"


def test_global_strict_goes_by_the_bands_ordering() -> None:
    b = band(GlobalStrict, EarliestDeadline)
    for name, ttl_s in (("a", 30), ("b", 10), ("a", 20), ("b", 40)):
        b.offer(Waits(name, arrival=1.0, ttl_s=ttl_s))
    assert names(b, 9) == "baab"


def test_global_strict_isolates_nobody() -> None:
    assert not GlobalStrict.isolates
    b = band(GlobalStrict)
    for number in range(20):
        b.offer(asking("big", arrival=number))
    b.offer(asking("small", arrival=20))
    assert names(b, 20) == "big" * 20


# Round robin


def test_round_robin_gives_each_flow_one_turn_and_a_new_one_waits_for_the_others_once() -> None:
    b = band(RoundRobin)
    for name in "aaabbb":
        b.offer(asking(name))
    assert names(b, 2) == "ab"
    b.offer(asking("c"))
    assert names(b, 9) == "abcab"


def test_a_flow_that_was_empty_does_not_jump_the_line() -> None:
    b = band(RoundRobin)
    for name in "abbb":
        b.offer(asking(name))
    assert names(b, 1) == "a"
    b.offer(asking("a"))
    assert names(b, 9) == "babb"


# Tokens, by weight


@given(
    sizes=st.lists(st.integers(0, 4000), min_size=60, max_size=60),
    weights=st.tuples(*[st.sampled_from([0.5, 1.0, 2.0, 5.0])] * 3),
    quantum=st.sampled_from([1, 100, 512, 5000]),
)
@settings(max_examples=60, deadline=None)
def test_two_backlogged_flows_stay_within_the_bound_at_every_moment(
    sizes: list[int], weights: tuple[float, ...], quantum: int
) -> None:
    """Estimates are exact here: nothing is ever reported, and bytes are tokens times 4. Looked at over any stretch of time."""
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
        assert (
            max(ahead, default=0) - min(ahead, default=0)
            <= 2 * quantum + most / weight[one] + most / weight[other] + 1e-6
        )


def test_weights_say_who_gets_how_much() -> None:
    b = band(TokenWeighted, weights={"gold": 3}, defaultWeight=1)
    for name in ("gold", "iron"):
        for _ in range(400):
            b.offer(Waits(name, bytes=1000))
    served = Counter(item.flow.fairness_id for _ in range(400) if (item := b.dispatch(0.0)) is not None)
    assert served["gold"] == pytest.approx(300, abs=6)


def test_large_requests_have_fewer_turns() -> None:
    b = band(TokenWeighted, expectedOutputTokens=0)
    for _ in range(900):
        b.offer(Waits("long", bytes=40_000))
        b.offer(Waits("short", bytes=4_000))
    served = Counter(item.flow.fairness_id for _ in range(880) if (item := b.dispatch(0.0)) is not None)
    assert served["short"] == pytest.approx(800, abs=12)


def test_what_answers_cost_more_than_expected_is_made_up_for() -> None:
    """Same bytes, but one flow's answers are a hundred times as long: tokens end up equal all the same."""
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


def test_cached_prompt_tokens_cost_nothing_by_report_or_by_the_prefix_match() -> None:
    policy = made(TokenWeighted)
    share = policy.share(lambda item: item.arrival)
    assert isinstance(share, Turns)
    b = Band(policy, made(FirstCome))
    spent = []
    for usage, match in (
        (Usage(1000, 10, 900), None),
        (Usage(1000, 10), PrefixMatch(np.array([0.0, 9.0]), np.zeros(10, dtype=np.uint64), 100)),
        (Usage(1000, 10), None),
    ):
        item = b.offer(asking("a"))
        b.dispatch(0.0)
        if match is not None:
            item.request[prefix_match(APPROXIMATE)] = match
        charge = item.request[policy.keeps[0]]
        answer(policy, item, 0.0, usage)
        spent.append(charge.prompt + charge.output - charge.account.owed)
    assert spent == pytest.approx([110, 110, 1010])


def test_the_requests_own_limit_bounds_the_output_that_is_expected() -> None:
    policy = made(TokenWeighted, expectedOutputTokens=500)
    b = Band(policy, made(FirstCome))
    item = b.offer(asking("a", max_tokens=16))
    b.dispatch(0.0)
    assert item.request[policy.keeps[0]].output == 16


@pytest.mark.parametrize("status", [0, 400, 503])
def test_answers_that_fail_cost_nothing_and_win_no_turns(status: int) -> None:
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


def test_who_asks_for_little_is_served_at_the_next_dispatch_but_one() -> None:
    b = band(TokenWeighted)
    for number in range(1000):
        b.offer(asking(f"big{number % 100}", bytes=100_000))
    for _ in range(500):
        b.dispatch(0.0)
    for _ in range(3):
        small = b.offer(asking("small", bytes=100))
        assert any(b.dispatch(0.0) is small for _ in range(2))


@pytest.mark.parametrize("bytes", [100, 1000, 20_000])
def test_however_many_newcomers_there_are_the_others_keep_their_rounds(bytes: int) -> None:
    """Three new names at each dispatch, more than can ever be served: the first flow gets as many tokens as they all do."""
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
    rounds = max(1.0, bytes / 4 / 512)  # that one of its requests takes
    assert served[True] >= 0.95 * 1000 / (rounds + 1)


def test_a_flow_that_comes_back_all_the_time_gets_its_share_of_tokens_and_no_more() -> None:
    """It is fresh at each of its large requests; the other has small ones waiting all the time."""
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
    """It was away for a thousand rounds, and gets no more than its share from now on."""
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


def test_debts_end_with_the_busy_period() -> None:
    b = band(TokenWeighted)
    b.offer(Waits("a", bytes=10**7))
    assert b.dispatch(0.0) is not None  # nothing waits now
    for name in "ab":
        for _ in range(10):
            b.offer(Waits(name, bytes=100))
    assert set(names(b, 4)) == {"a", "b"}


class Workers:
    """Bands of several workers that see each other; the one whose turn is the earliest goes, as the controller has it."""

    def __init__(self, count: int, **parameters: Any) -> None:
        self.board = Board(count)
        self.bands = [
            Band(made(TokenWeighted, **parameters), made(FirstCome), ledger=BoardPeers(self.board, n).ledger(0))
            for n in range(count)
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
        self.board.lanes[worker].progress += 1
        self._show(worker)
        return item

    def names(self, dispatches: int) -> str:
        return "".join(item.flow.fairness_id for _ in range(dispatches) if (item := self.dispatch()) is not None)

    def _show(self, worker: int) -> None:
        self.board.lanes[worker].bands[0] = Held(len(self.bands[worker]))


@given(
    places=st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.integers(0, 4000)), min_size=150, max_size=150
    ),
    weights=st.tuples(*[st.sampled_from([0.5, 1.0, 2.0, 5.0])] * 3),
)
@settings(max_examples=40, deadline=None)
def test_the_bound_holds_over_workers_in_whichever_of_them_flows_wait(
    places: list[tuple[str, int, int]], weights: tuple[float, ...]
) -> None:
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


def test_a_flow_in_many_workers_gets_no_more_than_one_in_a_single_worker() -> None:
    workers = Workers(4)
    for worker in range(4):
        workers.offer(worker, *(Waits("big", bytes=2000) for _ in range(200)))
    workers.offer(1, *(Waits("small", bytes=2000) for _ in range(200)))
    served = Counter(item.flow.fairness_id for _ in range(200) if (item := workers.dispatch()) is not None)
    assert served["small"] == pytest.approx(100, abs=2)


def test_newcomers_in_another_worker_leave_the_others_half() -> None:
    workers = Workers(2, expectedOutputTokens=0)
    workers.offer(0, *(Waits("old", bytes=2000) for _ in range(600)))
    workers.dispatch()
    served: Counter[bool] = Counter()
    for number in range(1000):
        workers.offer(1, *(Waits(f"new{number}-{each}", bytes=2000) for each in range(3)))
        item = workers.dispatch()
        assert item is not None
        served[item.flow.fairness_id == "old"] += 1
    assert served[True] >= 0.47 * 1000


def test_debts_last_as_long_as_something_waits_in_any_worker() -> None:
    workers = Workers(2)
    workers.offer(1, *(Waits("b", bytes=10_000) for _ in range(100)))
    workers.offer(0, Waits("a", bytes=10**6))
    while (item := workers.dispatch()) is not None and item.flow.fairness_id != "a":
        pass
    workers.offer(0, *(Waits("a", bytes=100) for _ in range(5)))  # nothing waited in its worker meanwhile
    assert workers.names(20) == "b" * 20
    while workers.dispatch() is not None:
        pass
    workers.offer(1, *(Waits("b", bytes=100) for _ in range(5)))
    workers.offer(0, *(Waits("a", bytes=100) for _ in range(5)))
    assert set(workers.names(2)) == {"a", "b"}


@pytest.mark.parametrize("tokens", [-5, 10**30])
def test_whatever_a_server_reports_nobody_is_locked_out_or_given_the_pool(tokens: int) -> None:
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
    [
        {"weights": {"a": 0}},
        {"weights": {"a": 1001}},
        {"defaultWeight": 0},
        {"quantumTokens": 0},
        {"weights": [1]},
        {"quantum": 1},
    ],
)
def test_weights_are_numbers_above_0_within_reason(parameters: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        made(TokenWeighted, **parameters)


RATES = {"small": 8.0, "big": 80.0}  # requests per second; the fleet serves about 14 of them


def tokens_of(rng: random.Random) -> Tokens:
    return lambda name: (rng.randrange(100, 900), rng.randrange(10, 1000))


def overloaded(cls: type[FairnessPolicy], rates: Mapping[str, float] = RATES, seconds: float = 60.0) -> Fleet:
    fleet = Fleet(made(cls), tokens_of(random.Random(5)))
    fleet.arrivals(rates, seconds)
    fleet.run(seconds)
    return fleet


def test_ten_to_one_in_arrivals_is_one_to_one_in_tokens() -> None:
    fleet = overloaded(TokenWeighted)
    assert jain([fleet.served[name] for name in RATES]) >= 0.99


def test_global_strict_shows_the_contrast() -> None:
    fleet = overloaded(GlobalStrict)
    assert jain([fleet.served[name] for name in RATES]) < 0.65


def test_a_small_tenant_waits_as_if_it_were_nearly_alone() -> None:
    """A tenant within its share waits for the next answer to end, and for no backlog."""
    shared = overloaded(TokenWeighted, {"small": 2.0, "big": 80.0})
    strict = overloaded(GlobalStrict, {"small": 2.0, "big": 80.0})
    assert p95(shared.waits["small"]) < 0.4  # about 14 answers end per second
    assert p95(strict.waits["small"]) > 10


# Programs


def naive(flows: Mapping[str, tuple[float, float]], now: float, by_service: float, by_wait: float) -> dict[str, float]:
    """Name -> score, from (service, arrival), as the formula is written."""

    def normal(value: float, values: list[float]) -> float:
        low, high = min(values), max(values)
        return 0.5 if low == high else (value - low) / (high - low)

    services = [service for service, _ in flows.values()]
    ages = [now - arrival for _, arrival in flows.values()]
    return {
        name: by_service * (1 - normal(service, services)) + by_wait * normal(now - arrival, ages)
        for name, (service, arrival) in flows.items()
    }


@given(
    services=st.lists(st.integers(0, 10_000), min_size=1, max_size=20),
    data=st.data(),
    weights=st.sampled_from([(0.8, 0.2), (0.0, 1.0), (1.0, 0.0), (0.3, 0.9)]),
    half_life=st.sampled_from([0.0, 1.0, 60.0]),
)
@settings(max_examples=80, deadline=None)
def test_the_highest_score_goes_next(
    services: list[int], data: st.DataObject, weights: tuple[float, float], half_life: float
) -> None:
    policy = made(ProgramAware, lasWeightService=weights[0], lasWeightHeadWait=weights[1], lasHalfLifeSeconds=half_life)
    b = Band(policy, made(FirstCome))
    attained = {f"u{number}": float(service) for number, service in enumerate(services)}
    at = {}
    for name, service in attained.items():
        at[name] = data.draw(st.integers(0, 30))
        answer(policy, asking(name), float(at[name]), Usage(service, 0))
    arrivals = {name: float(data.draw(st.integers(31, 60))) for name in attained}
    for name, arrival in arrivals.items():
        b.offer(asking(name, arrival=arrival))

    def faded(name: str, now: float) -> float:
        return attained[name] * (2 ** (-(now - at[name]) / half_life) if half_life else 1.0)

    for now in (61.0, 62.5, 200.0):
        scores = naive({name: (faded(name, now), arrivals[name]) for name in arrivals}, now, *weights)
        picked = b.share.pick(now)
        assert picked is not None
        name = picked.key.fairness_id
        assert scores[name] == pytest.approx(max(scores.values()), abs=1e-6)
        more = data.draw(st.integers(0, 5000))
        answered = int(now) + 1  # when its answer ends: what it had has faded until then
        attained[name], at[name] = faded(name, answered) + 2 * more, answered
        answer(policy, asking(name), float(at[name]), Usage(0, more))


def test_many_flows_are_scored_anew_every_few_milliseconds() -> None:
    policy = made(ProgramAware)
    b = Band(policy, made(FirstCome))
    for number in range(200):
        answer(policy, asking(f"u{number}"), 0.0, Usage(1000 + number, 0))
        b.offer(asking(f"u{number}", arrival=1.0))
    first = b.share.pick(2.0)
    assert first is not None and first.key.fairness_id == "u0"
    b.offer(asking("newcomer", arrival=1.0))
    for now in (2.001, 2.02):
        newest = b.share.pick(now)
        assert newest is not None and newest.key.fairness_id == "newcomer"


def test_the_least_served_goes_next_while_few_flows_become_many_and_few_again() -> None:
    policy = made(ProgramAware, lasWeightHeadWait=0.0)
    b = Band(policy, made(FirstCome))
    services = random.Random(3).sample(range(2, 10_000), 2 * EXACT_MAX)
    services[EXACT_MAX - 2] = 1  # between two picks
    now = 2.0
    for flows, service in enumerate(services, 1):
        answer(policy, asking(f"u{service}"), 0.0, Usage(service, 0))
        b.offer(asking(f"u{service}", arrival=1.0))
        now += 1e-5
        if flows in (EXACT_MAX // 2, EXACT_MAX + 1):
            picked = b.share.pick(now)
            assert picked is not None and picked.key.fairness_id == f"u{min(services[:flows])}"
    now += REFRESH_S
    for service in sorted(services):
        picked = b.share.pick(now)
        assert picked is not None and picked.key.fairness_id == f"u{service}"
        b.dispatch(now)
        now += 1e-5


def test_programs_are_forgotten_when_they_have_been_idle_and_have_nothing_in_flight() -> None:
    services = FakeServices()
    policy = ProgramAware("p", ProgramAware.Params(eviction_ttl_seconds=100.0, eviction_sweep_seconds=7.0))
    policy.start(services)
    ((every, sweep),) = services.periodic
    assert every == 7.0
    b = Band(policy, made(FirstCome))
    idle, flying, waiting = asking("idle"), asking("flying"), b.offer(asking("waiting"))
    for item in (idle, flying):
        policy.before_send(item.request, decision())
    answer(policy, idle, 1.0, None)
    answer(policy, asking("clock"), 102.0, None)
    sweep()
    assert set(policy._programs) == {"flying", "waiting", "clock"}
    answer(policy, flying, 103.0, None)
    assert b.dispatch(103.0) is waiting
    answer(policy, asking("clock"), 300.0, None)
    sweep()
    assert set(policy._programs) == {"clock"}


def test_a_ttl_of_0_forgets_nobody() -> None:
    services = FakeServices()
    ProgramAware("p", ProgramAware.Params(eviction_ttl_seconds=0.0)).start(services)
    assert services.periodic == []


def test_many_that_are_not_told_apart_attain_as_one() -> None:
    """Beyond the number of flows that a worker tells apart, all wait in one; new names win nothing."""
    policy = made(ProgramAware)
    share = policy.share(lambda item: item.arrival)
    assert isinstance(share, Scores)
    b = Band(policy, made(FirstCome))
    crowd = b.offer(Waits("other", request=request(fairness_id="one-of-a-million")))
    assert b.dispatch(0.0) is crowd
    policy.before_send(crowd.request, decision())
    answer(policy, crowd, 1.0, Usage(500, 0))
    assert list(policy._programs) == ["other"]
    assert policy._programs["other"].service == 500


@pytest.mark.parametrize(
    "parameters",
    [
        {"lasDecayFactor": 0.9},
        {"strategy": "fifo"},
        {"lasWeightService": -1},
        {"lasWeightHeadWait": -1},
        {"lasHalfLifeSeconds": -1},
        {"evictionTtlSeconds": -1},
        {"evictionSweepSeconds": 0},
    ],
)
def test_parameters_of_old_or_without_sense_are_refused(parameters: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        made(ProgramAware, **parameters)


def test_an_empty_strategy_is_the_only_one_there_is() -> None:
    assert made(ProgramAware, strategy="").params.las_weight_service == 0.8
