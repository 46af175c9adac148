"""A prefix index for owners whose caches have several tiers, such as GPU memory and the memory of the host.

Each owner may have an id per tier, at a fixed distance from each other. So what holds for an owner of the index holds for a tier of an
owner: it has its own entries and its own limit. Only ids of the first tier are given out. The id of another tier is live from its first
limit on, until the owner is retired.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from shm.index_capacity import OWNER_IDS
from shm.prefix_index import OWNER_FREE, OWNER_LIVE, OWNER_WORD_MASK, Hashes
from shm.prefix_writer import IndexWriter, OwnersExhausted

TIERS: Final = 4
SPAN: Final = OWNER_IDS // TIERS  # the distance between the ids of one owner in two neighbouring tiers


def in_tier(owner: int, tier: int) -> int:
    """Returns the id of an owner in a tier, from 0 to TIERS - 1."""
    return owner + tier * SPAN


class TieredWriter(IndexWriter):
    """Inserts and removes entries, and assigns ids to owners. `limit`, `insert` and `forget` take ids of any tier."""

    def limit(self, owner: int, blocks: int) -> None:
        if self._states[owner] == OWNER_FREE and self._states[owner % SPAN] == OWNER_LIVE:
            self._states[owner] = OWNER_LIVE
        super().limit(owner, blocks)

    def owners(self) -> list[int]:
        return [owner for owner in super().owners() if owner < SPAN]

    def new_owner(self) -> int:
        owner = super().new_owner()
        if owner >= SPAN:
            super().retire(owner)
            raise OwnersExhausted(f"all {SPAN} owner ids are taken: retire owners that have left and run sweep_step")
        return owner

    def retire(self, owner: int) -> None:
        for tier in range(TIERS):
            super().retire(in_tier(owner, tier))

    def load(self, entries: Hashes, ages: npt.NDArray[np.uint32], owners: Sequence[int], later: int) -> None:
        used = set(np.unique(entries & OWNER_WORD_MASK).tolist())
        higher = (in_tier(owner, tier) for owner in owners for tier in range(1, TIERS))
        super().load(entries, ages, [*owners, *(owner for owner in higher if owner in used)], later)
