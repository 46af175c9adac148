"""Defines the result of a prefix producer for one request: typed data for scorers and deciders."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from compiled.classes import subclassed
from epp.candidates import Floats
from epp.data import Datum
from epp.plugin_base import Plugin
from epp.prefix.blocks import Hashes

APPROXIMATE = "approx-prefix-cache-producer"
PRECISE = "precise-prefix-cache-producer"
TIERS_MAX = 4


class Capacity(NamedTuple):
    """Says how many blocks the index keeps of an endpoint. `auto_tune`: as many as the server's cache has room for, if the server reports
    its size; otherwise `blocks`.
    """

    auto_tune: bool
    blocks: int


@subclassed
class CutsPrompts:
    """Marks a producer that divides prompts into blocks for the shared index. All blocks of the index have the same size.

    Producers with different capacities stand for different tiers of the servers' caches. The index keeps tiers apart. `tier`: its number,
    from 0; `assign_tiers` sets it.
    """

    block_tokens: int
    capacity: Capacity
    tier: int = 0


def assign_tiers(plugins: Iterable[Plugin]) -> None:
    """Numbers the different capacities of producers in the order of `plugins`. Those beyond TIERS_MAX share the last number."""
    capacities: list[Capacity] = []
    for plugin in plugins:
        if isinstance(plugin, CutsPrompts):
            if plugin.capacity not in capacities:
                capacities.append(plugin.capacity)
            plugin.tier = min(capacities.index(plugin.capacity), TIERS_MAX - 1)


class Prefill(NamedTuple):
    """Says that an endpoint computes leading blocks of a prompt. `owner`: its owner id. `blocks`: how many of them it will hold then.

    `since`: when it was sent the prompt that it computes, in monotonic seconds. `tokens`: how many tokens it computes.
    """

    owner: int
    blocks: int
    since: float
    tokens: float


class PrefixMatch:
    """Says how much of one prompt each endpoint has in its prefix cache. Arrays: float64 of the snapshot's shape (endpoints,).

    `hashes`: the chain of block hashes of the prompt; `total`: its length in blocks; `block_tokens`: tokens per block. `tokens`: tokens of
    the prompt as the picker counts them; if it does not count them, `total` * `block_tokens`.
    `cached`: how many leading blocks of the prompt each endpoint holds; None: no endpoint holds any. `blocks`: the same, but each block
    counts by the weight of its tier (GPU memory 1, a slower tier may weigh less), rounded down. Without tiers both are equal.
    `why`: per endpoint, why its match is not precise, "" if it is; an empty list if this producer gives no precise matches.
    `under_way`: prefills that compute leading blocks of this prompt now. `blocks` counts these blocks as held.
    This object lives longer than the text of the prompt.
    """

    __slots__ = ("block_tokens", "blocks", "cached", "hashes", "tokens", "total", "under_way", "why")

    def __init__(
        self,
        blocks: Floats | None,
        hashes: Hashes,
        block_tokens: int,
        tokens: int = 0,
        *,
        cached: Floats | None = None,
        why: Sequence[str] = (),
        under_way: Sequence[Prefill] = (),
    ) -> None:
        self.blocks = blocks  # None: no endpoint holds any
        self.hashes = hashes
        self.total = len(hashes)
        self.block_tokens = block_tokens
        self.tokens = tokens or self.total * block_tokens
        self.cached = blocks if cached is None else cached
        self.why = why
        self.under_way = under_way

    def with_reasons(self, why: Sequence[str]) -> "PrefixMatch":
        """Returns the same match with `why`: per endpoint, why the match is not precise."""
        return PrefixMatch(
            self.blocks,
            self.hashes,
            self.block_tokens,
            self.tokens,
            cached=self.cached,
            why=why,
            under_way=self.under_way,
        )


def only_producer(plugins: Iterable[Plugin]) -> Plugin | None:
    """Returns the only producer of matches among `plugins`; None if there is none, or several."""
    found = [plugin for plugin in plugins for key in plugin.produces if key.type is PrefixMatch]
    return found[0] if len(found) == 1 else None


def read_producer(plugins: Iterable[Plugin], named: str = "") -> str:
    """Returns the name of the producer whose matches a plugin reads: `named` if given, else APPROXIMATE, as in the reference picker.

    If the only producer that is listed is of another type, such as a precise one, an unnamed one is that. One of this type with a name of
    its own is not: a configuration may have one producer per tier of the cache, and name only the second one.
    """
    only = None if named else only_producer(plugins)
    if only is None or type(only).type_name == APPROXIMATE:
        return named or APPROXIMATE
    return only.name


@subclassed
class FollowsMatches(Plugin):
    """Base of plugins that read the matches of one producer, which the parameter `prefixMatchInfoProducerName` may name.

    `_match`: the key of these matches. The subclass sets it first, and `meet` replaces it.
    """

    _match: Datum[PrefixMatch]

    def meet(self, plugins: Sequence[Plugin]) -> None:
        before, self._match = (
            self._match,
            prefix_match(read_producer(plugins, getattr(self.params, "prefix_match_info_producer_name", ""))),
        )
        self.consumes = tuple(self._match if key == before else key for key in self.consumes)
        self.optional = tuple(self._match if key == before else key for key in self.optional)


def prefix_match(producer: str) -> Datum[PrefixMatch]:
    """Returns the key under which the producer with this name emits its match."""
    return Datum(f"prefix_match/{producer}", PrefixMatch)
