"""Limits the blocks of each endpoint in the prefix index to the number that the cache of its server can hold.

The metrics of a server say for how many tokens its cache has room. Without these metrics, or without `autoTune`, the limit is
`lruCapacityPerServer`. With `autoTune`, a report of more cached tokens than the limit raises the limit: the server has further tiers, or
its metrics say too little. If producers differ in these parameters, each producer has its own tier, with its own limit. An endpoint that
has entries of a predecessor or a snapshot has no limit until its first scrape ends, because a wrong guess would free good entries.

This module frees no entries: `shm.index_capacity` does so, for the index writer.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from epp.data import CACHE_TOKENS, Column
from epp.plugin import Plugin
from epp.plugins.extractors._pages import Extracted
from epp.prefix.match import Capacity, CutsPrompts
from shm.prefix_writer import in_tier

BLOCKS_MAX = 1 << 40


class PrefixUse(NamedTuple):
    """What the prefix producers of the configuration require of the index. `tiers`: the capacity of each tier."""

    block_tokens: int
    tiers: tuple[Capacity, ...]


class Limiting(Protocol):
    """The part of the index writer that sets limits."""

    def limit(self, owner: int, blocks: int) -> None: ...


def prefix_use(plugins: Iterable[Plugin]) -> PrefixUse | None:
    """Returns the requirements of all prefix producers, or None without prefix producers. All producers use one block size
    (`epp.config.contracts` checks that).
    """
    producers = [plugin for plugin in plugins if isinstance(plugin, CutsPrompts)]
    if not producers:
        return None
    tiers = {producer.tier: producer.capacity for producer in reversed(producers)}
    return PrefixUse(producers[0].block_tokens, tuple(tiers[tier] for tier in range(len(tiers))))


class IndexLimits:
    """Sets the limits of endpoints in the index writer. A limit is set only when it changes."""

    def __init__(self, index: Limiting, use: PrefixUse | None, wanted: Sequence[Column[Any]]) -> None:
        self._index = index
        self._use = use
        self._sizes: dict[int, int] = {}  # owner -> blocks in the server's cache by its metrics, or 0 if not known
        # owner -> blocks in the server's cache at the time when its limits were set, or 0 if not known
        self._limits: dict[int, int] = {}
        numeric = [column.name for column in wanted if column.type is not frozenset]
        tuned = [tier.blocks for tier in use.tiers if tier.auto_tune] if use is not None else []
        # the highest limit with `autoTune` while the size is not known, or 0 without `autoTune`
        self._configured = max(tuned, default=0)
        self._tokens_at = numeric.index(CACHE_TOKENS.name) if tuned and CACHE_TOKENS.name in numeric else 0
        self._present = 1 << self._tokens_at if tuned and CACHE_TOKENS.name in numeric else 0

    def appeared(self, owner: int) -> None:
        """Sets the configured limit for an endpoint that is new or cannot be scraped. Does nothing if the endpoint has a limit already."""
        if self._use is not None and owner not in self._limits:
            self._size(owner, 0)

    def scraped(self, owner: int, extracted: Extracted) -> None:
        """Sets the limit of an endpoint after a good scrape."""
        use = self._use
        if use is None:
            return
        blocks = 0
        if extracted.present & self._present:
            blocks = int(extracted.values[self._tokens_at]) // use.block_tokens
        if self._sizes.get(owner) != blocks:
            self._size(owner, blocks)

    def reported(self, owner: int, tokens: int) -> None:
        """Raises the limit of an endpoint that has reported `tokens` cached tokens for one prompt, unless the limit is high enough."""
        use = self._use
        if use is None or not self._configured or owner not in self._limits:
            return
        blocks = tokens // use.block_tokens
        if blocks > (self._limits[owner] or self._configured):
            self._set(owner, blocks)

    def left(self, owner: int) -> None:
        """Forgets the limit of an endpoint that is gone."""
        self._sizes.pop(owner, None)
        self._limits.pop(owner, None)

    def _size(self, owner: int, blocks: int) -> None:
        self._sizes[owner] = blocks
        self._set(owner, blocks)

    def _set(self, owner: int, blocks: int) -> None:
        """Sets the limits of all tiers. `blocks`: the size of the server's cache, or 0 if not known."""
        assert self._use is not None
        self._limits[owner] = blocks
        for tier, (auto_tune, lru_capacity) in enumerate(self._use.tiers):
            most = blocks if auto_tune and blocks else lru_capacity
            self._index.limit(in_tier(owner, tier), min(most, BLOCKS_MAX))
