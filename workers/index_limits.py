"""How many blocks the prefix index is to hold for each endpoint: as many as that server's own cache takes.

A server says so with its other metrics (blocks of its cache, tokens in each); one that does not is given what the configuration names
as `lruCapacityPerServer`, and so are all of them without `autoTune`. An endpoint that is found with what a predecessor learned has no
limit until its first scrape has ended: a guess would throw away what is right.

What this does not do: free anything (`shm.index_capacity` does, for the index writer).
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from epp.data import CACHE_BLOCK_SIZE, CACHE_NUM_BLOCKS, Column
from epp.plugin import Plugin
from epp.plugins.extractors.core_metrics import Extracted
from epp.plugins.producers.approx_prefix import ApproximatePrefix

BLOCKS_MAX = 1 << 40


class PrefixUse(NamedTuple):
    """What the producers of one process want of the index."""

    block_tokens: int
    auto_tune: bool
    lru_capacity: int  # blocks


class Limiting(Protocol):
    """What is needed of the index writer."""

    def limit(self, owner: int, blocks: int) -> None: ...


def prefix_use(plugins: Iterable[Plugin]) -> PrefixUse | None:
    """None: nobody matches prefixes. All have blocks of one size (`epp.contracts`)."""
    producers = [plugin for plugin in plugins if isinstance(plugin, ApproximatePrefix)]
    if not producers:
        return None
    return PrefixUse(
        producers[0].block_tokens,
        any(producer.params.auto_tune for producer in producers),
        max(producer.params.lru_capacity_per_server for producer in producers),
    )


class IndexLimits:
    """Tells the index writer, whenever an endpoint's limit changes."""

    def __init__(self, index: Limiting, use: PrefixUse | None, wanted: Sequence[Column[Any]]) -> None:
        self._index = index
        self._use = use
        self._told: dict[int, int] = {}
        numeric = [column.name for column in wanted if column.type is not frozenset]
        both = (CACHE_BLOCK_SIZE.name, CACHE_NUM_BLOCKS.name)
        tuned = use is not None and use.auto_tune and all(name in numeric for name in both)
        self._size_at, self._count_at = (numeric.index(name) for name in both) if tuned else (0, 0)
        self._present = 1 << self._size_at | 1 << self._count_at if tuned else 0

    def appeared(self, owner: int) -> None:
        """A new endpoint, of which nothing is known yet, or one that cannot be scraped."""
        if self._use is not None and owner not in self._told:
            self._tell(owner, self._use.lru_capacity)

    def scraped(self, owner: int, extracted: Extracted) -> None:
        """An endpoint's page was read."""
        use = self._use
        if use is None:
            return
        blocks = use.lru_capacity
        if self._present and extracted.present & self._present == self._present:
            values = extracted.values
            blocks = int(values[self._size_at] * values[self._count_at]) // use.block_tokens or blocks
        if self._told.get(owner) != blocks:
            self._tell(owner, blocks)

    def left(self, owner: int) -> None:
        """The endpoint is gone."""
        self._told.pop(owner, None)

    def _tell(self, owner: int, blocks: int) -> None:
        self._told[owner] = blocks
        self._index.limit(owner, min(blocks, BLOCKS_MAX))
