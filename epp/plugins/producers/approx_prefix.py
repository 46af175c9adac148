"""Approximate prefix affinity: remembers which prompts were sent where, without asking the servers.

`produce` hashes the prompt and looks up the endpoints that hold its blocks. `before_send` tells the index writer that the target will
hold the blocks, and shows the prefill to all workers at once, because the index learns some milliseconds later (`epp.plugin.Prefills`).
The first token confirms the blocks. If a request ends without a token, `response_complete` removes the blocks that the request added,
except blocks of another recent request of this worker to the same server, unless that request failed, too.

If prompts without a first token exceed a small share of the server's cache, the index learns further prompts at the first token only.
Otherwise, requests that the server refuses would displace prefixes of other requests. The index never learns a prompt that is longer
than the server's cache.

The producer hashes the prompt's tokens if a token producer emits them, else its bytes. If a request has several prompts, each prompt has
its own chain of hashes, because servers cache prompts separately; the prefills of such a request are not shown.

Blocks have `blockSizeTokens` tokens, the same for all producers of a process. The index writer keeps as many blocks of an endpoint as the
server's cache has room for, by the size that the server reports. If the server reports no size, or `autoTune` is off, the writer keeps
`lruCapacityPerServer` blocks. Producers with different capacities stand for tiers of the cache; the index separates their blocks.
"""

from typing import ClassVar, Final

from epp.candidates import Candidates
from epp.data import CACHE_BLOCK_SIZE, CACHE_TOKENS
from epp.decision.decision import Decision, Response
from epp.metrics import buckets, histogram
from epp.plugin import DataProducer, PreRequest, ResponseComplete, ResponseStreaming, Services, plugin
from epp.plugins._parameters import BLOCK_TOKENS_DEFAULT, ApproxPrefixParameters
from epp.plugins.producers._sent_prompts import Keys, SentPrompts
from epp.prefix.match import Capacity, CutsPrompts, prefix_match
from epp.request import BYTES_PER_TOKEN, Request
from epp.request.tokens import TOKENS

BLOCK_TOKENS_MIN: Final = 64
PROMPT_BYTES_MAX: Final = 8 << 20  # two million tokens: no server caches more of one prompt

HIT_RATIO: Final = histogram(
    "prefix_indexer_hit_ratio", "Matched blocks over all blocks of the prompt, at the chosen endpoint.", buckets.RATIO
)
HIT_BYTES: Final = histogram("prefix_indexer_hit_bytes", "Matched prompt bytes at the chosen endpoint.", buckets.HIT_BYTES)


@plugin("approx-prefix-cache-producer")
class ApproximatePrefix(CutsPrompts, DataProducer, PreRequest, ResponseStreaming, ResponseComplete):
    """Emits how many leading blocks of the prompt each endpoint has probably cached (`PrefixMatch`), by what was sent to it."""

    Params = ApproxPrefixParameters
    renamed: ClassVar = {"blockSize": "blockSizeTokens"}
    metrics = (HIT_RATIO, HIT_BYTES)
    first_chunk_only = True
    reads_answer = False

    def __init__(self, name: str, params: ApproxPrefixParameters) -> None:
        super().__init__(name, params)
        older = bool(params.block_size) and params.block_size_tokens == BLOCK_TOKENS_DEFAULT
        field, configured = ("blockSize", params.block_size) if older else ("blockSizeTokens", params.block_size_tokens)
        self.block_tokens = max(configured, BLOCK_TOKENS_MIN)
        block_bytes = self.block_tokens * BYTES_PER_TOKEN
        tokens_max, blocks_max = params.max_prefix_tokens_to_match, params.max_prefix_blocks_to_match
        most = max(tokens_max // self.block_tokens, 1) if tokens_max else blocks_max
        self._bytes_max = most * block_bytes or PROMPT_BYTES_MAX
        self.capacity = Capacity(params.auto_tune, params.lru_capacity_per_server)
        self.deprecated = self.renamed if older else {}
        remarks = {
            f"{field}: {configured} is below the minimum; blocks have {BLOCK_TOKENS_MIN} tokens": configured < BLOCK_TOKENS_MIN
            and configured != BLOCK_TOKENS_DEFAULT,
            "blockSize: has no effect because blockSizeTokens is set": params.block_size and not older,
            "maxPrefixBlocksToMatch: has no effect because maxPrefixTokensToMatch is set": tokens_max and blocks_max,
        }
        self.without_effect = [remark for remark, due in remarks.items() if due]
        self._keys = Keys(name, prefix_match(name))
        self.optional = (TOKENS,)
        self.produces = (self._keys.match,)
        self.keeps = (self._keys.chains, self._keys.sure, self._keys.sent, self._keys.begun)
        self.consumes = (CACHE_BLOCK_SIZE, CACHE_TOKENS) if params.auto_tune else (CACHE_BLOCK_SIZE,)
        self._sent: SentPrompts

    def start(self, services: Services) -> None:
        self._sent = SentPrompts(
            self._keys,
            self.block_tokens,
            self._bytes_max,
            self.capacity,
            index=services.prefix_index,
            prefills=services.prefills,
            secret=services.prefix_seed,
            hit_ratio=services.measure(self, HIT_RATIO),
            hit_bytes=services.measure(self, HIT_BYTES),
        )

    def produce(self, request: Request, candidates: Candidates) -> None:
        self._sent.match(request, candidates)

    def before_send(self, request: Request, decision: Decision) -> None:
        self._sent.learn(request, decision)

    def response_streaming(self, request: Request, decision: Decision) -> None:
        self._sent.begun(request)

    def response_complete(self, request: Request, decision: Decision, response: Response) -> None:
        self._sent.ended(request, response)


@plugin("multicluster-approx-prefix-cache-producer")
class MulticlusterApproximatePrefix(ApproximatePrefix):
    """Does the same as approx-prefix-cache-producer for endpoints that are clusters.

    A cluster reports no size of its cache, so `autoTune` has no effect: the index keeps `lruCapacityPerServer` blocks of each cluster.
    """

    def __init__(self, name: str, params: ApproxPrefixParameters) -> None:
        super().__init__(name, params)
        self.consumes = ()
