"""Defines the result of a prefix producer for one request: typed data for scorers and deciders."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from compiled import calls
from compiled.classes import subclassed
from epp.candidates import Candidates, Floats, Mask, Scores
from epp.data import Datum
from epp.endpoints.server_blocks import ServerBlocks, whole
from epp.points.base import Plugin
from epp.prefix.blocks import Hashes

APPROXIMATE = "approx-prefix-cache-producer"
PRECISE = "precise-prefix-cache-producer"
TIERS_MAX = 4


class Capacity(NamedTuple):
    """Says how many blocks of an endpoint the index keeps: `blocks`, or with `auto_tune` as many as the server's cache has room for, if the
    server reports the size of the cache.
    """

    auto_tune: bool
    blocks: int


@subclassed
class CutsPrompts:
    """Base class of producers that divide prompts into blocks for the shared index. All blocks of the index have the same size.

    Producers with different capacities stand for different tiers of the servers' caches. The index separates tiers. `tier`: the number of
    the tier, from 0, which `assign_tiers` sets.
    """

    block_tokens: int
    capacity: Capacity
    tier: int = 0


def assign_tiers(plugins: Iterable[Plugin]) -> None:
    """Numbers the different capacities of producers in the order of `plugins`. Capacities beyond TIERS_MAX share the last number."""
    capacities: list[Capacity] = []
    for plugin in plugins:
        if isinstance(plugin, CutsPrompts):
            if plugin.capacity not in capacities:
                capacities.append(plugin.capacity)
            plugin.tier = min(capacities.index(plugin.capacity), TIERS_MAX - 1)


class Prefill(NamedTuple):
    """Says that an endpoint computes leading blocks of a prompt. `owner`: the endpoint's owner id. `blocks`: how many leading blocks of the
    prompt the endpoint will hold after that.

    `since`: when the prompt was sent to the endpoint, in monotonic seconds. `tokens`: how many tokens the endpoint computes.
    """

    owner: int
    blocks: int
    since: float
    tokens: float


class PrefixMatch:
    """Says how much of a prompt each endpoint has in its prefix cache. Arrays: float64 of the snapshot's shape (endpoints,).

    `hashes`: the chain of block hashes of the prompt; `total`: how many hashes; `block_tokens`: tokens per block. `tokens`: tokens of
    the prompt as the picker counts them; without a count, `total` * `block_tokens`. `prompts`: how many prompts the request has. The
    hashes of several prompts follow each other; the numbers of several prompts are added up.
    `blocks`: how many leading blocks of the prompt each endpoint holds, or computes now; None if no endpoint holds a block.
    `cached`: how many tokens of the prompt each endpoint probably need not compute; None if `blocks` is None. An endpoint may hold more,
    because a server reuses whole blocks of its own size, and never the whole prompt (`epp.endpoints.server_blocks`).
    `counted`: like `cached`, but each token has the weight of its tier (GPU memory 1; a slower tier may have less).
    `why`: per endpoint, why its match is not precise, "" if it is precise; an empty list if this producer gives no precise matches.
    `under_way`: prefills that compute leading blocks of this prompt now. `blocks` includes these blocks. This object lives longer than the
    text of the prompt.
    """

    __slots__ = (
        "_held", "_most", "_servers", "block_tokens", "blocks", "cached", "counted", "hashes", "prompts", "tokens", "total", "under_way",
        "why",
    )  # fmt: skip

    def __init__(
        self,
        blocks: Floats | None,
        hashes: Hashes,
        block_tokens: int,
        tokens: int = 0,
        *,
        servers: ServerBlocks | None = None,
        held: Floats | None = None,
        weighted: Floats | None = None,
        prompts: int = 1,
        why: Sequence[str] = (),
        under_way: Sequence[Prefill] = (),
    ) -> None:
        """`servers`: the block sizes of the servers; None if not known. `held`: the tokens that each endpoint holds, if they are not whole
        blocks of `block_tokens`. `weighted`: like `held`, but each token has the weight of its tier.
        """
        self.blocks = blocks
        self.hashes = hashes
        self.total = len(hashes)
        self.block_tokens = block_tokens
        self.tokens = tokens or self.total * block_tokens
        self.prompts = prompts
        self.why = why
        self.under_way = under_way
        self.cached: Floats | None = None
        self.counted: Floats | None = None
        self._most = -1.0  # what `most` returns; below 0 until it is computed from the other values
        self._held = held
        self._servers = servers
        if blocks is not None:
            if servers is None:
                servers = self._servers = ServerBlocks(np.ones(len(blocks)))
            if held is None:
                self.cached = servers.reused(blocks, float(block_tokens), self.tokens)
            else:
                self.cached = servers.reused(held, 1.0, self.tokens)
            self.counted = self.cached
            if weighted is not None and held is not None:
                self.counted = np.floor(np.divide(self.cached * weighted, held, np.zeros(len(held)), where=held > 0.0))

    def share(self, candidates: Candidates) -> Scores | None:
        """Returns `counted` as a share of `most`, from 0 to 1, per candidate; None if `counted` is None or `most` is 0."""
        counted, most = self.counted, self.most()
        return None if counted is None or not most else calls.share(candidates.narrow(counted), most)

    def most(self) -> float:
        """Returns the largest value that `cached` can have."""
        if self._most < 0.0:
            hashed, servers = self.total * self.block_tokens, self._servers
            self._most = whole(hashed, self.tokens, 1.0) if servers is None else servers.most(hashed, self.tokens)
        return self._most

    def reported(self, row: int, prompt: int) -> int:
        """Returns how many cached tokens the server in a row should report, if the server counted `prompt` tokens in the whole prompt."""
        if self.blocks is None or self._servers is None:
            return 0
        held = int(self.blocks.item(row) * self.block_tokens if self._held is None else self._held.item(row))
        scaled = held * prompt // self.tokens if held < self.tokens else prompt
        return whole(scaled, prompt, self._servers.sizes.item(row))

    def add(self, other: "PrefixMatch", whole: Mask) -> None:
        """Takes the longer match for each endpoint that is not `whole`: this one, or `other` of the same request, converted to blocks of
        this one's size.
        """
        blocks = other.blocks
        if blocks is None:
            return
        mine = np.zeros(len(blocks)) if self.blocks is None else self.blocks
        theirs = np.minimum(blocks * other.block_tokens // self.block_tokens, self.total)
        self.blocks = np.where(whole, mine, np.maximum(mine, theirs))
        self.cached = _longer(whole, self.cached, other.cached)
        self.counted = _longer(whole, self.counted, other.counted)
        if self._held is not None:
            self._held = np.where(whole, self._held, np.maximum(self._held, blocks * other.block_tokens))

    def with_reasons(self, why: Sequence[str]) -> "PrefixMatch":
        """Returns the same match with `why`: per endpoint, why the match is not precise."""
        same = PrefixMatch(
            None, self.hashes, self.block_tokens, self.tokens, servers=self._servers, held=self._held, prompts=self.prompts,
            why=why, under_way=self.under_way,
        )  # fmt: skip
        same.blocks, same.cached, same.counted, same._most = self.blocks, self.cached, self.counted, self.most()
        return same


def _longer(whole: Mask, mine: Floats | None, others: Floats | None) -> Floats | None:
    if others is None:
        return mine
    known = np.zeros(len(others)) if mine is None else mine
    return np.where(whole, known, np.maximum(known, others))


def joined(matches: Sequence[PrefixMatch]) -> PrefixMatch:
    """Returns the match of a request with several prompts, which the servers cache separately."""
    hashes = np.concatenate([match.hashes for match in matches])
    tokens = sum([match.tokens for match in matches])
    most = sum([match.most() for match in matches])
    both = PrefixMatch(None, hashes, matches[0].block_tokens, tokens, prompts=len(matches))
    both._most = most
    both.blocks = _sum([match.blocks for match in matches])
    both.cached = _sum([match.cached for match in matches])
    both.counted = _sum([match.counted for match in matches])
    return both


def _sum(parts: Sequence[Floats | None]) -> Floats | None:
    total: Floats | None = None
    for part in parts:
        if part is not None:
            total = part if total is None else total + part
    return total


def only_producer(plugins: Iterable[Plugin]) -> Plugin | None:
    """Returns the only producer of matches among `plugins`; None without such a producer, or with several."""
    found = [plugin for plugin in plugins for key in plugin.produces if key.type is PrefixMatch]
    return found[0] if len(found) == 1 else None


def read_producer(plugins: Iterable[Plugin], named: str = "") -> str:
    """Returns the name of the producer of the matches that a plugin reads: `named` if given, else APPROXIMATE, as in the reference picker.

    If nothing is `named` and the only listed producer is of another type, such as a precise one, returns that producer's name. A listed
    approximate producer with a name of its own is ignored here: a configuration may have one producer per tier of the cache, and only the
    second one has its own name.
    """
    only = None if named else only_producer(plugins)
    if only is None or type(only).type_name == APPROXIMATE:
        return named or APPROXIMATE
    return only.name


@subclassed
class FollowsMatches(Plugin):
    """Base class of plugins that read the matches of one producer, which the parameter `prefixMatchInfoProducerName` may name.

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
