"""What the endpoints hold, after events of every dialect: the index agrees with a model, and requests find it."""

import random

import msgspec
import numpy as np
import pytest

from epp.prefix.held import adapter_word, held_links, held_root, index_keys, request_extras
from epp.prefix.kv_events import CLEARED_MAX
from epp.request import Feature
from shm.held_blocks import HeldReader, HeldWriter, Owners, schemas
from shm.prefix_index import FAR_MARK
from shm.segment import Region
from workers.supervisor.kv_events.holdings import EVENTS_AT_ONCE, Holder, Holdings

SECRET = 5
BLOCK = 16
encode = msgspec.msgpack.encode


class World:
    """Holdings of some endpoints, and a reader as workers have it."""

    def __init__(self, endpoints: int = 1, blocks: int = 1 << 14) -> None:
        index, links = schemas(blocks)
        memory, linked = (Region(memoryview(bytearray(schema.bytes))) for schema in (index, links))
        self.writer = HeldWriter(index, memory, links, linked)
        self.reader = HeldReader(index, memory)
        self.holdings = Holdings(self.writer, (("gpu", 1000), ("cpu", 800)), SECRET)
        self.holders = [Holder(self.holdings) for _ in range(endpoints)]

    def apply(self, *events: object, at: int = 0) -> None:
        self.holders[at].apply(encode([1.0, list(events)]))

    def held(self, tokens, *, size: int = BLOCK, adapter: str = "", features=(), salt: str = "") -> tuple[list[int], list[int]]:
        self.holdings.flush(1)
        owners = Owners(len(self.holders))
        for row, holder in enumerate(self.holders):
            for tier in holder.tiers:
                owners.add(tier.owner, row, tier.weight)
        extras = request_extras(features, salt, size, len(tokens) // size)
        chain = held_links(np.array(tokens, np.uint32), size, held_root(adapter, size, SECRET), SECRET, extras)
        return self.reader.held(index_keys(chain), owners)


def stored(hashes, parent, tokens, size=BLOCK, *more):
    return ["BlockStored", list(hashes), parent, list(tokens), size, *more]


TOKENS = list(range(100, 100 + 10 * BLOCK))


@pytest.mark.parametrize("cuts", [[10], [1] * 10, [3, 4, 3]])
def test_blocks_that_are_stored_in_any_grouping_are_found(cuts) -> None:
    world, at = World(), 0
    for cut in cuts:
        world.apply(stored(range(at + 1, at + cut + 1), at or None, TOKENS[at * BLOCK : (at + cut) * BLOCK]))
        at += cut
    assert world.held(TOKENS) == ([10], [10_000])
    assert world.holders[0].held == 10


@pytest.mark.parametrize("size", [1, 4, 16, 64, 160])
def test_an_engine_may_have_blocks_of_any_size(size) -> None:
    world, count = World(), len(TOKENS) // size
    world.apply(stored(range(1, count + 1), 0, TOKENS[: count * size], size))
    assert world.holders[0].block_tokens == size
    assert world.held(TOKENS, size=size)[0] == [count]


def test_a_removed_block_ends_the_match_and_its_return_restores_it() -> None:
    world = World()
    world.apply(stored(range(1, 11), None, TOKENS))
    world.apply(["BlockRemoved", [4]])
    assert world.held(TOKENS)[0] == [3]
    world.apply(stored([4], 3, TOKENS[3 * BLOCK : 4 * BLOCK]))
    assert world.held(TOKENS)[0] == [10]


def test_a_block_that_is_stored_twice_is_held_until_it_is_removed_twice() -> None:
    world = World()
    world.apply(stored([1], None, TOKENS[:BLOCK]), stored([1], None, TOKENS[:BLOCK]), ["BlockRemoved", [1]])
    assert world.held(TOKENS)[0] == [1]
    assert world.holdings.counts.repeats_suppressed == 1
    world.apply(["BlockRemoved", [1]], ["BlockRemoved", [1]])
    assert world.held(TOKENS)[0] == [0]
    assert world.holdings.counts.removals_skipped == 1


def test_tiers_have_weights_in_thousandths_and_the_best_one_counts() -> None:
    world = World()
    world.apply(stored(range(1, 11), None, TOKENS, BLOCK, None, "CPU_PINNED"))
    assert world.held(TOKENS) == ([10], [8000])  # ten blocks at 0.8 are 8
    world.apply(["BlockStored", [1, 2], None, [], 0, None, "GPU"])  # a change of tier has no tokens
    assert world.held(TOKENS) == ([10], [8400])
    world.apply(["BlockRemoved", [1], "CPU"])
    assert world.held(TOKENS) == ([10], [8400])
    world.apply(["BlockRemoved", [1], "GPU"])
    assert world.held(TOKENS) == ([0], [0])


def test_an_unlisted_tier_has_the_weight_1() -> None:
    world = World()
    world.apply(stored([1], None, TOKENS[:BLOCK], BLOCK, None, "STORAGE"))
    assert world.held(TOKENS) == ([1], [1000])


def test_cleared_drops_all_tiers_of_this_endpoint_only() -> None:
    world = World(endpoints=2)
    for at in range(2):
        world.apply(stored(range(1, 11), None, TOKENS), at=at)
    world.apply(stored([1], None, TOKENS[:BLOCK], BLOCK, None, "CPU"))
    world.apply(["AllBlocksCleared"])
    assert world.held(TOKENS)[0] == [0, 10]
    world.apply(stored([21], 10, TOKENS[:BLOCK]))  # its parent is gone, too
    assert world.holdings.counts.stores_skipped == 1


def test_an_endpoint_that_clears_without_end_takes_no_owner_ids_from_others() -> None:
    world = World(endpoints=2)
    world.apply(stored(range(1, 11), None, TOKENS), at=1)
    clears = FAR_MARK // len(world.holders[0].owners) // CLEARED_MAX + 2
    for _ in range(clears):  # more ids than there are
        world.apply(*[["AllBlocksCleared"]] * CLEARED_MAX)
    assert world.held(TOKENS)[0] == [0, 10]


def test_blocks_before_a_clear_never_belong_to_the_next_holder_of_an_owner_id() -> None:
    world = World(endpoints=2)
    world.apply(stored(range(1, 11), None, TOKENS))  # waits to be written
    old = world.holders[0].owners
    world.apply(["AllBlocksCleared"])
    while not set(world.holders[1].owners) & set(old):  # until its old ids are assigned again
        world.apply(["AllBlocksCleared"], at=1)
    assert world.held(TOKENS)[0] == [0, 0]


def test_a_long_message_shows_progress() -> None:
    world, calls = World(), []
    world.holdings.progress = lambda: calls.append(1)
    world.apply(*[["BlockRemoved", [1]]] * (3 * EVENTS_AT_ONCE))
    assert len(calls) == 3


def test_an_endpoint_that_returns_begins_without_old_counts() -> None:
    world = World()
    world.apply(stored([1], None, TOKENS[:BLOCK]), stored([1], None, TOKENS[:BLOCK]))
    world.holders[0].leave()
    world.holders[0] = Holder(world.holdings)
    world.apply(stored([1], None, TOKENS[:BLOCK]), ["BlockRemoved", [1]])
    assert world.held(TOKENS)[0] == [0]


def test_engines_may_use_one_hash_for_different_blocks() -> None:
    world = World(endpoints=2)
    other = [token + 7 for token in TOKENS]
    world.apply(stored(range(1, 11), None, TOKENS))
    world.apply(stored(range(1, 11), None, other), at=1)
    assert (world.held(TOKENS)[0], world.held(other)[0]) == ([10, 0], [0, 10])


def test_an_adapter_is_another_prompt_and_its_name_is_learned() -> None:
    world = World()
    world.apply(stored([1], None, TOKENS[:BLOCK], BLOCK, 1, "GPU", "sql", [["sql"]]))
    assert world.held(TOKENS)[0] == [0]
    assert world.held(TOKENS, adapter="sql")[0] == [1]
    assert adapter_word("sql", SECRET) in world.holdings.known_words


def test_an_adapter_without_a_name_has_the_name_that_another_event_gives_its_number() -> None:
    world = World()
    (holder,) = world.holders
    world.apply(stored([1], None, TOKENS[:BLOCK], BLOCK, 3, "GPU", "sql"))
    world.apply(stored([2], 1, TOKENS[BLOCK : 2 * BLOCK], BLOCK, 3))
    assert world.held(TOKENS, adapter="sql")[0] == [2]
    assert not holder.nameless
    world.apply(stored([5], None, TOKENS[:BLOCK], BLOCK, 4))
    assert holder.nameless, "no event has named the adapter 4"
    assert world.held(TOKENS)[0] == [0]
    world.apply(stored([6], None, TOKENS[:BLOCK], BLOCK, 4, "GPU", "code"))
    assert not holder.nameless


def test_an_endpoint_that_clears_holds_no_blocks_of_adapters_without_a_name() -> None:
    world = World()
    world.apply(stored([5], None, TOKENS[:BLOCK], BLOCK, 4), ["AllBlocksCleared"])
    assert not world.holders[0].nameless


def test_salts_of_vllm_and_sglang_match_the_request() -> None:
    for event in (
        stored([1, 2], None, TOKENS[: 2 * BLOCK], BLOCK, None, "GPU", None, [["s"], None]),
        stored([1, 2], None, TOKENS[: 2 * BLOCK], BLOCK, None, "GPU", {"cache_salt": "s"}),
        {"type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": None, "token_ids": TOKENS[: 2 * BLOCK],
         "block_size": BLOCK, "cache_salt": "s"},
    ):  # fmt: skip
        world = World()
        world.apply(event)
        assert (world.held(TOKENS, salt="s")[0], world.held(TOKENS)[0]) == ([2], [0])


def test_media_match_by_their_hashes() -> None:
    world = World()
    world.apply(stored([1, 2, 3], None, TOKENS[: 3 * BLOCK], BLOCK, None, "GPU", None, [None, [["pic", 4]], ["pic"]]))
    picture = Feature("image", "pic", 20, 20)
    assert world.held(TOKENS, features=[picture])[0] == [3]
    assert world.held(TOKENS, features=[picture._replace(hash="other")])[0] == [1]


def test_only_groups_of_full_attention_count() -> None:
    world, more = World(), (None, "GPU", None, None)
    world.apply(
        stored([1], None, TOKENS[:BLOCK], BLOCK, *more, 1, "sliding_window"),
        stored([1], None, TOKENS[:BLOCK], BLOCK, *more, 0, "full_attention"),
        ["BlockRemoved", [1], "GPU", 1],
        ["BlockRemoved", [1], "GPU", 9],
    )
    assert world.held(TOKENS)[0] == [1]
    assert (world.holdings.counts.stores_skipped, world.holdings.counts.removals_skipped) == (1, 1)


def test_a_full_table_of_links_refuses_blocks_and_counts_them() -> None:
    world = World(blocks=256)
    for first in range(0, 4000, 10):
        world.apply(stored(range(first * 10 + 1, first * 10 + 11), None, [first + token for token in TOKENS]))
    assert world.holdings.counts.links_refused > 0
    assert world.holders[0].held <= 4000


def test_after_many_events_the_index_equals_what_is_held() -> None:
    """Chains of blocks, stored, removed, moved and cleared at random; every difference would show in the depths."""
    random_, world = random.Random(3), World(endpoints=3, blocks=1 << 15)
    prompts = [[random_.randrange(1 << 20) for _ in range(8 * BLOCK)] for _ in range(60)]
    held = [dict[int, int]() for _ in world.holders]  # hash -> copies
    for _ in range(20_000):
        at, number = random_.randrange(3), random_.randrange(60)
        first, count, own = random_.randrange(8), random_.randrange(1, 4), held[at]
        hashes = [1000 * number + block + 1 for block in range(first, min(first + count, 8))]
        parent = 1000 * number + first if first else None
        if random_.random() < 0.55:
            if parent is None or own.get(parent, 0):
                tokens = prompts[number][first * BLOCK : (first + len(hashes)) * BLOCK]
                world.apply(stored(hashes, parent, tokens), at=at)
                for hash_ in hashes:
                    own[hash_] = own.get(hash_, 0) + 1
        elif random_.random() < 0.999:
            world.apply(["BlockRemoved", hashes], at=at)
            for hash_ in hashes:
                own[hash_] = max(0, own.get(hash_, 0) - 1)
        else:
            world.apply(["AllBlocksCleared"], at=at)
            own.clear()
    for number, tokens in enumerate(prompts):
        expected = []
        for own in held:
            present = [own.get(1000 * number + block + 1, 0) > 0 for block in range(8)]
            expected.append(present.index(False) if False in present else 8)
        assert world.held(tokens)[0] == expected
    assert [holder.held for holder in world.holders] == [sum(map(bool, own.values())) for own in held]


def test_any_number_of_servers_may_hold_a_block() -> None:
    """The reference keeps ten holders of a block by default, and has no match for a block that more of them hold."""
    world = World(endpoints=40)
    for at in range(40):
        world.apply(stored(range(1, 11), None, TOKENS), at=at)
    assert world.held(TOKENS)[0] == [10] * 40
