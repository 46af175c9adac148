"""Tests of the latency model: on servers whose latency is known, and on any observations."""

import math
import random
from collections.abc import Callable, Iterator
from statistics import median

import numpy as np
import pytest

from compiled.outlook import CELLS, COSTS, ELAPSED, MEMORY, PROMPTS, TIMES
from epp.learning.endpoint import ERROR_BOUNDS, EndpointModel
from epp.learning.model import DISPLACED, FULL_SCRAPES, LEAST_S, MOST_S, QUEUE, UNCACHED, YOUNG, FirstToken, LatencyModel
from epp.learning.state import decode, encode

SERVERS = 4
Server = Callable[[float, float, float], float]  # uncached tokens, tokens ahead, load -> seconds


def shared_prefill(tokens: float, ahead: float, load: float) -> float:
    return 0.025 + 1e-4 * (tokens + ahead) + 1e-4 * load


def few_slots(tokens: float, ahead: float, load: float) -> float:
    """Prompts are computed side by side; requests above the 8th wait for a place."""
    return 0.02 + 2e-4 * tokens + 0.3 * max(0.0, load - 7.0)


def chunked(tokens: float, ahead: float, load: float) -> float:
    """Each step computes 512 tokens, decoding ones included, in 30 ms."""
    return 0.03 * (1.0 + (tokens + ahead) / (512.0 - min(load, 64.0)))


class Pool:
    """Servers of one kind with speeds of their own. `observe` sends one request to a random one of them, and lets the model learn."""

    def __init__(self, server: Server, speeds: list[float], seed: int = 1) -> None:
        self.model = LatencyModel()
        self.speeds = speeds
        self._server = server
        self._rng = random.Random(seed)
        self._now = 0.0
        for slot in range(len(speeds)):
            for _ in range(FULL_SCRAPES + 1):
                self.model.scraped(slot, 0, 8, 1)

    def observe(self, slot: int | None = None) -> float:
        """Returns the relative error of the prediction."""
        rng, model = self._rng, self.model
        slot = rng.randrange(len(self.speeds)) if slot is None else slot
        self._now += 0.02
        tokens = min(16_000.0, rng.lognormvariate(6.0, 1.2))
        ahead, load = rng.choice((0.0, 0.0, rng.uniform(0.0, 20_000.0))), float(rng.randrange(16))
        observed = self.speeds[slot] * self._server(tokens, ahead, load) * math.exp(rng.gauss(0.0, 0.05))
        predicted = model.first_token_s(slot, tokens, ahead, 0.0, load, self._now)
        model.learn_first(FirstToken(self._now, slot, 0, tokens, ahead, 0.0, load, predicted, observed))
        return abs(predicted - observed) / observed


@pytest.mark.parametrize("server", [shared_prefill, few_slots, chunked])
@pytest.mark.parametrize("speeds", [[1.0] * 4, [1.0, 1.0, 1.0, 3.0]], ids=["equal", "mixed"])
def test_predicts_within_15_percent_after_500_requests_per_endpoint(server: Server, speeds: list[float]) -> None:
    pool = Pool(server, speeds)
    for _ in range(500 * SERVERS):
        pool.observe()
    assert median(pool.observe() for _ in range(400)) <= 0.15
    assert pool.model.trusted


def test_loses_half_of_the_error_within_200_requests_after_an_endpoint_became_three_times_slower() -> None:
    pool = Pool(shared_prefill, [1.0] * SERVERS)
    for _ in range(500 * SERVERS):
        pool.observe()
    pool.speeds[2] = 3.0
    before = median(pool.observe(2) for _ in range(5))
    for _ in range(200):
        pool.observe(2)
    assert median(pool.observe(2) for _ in range(51)) <= before / 2
    assert median(pool.observe(0) for _ in range(51)) <= 0.3, "the others are still predicted well"


def test_an_endpoint_without_requests_becomes_faster_with_the_others() -> None:
    """Servers that have just started are slow, and the first to become fast gets all requests from then on."""
    pool = Pool(shared_prefill, [5.0, 5.0])
    for n in range(20):
        pool.observe(n % 2)
    pool.speeds = [1.0, 1.0]
    for _ in range(300):
        pool.observe(0)
    asked, silent = (pool.model.speed(slot, pool._now) for slot in (0, 1))
    assert silent == pytest.approx(asked, rel=0.3)
    copy = decode(encode(pool.model))
    assert copy.speed(1, pool._now) == pytest.approx(silent, rel=0.05)


