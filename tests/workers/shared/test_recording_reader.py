"""One pool of a recording of several: what is kept, what is left out, and what is refused."""

import numpy as np
import pytest

from epp.recording.records import Batch, Configured, Decided, Ended, EndpointList, Member, Named, Opened, Record, Scraped, floats, ints
from epp.recording.trace import requests
from workers.shared.recording import Unreadable
from workers.shared.recording.reader import of_pool

NAMES = ["one", "two"]


def opened(pools: list[str] = NAMES) -> Opened:
    return Opened(1, "test", 1, 1e9, 0.0, 7, pools)


def member(slot: int, pool: str, *, joined: bool = True) -> Member:
    return Member(0.0, joined, slot, 1, "ns", f"{pool}-{slot}", f"10.0.0.{slot}:80", {}, pool)


def decided(number: int, slot: int, pool: str) -> Decided:
    return Decided(
        number, 0, 1.0, 0.0, 1, "m", "", 0, 0, 0, None, False, 10, None, 2, 0, b"", 1, None, b"", None, None, [], [slot], "", [], pool
    )


def ended(number: int, slot: int) -> Ended:
    return Ended(number, 200, slot, 0.1, 0.2, False, True, 10, None, None, None)


def scraped(slots: list[int], columns: list[str]) -> Scraped:
    values = np.array([[float(slot), 1.0] for slot in slots])
    at = np.full(len(slots), 5.0)
    return Scraped(0.5, columns, np.array(slots, np.int64).tobytes(), at.tobytes(), values.tobytes(), bytes(slots))


RECORDS: list[list[Record]] = [
    [opened(), member(1, "one"), member(2, "two"), scraped([1, 2], ["a", "b"]), Named(0.6, 2, {"lora": ["x"]})],
    [
        Batch(9, 0),
        Configured(1, "hash-one", [], [], "one"),
        Configured(1, "hash-two", [], [], "two"),
        EndpointList(1, np.array([1, 2]).tobytes(), np.array([1, 1]).tobytes()),
        decided(1, 1, "one"),
        decided(2, 2, "two"),
        ended(1, 1),
        ended(2, 2),
    ],
    [scraped([2], []), member(2, "two", joined=False), member(2, "one"), scraped([2], [])],
]


def kept(pool: str) -> list[Record]:
    return [record for batch in of_pool(RECORDS, pool, "rec") for record in batch]


@pytest.mark.parametrize(("pool", "slot"), [("one", 1), ("two", 2)])
def test_only_what_belongs_to_the_pool_is_kept(pool: str, slot: int) -> None:
    records = kept(pool)
    assert [each.pool for each in records if isinstance(each, (Configured, Decided))] == [pool] * 2
    assert [each.slot for each in records if isinstance(each, Ended)] == [slot]
    assert {each.pool for each in records if isinstance(each, Member)} == {pool}
    assert len([each for each in records if isinstance(each, Named)]) == (pool == "two")
    first = next(each for each in records if isinstance(each, Scraped))
    assert (ints(first.slots).tolist(), floats(first.values).tolist(), first.states) == ([slot], [float(slot), 1.0], bytes([slot]))
    assert first.columns == ["a", "b"]


def test_a_slot_that_moves_to_another_pool_takes_its_scrapes_along() -> None:
    assert [ints(each.slots).tolist() for each in kept("one") if isinstance(each, Scraped)] == [[1], [2]]
    assert [ints(each.slots).tolist() for each in kept("two") if isinstance(each, Scraped)] == [[2], [2]]


def test_requests_of_all_pools_have_the_configuration_of_their_own() -> None:
    found = {each.decided.pool: each for each in requests(RECORDS)}
    assert {pool: each.config.hash for pool, each in found.items() if each.config is not None} == {"one": "hash-one", "two": "hash-two"}
    assert {pool: target.name for pool, each in found.items() if (target := each.target()) is not None} == {"one": "one-1", "two": "two-2"}


@pytest.mark.parametrize(
    ("pool", "pools", "why"),
    [
        ("", NAMES, "the recording has several pools: give one with --pool; pools: one, two"),
        ("three", NAMES, "the recording has no pool 'three'; pools: one, two"),
        ("one", [], "the recording is of a picker of one pool"),
    ],
)
def test_a_pool_that_the_recording_does_not_have_is_refused_with_those_that_it_has(pool: str, pools: list[str], why: str) -> None:
    with pytest.raises(Unreadable, match=f"^rec: {why}"):
        list(of_pool([[opened(pools)]], pool, "rec"))


def test_a_recording_of_one_pool_needs_no_name() -> None:
    alone: list[list[Record]] = [[opened([]), member(1, ""), scraped([1], ["a", "b"])], [Batch(9, 0), decided(1, 1, ""), ended(1, 1)]]
    assert list(of_pool(alone, "", "rec")) == alone
    named: list[list[Record]] = [[opened(["one"]), member(1, "one"), scraped([1], ["a", "b"]), decided(1, 1, "one"), ended(1, 1)]]
    assert list(of_pool(named, "", "rec")) == named
