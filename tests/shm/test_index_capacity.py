"""Tests of capacity limits: the index keeps an owner's latest blocks, about as many as its cache holds.

A large index is compared with a dict and with an LRU.
"""

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm.index_capacity import OVER_MAX, WIDE, WIDE_BLOCKS, blocks_of
from shm.prefix_index import IndexReader, IndexSchema
from shm.prefix_writer import IndexWriter
from tests.examples import examples
from tests.shm.memory import region_for

SCHEMA = IndexSchema(40_000)
NARROW = np.uint64((1 << 64) - 1 - WIDE)
DENSE, STRIDE = 64, WIDE_BLOCKS  # the picker stores the first 64 blocks of a prompt, and then every fourth


def pair(schema: IndexSchema = SCHEMA) -> tuple[IndexWriter, IndexReader]:
    region = region_for(schema)
    return IndexWriter(schema, region), IndexReader(schema, region)


def blocks(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(1, 2**64, count, dtype=np.uint64) & NARROW


def held(writer: IndexWriter, owner: int) -> int:
    """The number of blocks of one owner, counted in the table instead of by the writer."""
    entries = writer._entries[(writer._entries & np.uint64(0xFFFF)) == owner]
    return int(blocks_of(entries).sum())


def test_the_held_count_exceeds_the_capacity_by_at_most_a_tenth() -> None:
    rng = np.random.default_rng(1)
    writer, _ = pair()
    capacities = {writer.new_owner(): capacity for capacity in (300, 1000, 4000, 0)}
    for owner, capacity in capacities.items():
        writer.limit(owner, capacity)
    owners = np.array(list(capacities), dtype=np.uint16)
    for age in range(400):
        count = int(rng.integers(1, 60))
        writer.insert(blocks(rng, count), rng.choice(owners, count), age // 3)
        for owner, capacity in capacities.items():
            assert held(writer, owner) == writer.held(owner)
            assert not capacity or held(writer, owner) <= capacity * 1.1
    unlimited = next(owner for owner, capacity in capacities.items() if not capacity)
    assert writer.held(unlimited) > 1500
    assert writer.size() == np.count_nonzero(writer._entries)
    assert writer.freed()["capacity"] > 0 == writer.freed()["full"]


def test_entries_that_are_used_repeatedly_stay_and_the_oldest_are_removed() -> None:
    rng = np.random.default_rng(2)
    writer, reader = pair()
    owner = writer.new_owner()
    writer.limit(owner, 2000)
    popular = blocks(rng, 500)
    batches = []
    for age in range(300):
        batches.append(blocks(rng, 50))
        writer.insert(batches[-1], owner, age)
        writer.insert(popular[: 250 + 250 * (age % 2)], owner, age)
    there = [sum(bool(reader.match(batch[i : i + 1])) for i in range(50)) / 50 for batch in batches]
    assert all(reader.match(popular[i : i + 1]) for i in range(500))
    assert min(there[-26:]) == 1.0  # 1,300 blocks and the 500 popular ones fit in any case
    assert max(there[:-33]) == 0.0
    kept = [number for number, share in enumerate(there) if share]
    assert kept == list(range(kept[0], 300))


def test_an_entry_that_represents_several_blocks_counts_as_several() -> None:
    writer, _ = pair()
    owner = writer.new_owner()
    writer.limit(owner, 1000)
    rng = np.random.default_rng(3)
    for age in range(60):
        writer.insert(blocks(rng, 20) | np.uint64(WIDE), owner, age)
        assert writer.held(owner) == held(writer, owner) <= 1100
    assert 900 <= writer.held(owner) == WIDE_BLOCKS * writer.size()


def test_a_lower_limit_takes_effect_with_the_next_insert_and_0_removes_it() -> None:
    writer, _ = pair()
    owner, other = writer.new_owner(), writer.new_owner()
    rng = np.random.default_rng(4)
    writer.insert(blocks(rng, 3000), owner, 1)
    writer.limit(owner, 1000)
    writer.insert(blocks(rng, 1), other, 2)
    assert writer.held(owner) <= 1000
    writer.limit(owner, 0)
    writer.insert(blocks(rng, 3000), owner, 3)
    assert writer.held(owner) > 3900


def test_a_few_owners_over_their_capacity_are_reduced_per_insert() -> None:
    writer, _ = pair()
    owners = [writer.new_owner() for _ in range(3 * OVER_MAX)]
    rng = np.random.default_rng(5)
    for owner in owners:
        writer.insert(blocks(rng, 1000), owner, 1)
    for owner in owners:
        writer.limit(owner, 500)
    turns = 0
    while any(writer.held(owner) > 500 for owner in owners):
        writer.insert(blocks(rng, 1), owners[0], 2)
        turns += 1
    assert turns == 3


def test_the_clock_may_wrap() -> None:
    rng = np.random.default_rng(6)
    writer, reader = pair()
    owner = writer.new_owner()
    writer.limit(owner, 400)
    batches = [blocks(rng, 20) for _ in range(100)]
    for number, batch in enumerate(batches):
        writer.insert(batch, owner, (1 << 32) - 50 + number)
    assert all(reader.match(batch[:1]) for batch in batches[-15:])
    assert not any(reader.match(batch[:1]) for batch in batches[:75])


def test_a_successor_counts_the_entries_of_its_predecessor() -> None:
    region = region_for(SCHEMA)
    writer = IndexWriter(SCHEMA, region)
    owner, gone = writer.new_owner(), writer.new_owner()
    rng = np.random.default_rng(7)
    writer.insert(blocks(rng, 700), owner, 1)
    writer.insert(blocks(rng, 50), gone, 1)
    successor = IndexWriter(SCHEMA, region)
    assert successor.held(owner) == 700
    successor.limit(owner, 500)
    successor.insert(blocks(rng, 1), owner, 2)
    assert successor.held(owner) <= 500
    successor.retire(gone)
    successor.sweep_step(SCHEMA.buckets)
    assert successor.held(gone) == 0
    assert successor.freed()["gone"] == 50
    assert successor.new_owner() == gone
    successor.insert(blocks(rng, 60), gone, 3)
    assert successor.held(gone) == 60


STEPS = st.lists(
    st.tuples(st.sampled_from(["insert", "insert", "insert", "forget", "retire", "limit", "sweep"]), st.integers(0, 3), st.integers(1, 80)),
    max_size=60,
)


@given(STEPS, st.integers(0, 9))
@examples(60)
def test_counts_and_limits_hold_under_any_operations_and_no_owner_is_found_without_an_insert(
    steps: list[tuple[str, int, int]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    writer, reader = pair(IndexSchema(2048))
    owners = [writer.new_owner() for _ in range(4)]
    limits = dict.fromkeys(owners, 0)
    inserted: dict[int, set[int]] = {owner: set() for owner in owners}
    pool = blocks(rng, 600)
    for age, (step, which, count) in enumerate(steps):
        owner = owners[which]
        if step == "insert":
            some = rng.choice(pool, count)
            writer.insert(some, owner, age)
            inserted[owner].update(some.tolist())
            assert not limits[owner] or writer.held(owner) <= limits[owner] * 1.1
        elif step == "forget":
            some = rng.choice(pool, count)
            writer.forget(some, owner)
            inserted[owner].difference_update(some.tolist())
        elif step == "limit":
            writer.limit(owner, count)
            limits[owner] = count
            writer.insert(pool[:1], owner, age)
            inserted[owner].add(int(pool[0]))
        elif step == "retire":
            writer.retire(owner)
            writer.sweep_step(writer.schema.buckets)
            del inserted[owner], limits[owner]
            owners[which] = writer.new_owner()
            inserted[owners[which]], limits[owners[which]] = set(), 0
        else:
            writer.sweep_step(count)
    for owner in owners:
        assert writer.held(owner) == held(writer, owner)
    for block in pool[:100]:
        assert set(reader.match(np.array([block]))) <= {owner for owner in owners if int(block) in inserted[owner]}


def cut(chain: np.ndarray, start: int = 0) -> np.ndarray:
    """The blocks of a prompt that the index stores, chosen as in `epp.prefix.blocks.landmarks`."""
    places = [i for i in range(start, len(chain)) if i < DENSE or i % STRIDE == 0 or i == len(chain) - 1]
    return chain[places]


class Oracle:
    """A reference index: per owner, an LRU of the longest known head of each prompt, limited to `capacity` blocks."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held: dict[int, OrderedDict[int, int]] = {}  # owner -> prompt -> depth, oldest first

    def learn(self, owner: int, prompt: int, depth: int) -> None:
        own = self._held.setdefault(owner, OrderedDict())
        own[prompt] = max(depth, own.pop(prompt, 0))
        while sum(own.values()) > self._capacity:
            own.popitem(last=False)

    def match(self, prompt: int, asked: int) -> dict[int, int]:
        return {owner: min(own[prompt], asked) for owner, own in self._held.items() if prompt in own}


def test_matches_at_57_percent_load_are_as_long_as_those_of_a_dict_and_never_wrong() -> None:
    rng = np.random.default_rng(8)
    entries, owners_count = 131_072, 8
    schema = IndexSchema(entries)
    writer, reader = pair(schema)
    owners = [writer.new_owner() for _ in range(owners_count)]
    oracle = Oracle(1 << 40)
    prompts: list[np.ndarray] = []
    while writer.size() < entries * 0.57:
        chain = blocks(rng, int(rng.integers(16, 1564)))
        chain[DENSE:] |= np.uint64(WIDE)
        prompts.append(chain)
        for owner in rng.choice(owners, 2, replace=False).tolist():
            depth = int(rng.integers(16, len(chain) + 1))
            writer.insert(cut(chain[:depth]), owner, len(prompts) // 8)
            oracle.learn(owner, len(prompts) - 1, depth)
    ours = theirs = 0
    for number, chain in enumerate(prompts):
        asked = int(rng.integers(16, len(chain) + 1))
        found, expected = reader.match(chain[:asked]), oracle.match(number, asked)
        assert set(found) <= set(expected)
        assert all(depth <= expected[owner] for owner, depth in found.items())
        ours += sum(found.values())
        theirs += sum(expected.values())
    for _ in range(200):
        assert reader.match(blocks(rng, 400)) == {}
    print(f"matched {ours / theirs:.4f} of the reference's blocks; {writer.evictions} evictions")
    assert ours >= 0.99 * theirs


def test_matches_follow_an_lru_when_caches_overflow() -> None:
    rng = np.random.default_rng(9)
    writer, reader = pair(IndexSchema(65_536))
    owners = [writer.new_owner() for _ in range(4)]
    capacity = 6000
    oracle = Oracle(capacity)
    for owner in owners:
        writer.limit(owner, capacity)
    prompts = [blocks(rng, int(rng.integers(16, 400))) for _ in range(400)]
    for chain in prompts:
        chain[DENSE:] |= np.uint64(WIDE)
    ours = theirs = wrong = 0
    for age in range(2500):
        number = min(int(rng.zipf(1.3)), len(prompts)) - 1
        owner = owners[number % 4]
        found = reader.match(prompts[number]).get(owner, 0)
        expected = oracle.match(number, 1 << 30).get(owner, 0)
        ours, theirs, wrong = ours + found, theirs + expected, wrong + abs(found - expected)
        writer.insert(cut(prompts[number]), owner, age)
        oracle.learn(owner, number, len(prompts[number]))
        assert writer.held(owner) <= capacity * 1.1
    print(f"matched {ours / theirs:.3f} of an exact LRU's blocks, {wrong / theirs:.3f} differ")
    assert ours == pytest.approx(theirs, rel=0.05)


def test_a_million_entries_at_57_percent_load_take_24_mib() -> None:
    assert IndexSchema(int(1_000_000 / 0.57)).bytes <= 24 << 20