def test_a_slow_endpoint_counts_as_slow_although_later_requests_delay_the_others_more() -> None:
    rng, model = random.Random(1), LatencyModel()
    for n in range(1200):
        tokens = min(16_000.0, rng.lognormvariate(6.0, 1.2))
        slow, later = n % 4 == 3, rng.choice((0.0, rng.expovariate(6.0)))
        observed = (3.0 if slow else 1.0) * (0.025 + 1e-4 * tokens) + (0.0 if slow else later)
        model.learn_first(FirstToken(0.05 * n, n % 4, 0, tokens, 0.0, 0.0, 1.0, 0.1, observed))
    assert 2.2 < model.speed(3, 60.0) / model.speed(0, 60.0) < 4.0
    assert model.speed(0, 60.0) == pytest.approx(model.speed(1, 60.0), rel=0.1)


def test_a_slow_endpoint_without_requests_stays_slow_for_a_while_if_the_others_stay_as_they_are() -> None:
    pool = Pool(shared_prefill, [1.0, 1.0, 3.0])
    for _ in range(600):
        pool.observe()
    before = pool.model.speed(2, pool._now)
    for _ in range(400):
        pool.observe(pool._rng.randrange(2))
    assert pool.model.speed(2, pool._now) > 0.8 * before


def test_a_slow_endpoint_without_requests_is_trusted_again_with_time() -> None:
    pool = Pool(shared_prefill, [1.0, 1.0, 1.0, 4.0])
    for _ in range(1000):
        pool.observe()
    speeds = [pool.model.speed(3, 20.0 + silent) for silent in (0.0, 60.0, 120.0, 3600.0)]
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[0] > 2.5
    assert speeds[-1] < 1.1


def test_a_new_endpoint_is_predicted_as_the_pool_and_does_not_move_the_others() -> None:
    pool = Pool(shared_prefill, [1.0, 1.0, 2.0])
    for _ in range(1000):
        pool.observe()
    model = pool.model
    before = [model.speed(slot, 20.0) for slot in range(3)]
    assert model.speed(7, 20.0) == pytest.approx(model.speed(0, 20.0), rel=0.1), "the usual speed"
    model.learn_first(FirstToken(20.0, 7, 0, 1000.0, 0.0, 0.0, 1.0, 0.125, 0.125))
    assert model.speed(7, 20.0) == pytest.approx(model.speed(0, 20.0), rel=0.2)
    assert [model.speed(slot, 20.0) for slot in range(3)] == pytest.approx(before, rel=0.05)


def test_another_endpoint_in_the_same_slot_begins_anew() -> None:
    pool = Pool(shared_prefill, [1.0, 1.0, 1.0, 4.0])
    for _ in range(1000):
        pool.observe()
    pool.model.learn_first(FirstToken(20.0, 3, 1, 1000.0, 0.0, 0.0, 1.0, 0.125, 0.125))
    assert pool.model.endpoints[3].samples == 1
    assert pool.model.speed(3, 20.0) < 2.0


def test_knows_the_candidates_when_half_of_them_have_answered_often_enough() -> None:
    model = LatencyModel()
    assert not model.knows([0, 1, 2, 3])
    for slot in (0, 1):
        for _ in range(8):
            model.learn_first(FirstToken(1.0, slot, 0, 100.0, 0.0, 0.0, 1.0, 0.1, 0.1))
    assert model.knows([0, 1, 2, 3])
    assert not model.knows([1, 2, 3])


def test_where_prompts_do_not_wait_for_each_other_the_first_ten_answers_teach_what_all_endpoints_cost() -> None:
    model = LatencyModel()
    for step in range(10):
        assert not model.knows([0, 7])
        tokens = 1000.0 * (1 + step)
        model.learn_first(FirstToken(1.0, 1, 0, tokens, 9000.0 * (step % 2), 0.0, 0.0, tokens * 1e-3, 0.03 + tokens * 1e-3))
    assert model.knows([0, 7])
    assert model.first_token_s(7, 10_000.0, 0.0, 0.0, 0.0, 1.0) == pytest.approx(10.0, rel=0.2), "no answer came from this endpoint"


