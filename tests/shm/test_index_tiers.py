"""The tiers of owners in the prefix index: entries and limits apart, one life together."""

import numpy as np
import pytest

from shm.prefix_index import IndexReader, IndexSchema
from shm.prefix_writer import SPAN, OwnersExhausted, TieredWriter, in_tier
from shm.segment import Region
from tests.shm.test_prefix_index import chain

SCHEMA = IndexSchema(4096)


def world() -> tuple[TieredWriter, IndexReader, Region]:
    region = Region(memoryview(bytearray(SCHEMA.bytes)))
    return TieredWriter(SCHEMA, region), IndexReader(SCHEMA, region), region


def test_each_tier_of_an_owner_has_its_own_limit() -> None:
    writer, reader, _ = world()
    owner = writer.new_owner()
    writer.limit(owner, 20)
    writer.limit(in_tier(owner, 1), 200)
    chains = [chain(16, seed) for seed in range(4)]
    for age, hashes in enumerate(chains):
        for tier in (0, 1):
            writer.insert(hashes, in_tier(owner, tier), age)
    assert reader.match(chains[-1]) == {owner: 16, in_tier(owner, 1): 16}
    assert reader.match(chains[0]) == {in_tier(owner, 1): 16}, "the first tier has no room for it any more"


def test_a_tier_without_a_limit_is_not_in_use() -> None:
    writer, reader, _ = world()
    owner = writer.new_owner()
    writer.insert(chain(16), in_tier(owner, 1), 1)
    assert reader.match(chain(16)) == {}
    writer.limit(in_tier(owner + 1, 1), 200)  # there is no such owner
    writer.insert(chain(16), in_tier(owner + 1, 1), 1)
    assert reader.match(chain(16)) == {}


def test_an_owner_that_leaves_takes_all_tiers_along() -> None:
    writer, reader, region = world()
    owner = writer.new_owner()
    for tier in range(3):
        writer.limit(in_tier(owner, tier), 100)
        writer.insert(chain(16), in_tier(owner, tier), 1)
    assert writer.owners() == [owner]
    successor = TieredWriter(SCHEMA, region)
    assert successor.owners() == [owner]
    successor.retire(owner)
    successor.sweep_step(SCHEMA.buckets)
    assert (successor.owners(), successor.size(), reader.match(chain(16))) == ([], 0, {})
    assert successor.new_owner() == owner
    successor.insert(chain(16), in_tier(owner, 1), 1)
    assert reader.match(chain(16)) == {}, "its tiers begin with their limits"


def test_a_snapshot_has_all_tiers() -> None:
    writer, _, _ = world()
    owner = writer.new_owner()
    writer.limit(in_tier(owner, 2), 100)
    writer.insert(chain(16), owner, 1)
    writer.insert(chain(8), in_tier(owner, 2), 1)
    entries, ages = (np.frombuffer(data, kind) for data, kind in zip(writer.copy(0, SCHEMA.buckets), ("<u8", "<u4"), strict=True))
    loaded, reader, _ = world()
    loaded.load(entries, ages, [owner], 0)
    assert reader.match(chain(16)) == {owner: 16, in_tier(owner, 2): 8}
    assert loaded.owners() == [owner]


def test_no_owner_gets_the_id_of_a_tier() -> None:
    writer, _, _ = world()
    given = {writer.new_owner() for _ in range(SPAN - 2)}
    assert max(given) < SPAN
    with pytest.raises(OwnersExhausted, match=f"all {SPAN} owner ids"):
        writer.new_owner()
    assert set(writer.owners()) == given
