"""The table of links behaves like a dict."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiled import kernels
from compiled.kernels import links_reference
from shm.link_table import COUNT_MAX, TIERS, LinkSchema, LinkTable
from shm.segment import Region
from tests.examples import examples


def table(entries: int = 4096, live: np.ndarray | None = None) -> LinkTable:
    schema = LinkSchema(entries)
    return LinkTable(schema, Region(memoryview(bytearray(schema.bytes))), np.ones(1 << 16, np.uint8) if live is None else live)


@contextmanager
def by_reference() -> Iterator[None]:
    """Lets tables use the references of the kernels."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("remove_links", "store_links"):
            patch.setattr(kernels, name, getattr(links_reference, name))
        yield


def links_of(hashes: Iterable[int]) -> np.ndarray:
    return np.array([hash_ + 1 for hash_ in hashes], np.uint64)


def store(links: LinkTable, hashes: Iterable[int], owner: int, tier: int = 0) -> tuple[list[int], int]:
    """Stores blocks whose links are their hashes + 1. Returns the new ones, as links, and how many were refused."""
    new, refused = links.store(list(hashes), owner, tier, links_of(hashes))
    return new.tolist(), refused


Step = tuple[bool, list[int], int, int]  # whether it stores, hashes, owner, tier
operations = st.lists(
    st.tuples(st.booleans(), st.lists(st.integers(0, 30), max_size=12), st.integers(2, 4), st.integers(0, TIERS - 1)), max_size=40
)


@pytest.mark.parametrize("native", [True, False])
@examples(100)
@given(operations)
def test_it_agrees_with_a_dict(native: bool, steps: list[Step]) -> None:
    links, model, number = table(), {}, 0
    for stores, hashes, owner, tier in steps:
        expected, others, unknown = [], 0, 0
        given_links = np.arange(number + 1, number + 1 + len(hashes), dtype=np.uint64)
        for place, hash_ in enumerate(hashes):
            counts, before = model.setdefault((hash_, owner), ([0] * TIERS, 0))
            if stores:
                number += 1
                if counts[tier] == 0:
                    expected.append(number)
                counts[tier] += 1
                model[hash_, owner] = counts, int(given_links[place])
            elif counts[tier] == 0:
                unknown += 1
            else:
                counts[tier] -= 1
                others += counts[tier] > 0
                if counts[tier] == 0:
                    expected.append(before)
        words = np.array(hashes, np.uint64)
        if stores:
            with nullcontext() if native else by_reference():
                changed, refused = links.store(words, owner, tier, given_links)
            assert (changed.tolist(), refused) == (expected, 0)
        else:
            with nullcontext() if native else by_reference():
                gone = links.remove(words, owner, tier)
            assert (gone[0].tolist(), *gone[1:]) == (expected, others, unknown)
        for (known, who), (numbers, value) in model.items():
            assert links.link(known, who) == (value if any(numbers) else None)
    assert links.size == sum(any(numbers) for numbers, _ in model.values())


@pytest.mark.skipif(not kernels.NATIVE, reason="the kernels in C are not built")
@examples(100)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(2, 5), st.integers(0, TIERS - 1)), max_size=30))
def test_the_kernels_write_what_the_reference_writes(steps: list[tuple[bool, int, int, int]]) -> None:
    """In a table that is too small: with refusals, keys that move to their other bucket, and owners that are not live."""
    live = np.ones(1 << 16, np.uint8)
    schema = LinkSchema(160)
    memories = [bytearray(schema.bytes) for _ in range(2)]
    one, other = (LinkTable(schema, Region(memoryview(memory)), live) for memory in memories)
    live[5] = 0
    for stores, seed, owner, tier in steps:
        hashes = np.random.default_rng(seed).integers(0, 2**64, 30, dtype=np.uint64)
        if stores:
            new = one.store(hashes, owner, tier, ~hashes)
            with by_reference():
                new_too = other.store(hashes, owner, tier, ~hashes)
            assert (new[0].tolist(), new[1]) == (new_too[0].tolist(), new_too[1])
        else:
            gone = one.remove(hashes, owner, tier)
            with by_reference():
                gone_too = other.remove(hashes, owner, tier)
            assert (gone[0].tolist(), *gone[1:]) == (gone_too[0].tolist(), *gone_too[1:])
        assert memories[0] == memories[1]
        assert one.size == other.size