def test_the_first_answers_that_end_say_how_long_places_are_taken() -> None:
    model = LatencyModel()
    for _ in range(10):
        model.learn_token(0, 0, 1.0, 0.1, 20.0)
    assert model.place_s == pytest.approx(20.0, rel=0.15)


def test_tokens_ahead_are_computed_while_time_passes() -> None:
    model = LatencyModel()
    times = [model.first_token_s(0, 1000.0, 8000.0, elapsed, 1.0, 0.0) for elapsed in (0.0, 0.2, 0.4, 0.8, 0.82)]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[1] > times[2] > times[3]


def test_requests_wait_for_a_place_only_when_the_batch_has_been_full_often() -> None:
    model = LatencyModel()
    model.scraped(0, 0, 8, 1)
    assert model.limit(0) == 0.0
    for _ in range(FULL_SCRAPES):
        model.scraped(0, 0, 8, 1)
    assert model.limit(0) == 8.0
    assert model.features(8.0, 1.0, 0.0, 0.0, 0.0, 7.0)[QUEUE] == 0.0
    assert model.features(8.0, 1.0, 0.0, 0.0, 0.0, 10.0)[QUEUE] == pytest.approx(3.0 * model.place_s / 8.0)
    told = model.changes
    model.scraped(0, 0, 30, 0)
    assert model.limit(0) == 0.0, "a larger batch has run, so the limit is not 8"
    assert model.changes > told, "the workers have to learn that"


def test_an_endpoint_has_the_usual_limit_until_it_has_run_more() -> None:
    model = LatencyModel()
    for slot, batch in ((0, 8), (1, 8), (2, 64)):
        for _ in range(FULL_SCRAPES + 1):
            model.scraped(slot, 0, batch, 1)
    model.scraped(4, 0, 9, 1)
    assert [model.limit(slot) for slot in (0, 2, 3, 4)] == [8.0, 64.0, 8.0, 0.0]
    model.forget(0)
    model.forget(1)
    assert model.limit(3) == 64.0


def test_requests_that_wait_while_the_kv_cache_is_full_say_nothing_of_the_batch_limit() -> None:
    model = LatencyModel()
    for _ in range(FULL_SCRAPES + 1):
        model.scraped(0, 0, 8, 1, 0.97)
    assert model.limit(0) == 0.0
    for _ in range(FULL_SCRAPES + 1):
        model.scraped(0, 0, 8, 1, 0.5)
    assert model.limit(0) == 8.0


def test_a_prompt_waits_until_answers_that_end_make_room_for_it_and_for_those_before_it() -> None:
    """Four KV caches of 10,000 tokens: with room; full; full and 3,000 tokens in the queue; of unknown size."""
    model, slots, none = LatencyModel(), np.arange(4, dtype=np.intp), np.zeros(4)
    for _ in range(500):
        model.learn_token(0, 0, 4.0, 0.02, 20.0)
    usage, room = np.array([0.7, 1.0, 1.0, 1.0]), np.array([10_000.0, 10_000.0, 10_000.0, 0.0])
    ahead, waiting = np.array([0.0, 3_000.0, 3_000.0, 0.0]), np.array([0.0, 0.0, 2.0, 0.0])

    starts = np.zeros((1, CELLS, 4))

    def found(usage: np.ndarray) -> np.ndarray:
        return model.outlook(slots, starts, 0.0, 2_000.0, None, 0.0, ahead, none, none, none, waiting, usage, room)

    crowded, empty = found(usage), found(none)
    # What waits computes meanwhile only for the memory that it has: the 3,000 tokens ahead take no time beyond the wait.
    assert crowded[MEMORY].tolist() == pytest.approx([0.0, 0.2 * 20.0 - 0.31, 0.5 * 20.0 - 0.31, 0.0], rel=0.01)
    assert (empty[MEMORY] == 0.0).all()
    assert (crowded[TIMES] - empty[TIMES]).tolist() == pytest.approx(crowded[MEMORY].tolist())
    starts[0, PROMPTS, 2] = 6.0  # then the two that wait have a third of the tokens ahead
    assert found(usage)[MEMORY, 2] == pytest.approx(0.3 * 20.0 - 0.31, rel=0.01)
    lacking = 0.5 * 0.2 * 20.0 * np.array([0.7**8, 1.0, 1.0, 0.0])
    assert (crowded[COSTS] - empty[COSTS] - crowded[MEMORY]).tolist() == pytest.approx(lacking.tolist(), rel=0.01)


