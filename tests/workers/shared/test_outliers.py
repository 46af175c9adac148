"""Endpoints that fail far more than the others: which are ejected, and which failures are their clients'."""

import itertools

import numpy as np
import pytest

from tests.workers.shared.outlier_world import NOTHING, OK, Pool, failing
from workers.shared.ejection import BACK_OFF_S, SHARE_MAX, TRIAL_S, Step
from workers.shared.outliers import BLAMED_S, HALF_LIFE_S, LOOK_S, excess, worse_than_others

RATE = 40.0  # good requests per second


@pytest.mark.parametrize(("status", "cause"), [(404, "404"), (429, "429"), (400, "400"), (401, "other 4xx"), (NOTHING, "empty answers")])
def test_a_server_that_answers_errors_at_once_is_ejected_and_named(status: int, cause: str) -> None:
    """It gets nine of ten requests, because it looks idle."""
    pool = Pool(4)
    answers = failing(2, status=status)
    pool.run(3.0, (RATE, lambda: pool.send(answers, to=2 if pool.rng.random() < 0.9 else -1)))
    assert pool.ejected()[:1] == [2] and set(pool.ejected()) == {2}
    assert pool.events[0][0] < 2.0
    name, why = pool.why(Step.EJECTED)
    assert name == cause
    assert why.startswith("100% of its last ") and why.endswith(f"(most: {cause}), and 0% of the answers of the other endpoints")


@pytest.mark.parametrize("status", [404, 429, 400, NOTHING])
def test_a_server_that_gets_all_requests_and_fails_them_is_ejected(status: int) -> None:
    """It alone holds their prefix, so nothing can be compared before it is ejected."""
    pool = Pool(4)
    sent: list[int] = []
    pool.run(20.0, (RATE, lambda: sent.append(pool.send(failing(2, status=status), to=2))))
    assert set(pool.ejected()) == {2} and pool.events[0][0] < 1.5
    assert sent.count(2) < 0.1 * len(sent)
    assert Step.RETURNED not in [step for _, _, step in pool.events]
    assert pool.why(Step.EJECTED)[1].endswith("and no other endpoint got a request")


@pytest.mark.parametrize("rate", [1.0, 5.0, 20.0, 100.0])
def test_a_client_that_is_alone_and_whose_requests_fail_everywhere_costs_little(rate: float) -> None:
    pool, last = Pool(), [0]

    def bad() -> None:
        last[0] = pool.send(400, to=last[0])

    pool.run(BLAMED_S, (rate, bad))
    assert pool.out_s <= 2 * BACK_OFF_S + 5 / rate and pool.ejections.count() == 0


def test_a_burst_of_bad_requests_to_one_server_of_a_busy_pool_ejects_none() -> None:
    """Requests to the others are not counted before the first failure is seen."""
    pool = Pool()
    pool.run(5.0, (RATE, pool.send))
    for _ in range(50):
        pool.send(400, to=3, flow="its own")
    pool.run(5.0, (RATE, pool.send))
    assert pool.ejected() == []


def test_it_stays_out_while_it_fails_and_its_trials_cost_one_request_each() -> None:
    pool = Pool()
    sent: list[int] = []
    pool.run(60.0, (RATE, lambda: sent.append(pool.send(failing(5)))))
    assert set(pool.ejected()) == {5}
    assert sent.count(5) < 30
    backoffs = [step for _, _, step in pool.events].count(Step.TRIAL)
    assert 4 <= backoffs <= 8


def test_a_server_that_recovers_returns_after_a_trial_and_gets_traffic_again() -> None:
    pool = Pool()
    pool.run(5.0, (RATE, lambda: pool.send(failing(5))))
    assert 5 in pool.ejected()
    shares: list[float] = []
    pool.run(30.0, (RATE, pool.send), (RATE, lambda: shares.append(pool.share(5))))
    assert pool.ejections.count() == 0
    assert max(shares) > 0.5, "it is on probation: what it failed before counts for a while"
    assert shares[-1] == 0.0


def test_an_answer_that_takes_longer_than_the_turn_of_a_worker_ends_the_trial() -> None:
    """The request leaves the server with its answer, so the trial looks unused before the answer is judged."""
    pool = Pool()
    pool.run(5.0, (RATE, lambda: pool.send(failing(5))))
    pool.run(BACK_OFF_S)
    assert 5 in pool.usable() and pool.ejections.count() == 1
    pool.inflight[5] = 1
    pool.run(2 * TRIAL_S)
    pool.inflight[5] = 0
    assert pool.send(to=5) == 5
    pool.run(2 * LOOK_S)
    assert pool.events[-1][1:] == (5, Step.RETURNED)