@pytest.mark.skipif(not kernels.NATIVE, reason="the kernels in C are not built")
def test_the_kernels_refuse_what_is_no_table() -> None:
    words, live, hashes = np.zeros((3, 16), np.uint64), np.ones(1 << 16, np.uint8), np.ones(2, np.uint64)
    assert kernels.store_links(words, live, hashes[:1], 2, 0, hashes[:1])[1:] == (0, 1)
    for arrays, owner, tier in (
        ((words[:2], live), 2, 0),
        ((words, live[:9]), 2, 0),
        ((words, live), 1 << 16, 0),
        ((words, live), 2, TIERS),
    ):
        with pytest.raises(ValueError, match="not those of one table of links"):
            kernels.remove_links(*arrays, hashes, owner, tier)
    with pytest.raises(ValueError, match="differ in length"):
        kernels.store_links(words, live, hashes, 2, 0, hashes[:1])
    with pytest.raises(TypeError, match="contiguous"):
        kernels.remove_links(words[:, ::2], live, hashes, 2, 0)


def test_three_quarters_of_the_table_can_be_used_and_more_is_refused_not_lost() -> None:
    links = table(1 << 14)
    new, refused = store(links, range(1 << 14), 2)
    assert len(new) + refused == 1 << 14
    assert len(new) > 0.75 * (1 << 14)
    assert new[: 3 << 12] == list(range(1, (3 << 12) + 1))
    assert all(links.link(link - 1, 2) == link for link in new)
    known = set(new)
    assert all(links.link(hash_, 2) is None for hash_ in range(1 << 14) if hash_ + 1 not in known)


def test_entries_of_owners_that_are_not_live_make_room_and_are_swept() -> None:
    live = np.ones(1 << 16, np.uint8)
    links = table(64, live)
    assert store(links, range(500), 2)[1] > 0
    live[2] = 2
    assert store(links, range(40), 3) == (list(range(1, 41)), 0)
    for _ in range(10):
        links.sweep_step(1)
    assert links.size == 40
    assert all(links.link(hash_, 3) == hash_ + 1 for hash_ in range(40))


def test_a_successor_finds_everything() -> None:
    schema = LinkSchema(64)
    memory, live = bytearray(schema.bytes), np.ones(1 << 16, np.uint8)
    store(LinkTable(schema, Region(memoryview(memory)), live), [5], 2, 1)
    again = LinkTable(schema, Region(memoryview(memory)), live)
    assert (again.size, again.link(5, 2)) == (1, 6)
    assert again.remove([5], 2, 1)[0].tolist() == [6]


def test_a_count_stays_at_its_highest_value() -> None:
    links = table()
    assert store(links, [1] * (COUNT_MAX + 5), 2) == ([2], 0)
    gone, held, unknown = links.remove([1] * (COUNT_MAX - 1), 2, 0)
    assert (gone.tolist(), held, unknown) == ([], COUNT_MAX - 1, 0)
    gone, held, unknown = links.remove([1, 1], 2, 0)
    assert (gone.tolist(), held, unknown) == ([2], 0, 1)


@pytest.mark.parametrize("entries", [1, 8, 9])
def test_its_size_is_whole_buckets(entries) -> None:
    assert LinkSchema(entries).entries % 8 == 0
    assert LinkSchema(5_000_000 * 4 // 3).bytes < 155 << 20


def test_nine_tenths_of_the_table_can_be_used() -> None:
    links = table(20_000)
    hashes = np.random.default_rng(3).integers(1, 2**63, int(0.9 * links.schema.entries), dtype=np.uint64).tolist()
    assert store(links, hashes, 7)[1] == 0
    assert links.size == len(hashes)
    assert [links.link(hash_, 7) for hash_ in hashes] == [hash_ + 1 for hash_ in hashes]
