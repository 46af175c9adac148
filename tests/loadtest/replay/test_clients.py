"""When requests arrive in a replay."""

import math

from hypothesis import given
from hypothesis import strategies as st

from loadtest.replay.clients import Arrivals, turns
from loadtest.replay.prompts import OPEN, compared
from tests.loadtest.replay.recordings import asked


def test_a_flow_that_never_overlaps_is_one_client() -> None:
    alone = [asked(0.0, 1, flow=7), asked(1.0, 2, flow=7), asked(2.0, 3, flow=7)]
    assert turns(alone, [OPEN] * 3) == [OPEN, 0, 1]
    busy = [asked(0.0, 1, flow=7, lasted=1.5), asked(1.0, 2, flow=7), asked(2.0, 3, flow=7)]
    assert turns(busy, [OPEN] * 3) == [OPEN, OPEN, OPEN]


def test_a_turn_comes_after_the_recorded_pause_from_the_replayed_end() -> None:
    requests = [asked(10.0, 1, 2), asked(11.0, 1, 2, 3, 4)]
    arrivals = Arrivals(requests, compared(requests).before, 1.0)
    assert (arrivals.due, arrivals.pop(), arrivals.due) == (0.0, 0, math.inf)
    arrivals.ended(0, 3.0)
    assert (arrivals.due, arrivals.pop()) == (3.5, 1)


def test_a_higher_rate_shortens_pauses() -> None:
    requests = [asked(10.0, 1, 2), asked(11.0, 1, 2, 3, 4), asked(14.0, 7)]
    arrivals = Arrivals(requests, compared(requests).before, 2.0)
    arrivals.pop()
    arrivals.ended(0, 0.5)
    assert (arrivals.due, arrivals.pop()) == (0.75, 1)
    assert (arrivals.due, arrivals.pop()) == (2.0, 2)


def test_of_n_clients_at_most_n_have_a_request_under_way() -> None:
    requests = [asked(0.1 * number, number, lasted=0.2) for number in range(9)]
    arrivals = Arrivals(requests, [OPEN] * 9, 1.0, clients=3)
    assert [arrivals.pop() for _ in range(3)] == [0, 1, 2]
    assert arrivals.due == math.inf
    arrivals.ended(2, 7.0)
    assert arrivals.due >= 7.0 and arrivals.pop() == 3


@given(st.lists(st.floats(0.0, 5.0), min_size=1, max_size=30), st.sampled_from((0, 1, 4)), st.randoms(use_true_random=False))
def test_each_request_arrives_once_in_the_order_of_time(gaps: list[float], clients: int, rng: object) -> None:
    at, requests = 0.0, []
    for number, gap in enumerate(gaps):
        at += gap
        requests.append(asked(at, number % 3, number % 5, flow=number % 4, lasted=gap / 2))
    arrivals = Arrivals(requests, turns(requests, compared(requests).before), 1.0, clients)
    arrived, now = [], 0.0
    while arrivals.due < math.inf:
        assert arrivals.due >= now - 1e-9
        now = arrivals.due
        arrived.append(arrivals.pop())
        arrivals.ended(arrived[-1], now + 0.01)
    assert sorted(arrived) == list(range(len(gaps)))
