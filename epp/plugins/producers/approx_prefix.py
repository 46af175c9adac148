"""Approximate prefix affinity: remembers which prompts were sent where, without asking the servers.

`produce` hashes the prompt and looks up the endpoints that hold its blocks. `before_send` tells the index writer that the target will
hold them. If the server answers with an error or not at all, `response_complete` takes back the blocks that this request added. It does
not take back blocks that another recent request of this worker to the same server has in common, unless that request failed, too. Hashed
are the prompt's tokens if a token producer emits them, else its bytes. If a request has several prompts, each has a chain of hashes of its
own, because servers cache them separately.

Blocks have `blockSizeTokens` tokens, the same for all producers of a process. The index writer keeps as many blocks of an endpoint as the
server's cache has room for, by the size that the server reports. If the server reports none, or `autoTune` is off, it keeps
`lruCapacityPerServer` blocks.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import ClassVar, Final

import numpy as np

from compiled.kernels import by_row
from epp.candidates import Candidates, Floats
from epp.data import CACHE_BLOCK_SIZE, CACHE_NUM_BLOCKS, Datum
from epp.decision import Decision, ProfileRun, Response
from epp.metrics import Metric, buckets
from epp.plugin import DataProducer, Hashes, Measure, PrefixIndex, PreRequest, ResponseComplete, Services, plugin
from epp.plugins.producers._prefix_parameters import BLOCK_TOKENS_DEFAULT, Parameters
from epp.prefix.blocks import block_hashes, landmarks, root, with_media
from epp.prefix.match import CutsPrompts, PrefixMatch, prefix_match
from epp.request import BYTES_PER_TOKEN, Request
from epp.tokens import TOKENS, PromptTokens

BLOCK_TOKENS_MIN: Final = 64
ROOTS_MAX: Final = 4096
SALT_CHARS_MAX: Final = 256  # characters of a cache salt; the root hashes of longer salts are not kept
PROMPTS_MAX: Final = 64  # prompts of one request that are matched
PROMPT_BYTES_MAX: Final = 8 << 20  # two million tokens: no server caches more of one prompt
REFRESH_EVERY: Final = 8
RECENT_MAX: Final = 256
LONG_BLOCKS: Final = 512  # a chain pushes one more of the remembered chains out for each so many blocks
COMPARED_MAX: Final = 256  # remembered chains with which the chains of one failed request are compared

HIT_RATIO: Final = Metric(
    "prefix_indexer_hit_ratio",
    "histogram",
    "Matched blocks over all blocks of the prompt, at the chosen endpoint.",
    buckets.RATIO,
)
HIT_BYTES: Final = Metric(
    "prefix_indexer_hit_bytes", "histogram", "Matched prompt bytes at the chosen endpoint.", buckets.HIT_BYTES
)


Chain = tuple[Hashes, Mapping[int, int]]  # hashes of one of several prompts; owner -> leading blocks that it holds


class Sent:
    """Remembers a chain that was sent to an endpoint. `owner`: the endpoint's owner id; 0: the request failed.

    `known`: how many leading blocks the endpoint held before.
    """

    __slots__ = ("hashes", "known", "owner")

    def __init__(self, owner: int, hashes: Hashes, known: int) -> None:
        self.owner = owner
        self.hashes = hashes
        self.known = known


@plugin("approx-prefix-cache-producer")
class ApproximatePrefix(CutsPrompts, DataProducer, PreRequest, ResponseComplete):
    """Emits how many leading blocks of the prompt each endpoint has probably cached (`PrefixMatch`), by what was sent to it."""

    Params = Parameters
    renamed: ClassVar = {"blockSize": "blockSizeTokens"}
    metrics = (HIT_RATIO, HIT_BYTES)
    failures_only = True

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        older = bool(params.block_size) and params.block_size_tokens == BLOCK_TOKENS_DEFAULT
        field, configured = ("blockSize", params.block_size) if older else ("blockSizeTokens", params.block_size_tokens)
        self.block_tokens = max(configured, BLOCK_TOKENS_MIN)
        self._block_bytes = self.block_tokens * BYTES_PER_TOKEN
        tokens_max, blocks_max = params.max_prefix_tokens_to_match, params.max_prefix_blocks_to_match
        most = max(tokens_max // self.block_tokens, 1) if tokens_max else blocks_max
        self._bytes_max = most * self._block_bytes or PROMPT_BYTES_MAX
        self.deprecated = self.renamed if older else {}
        remarks = {
            f"{field}: {configured} is below the minimum; blocks have {BLOCK_TOKENS_MIN} tokens": configured
            < BLOCK_TOKENS_MIN
            and configured != BLOCK_TOKENS_DEFAULT,
            "blockSize: has no effect because blockSizeTokens is set": params.block_size and not older,
            "maxPrefixBlocksToMatch: has no effect because maxPrefixTokensToMatch is set": tokens_max and blocks_max,
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
            self._produce_each(request, candidates, [_words(prompt) for prompt in tokenized.prompts[:PROMPTS_MAX]])
            return
        several = request.prompt.several
        if several:
            self._produce_each(request, candidates, several[:PROMPTS_MAX])
        elif prompt := request.prompt.canonical:
            hashes = self._hashed(prompt, request)
            blocks = self._held(self._index.match(hashes), candidates, None)
            request[self._match] = PrefixMatch(blocks, hashes, self.block_tokens, len(prompt) // BYTES_PER_TOKEN)

    def _produce_each(self, request: Request, candidates: Candidates, prompts: Sequence[bytes]) -> None:
        """Matches each prompt separately, and adds up their blocks."""
        chains = [self._hashed(prompt, request) for prompt in prompts if prompt]
        if not chains:
            return
        matches = [self._index.match(chain) for chain in chains]
        blocks = None
        for depths in matches:
            blocks = self._held(depths, candidates, blocks)
        if len(chains) > 1:
            request[self._chains] = list(zip(chains, matches, strict=True))
        tokens = sum(map(len, prompts)) // BYTES_PER_TOKEN
        request[self._match] = PrefixMatch(blocks, np.concatenate(chains), self.block_tokens, tokens)

    def _hashed(self, prompt: bytes, request: Request) -> Hashes:
        return block_hashes(prompt[: self._bytes_max], self._block_bytes, self._root(request), self._secret)

    def _held(self, depths: Mapping[int, int], candidates: Candidates, blocks: Floats | None) -> Floats | None:
        """Adds the depths of one prompt to `blocks`, the sum over earlier prompts (one per endpoint). None: no endpoint holds any block."""
        if not depths:
            return blocks
        roster = candidates.snapshot.roster
        held = by_row(depths, roster.row_of_owner, len(roster.endpoints))
        return held if blocks is None else blocks + held

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
        """Takes the request's blocks back if the server answered with an error or not at all, because it has not computed the prompt.

        `failures_only`: the picker calls this method for no other requests.
        """
        failed = [(sent, sent.owner) for sent in request[self._sent] or ()]
        for sent, _ in failed:
            sent.owner = 0
        similar = self._similar(failed)
        left = COMPARED_MAX  # bounded, because a request may have many prompts that begin alike
        for sent, owner in failed:
            kept = sent.known
            others = similar[owner, sent.hashes.item(0)][:left]
            left -= len(others)
            for other in others:
                if (shared := _shared(sent, other)) > sent.known:
                    kept = max(kept, shared)
                    # From now on the other request counts as the one that added these blocks: if it fails, too, it takes them back.
                    other.known = min(other.known, sent.known)
            added = landmarks(sent.hashes, kept)
            if len(added):
                self._index.forget(added, owner)

    def _similar(self, failed: Sequence[tuple[Sent, int]]) -> Mapping[tuple[int, int], list[Sent]]:
        """Maps owner and first hash of each failed chain to the recent chains that have both in common with it, the latest first."""
        chains: dict[tuple[int, int], list[Sent]] = {(owner, sent.hashes.item(0)): [] for sent, owner in failed}
        owners = {owner for _, owner in failed}
        for other in reversed(self._recent):
            if other.owner in owners and (alike := chains.get((other.owner, other.hashes.item(0)))) is not None:
                alike.append(other)
        return chains

    def _target(self, run: ProfileRun, match: PrefixMatch) -> tuple[int, int]:
        """Returns the owner id of the endpoint that a profile picked, and how many blocks of the match the endpoint holds."""
        row = run.row
        held = 0 if match.blocks is None else int(match.blocks[row])
        return run.candidates.snapshot.endpoints[row].owner, held

    def _learn(
        self, match: PrefixMatch, held: int, owner: int, chains: Sequence[Chain] | None, sent: list[Sent]
    ) -> None:
        """Adds a request's chains to the index for the owner that it is sent to, and remembers them in `sent`.

        Blocks that the owner is known to hold are added again only now and then, to keep their entries young.
        """
        self._turn = (self._turn + 1) % REFRESH_EVERY
        parts = [(match.hashes, held)] if chains is None else [(chain, by.get(owner, 0)) for chain, by in chains]
        for hashes, known in parts:
            chain_sent = Sent(owner, hashes, known)
            sent.append(chain_sent)
            self._recent.append(chain_sent)
            if len(hashes) >= LONG_BLOCKS:
                self._forget_for(len(hashes))
            learned = landmarks(hashes, known if self._turn else 0)
            if len(learned):
                self._index.learn(learned, owner)

    def _forget_for(self, blocks: int) -> None:
        """Forgets remembered chains to make room for a long one, so that memory stays bounded: one chain may have 256 KB."""
        recent = self._recent
        for _ in range(min(blocks // LONG_BLOCKS, len(recent) - 1)):
            recent.popleft()

    def _root(self, request: Request) -> int:
        key = (request.target_model, request.cache_salt)
        if len(request.cache_salt) > SALT_CHARS_MAX:
            return root(*key, self._secret)
        start = self._roots.get(key)
        if start is None:
            if len(self._roots) >= ROOTS_MAX:  # the cache is bounded, because clients choose names and salts
                self._roots.clear()
            start = self._roots[key] = root(*key, self._secret)
        return start


def _words(prompt: PromptTokens) -> bytes:
    """Returns the bytes of a prompt's tokens for hashing."""
    ids = prompt.token_ids
    if ids is None:
        return b""
    return (with_media(ids, prompt.features) if prompt.features else ids).astype("<u4", copy=False).tobytes()


def _shared(failed: Sent, other: Sent) -> int:
    """Returns how many leading blocks of a failed chain stay: those known before, and those in common with the other chain."""
    known, most = failed.known, min(len(failed.hashes), len(other.hashes))
    if known >= most or failed.hashes.item(known) != other.hashes.item(known):
        return known
    differ = failed.hashes[known:most] != other.hashes[known:most]
    return known + int(differ.argmax()) if differ.any() else most


@plugin("multicluster-approx-prefix-cache-producer")
class MulticlusterApproximatePrefix(ApproximatePrefix):
    """Does the same as approx-prefix-cache-producer for endpoints that are clusters.

    A cluster reports no size of its cache, so `autoTune` has no effect: the index keeps `lruCapacityPerServer` blocks of each.
    """

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        self.consumes = ()