def test_an_answer_on_trial_that_ends_empty_is_no_success() -> None:
    pool = Pool()
    pool.run(2.0, (RATE, lambda: pool.send(failing(1, status=NOTHING))))
    assert pool.ejected() == [1]
    pool.run(20.0, (RATE, lambda: pool.send(failing(1, status=NOTHING))))
    assert Step.RETURNED not in [step for _, _, step in pool.events]


def test_a_client_whose_requests_fail_everywhere_ejects_none() -> None:
    """Evenly, and without a flow of its own."""
    pool = Pool()
    pool.run(60.0, (RATE, pool.send), (RATE, lambda: pool.send(400)))
    assert pool.ejected() == []


@pytest.mark.parametrize("rate", [1.0, 5.0, 40.0])
@pytest.mark.parametrize("bound", [0.0, 0.5, 0.97, 1.0])
def test_a_client_with_a_flow_of_its_own_ejects_none_whatever_mixture_of_servers_it_meets(rate: float, bound: float) -> None:
    """`bound`: the part of its requests that goes to one endpoint, as with session affinity."""
    pool = Pool()
    bad = lambda: pool.send(400, to=3 if pool.rng.random() < bound else -1, flow="its own")  # noqa: E731
    pool.run(60.0, (RATE, pool.send), (rate, bad))
    assert pool.ejected() == []


@pytest.mark.parametrize("rate", [5.0, 20.0, 100.0])
def test_a_client_without_a_flow_of_its_own_that_is_bound_to_one_server_costs_little(rate: float) -> None:
    """Its failures follow it when its server is ejected: that tells that they are its own."""
    pool, last = Pool(), [0]

    def bad() -> None:
        last[0] = pool.send(400, to=last[0])

    pool.run(BLAMED_S, (RATE, pool.send), (rate, bad))
    assert pool.out_s <= 4 * BACK_OFF_S
    if pool.ejected():
        returned = [reason for reason, (_, _, step) in zip(pool.reasons, pool.events, strict=True) if step is Step.RETURNED]
        assert returned[-1][0] == "requests" and "look at their clients" in returned[-1][1]


def test_a_request_that_its_client_repeats_says_nothing_about_the_server_to_which_it_is_bound() -> None:
    pool = Pool()
    pool.run(60.0, (RATE, pool.send), (20.0, lambda: pool.send(400, to=3, body=-1)))
    assert pool.ejected() == []


def test_a_repeated_request_that_other_servers_serve_blames_the_server_that_does_not() -> None:
    pool = Pool()
    pool.run(3.0, (RATE, lambda: pool.send(failing(3), body=-1)))
    assert set(pool.ejected()) == {3}


def test_a_model_that_a_server_lacks_does_not_eject_it_while_it_serves_the_others() -> None:
    pool = Pool()
    pool.run(30.0, (RATE, pool.send), (RATE / 2, lambda: pool.send(failing(3), model="x")))
    assert pool.ejected() == []
    assert 0.2 < pool.share(3) < 0.5
    assert [slot for _, slot, step in pool.events if step is Step.FAILING] == [3]
    assert pool.why(Step.FAILING)[0] == "404"


def test_a_model_that_one_server_alone_has_blames_none_of_the_others() -> None:
    """All of the others answer 404: they are the majority."""
    pool = Pool()
    pool.run(30.0, (RATE, pool.send), (RATE, lambda: pool.send(failing(*range(1, 8)), model="x", flow="x")))
    assert pool.ejected() == []


def test_never_more_than_half_of_the_pool_is_ejected() -> None:
    pool = Pool(6)
    sizes: list[int] = []
    bad = failing(0, 1, 2, 3, 4)
    pool.run(30.0, (RATE, lambda: pool.send(bad)), (200.0, lambda: sizes.append(pool.ejections.count())))
    assert max(sizes) <= SHARE_MAX * 6


def test_half_of_the_pool_may_be_ejected_if_the_other_half_serves() -> None:
    pool = Pool(4)
    pool.run(5.0, (RATE, lambda: pool.send(failing(0, 1))))
    assert set(pool.ejected()) == {0, 1}


def test_random_failures_of_all_servers_eject_none_and_none_counts_as_failing() -> None:
    pool = Pool()
    pool.run(120.0, (RATE, lambda: pool.send(400 if pool.rng.random() < 0.05 else OK)))
    assert pool.ejected() == []
    assert [slot for _, slot, step in pool.events if step is Step.FAILING] == []