def sent_after(late: float, elapsed: float, usage: float = 0.0) -> tuple[float, float]:
    """Returns the predicted time at an endpoint with 4,000 tokens ahead, and the time on them that counts. `late`: how many of these were
    sent after it began with them, `elapsed` seconds ago. Its KV cache holds 10,000 tokens.
    """
    model, one = LatencyModel(), np.ones(1)
    starts = np.array([[[100.0 - elapsed], [100.0 - elapsed], [late], [0.0]]])
    found = model.outlook(
        np.array([0]), starts, 100.0, 1000.0, None, 0.0, 4000.0 * one, one, one, one, 0.0 * one, usage * one, 10_000.0 * one
    )  # fmt: skip
    return float(found[TIMES, 0]), float(found[ELAPSED, 0])


def test_an_endpoint_that_does_not_end_what_it_began_with_is_slow_whatever_was_sent_after() -> None:
    """Where 4,000 tokens take 0.4 s, it has spent 0.4 s: on all of them, or on the first 1,000, which take 0.1 s."""
    assert sent_after(0.0, 0.4)[0] < 0.2
    assert sent_after(3000.0, 0.4)[0] > 1.0
    assert sent_after(3000.0, 0.4, usage=0.86)[0] < 0.2, "it may have waited for memory"


def test_time_on_the_first_prompts_computes_none_that_were_sent_after() -> None:
    assert sent_after(3000.0, 0.1)[0] == pytest.approx(sent_after(0.0, 0.1)[0], abs=0.001)
    there, spent = sent_after(3900.0, 0.04)
    assert spent == pytest.approx(0.04)
    assert there == pytest.approx(sent_after(0.0, 0.04)[0], abs=0.001)


def test_prompts_that_wait_for_memory_are_not_computed_meanwhile() -> None:
    (full, spent), (empty, computed) = sent_after(0.0, 0.3, usage=0.95), sent_after(0.0, 0.3)
    assert (spent, computed) == (0.0, pytest.approx(0.3))
    assert full > empty + 0.25


def test_waiting_for_a_place_takes_as_long_as_answers_last() -> None:
    model = LatencyModel()
    for _ in range(500):
        model.learn_token(0, 0, 4.0, 0.02, 4.0)
    assert model.place_s == pytest.approx(4.0, rel=0.01)


def test_an_endpoint_that_takes_longer_than_predicted_counts_as_slower_before_it_answers() -> None:
    pool = Pool(shared_prefill, [1.0] * SERVERS)
    for _ in range(2000):
        pool.observe()
    times = [pool.model.first_token_s(1, 500.0, 2000.0, elapsed, 4.0, 40.0) for elapsed in (0.1, 0.25, 1.0, 3.0)]
    assert times[1] < times[0], "the prompts ahead are computed"
    assert times[0] < times[2] < times[3], "they should have been"


# What was learned of two equal servers, one of which had stood still: speeds, and coefficients in milliseconds. The last one is invented.
# `most`: of 40 requests to the favourite.
STRANGE = [
    ([2.1, 0.44], [93.3, 0.0, 0.0, 73.8, 1000.0, 0.0], 30),
    ([2.59, 0.39], [11.9, 0.0, 0.0, 186.0, 1000.0, 16.6], 30),
    ([1.39, 0.68], [27.3, 263.0, 0.0, 79.9, 1000.0, 0.0], 30),
    ([8.0, 0.125], [30.0, 100.0, 0.0, 0.0, 0.0, 0.0], 35),
]


@pytest.mark.parametrize(("speeds", "theta", "most"), STRANGE)
def test_a_burst_between_two_scrapes_spreads_whatever_was_learned(speeds: list[float], theta: list[float], most: int) -> None:
    model, sent = LatencyModel(), np.zeros(2)
    for slot, speed in enumerate(speeds):
        model.endpoints[slot] = known = EndpointModel(slot, 0)
        known.speed.log, known.learned_at = math.log(speed), 100.0
        model.speed_sum += known.speed.log
    model.first.theta = [each / 1000.0 for each in theta]
    slots, none = np.array([0, 1]), np.zeros(2)
    for _ in range(40):
        outlook = model.outlook(slots, np.zeros((1, CELLS, 2)), 100.0, 200.0, None, 0.0, 200.0 * sent, sent, *[none] * 5)
        sent[int(outlook[COSTS].argmin())] += 1.0
    assert sent.sum() == 40.0
    assert max(sent) <= most


