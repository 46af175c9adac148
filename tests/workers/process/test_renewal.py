"""The children of an earlier program are replaced one by one, and only while their successors serve."""

from hypothesis import given
from hypothesis import strategies as st

from workers.process.renewal import READY_S, Renewal
from workers.process.restart import Policy


def test_a_worker_follows_when_the_one_before_has_ended_and_the_others_come_last() -> None:
    renewal = Renewal([(11, True), (12, True), (10, False)])
    assert renewal.next(0.0, {10, 11, 12}, missing=True) is None
    assert renewal.next(1.0, {10, 11, 12}, missing=False) == (11, True)
    assert renewal.next(2.0, {10, 11, 12, 13}, missing=False) is None, "it drains"
    assert renewal.next(500.0, {10, 11, 12, 13}, missing=False) is None, "however long that takes"
    assert renewal.next(501.0, {10, 12, 13}, missing=True) is None
    assert renewal.next(502.0, {10, 12, 13}, missing=False) == (12, True)
    assert renewal.next(503.0, {10, 13, 14}, missing=False) == (10, False)
    assert not renewal.over
    assert renewal.next(504.0, {13, 14, 15}, missing=False) is None
    assert renewal.over
    assert not renewal.failed


def test_it_is_given_up_if_a_successor_does_not_serve_in_time() -> None:
    renewal = Renewal([(11, True), (12, True), (10, False)])
    renewal.next(0.0, {10, 11, 12}, missing=False)
    assert renewal.next(READY_S, {10, 11, 12, 13}, missing=True) is None
    assert not renewal.over
    renewal.next(2 * READY_S + 1.0, {10, 11, 12, 13}, missing=True)
    assert renewal.failed and renewal.over
    assert renewal.next(2 * READY_S + 2.0, {10, 11, 12, 13}, missing=False) is None


def test_workers_that_learn_nothing_more_about_endpoints_do_not_wait_for_each_other() -> None:
    renewal = Renewal([(10, False), (11, True), (12, True)], overlaps=True)
    assert renewal.next(0.0, {10, 11, 12}, missing=False) == (10, False)
    assert renewal.next(1.0, {10, 11, 12}, missing=False) is None, "its successor takes over its memory"
    assert renewal.next(2.0, {11, 12, 13}, missing=False) == (11, True)
    assert renewal.next(3.0, {11, 12, 13}, missing=True) is None, "its successor does not serve yet"
    assert renewal.next(4.0, {11, 12, 13, 14}, missing=False) == (12, True)
    assert renewal.next(5.0, {11, 12, 13, 14, 15}, missing=False) is None
    assert not renewal.over, "they drain"
    assert renewal.next(6.0, {13, 14, 15}, missing=False) is None
    assert renewal.over


def test_a_worker_that_drains_without_a_free_seat_is_not_a_missing_successor() -> None:
    renewal, policy = Renewal([(11, True), (12, True)], overlaps=True), Policy(3, 2)
    policy.take_over({0: False, 1: False, 2: False}, 2, 0.0)
    alive = {10, 11, 12}
    assert renewal.next(0.0, alive, missing=policy.missing, crowded=policy.crowded) == (11, True)
    policy.leaving(1, 0.0)
    for now in (1.0, READY_S, 3 * READY_S):
        assert renewal.next(now, alive, missing=policy.missing, crowded=policy.crowded) is None
    policy.exited(1, 0, 100.0)
    assert renewal.next(100.0, {10, 12}, missing=policy.missing, crowded=policy.crowded) is None
    policy.spawned(1, 100.0)
    policy.ready(1, 101.0)
    assert renewal.next(101.0, {10, 12, 13}, missing=policy.missing, crowded=policy.crowded) == (12, True)
    assert not renewal.failed


def test_the_next_worker_leaves_only_when_its_successor_has_a_seat() -> None:
    renewal, policy = Renewal([(11, True), (12, True)], overlaps=True), Policy(4, 2)
    policy.take_over({0: False, 1: False, 2: False}, 2, 0.0)
    assert renewal.next(0.0, {10, 11, 12}, missing=policy.missing, crowded=policy.crowded) == (11, True)
    policy.leaving(1, 0.0)
    policy.spawned(3, 0.0)
    policy.ready(3, 1.0)
    alive = {10, 11, 12, 13}
    for now in (1.0, READY_S, 3 * READY_S):
        assert renewal.next(now, alive, missing=policy.missing, crowded=policy.crowded) is None, "worker 1 drains"
    policy.exited(1, 0, 100.0)
    assert renewal.next(100.0, {10, 12, 13}, missing=policy.missing, crowded=policy.crowded) == (12, True)
    policy.leaving(2, 100.0)
    assert [action.seat for action in policy.decide(100.0, [0.0] * 4)] == [1]


@given(st.sets(st.integers(1, 9)), st.data())
def test_each_child_that_lives_is_ended_once_and_never_two_at_a_time(ended: set[int], data: st.DataObject) -> None:
    renewal = Renewal([*((pid, True) for pid in range(1, 9)), (9, False)])
    alive, told = set(range(1, 10)) - ended, []
    for now in range(200):
        step = renewal.next(float(now), alive, missing=False)
        if step is not None:
            assert not told or told[-1] not in alive
            told.append(step[0])
        if told and told[-1] in alive and data.draw(st.booleans()):
            alive.discard(told[-1])
    assert len(told) == len(set(told))
    assert set(told) <= set(range(1, 10)) - ended


def test_a_policy_goes_on_with_the_children_of_an_earlier_program() -> None:
    policy = Policy(5, 2)
    policy.take_over({0: False, 2: True, 3: False}, 2, 100.0)
    assert (policy.workers, policy.missing) == (2, True)
    (spawn,) = policy.decide(100.0, [0.0] * 5)
    assert spawn.seat in (1, 4)
    policy.spawned(spawn.seat, 100.0)
    assert policy.missing
    policy.ready(spawn.seat, 101.0)
    assert not policy.missing