def test_a_prefill_server_that_makes_requests_fail_is_told_from_the_decode_servers() -> None:
    """Endpoints 0 to 3 decode, 4 to 7 prefill; the router sends each request to one of each."""
    pool = Pool()

    def send() -> None:
        decode, prefill = pool.rng.randrange(4), pool.rng.choice([slot for slot in pool.usable() if slot >= 4])
        pool.send(404 if prefill == 6 else OK, to=decode, also=prefill)

    pool.run(5.0, (RATE, send))
    assert set(pool.ejected()) == {6}


def test_more_kinds_than_a_worker_tells_apart_hide_no_outlier() -> None:
    pool, kinds = Pool(), itertools.cycle(range(100))
    pool.run(5.0, (RATE, lambda: pool.send(failing(3), flow=f"flow {next(kinds)}")))
    assert set(pool.ejected()) == {3}


def test_clients_that_make_up_flows_hide_no_outlier() -> None:
    pool = Pool()
    pool.run(10.0, (RATE, lambda: pool.send(failing(3))), (RATE, lambda: pool.send(400, flow=f"flow {pool.requests}")))
    assert set(pool.ejected()) == {3}


def test_a_pool_without_failures_is_not_watched_and_evidence_fades() -> None:
    pool = Pool()
    pool.run(1.0, (RATE, pool.send))
    assert not pool.workers[0].watched[0]
    assert not any(pool.reader.changes()), "no worker counts"
    pool.send(400)
    pool.run(1.0, (RATE, pool.send))
    assert pool.workers[0].watched[0]
    pool.run(3 * HALF_LIFE_S, (RATE, pool.send))
    assert not pool.workers[0].watched[0]


def test_an_endpoint_that_takes_the_slot_of_an_outlier_begins_without_evidence() -> None:
    pool = Pool()
    pool.run(1.0, (RATE, lambda: pool.send(failing(3))))
    pool.ejections.forget(3)
    assert pool.ejections.flags(3) == 0 and pool.ejections.reason(3) == ("", "")
    before = len(pool.ejected())
    pool.run(10.0, (RATE, pool.send))
    assert len(pool.ejected()) == before


def test_a_worker_that_another_replaces_does_not_count_twice() -> None:
    pool = Pool(workers=1)
    pool.run(0.5, (RATE, lambda: pool.send(failing(3))))
    old = pool.workers[0]
    pool.workers[0] = type(old)(old._writer, lambda: pool.now)
    pool.run(30.0, (RATE, pool.send))
    assert pool.ejections.count() == 0


def test_z_is_that_of_mantel_and_haenszel_with_their_correction() -> None:
    """One kind: 8 of 8 requests of the first group failed, and 0 of 24 of the second. By hand: expected 2, variance 4608 / 3968."""
    one = np.array([[[8.0, 24.0], [8.0, 0.0]]])
    assert excess(one)[0] == pytest.approx((8 - 2 - 0.5) / (8 * 24 * 8 * 24 / (32 * 32 * 31)) ** 0.5)
    assert excess(np.concatenate((one, one)))[0] == pytest.approx((12 - 0.5) / (2 * 8 * 24 * 8 * 24 / (32 * 32 * 31)) ** 0.5)
    alone = np.array([[[8.0, 0.0], [8.0, 0.0]]])
    assert excess(alone).tolist() == [0.0, 0.0], "nobody else has requests of this kind"
    assert excess(np.zeros((3, 2, 2))).tolist() == [0.0, 0.0]


def test_an_outlier_serves_at_most_half_of_what_the_others_would_with_the_same_kinds_of_requests() -> None:
    kinds = np.array([[[10.0, 90.0], [5.0, 9.0]], [[100.0, 0.0], [100.0, 0.0]]])
    assert not worse_than_others(kinds)[0], "5 of 10, and 9 of 10 with the others; the second kind says nothing"
    kinds[0, 1, 0] = 6.0
    assert worse_than_others(kinds).tolist() == [True, False]


def test_an_endpoint_is_compared_with_those_of_its_pool_only() -> None:
    """A pool whose requests all fail says nothing about its endpoints, however well another pool with the same model does."""
    w = Pool()
    for slot in range(4, 8):
        w.endpoints[slot].pool = 1
    w.run(30.0, (50.0, lambda: w.send(failing(4, 5, 6, 7))))
    assert w.ejected() == []


def test_a_sole_endpoint_of_a_pool_is_found_beside_busy_pools() -> None:
    w = Pool()
    for slot in range(4, 8):
        w.endpoints[slot].pool = 1
    w.run(10.0, (30.0, lambda: w.send(to=w.rng.randrange(4))), (30.0, lambda: w.send(failing(5), to=5)))
    assert w.ejected()[:1] == [5]
