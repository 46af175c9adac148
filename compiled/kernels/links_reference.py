"""The kernels of the table of links in plain Python. They define what `links.c` computes, and run where it is not built.

`shm.link_table` has the layout and the terms.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

WAYS: Final = 8
COUNT_BITS: Final = 8
COUNT_MAX: Final = (1 << COUNT_BITS) - 1
OWNER_BITS: Final = 16
OWNER: Final = (1 << OWNER_BITS) - 1
MASK: Final = (1 << 64) - 1
HALF: Final = (1 << 32) - 1
SPREAD: Final = 0x9E3779B97F4A7C15
OWNER_SPREAD: Final = 0xD6E8FEB86659FD93
KEYS, LINKS, METAS = 0, 1, 2

Hashes = NDArray[np.uint64]
Live = NDArray[np.uint8]


def store_links(table: Hashes, live: Live, hashes: Hashes, owner: int, tier: int, links: Hashes) -> tuple[Hashes, int, int]:
    """Counts one more copy of each block in a tier, and stores the blocks' links (one per hash). `table`: keys, links and metas.

    Returns the links of the blocks that the tier did not hold before, the number of blocks for which the table has no room, and by how much
    the number of its entries grew.
    """
    new, refused, added, one = [], 0, 0, 1 << OWNER_BITS + tier * COUNT_BITS
    for hash_, link in zip(hashes.tolist(), links.tolist(), strict=True):
        key = mixed(hash_, owner)
        place = place_of(table, key, owner)
        if place is None:
            place = _room(table, live, key)
            if place is None:
                refused += 1
                continue
            added += int(table[KEYS, place] == 0)
            table[KEYS, place], table[METAS, place] = key, owner
        meta = int(table[METAS, place])
        held = meta // one & COUNT_MAX
        if held < COUNT_MAX:
            table[METAS, place] = meta + one
        table[LINKS, place] = link
        if not held:
            new.append(link)
    return np.array(new, np.uint64), refused, added


def remove_links(table: Hashes, live: Live, hashes: Hashes, owner: int, tier: int) -> tuple[Hashes, int, int, int]:
    """Counts one copy less of each block in a tier.

    Returns the links of the blocks that the tier does not hold any more, the number of blocks that it still holds, the number of blocks of
    which it had no copy, and by how much the number of the table's entries fell.
    """
    gone, still, unknown, removed, one = [], 0, 0, 0, 1 << OWNER_BITS + tier * COUNT_BITS
    for hash_ in hashes.tolist():
        place = place_of(table, mixed(hash_, owner), owner)
        meta = 0 if place is None else int(table[METAS, place])
        held = meta // one & COUNT_MAX
        if not held:
            unknown += 1
            continue
        table[METAS, place] = meta - one
        if not meta - one >> OWNER_BITS:
            table[KEYS, place] = 0
            removed += 1
        if held > 1:
            still += 1
        else:
            gone.append(int(table[LINKS, place]))
    return np.array(gone, np.uint64), still, unknown, removed


def mixed(hash_: int, owner: int) -> int:
    """Returns the key of an engine's hash. This key is well spread over 64 bits, never 0, and differs between owners."""
    key = (hash_ ^ owner * OWNER_SPREAD & MASK) * SPREAD & MASK
    return (key ^ key >> 32) or 1


def place_of(table: Hashes, key: int, owner: int) -> int | None:
    """Returns the place of a key that belongs to this owner."""
    for first in _buckets(table, key):
        bucket: list[int] = table[KEYS, first : first + WAYS].tolist()
        if key in bucket:
            place = first + bucket.index(key)
            if int(table[METAS, place]) & OWNER == owner:
                return place
    return None


def _buckets(table: Hashes, key: int) -> tuple[int, int]:
    """Returns where the two buckets of a key begin, which its lower and its upper half determine."""
    buckets = table.shape[1] // WAYS
    return ((key & HALF) * buckets >> 32) * WAYS, ((key >> 32) * buckets >> 32) * WAYS


def _room(table: Hashes, live: Live, key: int) -> int | None:
    """Returns a place for a new key in one of its two buckets. Returns None if no place can be made free.

    Takes an empty place of the emptier bucket. If both buckets are full, takes the place of an owner that is not live, or a place
    that `_moved` frees.
    """
    buckets = _buckets(table, key)
    found: list[list[int]] = [table[KEYS, first : first + WAYS].tolist() for first in buckets]
    first, keys = max(zip(buckets, found, strict=True), key=lambda bucket: bucket[1].count(0))
    if 0 in keys:
        return first + keys.index(0)
    places = [place for first in buckets for place in range(first, first + WAYS)]
    for place in places:
        if live[int(table[METAS, place]) & OWNER] != 1:
            return place
    return _moved(table, places)


def _moved(table: Hashes, places: list[int]) -> int | None:
    """Moves a key out of one of two full buckets to that key's other bucket. Returns the place that became empty.

    Returns None if the other bucket of each key is full, too.
    """
    for place in places:
        one, two = _buckets(table, int(table[KEYS, place]))
        other = two if one == place // WAYS * WAYS else one
        row = table[KEYS, other : other + WAYS].tolist()
        if 0 in row:
            to = other + row.index(0)
            table[:, to] = table[:, place]
            table[KEYS, place] = 0
            return place
    return None
