"""The updates of one turn, in both directions, without a store."""

import numpy as np

from tests.workers.endpoints.replicas.live import HASHES, Replica
from workers.endpoints.replicas.wire import Blocks

X, Y = "10.0.0.1:8000", "10.0.0.2:8000"


def replica() -> Replica:
    made = Replica("unix:///none", "a", {X: 0, Y: 1})
    made.exchange.parts.places.refresh()
    return made


def key(of: Replica, address: str) -> int:
    return of.exchange.parts.places.keys[of.owners[address]]


def test_a_message_names_each_endpoint_once_with_all_its_new_blocks_in_order() -> None:
    a = replica()
    for at, address in enumerate((X, Y, X)):
        part = HASHES[2 * at : 2 * at + 2]
        a.taught.insert(part, np.full(2, a.owners[address], np.uint16), 1)
    x = np.concatenate((HASHES[:2], HASHES[4:6])).tobytes()
    assert a.taught.take() == [Blocks(key(a, X), x), Blocks(key(a, Y), HASHES[2:4].tobytes())]
    assert a.taught.take() == []


def test_what_is_taken_back_follows_what_was_taught_before_and_precedes_what_is_taught_after() -> None:
    a, b = replica(), replica()
    a.teach(X)
    a.taught.forget(HASHES[:3], a.owners[X])
    a.teach(Y)
    updates = a.taught.take()
    assert [(update.endpoint == key(a, X), update.forget) for update in updates] == [
        (True, False),
        (True, True),
        (False, False),
    ]
    b.taught.learn(updates)
    assert b.index.size() == 0, "nothing is written before the end of the turn"
    b.taught.apply(1)
    assert (b.holds(X), b.holds(Y)) == (a.holds(X), a.holds(Y))
    assert b.index.size() == a.index.size() == 2 * len(HASHES) - 3


def test_updates_of_endpoints_that_this_replica_does_not_know_are_left_out() -> None:
    a = replica()
    a.taught.learn(
        [Blocks(1, HASHES.tobytes()), Blocks(1, HASHES.tobytes(), True), Blocks(key(a, X), HASHES[:1].tobytes())]
    )
    a.taught.apply(1)
    assert a.index.size() == 1
