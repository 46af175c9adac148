"""Look-ups of held blocks agree with a plain count, whatever is missing in the middle."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shm.held_blocks import HeldReader, HeldWriter, Owners, schemas
from shm.segment import Region
from tests.examples import examples


def world(blocks: int = 1 << 14):
    index, links = schemas(blocks)
    memory, linked = (Region(memoryview(bytearray(schema.bytes))) for schema in (index, links))
    return HeldWriter(index, memory, links, linked), HeldReader(index, memory)


def keys(count: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 2**63, count, dtype=np.uint64) << np.uint64(1) & np.uint64(~(1 << 16) & (2**64 - 1))


@examples(60)
@given(st.integers(1, 400), st.lists(st.tuples(st.integers(0, 399), st.integers(0, 5)), max_size=12), st.integers(0, 3))
def test_it_counts_blocks_up_to_the_first_missing_one(count, gaps, lost) -> None:
    writer, reader = world()
    chain, rows = keys(count), 3
    owners, weights = Owners(rows), {0: 1000, 1: 400}
    holders = {}  # (row, tier) -> the owner id and the blocks that it holds
    for row in range(rows):
        for tier, weight in weights.items():
            owner = writer.new_owner()
            owners.add(owner, row, weight)
            missing = {block for block, who in gaps if who == 2 * row + tier} | ({0} if row == lost else set())
            held = [block for block in range(count) if block not in missing]
            writer.insert(chain[held], owner, 1)
            holders[row, tier] = set(held)
    blocks, weighted = reader.held(chain, owners)
    for row in range(rows):
        best = [max((weights[t] for t in weights if block in holders[row, t]), default=0) for block in range(count)]
        depth = best.index(0) if 0 in best else count
        assert (blocks[row], weighted[row]) == (depth, sum(best[:depth]))


def test_many_holders_of_one_block_are_all_found() -> None:
    writer, reader = world(1 << 16)
    chain, owners = keys(40), Owners(60)
    for row in range(60):
        owner = writer.new_owner()
        owners.add(owner, row, 1000)
        writer.insert(chain[: row % 40 + 1], owner, 1)
    blocks, _ = reader.held(chain, owners)
    assert blocks == [row % 40 + 1 for row in range(60)]


def test_prompts_longer_than_one_look_up_are_counted_to_their_end() -> None:
    writer, reader = world(1 << 16)
    chain, owners = keys(5000), Owners(2)
    whole, part = writer.new_owner(), writer.new_owner()
    owners.add(whole, 0, 1000)
    owners.add(part, 1, 1000)
    writer.insert(chain, whole, 1)
    writer.insert(chain[:3000], part, 1)
    writer.forget(chain[2999:3000], np.array([part], np.uint16))
    assert reader.held(chain, owners) == ([5000, 2999], [5_000_000, 2_999_000])
    assert reader.held(chain[:0], owners) == ([0, 0], [0, 0])


def test_forgetting_spares_what_was_inserted_again() -> None:
    writer, reader = world()
    chain, owners = keys(10), Owners(1)
    owner = writer.new_owner()
    owners.add(owner, 0, 1000)
    writer.insert(chain, owner, 5)
    writer.insert(chain[:4], owner, 9)
    writer.forget(chain, np.full(10, owner, np.uint16), before=5)
    assert reader.held(chain, owners)[0] == [4]


def test_a_retired_owner_leaves_index_and_links_before_its_id_is_used_again() -> None:
    writer, _ = world()
    owner = writer.new_owner()
    chain = keys(100)
    writer.insert(chain, owner, 1)
    writer.links.store(chain, owner, 0, chain)
    writer.retire(owner)
    for _ in range(200):
        writer.sweep_both(1 / 64)
    assert (writer.size(), writer.links.size, writer.new_owner()) == (0, 0, owner)
