"""Prefix affinity without asking the servers: what was sent where, hashed once and matched against the shared index.

`produce` hashes the prompt and looks up who holds its blocks; `before_send` tells the index writer that the target will. A prompt
is its tokens where a token producer emits them, else its bytes.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
import numpy as np

from epp.candidates import Candidates, Floats
from epp.data import Datum
from epp.decision import Decision
from epp.metrics import HITB, RATIO, Metric
from epp.plugin import DataProducer, Hashes, Measure, PrefixIndex, PreRequest, Services, plugin
from epp.prefix.blocks import block_hashes, landmarks, root
from epp.prefix.match import PrefixMatch, prefix_match
from epp.request import BYTES_PER_TOKEN, Request
from epp.tokens import TOKENS, TokenizedPrompt

BLOCK_TOKENS_MIN = 64
LRU_CAPACITY = 31250
CAPACITY = "one index of a fixed size (--index-entries) serves all servers, and the oldest entries leave"
ROOTS_MAX = 4096
PROMPTS_MAX = 64  # of one request, where it is tokenised
REFRESH_EVERY = 8

HIT_RATIO = Metric(
    "prefix_indexer_hit_ratio",
    "histogram",
    "Matched blocks over all blocks of the prompt, at the chosen endpoint.",
    RATIO,
)
HIT_BYTES = Metric("prefix_indexer_hit_bytes", "histogram", "Matched prompt bytes at the chosen endpoint.", HITB)


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """As in the field; effective blocks are at least 64 tokens, and 0 as a limit means none."""

    auto_tune: bool = True
    block_size_tokens: Annotated[int, msgspec.Meta(ge=1)] = 16
    block_size: Annotated[int, msgspec.Meta(ge=0)] = 0
    max_prefix_tokens_to_match: Annotated[int, msgspec.Meta(ge=0)] = 0
    max_prefix_blocks_to_match: Annotated[int, msgspec.Meta(ge=0)] = 0
    lru_capacity_per_server: Annotated[int, msgspec.Meta(ge=1)] = LRU_CAPACITY


@plugin("approx-prefix-cache-producer")
class ApproximatePrefix(DataProducer, PreRequest):
    """Emits `PrefixMatch`; learns from every request that is sent."""

    Params = Parameters
    metrics = (HIT_RATIO, HIT_BYTES)

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        configured = (
            params.block_size if params.block_size and params.block_size_tokens == 16 else params.block_size_tokens
        )
        self.block_tokens = max(configured, BLOCK_TOKENS_MIN)
        self._block_bytes = self.block_tokens * BYTES_PER_TOKEN
        blocks_max = params.max_prefix_tokens_to_match // self.block_tokens or params.max_prefix_blocks_to_match
        self._bytes_max = blocks_max * self._block_bytes or None
        self._match = prefix_match(name)
        self._chains: Datum[list[Hashes]] = Datum(f"prefix_chains/{name}", list)
        self.optional = (TOKENS,)
        self.produces = (self._match,)
        self.keeps = (self._chains,)
        untuned = {
            "autoTune": not params.auto_tune,
            "lruCapacityPerServer": params.lru_capacity_per_server != LRU_CAPACITY,
        }
        self.without_effect = [f"{name}: has no effect here: {CAPACITY}" for name, given in untuned.items() if given]
        self._turn = 0
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
            self._produce_by_tokens(request, candidates, tokenized)
            return
        prompt = request.prompt.canonical
        if not prompt:
            return
        hashes = self._hashed(prompt, request)
        blocks = self._held(self._index.match(hashes), candidates, None)
        request[self._match] = PrefixMatch(blocks, hashes, self.block_tokens)

    def _produce_by_tokens(self, request: Request, candidates: Candidates, tokenized: TokenizedPrompt) -> None:
        """Prompts are matched one by one, and their blocks added up."""
        ids = [prompt.token_ids for prompt in tokenized.prompts[:PROMPTS_MAX] if prompt.token_ids is not None]
        chains = [self._hashed(tokens.astype("<u4", copy=False).tobytes(), request) for tokens in ids if len(tokens)]
        if not chains:
            return
        blocks = None
        for chain in chains:
            blocks = self._held(self._index.match(chain), candidates, blocks)
        if len(chains) > 1:
            request[self._chains] = chains
        request[self._match] = PrefixMatch(blocks, np.concatenate(chains), self.block_tokens)

    def _hashed(self, prompt: bytes, request: Request) -> Hashes:
        return block_hashes(prompt[: self._bytes_max], self._block_bytes, self._root(request), self._secret)

    def _held(self, depths: Mapping[int, int], candidates: Candidates, blocks: Floats | None) -> Floats | None:
        """Blocks per endpoint, added to those before; None: nobody holds any."""
        if not depths:
            return blocks
        roster = candidates.snapshot.roster
        if blocks is None:
            blocks = np.zeros(len(roster.endpoints))
        for owner, depth in depths.items():
            row = roster.row_of_owner.get(owner)
            if row is not None:
                blocks[row] += depth
        return blocks

    def before_send(self, request: Request, decision: Decision) -> None:
        match = request[self._match]
        if match is None:
            return
        primary = decision.runs[decision.primary]
        assert primary is not None
        picked = primary.picked[0]
        row = picked if primary.candidates.rows is None else int(primary.candidates.rows[picked])
        held = 0 if match.blocks is None else int(match.blocks[row])
        self._hit_ratio.observe(held / match.total)
        self._hit_bytes.observe(held * self._block_bytes)
        chains = request[self._chains]
        self._learn(match, held, primary.candidates.snapshot.endpoints[row].owner, chains)
        prefill = decision.runs.get(decision.prefill)
        if prefill is not None and prefill is not primary:
            self._learn(match, 0, prefill.targets[0].owner, chains)

    def _learn(self, match: PrefixMatch, held: int, owner: int, chains: Sequence[Hashes] | None) -> None:
        """What the owner is known to hold is told again now and then only, so that it does not look old.

        Of several prompts it is not known which it holds: all are told.
        """
        if chains is not None:
            for chain in chains:
                self._index.learn(landmarks(chain), owner)
            return
        self._turn = (self._turn + 1) % REFRESH_EVERY
        learned = landmarks(match.hashes, held if self._turn else 0)
        if len(learned):
            self._index.learn(learned, owner)

    def _root(self, request: Request) -> int:
        key = (request.target_model, request.cache_salt)
        start = self._roots.get(key)
        if start is None:
            if len(self._roots) >= ROOTS_MAX:  # names come from clients: bounded
                self._roots.clear()
            start = self._roots[key] = root(*key, self._secret)
        return start
