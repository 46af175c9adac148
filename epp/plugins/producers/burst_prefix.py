"""Sends requests of a burst with the same prompt to the same endpoint while all caches are still cold, as for samples of a training step.

Requests of one worker that arrive within a window are placed jointly (`_bursts`). Workers do not know each other's bursts. Among equal
endpoints, the one with fewer running requests wins, then the first one by name; so all workers choose alike.
"""

from typing import Annotated, Literal

import msgspec
import numpy as np

from epp.candidates import Candidates
from epp.data import RUNNING
from epp.endpoints.server_blocks import server_blocks
from epp.errors import ProducerFailed
from epp.plugin import DataProducer, Hashes, Services, Waiting, plugin
from epp.plugins.producers._bursts import Rules, assign
from epp.prefix.blocks import block_hashes, root, seed, with_media
from epp.prefix.match import PrefixMatch, prefix_match
from epp.request import BYTES_PER_TOKEN, Request
from epp.request.tokens import TOKENS

BLOCKS_MAX = 2048
BATCH_MAX = 1000
PROMPTS_MAX = 64  # prompts of one request
MARGIN_S = 0.3  # how much longer than its duration a window may last, in seconds
Limit = Annotated[int, msgspec.Meta(ge=-1)]


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """How bursts are collected and placed, as in the reference picker.

    window_duration_ms: How long requests are collected. Each request waits up to so long.
    max_per_replica: How many requests with one prompt an endpoint gets; -1 for all.
    block_size_tokens: Tokens that are hashed as a unit.
    max_prefix_tokens_to_match: How many tokens of a prompt are compared; 0 for 2048 blocks.
    min_colocate_blocks: How many leading blocks different prompts must share to go to one endpoint. With 0, only equal prompts do.
    max_batch_size: How many requests a window takes; further requests get no preference. With -1, there is no limit.
    balance_by: What is balanced over endpoints: requests (also if empty), or the tokens that endpoints have to compute.
    """

    window_duration_ms: Annotated[int, msgspec.Meta(ge=1, le=10000)] = 100
    max_per_replica: Limit = -1
    block_size_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 64
    max_prefix_tokens_to_match: Annotated[int, msgspec.Meta(ge=0)] = 0
    min_colocate_blocks: Annotated[int, msgspec.Meta(ge=0)] = 0
    max_batch_size: Limit = BATCH_MAX
    balance_by: Literal["requests", "tokens", ""] = "requests"


class Batch:
    """Collects the requests of one window, each with its block hashes."""

    __slots__ = ("entries", "running", "waiting")

    def __init__(self, running: dict[int, float]) -> None:
        self.entries: list[tuple[Request, Candidates, Hashes]] = []
        self.running = running
        self.waiting: Waiting


@plugin("burst-prefix-cache-producer")
class BurstPrefix(DataProducer):
    """Emits a match of the whole prompt (`PrefixMatch`) at the endpoint that is chosen for all requests of a burst with this prompt."""

    Params = Parameters

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        for field, value in (("maxPerReplica", params.max_per_replica), ("maxBatchSize", params.max_batch_size)):
            if value == 0:
                raise ValueError(f"{field}: is 0; write -1 for no limit, or at least 1")
        size, most = params.block_size_tokens, params.max_prefix_tokens_to_match
        if 0 < most < size:
            raise ValueError(f"maxPrefixTokensToMatch: {most} is less than a block ({size} tokens); write 0 or more than that")
        self._block_bytes = size * BYTES_PER_TOKEN
        self._bytes_max = (most // size or BLOCKS_MAX) * self._block_bytes
        self._rules = Rules(params.max_per_replica, params.min_colocate_blocks, params.balance_by == "tokens")
        self._window_s = params.window_duration_ms / 1000
        self._match = prefix_match(name)
        self.consumes = (RUNNING,)
        self.optional = (TOKENS,)
        self.produces = (self._match,)
        self._batch: Batch | None = None
        self._services: Services

    def start(self, services: Services) -> None:
        self._services = services

    def produce(self, request: Request, candidates: Candidates) -> Waiting | None:
        hashes = self._hashes(request)
        if not len(hashes):
            return None
        batch = self._batch
        if batch is None:
            ordered = sorted(
                zip(candidates.endpoints, candidates[RUNNING].tolist(), strict=True), key=lambda e: (e[0].namespace, e[0].name, e[0].port)
            )
            batch = Batch({endpoint.owner: running for endpoint, running in ordered})
            batch.waiting = self._services.spawn(self._collect(batch), self._window_s + MARGIN_S)
            self._batch = batch
        elif 0 < self.params.max_batch_size <= len(batch.entries):
            raise ProducerFailed(f"the window has {len(batch.entries)} requests already (maxBatchSize)")
        batch.entries.append((request, candidates, hashes))
        return batch.waiting

    async def _collect(self, batch: Batch) -> None:
        try:
            await self._services.after(self._window_s)
        finally:
            if self._batch is batch:
                self._batch = None
        owners = assign([tuple(hashes.tolist()) for _, _, hashes in batch.entries], batch.running, self._rules)
        for (request, candidates, hashes), owner in zip(batch.entries, owners, strict=True):
            endpoint_list = candidates.snapshot.endpoint_list
            row = None if owner is None else endpoint_list.row_of_owner.get(owner)
            blocks = None
            if row is not None:
                blocks = np.zeros(len(endpoint_list.endpoints))
                blocks[row] = len(hashes)
            servers, tokenized = server_blocks(candidates.snapshot), request[TOKENS]
            prompts = request.prompt.several if tokenized is None else tokenized.prompts
            request[self._match] = PrefixMatch(blocks, hashes, self.params.block_size_tokens, servers=servers, prompts=max(1, len(prompts)))

    def _hashes(self, request: Request) -> Hashes:
        tokenized = request[TOKENS]
        if tokenized is not None:
            ids = [(p.token_ids, p.features) for p in tokenized.prompts[:PROMPTS_MAX] if p.token_ids is not None]
            prompts = [(with_media(i, f) if f else i).astype("<u4", copy=False).tobytes() for i, f in ids]
        else:
            prompts = list(request.prompt.several[:PROMPTS_MAX]) or [request.prompt.canonical]
        salt, secret = request.cache_salt, self._services.prefix_seed
        start, secret = root(request.target_model, salt, secret), seed(salt, secret)
        chains = [block_hashes(p[: self._bytes_max], self._block_bytes, start, secret) for p in prompts if p]
        return np.concatenate(chains) if chains else np.empty(0, dtype=np.uint64)
