"""Tests of the prefix index: comparison with a dict, limits, and owner ids."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiled.kernels.index_reference import PROBE_STRIDE, far_bucket, near_buckets
from shm.prefix_index import FAR_BUCKETS, FAR_WAYS, NEAR_OWNERS, OWNER_IDS, WAYS, IndexReader, IndexSchema
from shm.prefix_writer import IndexWriter, OwnersExhausted
from tests.cases import cases
from tests.examples import examples
from tests.shm.memory import region_for

LARGE = IndexSchema(40_000)
SMALL = IndexSchema(FAR_WAYS)
LENGTHS = (1, 2, 3, 7, 8, 9, 31, 32, 33, 34, 63, 64, 65, 161, 162, 200, 700)


def pair(schema: IndexSchema = LARGE) -> tuple[IndexWriter, IndexReader]:
    region = region_for(schema)
    return IndexWriter(schema, region), IndexReader(schema, region)


def chain(count: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 2**64, count, dtype=np.uint64)


@cases("count", LENGTHS)
def test_every_depth_of_a_prompt_is_matched_exactly(count: int) -> None:
    hashes = chain(count)
    for depth in sorted({1, count // 3, count // 2, count - 1, count} - {0}):
        writer, reader = pair()
        owner = writer.new_owner()
        writer.insert(hashes[:depth], owner, 1)
        assert reader.match(hashes) == {owner: depth}


@cases("count", LENGTHS)
def test_owners_with_different_depths_are_distinguished(count: int) -> None:
    writer, reader = pair()
    hashes = chain(count)
    expected = {}
    for part in range(1, 8):
        depth = max(1, count * part // 7)
        owner = writer.new_owner()
        writer.insert(hashes[:depth], owner, part)
        expected[owner] = depth
    assert reader.match(hashes) == expected


def test_unknown_blocks_and_an_empty_prompt_match_no_owner() -> None:
    writer, reader = pair()
    writer.insert(chain(500), writer.new_owner(), 1)
    for count in (0, *LENGTHS):
        assert reader.match(chain(count, seed=2)) == {}


def test_a_hit_on_a_later_probe_counts_when_the_first_blocks_were_lost() -> None:
    writer, reader = pair()
    hashes, owner = chain(100), writer.new_owner()
    writer.insert(hashes[:80], owner, 1)
    writer.forget(hashes[:40], owner)
    assert reader.match(hashes) == {owner: 80}


def test_blocks_between_probes_are_found_without_the_probes_of_their_owner() -> None:
    writer, reader = pair()
    hashes, one, two = chain(200), writer.new_owner(), writer.new_owner()
    writer.insert(hashes[:115], one, 1)
    writer.insert(hashes[3 * PROBE_STRIDE + 3 : 109], two, 1)
    assert reader.match(hashes) == {one: 115, two: 109}


@cases("held", [1, 2, 15, 16, 17, 31, 32, 33, 40, 63, 64])
def test_short_matches_of_any_length_are_found_by_bisection(held: int) -> None:
    writer, reader = pair()
    hashes, one, two = chain(64), writer.new_owner(), writer.new_owner()
    writer.insert(hashes[:held], one, 1)
    writer.insert(hashes[: held // 2 + 1], two, 1)
    assert reader.match(hashes) == {one: held, two: held // 2 + 1}


def test_a_view_with_gaps_matches_like_a_copy() -> None:
    writer, reader = pair()
    hashes, owner = chain(400)[::2], writer.new_owner()
    writer.insert(hashes[:111], owner, 1)
    assert reader.match(hashes) == {owner: 111}
    assert reader.match(hashes[:33]) == {owner: 33}


def test_one_batch_may_hold_many_owners_and_repeats() -> None:
    writer, reader = pair()
    owners = [writer.new_owner() for _ in range(20)]
    prompts = [chain(30, seed) for seed in range(20)]
    hashes = np.concatenate([*prompts, *prompts[:5]])
    ids = np.repeat(np.array([*owners, *owners[:5]], dtype=np.uint16), 30)
    writer.insert(hashes, ids, 1)
    assert writer.size() == 600
    for owner, prompt in zip(owners, prompts, strict=True):
        assert reader.match(prompt) == {owner: 30}


def test_a_known_block_is_only_refreshed() -> None:
    writer, _ = pair()
    hashes, owner = chain(1000), writer.new_owner()
    writer.insert(hashes, owner, 1)
    writer.insert(hashes, owner, 2)
    assert writer.size() == 1000
    assert sorted(writer._flat_ages[writer._entries != 0].tolist()) == [2] * 1000


@cases("owners", [1, 8, NEAR_OWNERS, NEAR_OWNERS + 1, 60, 120])
@cases("count", [1, 4, 40, 300])
def test_a_prompt_that_all_owners_hold_is_found_for_all_owners(owners: int, count: int) -> None:
    writer, reader = pair()
    hashes = chain(count)
    ids = [writer.new_owner() for _ in range(owners)]
    for owner in ids:
        writer.insert(hashes[: max(1, min(count, 40) * (owner % 2 + 1) // 2)], owner, owner)
    found = reader.match(hashes)
    missing = [owner for owner in ids if owner not in found]
    assert len(missing) <= owners // 20
    depths = {owner: max(1, min(count, 40) * (owner % 2 + 1) // 2) for owner in ids}
    assert sum(found.get(owner) == depths[owner] for owner in ids) >= owners * 0.9


def test_a_block_that_all_owners_hold_leaves_other_blocks_in_its_buckets() -> None:
    writer, reader = pair()
    rare, popular = next(
        (rare, rare ^ np.uint64(1 << 16))  # a different tag, but the same near buckets
        for rare in map(chain, [1] * 99, range(99))
        if near_buckets(int(rare[0]), LARGE.buckets) == near_buckets(int(rare[0]) ^ (1 << 16), LARGE.buckets)
    )
    rare_owner = writer.new_owner()
    writer.insert(rare, rare_owner, 1)
    for age in range(2, 60):
        writer.insert(popular, writer.new_owner(), age)
    assert len(reader.match(popular)) == 58
    assert reader.match(rare) == {rare_owner: 1}


def test_blocks_of_one_batch_do_not_evict_each_other_while_there_is_room() -> None:
    writer, reader = pair(IndexSchema(2000))
    hashes, owner = chain(1200), writer.new_owner()
    writer.insert(hashes, owner, 1)
    assert writer.evictions == 0
    assert writer.size() == 1200
    assert all(reader.match(hashes[i : i + 1]) for i in range(1200))


def test_a_full_index_evicts_the_oldest_entries() -> None:
    writer, reader = pair(IndexSchema(1600))
    owner, old, new = writer.new_owner(), chain(1600, 1), chain(300, 2)
    writer.insert(old, owner, 1)
    kept = np.array([h for h in old if reader.match(np.array([h]))][:300], dtype=np.uint64)
    writer.insert(kept, owner, 5)
    writer.insert(new, owner, 6)
    assert writer.evictions > 0
    recalled = [sum(bool(reader.match(part[i : i + 1])) for i in range(300)) for part in (kept, new)]
    assert min(recalled) > 290


def test_sizes_and_evictions_add_up() -> None:
    writer, _ = pair(IndexSchema(1600))
    owner = writer.new_owner()
    for seed in range(5):
        writer.insert(chain(700, seed), owner, seed)
    assert writer.size() + writer.evictions == 3500
    assert writer.size() == np.count_nonzero(writer._entries)


def test_forget_removes_near_and_far_entries() -> None:
    writer, reader = pair()
    hashes = chain(3)
    owners = [writer.new_owner() for _ in range(40)]
    for owner in owners:
        writer.insert(hashes, owner, 1)
    for owner in owners[::2]:
        writer.forget(hashes, owner)
    assert set(reader.match(hashes)) == set(owners[1::2])
    assert writer.size() == np.count_nonzero(writer._entries) == 60 + len(hashes)  # one mark each
    writer.forget(chain(3, seed=9), owners[0])
    assert writer.size() == 63


def test_owner_ids_start_at_2_and_the_lowest_free_one_is_taken() -> None:
    writer, _ = pair()
    assert [writer.new_owner() for _ in range(3)] == [2, 3, 4]
    assert writer.owners() == [2, 3, 4]
    writer.retire(3)
    assert writer.owners() == [2, 4]
    writer.sweep_step(LARGE.buckets)
    assert writer.new_owner() == 3


def test_an_owner_id_is_assigned_again_only_after_a_full_sweep() -> None:
    writer, reader = pair()
    hashes, owner, other = chain(500), writer.new_owner(), writer.new_owner()
    writer.insert(hashes, owner, 1)
    writer.insert(hashes, other, 1)
    writer.sweep_step(100)  # there is nothing to sweep, so this step does not count
    writer.retire(owner)
    writer.retire(owner)
    steps = 0
    while writer.new_owner() != owner:
        writer.sweep_step(700)
        steps += 1
    assert steps == -(-LARGE.buckets // 700)
    assert reader.match(hashes) == {other: 500}
    assert writer.size() == 500


def test_a_retirement_in_the_middle_of_a_sweep_waits_for_a_full_round() -> None:
    writer, _ = pair()
    one, two = writer.new_owner(), writer.new_owner()
    writer.retire(one)
    half = LARGE.buckets // 2
    writer.sweep_step(half)
    writer.retire(two)
    writer.sweep_step(LARGE.buckets - half)
    assert list(writer._retired_at) == [two]
    writer.sweep_step(half)
    assert not writer._retired_at


def test_entries_of_a_retired_owner_are_overwritten_first_and_are_no_evictions() -> None:
    writer, reader = pair(SMALL)
    gone, stays = writer.new_owner(), writer.new_owner()
    for seed in range(20):
        writer.insert(chain(100, seed), gone, 9)
    full = writer.size()
    evictions = writer.evictions
    writer.retire(gone)
    new = chain(30, seed=99)
    writer.insert(new, stays, 1)  # older than the present entries
    assert writer.evictions == evictions
    assert writer.size() >= full
    assert all(reader.match(new[i : i + 1]) == {stays: 1} for i in range(30))


def test_an_insert_for_an_owner_that_is_not_live_is_dropped_and_counted() -> None:
    writer, reader = pair()
    gone, stays = writer.new_owner(), writer.new_owner()
    writer.retire(gone)
    hashes = chain(10)
    writer.insert(hashes, gone, 1)
    writer.insert(hashes, 500, 1)
    assert writer.dropped == 20
    writer.insert(hashes, np.array([gone, stays] * 5, dtype=np.uint16), 1)
    assert writer.dropped == 25
    assert reader.match(hashes) == {stays: 10}


def test_an_error_says_that_all_owner_ids_are_taken() -> None:
    writer, _ = pair()
    writer._states[2:] = 1
    with pytest.raises(OwnersExhausted, match="all 65534 owner ids are taken"):
        writer.new_owner()
    writer.retire(OWNER_IDS - 1)
    writer.sweep_step(LARGE.buckets)
    assert writer.new_owner() == OWNER_IDS - 1


def test_more_owners_of_one_far_bucket_than_it_has_ways_evict_each_other_and_are_counted() -> None:
    writer, reader = pair(SMALL)
    owners = np.array([writer.new_owner() for _ in range(110 * FAR_BUCKETS)])
    owners = owners[far_bucket(owners) == 0][:100].astype(np.uint16)
    writer.insert(np.repeat(chain(1), 100), owners, 1)
    assert writer.evictions >= 100 - NEAR_OWNERS - WAYS
    assert len(reader.match(chain(1))) >= NEAR_OWNERS


def test_far_owners_are_found_while_near_owners_leave() -> None:
    writer, reader = pair()
    hashes = chain(4)
    owners = [writer.new_owner() for _ in range(30)]
    for owner in owners:
        writer.insert(hashes, owner, 1)
    for owner in owners[:NEAR_OWNERS]:
        writer.retire(owner)
    writer.sweep_step(LARGE.buckets)
    assert set(reader.match(hashes)) == set(owners[NEAR_OWNERS:])
    assert reader.match(hashes[:1]).keys() == reader.match(np.tile(hashes, 60)).keys()


def test_a_successor_continues_where_its_predecessor_was_killed() -> None:
    region = region_for(LARGE)
    writer, reader = IndexWriter(LARGE, region), IndexReader(LARGE, region)
    hashes, stays, gone = chain(100), writer.new_owner(), writer.new_owner()
    writer.insert(hashes, stays, 1)
    writer.insert(hashes, gone, 1)
    writer.retire(gone)
    writer.sweep_step(LARGE.buckets - 1)
    successor = IndexWriter(LARGE, region)
    assert successor.size() == np.count_nonzero(successor._entries)
    assert successor.owners() == [stays]
    successor.sweep_step(1)
    assert successor.new_owner() not in (stays, gone)
    successor.sweep_step(LARGE.buckets)
    assert successor.new_owner() == gone
    assert reader.match(hashes) == {stays: 100}


def test_an_empty_entry_has_no_owner_even_if_the_tag_is_zero() -> None:
    writer, reader = pair()
    hashes = np.array([5, 6, 7], dtype=np.uint64)  # the upper 48 bits are zero
    assert reader.match(hashes) == {}
    owner = writer.new_owner()
    writer.insert(hashes, owner, 1)
    assert reader.match(hashes) == {owner: 3}
    assert reader.match(np.tile(hashes, 100)) == {owner: 300}


def test_an_index_smaller_than_the_far_buckets_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 256 entries"):
        IndexSchema(FAR_WAYS - 1)


def test_a_reader_cannot_write() -> None:
    _, reader = pair()
    with pytest.raises(ValueError, match="read-only"):
        reader._table[0, 0] = 1


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["insert", "insert", "insert", "forget", "replace", "sweep", "restart"]),
        st.integers(0, 5),  # prompt
        st.integers(0, 9),  # which owner
        st.integers(1, 70),  # depth
    ),
    max_size=30,
)


@given(STEPS, st.sampled_from([1, 5, 40, 70]))
@examples(60)
def test_the_index_agrees_with_a_dict_while_nothing_is_evicted(steps: list, asked: int) -> None:
    region = region_for(LARGE)
    writer, reader = IndexWriter(LARGE, region), IndexReader(LARGE, region)
    prompts = [chain(70, seed) for seed in range(6)]
    owners = [writer.new_owner() for _ in range(10)]
    model: dict[tuple[int, int], int] = {}
    for age, (action, prompt, which, depth) in enumerate(steps):
        owner = owners[which]
        if action == "insert":
            writer.insert(prompts[prompt][:depth], owner, age)
            model[prompt, owner] = max(depth, model.get((prompt, owner), 0))
        elif action == "forget":
            writer.forget(prompts[prompt], owner)
            model.pop((prompt, owner), None)
        elif action == "replace":
            writer.retire(owner)
            writer.sweep_step(LARGE.buckets)
            owners[which] = writer.new_owner()
            model = {key: value for key, value in model.items() if key[1] != owner}
        elif action == "sweep":
            writer.sweep_step(depth)
        else:
            writer = IndexWriter(LARGE, region)
    assert writer.evictions == 0
    assert writer.size() == sum(model.values())
    for prompt, hashes in enumerate(prompts):
        expected = {o: min(d, asked) for (p, o), d in model.items() if p == prompt}
        assert reader.match(hashes[:asked]) == expected


@given(st.integers(0, 2**32), st.integers(1, 300))
@examples(30)
def test_an_index_under_eviction_never_names_a_wrong_owner_or_depth(seed: int, count: int) -> None:
    writer, reader = pair(IndexSchema(512))
    owners = [writer.new_owner() for _ in range(5)]
    prompts = [chain(count, seed + i) for i in range(5)]
    for age in range(3):
        for owner, prompt in zip(owners, prompts, strict=True):
            writer.insert(prompt, owner, age)
    for owner, prompt in zip(owners, prompts, strict=True):
        found = reader.match(prompt)
        assert set(found) <= {owner}
        assert all(1 <= depth <= count for depth in found.values())
