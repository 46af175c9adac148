"""The updates of one turn, in both directions, without a store."""

import numpy as np

from tests.workers.replicas.live import HASHES, Replica
from tests.workers.replicas.messages import blocks, runs_of
from workers.replicas.taught import STALE_TICKS
from workers.replicas.wire import RUNS_MAX

X, Y = "10.0.0.1:8000", "10.0.0.2:8000"
NUMBERS = HASHES.tolist()


def replica() -> Replica:
    made = Replica("unix:///none", "a", {X: 0, Y: 1})
    made.exchange.parts.places.refresh()
    return made


def key(of: Replica, address: str) -> int:
    return of.exchange.parts.places.keys[of.owners[address]]


def test_a_message_has_all_new_blocks_in_order_with_their_endpoints() -> None:
    a = replica()
    for at, address in enumerate((X, Y, X)):
        part = HASHES[2 * at : 2 * at + 2]
        a.taught.insert(part, np.full(2, a.owners[address], np.uint16), 1)
    learned, taken_back = a.taught.take()
    assert runs_of(learned) == [(key(a, X), NUMBERS[:2]), (key(a, Y), NUMBERS[2:4]), (key(a, X), NUMBERS[4:6])]
    assert taken_back is None
    assert a.taught.take() == (None, None)


def test_only_news_are_told_to_others() -> None:
    a, b = replica(), replica()
    a.teach(X)
    b.taught.learn(*a.taught.take())
    b.taught.apply(1)
    for each in (a, b):
        each.teach(X)
        assert each.taught.take() == (None, None), "the others have heard of these blocks just now"
    owners = np.full(len(HASHES), a.owners[X], np.uint16)
    a.taught.insert(HASHES, owners, STALE_TICKS)
    assert a.taught.take() == (None, None)
    a.taught.insert(HASHES, owners, 2 * STALE_TICKS)
    assert runs_of(a.taught.take()[0]) == [(key(a, X), NUMBERS)], "others should not think that nobody uses them"


def test_what_is_taken_back_follows_what_was_taught_before_and_precedes_what_is_taught_after() -> None:
    a, b = replica(), replica()
    a.teach(X)
    a.taught.forget(HASHES[:3], a.owners[X])
    a.teach(Y)
    first, second = a.taught.take(), a.taught.take()
    assert [runs_of(part) for part in (*first, *second)] == [[(key(a, X), NUMBERS)], [(key(a, X), NUMBERS[:3])], [(key(a, Y), NUMBERS)], []]
    b.taught.learn(*first)
    b.taught.learn(*second)
    assert b.index.size() == 0, "nothing is written before the end of the turn"
    b.taught.apply(1)
    assert (b.holds(X), b.holds(Y)) == (a.holds(X), a.holds(Y))
    assert b.index.size() == a.index.size() == 2 * len(HASHES) - 3


def test_updates_of_endpoints_that_this_replica_does_not_know_are_left_out() -> None:
    a = replica()
    a.taught.learn(blocks((1, NUMBERS), (key(a, X), NUMBERS[:1])), blocks((1, NUMBERS[:1])))
    a.taught.apply(1)
    assert a.index.size() == 1
    assert a.index.dropped == 0


def test_more_runs_than_one_message_may_have_take_several() -> None:
    a = replica()
    many = np.arange(1, 3 * RUNS_MAX + 1, dtype=np.uint64) << np.uint64(20)
    owners = np.array([a.owners[X], a.owners[Y]], np.uint16)[np.arange(len(many)) % 2]
    a.taught.insert(many, owners, 1)
    told = []
    while (part := a.taught.take()[0]) is not None:
        told += runs_of(part)
        assert len(runs_of(part)) <= RUNS_MAX
    assert [each for _, run in told for each in run] == many.tolist()
