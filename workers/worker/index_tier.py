"""Shows a prefix producer its own tier of the prefix index, as if there were no others."""

from collections.abc import Mapping

from epp.plugin import Hashes, PrefixIndex
from shm.index_tiers import SPAN, in_tier


class IndexTier:
    """Implements `epp.plugin.PrefixIndex` for one tier. Owners are named by their ids in the first tier."""

    def __init__(self, index: PrefixIndex, tier: int) -> None:
        self._index = index
        self._tier = tier

    def match(self, hashes: Hashes) -> Mapping[int, int]:
        found = self._index.match(hashes)
        return {owner % SPAN: depth for owner, depth in found.items() if owner // SPAN == self._tier}

    def learn(self, hashes: Hashes, owner: int) -> None:
        self._index.learn(hashes, in_tier(owner, self._tier))

    def forget(self, hashes: Hashes, owner: int) -> None:
        self._index.forget(hashes, in_tier(owner, self._tier))
