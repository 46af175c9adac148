"""Prefix affinity without asking the servers: what was sent where, hashed once and matched against the shared index.

`produce` hashes the prompt and looks up who holds its blocks; `before_send` tells the index writer that the target will, and
`response_complete` takes back what this request added where the server answered with an error or not at all, but for what another
request of this worker has with it that was sent there lately and did not fail. A prompt is its tokens where a token producer emits
them, else its bytes; of several prompts each has a chain of its own, as servers cache them one by one.

Blocks have `blockSizeTokens` tokens, one value for all producers of a process. How many blocks the index holds for an endpoint is what
that server's own cache takes, by the size that it reports, or `lruCapacityPerServer` blocks where it reports none or `autoTune` is
off; the index writer sees to that.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
import numpy as np

from epp.candidates import Candidates, Floats
from epp.data import CACHE_BLOCK_SIZE, CACHE_NUM_BLOCKS, Datum
from epp.decision import Decision, ProfileRun, Response
from epp.metrics import HITB, RATIO, Metric
from epp.plugin import DataProducer, Hashes, Measure, PrefixIndex, PreRequest, ResponseComplete, Services, plugin
from epp.prefix.blocks import block_hashes, landmarks, root, with_media
from epp.prefix.match import CutsPrompts, PrefixMatch, prefix_match
from epp.request import BYTES_PER_TOKEN, Request
from epp.tokens import TOKENS, PromptTokens

BLOCK_TOKENS_MIN = 64
BLOCK_TOKENS_MAX = 1 << 20  # beyond that no prompt has a whole one
BLOCK_TOKENS_DEFAULT = 16  # the field's; stands for the least
LRU_CAPACITY = 31250
ROOTS_MAX = 4096
SALT_CHARS_MAX = 256  # of one that is remembered with its root
PROMPTS_MAX = 64  # of one request
PROMPT_BYTES_MAX = 8 << 20  # two million tokens: no server caches more of one prompt
REFRESH_EVERY = 8
RECENT_MAX = 256
LONG_BLOCKS = 512  # so many of a chain that is remembered take the place of one more
COMPARED_MAX = 256  # chains that those of a request that failed are compared with

HIT_RATIO = Metric(
    "prefix_indexer_hit_ratio",
    "histogram",
    "Matched blocks over all blocks of the prompt, at the chosen endpoint.",
    RATIO,
)
HIT_BYTES = Metric("prefix_indexer_hit_bytes", "histogram", "Matched prompt bytes at the chosen endpoint.", HITB)


Chain = tuple[Hashes, Mapping[int, int]]  # of one prompt among several, and who holds how much of it


class Sent:
    """A chain on its way to an owner who was known to hold the first `known` blocks of it. `owner` 0: it failed."""

    __slots__ = ("hashes", "known", "owner")

    def __init__(self, owner: int, hashes: Hashes, known: int) -> None:
        self.owner = owner
        self.hashes = hashes
        self.known = known


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """As in the field; effective blocks are at least 64 tokens, 0 as a limit means none, and none is the default.

    `block_size` is deprecated. `max_prefix_tokens_to_match` wins over `max_prefix_blocks_to_match`, and means a block at least.
    `auto_tune` takes how many blocks the index holds for a server from that server's own metrics, else it is `lru_capacity_per_server`.
    """

    auto_tune: bool = True
    block_size_tokens: Annotated[int, msgspec.Meta(ge=1, le=BLOCK_TOKENS_MAX)] = BLOCK_TOKENS_DEFAULT
    block_size: Annotated[int, msgspec.Meta(ge=0, le=BLOCK_TOKENS_MAX)] = 0
    max_prefix_tokens_to_match: Annotated[int, msgspec.Meta(ge=0)] = 0
    max_prefix_blocks_to_match: Annotated[int, msgspec.Meta(ge=0)] = 0
    lru_capacity_per_server: Annotated[int, msgspec.Meta(ge=1)] = LRU_CAPACITY


@plugin("approx-prefix-cache-producer")
class ApproximatePrefix(CutsPrompts, DataProducer, PreRequest, ResponseComplete):
    """Emits `PrefixMatch`; learns from every request that is sent."""

    Params = Parameters
    metrics = (HIT_RATIO, HIT_BYTES)
    failures_only = True

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        older = bool(params.block_size) and params.block_size_tokens == BLOCK_TOKENS_DEFAULT
        given, configured = ("blockSize", params.block_size) if older else ("blockSizeTokens", params.block_size_tokens)
        self.block_tokens = max(configured, BLOCK_TOKENS_MIN)
        self._block_bytes = self.block_tokens * BYTES_PER_TOKEN
        tokens_max, blocks_max = params.max_prefix_tokens_to_match, params.max_prefix_blocks_to_match
        most = max(tokens_max // self.block_tokens, 1) if tokens_max else blocks_max
        self._bytes_max = most * self._block_bytes or PROMPT_BYTES_MAX
        self.deprecated = ["blockSize: is deprecated; write blockSizeTokens"] if older else []
        remarks = {
            f"{given}: blocks have at least {BLOCK_TOKENS_MIN} tokens, so have these": configured < BLOCK_TOKENS_MIN
            and configured != BLOCK_TOKENS_DEFAULT,
            "blockSize: has no effect beside blockSizeTokens": params.block_size and not older,
            "maxPrefixBlocksToMatch: has no effect beside maxPrefixTokensToMatch": tokens_max and blocks_max,
        }
        self.without_effect = [remark for remark, due in remarks.items() if due]
        self._match = prefix_match(name)
        self._chains: Datum[list[Chain]] = Datum(f"prefix_chains/{name}", list)
        self._sent: Datum[list[Sent]] = Datum(f"prefix_sent/{name}", list)
        self.optional = (TOKENS,)
        self.produces = (self._match,)
        self.keeps = (self._chains, self._sent)
        if params.auto_tune:
            self.consumes = (CACHE_BLOCK_SIZE, CACHE_NUM_BLOCKS)
        self._turn = 0
        self._recent: deque[Sent] = deque(maxlen=RECENT_MAX)
        self._roots: dict[tuple[str, str], int] = {}
        self._index: PrefixIndex
        self._secret: int
        self._hit_ratio: Measure
        self._hit_bytes: Measure

    def start(self, services: Services) -> None:
        self._index = services.prefix_index
        self._secret = services.prefix_seed
        self._hit_ratio = services.measure(self, HIT_RATIO)
        self._hit_bytes = services.measure(self, HIT_BYTES)

    def produce(self, request: Request, candidates: Candidates) -> None:
        tokenized = request[TOKENS]
        if tokenized is not None:
            self._produce_each(request, candidates, [_words(given) for given in tokenized.prompts[:PROMPTS_MAX]])
            return
        several = request.prompt.several
        if several:
            self._produce_each(request, candidates, several[:PROMPTS_MAX])
        elif prompt := request.prompt.canonical:
            hashes = self._hashed(prompt, request)
            blocks = self._held(self._index.match(hashes), candidates, None)
            request[self._match] = PrefixMatch(blocks, hashes, self.block_tokens, len(prompt) // BYTES_PER_TOKEN)

    def _produce_each(self, request: Request, candidates: Candidates, prompts: Sequence[bytes]) -> None:
        """Prompts are matched one by one, and their blocks added up."""
        chains = [self._hashed(prompt, request) for prompt in prompts if prompt]
        if not chains:
            return
        found = [self._index.match(chain) for chain in chains]
        blocks = None
        for depths in found:
            blocks = self._held(depths, candidates, blocks)
        if len(chains) > 1:
            request[self._chains] = list(zip(chains, found, strict=True))
        tokens = sum(map(len, prompts)) // BYTES_PER_TOKEN
        request[self._match] = PrefixMatch(blocks, np.concatenate(chains), self.block_tokens, tokens)

    def _hashed(self, prompt: bytes, request: Request) -> Hashes:
        return block_hashes(prompt[: self._bytes_max], self._block_bytes, self._root(request), self._secret)

    def _held(self, depths: Mapping[int, int], candidates: Candidates, blocks: Floats | None) -> Floats | None:
        """Blocks per endpoint, added to those before; None: nobody holds any."""
        if not depths:
            return blocks
        roster = candidates.snapshot.roster
        row_of = roster.row_of_owner.get
        held = [0.0] * len(roster.endpoints)
        for (
            owner,
            depth,
        ) in depths.items():  # one array of a list at the end: 1.3 us for eight owners, 3.9 stored into one
            row = row_of(owner)
            if row is not None:
                held[row] = depth
        return np.array(held) if blocks is None else blocks + held

    def before_send(self, request: Request, decision: Decision) -> None:
        match = request[self._match]
        if match is None:
            return
        primary = decision.runs[decision.primary]
        assert primary is not None
        owner, held = self._target(primary, match)
        self._hit_ratio.observe(held / match.total)
        self._hit_bytes.observe(held * self._block_bytes)
        sent: list[Sent] = []
        chains = request[self._chains]
        self._learn(match, held, owner, chains, sent)
        prefill = decision.runs.get(decision.prefill)
        if prefill is not None and prefill is not primary:
            owner, held = self._target(prefill, match)
            self._learn(match, held, owner, chains, sent)
        request[self._sent] = sent

    def response_complete(self, request: Request, decision: Decision, response: Response) -> None:
        """Who answered with an error, or not at all, has not computed the prompt."""
        failed = [(sent, sent.owner) for sent in request[self._sent] or ()]
        for sent, _ in failed:
            sent.owner = 0
        beside = self._beside(failed)
        left = COMPARED_MAX  # a request may have many prompts, all alike
        for sent, owner in failed:
            kept = sent.known
            others = beside[owner, sent.hashes.item(0)][:left]
            left -= len(others)
            for other in others:
                if (shared := _shared(sent, other)) > sent.known:
                    kept = max(kept, shared)
                    other.known = min(other.known, sent.known)  # if it fails too, it takes them back
            added = landmarks(sent.hashes, kept)
            if len(added):
                self._index.forget(added, owner)

    def _beside(self, failed: Sequence[tuple[Sent, int]]) -> Mapping[tuple[int, int], list[Sent]]:
        """By owner and first hash of what failed: which chains that begin so were sent there lately, the latest first."""
        found: dict[tuple[int, int], list[Sent]] = {(owner, sent.hashes.item(0)): [] for sent, owner in failed}
        owners = {owner for _, owner in failed}
        for other in reversed(self._recent):
            if other.owner in owners and (begun := found.get((other.owner, other.hashes.item(0)))) is not None:
                begun.append(other)
        return found

    def _target(self, run: ProfileRun, match: PrefixMatch) -> tuple[int, int]:
        """Whom a profile picked, and how many blocks that endpoint holds."""
        row = run.row
        held = 0 if match.blocks is None else int(match.blocks[row])
        return run.candidates.snapshot.endpoints[row].owner, held

    def _learn(
        self, match: PrefixMatch, held: int, owner: int, chains: Sequence[Chain] | None, sent: list[Sent]
    ) -> None:
        """What the owner is known to hold is told again now and then only, so that it does not look old."""
        self._turn = (self._turn + 1) % REFRESH_EVERY
        parts = [(match.hashes, held)] if chains is None else [(chain, by.get(owner, 0)) for chain, by in chains]
        for hashes, known in parts:
            on_its_way = Sent(owner, hashes, known)
            sent.append(on_its_way)
            self._recent.append(on_its_way)
            if len(hashes) >= LONG_BLOCKS:
                self._forget_for(len(hashes))
            told = landmarks(hashes, known if self._turn else 0)
            if len(told):
                self._index.learn(told, owner)

    def _forget_for(self, blocks: int) -> None:
        """A long chain was remembered: by their number alone, 256 KB of each would be."""
        recent = self._recent
        for _ in range(min(blocks // LONG_BLOCKS, len(recent) - 1)):
            recent.popleft()

    def _root(self, request: Request) -> int:
        key = (request.target_model, request.cache_salt)
        if len(request.cache_salt) > SALT_CHARS_MAX:
            return root(*key, self._secret)
        start = self._roots.get(key)
        if start is None:
            if len(self._roots) >= ROOTS_MAX:  # names and salts come from clients: bounded
                self._roots.clear()
            start = self._roots[key] = root(*key, self._secret)
        return start


def _words(prompt: PromptTokens) -> bytes:
    """What is hashed of a prompt's tokens."""
    ids = prompt.token_ids
    if ids is None:
        return b""
    return (with_media(ids, prompt.features) if prompt.features else ids).astype("<u4", copy=False).tobytes()


def _shared(failed: Sent, other: Sent) -> int:
    """How many leading blocks of a chain are not to be taken back, because the other chain has them or they were known before."""
    known, most = failed.known, min(len(failed.hashes), len(other.hashes))
    if known >= most or failed.hashes.item(known) != other.hashes.item(known):
        return known
    differ = failed.hashes[known:most] != other.hashes[known:most]
    return known + int(differ.argmax()) if differ.any() else most