def test_requests_from_before_the_last_scrape_cost_nothing_beyond_what_was_learned() -> None:
    model, slots, none = LatencyModel(), np.array([0]), np.zeros(1)
    model.first.theta = [0.03, 0.1, 0.0, 0.0, 0.0, 0.0]

    def cost(inflight: float, before: float) -> float:
        load = (np.array([inflight]), np.array([before]))
        found = model.outlook(slots, np.zeros((1, CELLS, 1)), 0.0, 1000.0, None, 0.0, none, *load, *[none] * 4)
        assert found[TIMES, 0] == pytest.approx(0.13), "it is a cost, and no prediction"
        return float(found[COSTS, 0])

    assert cost(5.0, 5.0) == cost(0.0, 0.0) == pytest.approx(0.13)
    assert cost(7.0, 5.0) == pytest.approx(0.13 + 2 * 0.5 * 0.13)


@pytest.mark.parametrize(("busy", "copies"), [(0, True), (2, False), (4, False)])
def test_the_busier_the_pool_the_longer_a_request_waits_for_the_endpoint_that_holds_its_long_prefix(busy: int, copies: bool) -> None:
    """Slot 0 holds all but 100 tokens of a prompt of 8,000, and prompts of 9,000 tokens before it."""
    model, slots, none = LatencyModel(), np.arange(5, dtype=np.intp), np.zeros(5)
    ahead = np.array([9_000.0] + [100.0] * busy + [0.0] * (4 - busy))
    held = np.array([7_900.0, 0.0, 0.0, 0.0, 0.0])
    for prompt, waits in ((8_000.0, not copies), (2_000.0, False)):
        blocks = np.minimum(held, prompt - 100.0)
        found = model.outlook(slots, np.zeros((1, CELLS, 5)), 0.0, prompt, blocks, 1.0, ahead, *[none] * 6)
        assert (found[COSTS].argmin() == 0) == waits


@pytest.mark.parametrize(("prompt", "cached", "again"), [(8_000.0, 0.0, 1.0), (2_048.0, 1_024.0, 0.875), (8_192.0, 6_144.0, 0.25)])
def test_the_longer_a_cached_prefix_the_less_the_wait_for_prompts_ahead_counts_again(prompt: float, cached: float, again: float) -> None:
    model, slots, none, idle = LatencyModel(), np.array([0]), np.zeros(1), np.zeros((1, CELLS, 1))
    found = model.outlook(slots, idle, 0.0, prompt, np.array([cached]), 1.0, np.array([1_000.0]), *[none] * 6)
    later = 0.1 * max(0.0, prompt - cached - 4_096.0) / 1_000.0
    assert found[COSTS, 0] == pytest.approx(found[TIMES, 0] + again * (0.1 + 0.01) + later)


@pytest.mark.parametrize("in_turn", [False, True])
def test_a_prompt_costs_more_where_it_drops_cached_prefixes(in_turn: bool) -> None:
    """Slot 0 has computed 9,000 of the 10,000 tokens that its cache holds, slot 1 as many of 20,000; the size of slot 2 is not known."""
    model, slots, none = LatencyModel(), np.arange(3, dtype=np.intp), np.zeros(3)
    for _ in range(0 if in_turn else 300):  # prompts do not wait for 8,000 tokens ahead
        model.learn_first(FirstToken(1.0, 3, 1, 1_000.0, 8_000.0, 0.0, 1.0, 0.13, 0.13))
    for slot in range(3):
        for _ in range(9):
            model.learn_first(FirstToken(1.0, slot, 1, 1_000.0, 0.0, 0.0, 0.0, 0.13, 0.13))
    room, held = np.array([10_000.0, 20_000.0, 0.0]), np.array([500.0] * 3)

    def extra() -> list[float]:
        found = model.outlook(slots, np.zeros((1, CELLS, 3)), 1.0, 2_000.0, held, 1.0, *[none] * 6, room)
        extra: list[float] = (found[COSTS] - found[TIMES]).tolist()
        return extra

    own = model.speed(0, 1.0) * model.first.theta[UNCACHED] * 1.5
    assert extra() == pytest.approx([0.0 if in_turn else DISPLACED * own, 0.0, 0.0])
    model.learn_first(FirstToken(1.0, 0, 2, 1_000.0, 0.0, 0.0, 0.0, 0.13, 0.13))
    assert extra() == pytest.approx([0.0, 0.0, 0.0]), "another endpoint in this slot has an empty cache"


def test_is_not_trusted_while_it_predicts_worse_than_the_mean() -> None:
    model = LatencyModel()
    for _ in range(YOUNG):
        model.learn_first(FirstToken(1.0, 0, 0, 100.0, 0.0, 0.0, 1.0, 0.1, 0.1))
    for _ in range(200):  # a constant time, whatever the features are: the predictions of another process
        model.learn_first(FirstToken(1.0, 0, 0, 100.0, 0.0, 0.0, 1.0, 0.5, 0.1))
    assert not model.trusted
    for _ in range(400):
        model.learn_first(FirstToken(1.0, 0, 0, 100.0, 0.0, 0.0, 1.0, 0.1, 0.1))
    assert model.trusted


def test_a_young_model_is_judged_by_what_it_knows_when_an_answer_comes() -> None:
    """The predictions for the first answers are of a time without answers."""
    model = LatencyModel()
    for step in range(YOUNG // 2):
        tokens = 1000.0 * (1 + step % 9)
        model.learn_first(FirstToken(1.0, step % 4, 0, tokens, 0.0, 0.0, 0.0, 0.03 + tokens * 1e-4, 0.02 + tokens * 1e-5))
    assert model.trusted
    assert model.error < 0.6 * model.mean_error


def test_counts_errors_by_size() -> None:
    model = LatencyModel()
    for predicted in (0.101, 0.13, 0.9):
        model.learn_first(FirstToken(1.0, 0, 0, 100.0, 0.0, 0.0, 1.0, predicted, 0.1))
    counted = model.endpoints[0].errors
    assert [counted[ERROR_BOUNDS.index(bound)] for bound in (0.05, 0.5)] == [1, 1]
    assert counted[-1] == 1
    assert sum(counted) == 3


def test_learns_the_time_per_output_token_of_each_endpoint() -> None:
    model, rng = LatencyModel(), random.Random(4)
    for _ in range(2000):
        slot, load = rng.randrange(3), float(rng.randrange(1, 40))
        model.learn_token(slot, 0, load, (3.0 if slot == 2 else 1.0) * (0.02 + 0.0005 * load), 2.0)
    assert model.per_token_s(0, 20.0) == pytest.approx(0.03, rel=0.1)
    assert model.per_token_s(2, 20.0) == pytest.approx(0.09, rel=0.1)


ODD = (0.0, 1e-12, 1.0, 1e3, 1e7, 1e15)


def odd_observations(count: int, seed: int) -> Iterator[tuple[int, list[float]]]:
    rng = random.Random(seed)
    for _ in range(count):
        yield rng.randrange(3), [rng.choice(ODD) for _ in range(6)]


@pytest.mark.parametrize("seed", range(5))
def test_predictions_are_bounded_and_monotone_whatever_was_observed(seed: int) -> None:
    model = LatencyModel()
    rng, at = random.Random(seed), 0.0
    for slot, (tokens, ahead, elapsed, load, predicted, observed) in odd_observations(2000, seed):
        at += rng.choice((0.0, 0.001, 10.0))
        model.learn_first(FirstToken(at, slot, 0, tokens, ahead, elapsed, load, predicted, observed))
        model.learn_token(slot, 0, load, observed, observed)
        model.scraped(slot, 0, rng.choice((0.0, 3.0, 500.0)), rng.choice((0.0, 2.0)))
        times = [model.first_token_s(slot, tokens * k, ahead, elapsed, load, at) for k in (0.0, 1.0, 2.0)]
        times += [model.first_token_s(slot, tokens * 2.0, ahead * k, 0.0, load * k, at) for k in (1.0, 2.0)]
        assert times[:3] == sorted(times[:3])
        assert times[3:] == sorted(times[3:])
        assert all(LEAST_S <= time <= MOST_S for time in (*times, model.per_token_s(slot, load)))
