"""Precise prefix affinity: routes by the blocks that model servers report as cached. Servers without reports get the approximate match.

The model servers publish their KV events. The kv-events process follows them and keeps an index of the blocks that each endpoint holds.
`produce` looks up the prompt's tokens in that index, for the endpoints with an event stream without a gap (the followed ones). Other
endpoints get the match of the approximate producer. Endpoints with unknown older blocks get the longer one of both matches. So a lost
stream costs precision but no affinity. A server with several data-parallel ranks behind one address gets the approximate match, too: each
rank has its own cache, and a request may reach any rank. If no token producer has emitted tokens, or if the request's model may be an
adapter that no event has named, all endpoints get the approximate match, with the reason.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from epp.candidates import Candidates, Floats, Scores, Snapshot
from epp.data import CACHE_RANKS, Datum
from epp.decision.decision import Decision
from epp.endpoints.server_blocks import ServerBlocks, server_blocks
from epp.metrics import buckets, counter, histogram
from epp.plugin import Count, DataProducer, HeldBlocks, HeldView, Plugin, PreRequest, Profile, Scorer, Services, plugin
from epp.plugins.producers._precise_params import COUNTS_WITH, RENAMED, Parameters, Settings, deprecated, settings
from epp.prefix.blocks import Hashes
from epp.prefix.deciding import ScoresOwnMatches
from epp.prefix.held import BASE_MODEL, adapter_word, held_links, held_root, index_keys, request_extras
from epp.prefix.match import APPROXIMATE, PrefixMatch, joined, prefix_match
from epp.prefix.streams import WEIGHT_ONE, of_ranks
from epp.request import Request
from epp.request.tokens import NO_TOKENS, TOKENS, PromptTokens, no_tokens

PROMPTS_MAX = 64  # prompts of one request
TOKENS_MAX = 2 << 20  # looked-up tokens of one prompt; no server caches more
# Blocks of one prompt that are looked up. Without this bound, a look-up for a server with blocks of one token would take 0.3 us per token.
BLOCKS_MAX = 1 << 15
ROOTS_MAX = 4096
BLOCK_TOKENS = 16  # the block size that an empty match states
UNNAMED = "no event has named its model as an adapter, and it is not modelName"
NO_KEYS: Hashes = np.empty(0, dtype=np.uint64)

# These metrics are counted only with `enableMetrics`.
LOOKUPS = counter("kv_cache_index_lookup_requests_total", "Prompts that were looked up in the index.")
LOOKUP_HITS = counter("kv_cache_index_lookup_hits_total", "Blocks of looked-up prompts that the best endpoint holds without a gap.")
MOST_HITS = counter("kv_cache_index_max_pod_hit_count_total", "The same as lookup_hits_total, as the reference picker has both.")
LOOKUP_LATENCY = histogram("kv_cache_index_lookup_latency_seconds", "Time of a look-up in the index.", buckets.LOOKUP_S)

Keys = dict[int, Hashes]  # block size -> keys of all prompts


class _Precise(DataProducer, PreRequest):
    """Base of `precise-prefix-cache-producer`, and of the scorer that is its older form."""

    Params = Parameters
    renamed = RENAMED
    counts_with = COUNTS_WITH
    metrics = (LOOKUPS, LOOKUP_HITS, MOST_HITS, LOOKUP_LATENCY)

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        self.settings = settings(params)
        self.deprecated = deprecated(params)
        self._match = prefix_match(name)
        self._approximate = prefix_match(APPROXIMATE)
        self._keys: Datum[Keys] = Datum(f"held_keys/{name}", dict)
        self.consumes = (TOKENS, self._approximate, CACHE_RANKS)
        self.optional = (NO_TOKENS,)
        self.produces = (self._match,)
        self.keeps = (self._keys,)
        self._counts = self.settings.index_metrics
        self._base_model = ""  # the name of the base model; "" if not known
        self._lookups: Count
        self._hits: tuple[Count, Count]
        self._speculates = self.settings.speculative_s > 0
        self._roots: dict[tuple[str, int], int] = {}
        # The latest arguments of `_blocks`, and its result.
        self._seen: tuple[HeldView, ServerBlocks, ServerBlocks] | None = None
        # The latest arguments of `_of_one_cache`, and its result.
        self._viewed: tuple[HeldView, Floats, HeldView] | None = None
        self._held: HeldBlocks
        self._secret: int

    def meet(self, plugins: Sequence[Plugin]) -> None:
        tokenizers = (other for other in plugins if TOKENS in other.produces)
        self._base_model = next((getattr(other.params, "model_name", "") for other in tokenizers), "")

    def start(self, services: Services) -> None:
        self._held = services.held_blocks
        self._secret = services.prefix_seed
        if self._counts:
            self._lookups = services.count(self, LOOKUPS)
            self._hits = services.count(self, LOOKUP_HITS), services.count(self, MOST_HITS)
            self._held.measure(services.measure(self, LOOKUP_LATENCY))

    def produce(self, request: Request, candidates: Candidates) -> None:
        approximate, tokenized = request[self._approximate], request[TOKENS]
        view = self._view(candidates.snapshot, request.now)
        without = request[NO_TOKENS]  # also set for estimated tokens, which occur in no server's events
        prompts = [p for p in tokenized.prompts[:PROMPTS_MAX] if p.token_ids is not None] if tokenized is not None and not without else []
        adapter = self._adapter(request.target_model, view) if prompts else None
        why = view.why
        if adapter is None:
            lacks = UNNAMED if prompts else no_tokens(without)
            why = [lacks if followed else why for followed, why in zip(view.followed.tolist(), view.why, strict=True)]
        if view.sizes and adapter is not None:
            match = self._matched(request, candidates, view, prompts, adapter, approximate)
        elif approximate is not None:
            match = approximate.with_reasons(why)
        else:
            match = PrefixMatch(None, NO_KEYS, BLOCK_TOKENS, request.prompt.tokens or 1, why=why)
        request[self._match] = match

    def before_send(self, request: Request, decision: Decision) -> None:
        if not self._speculates or not (by_size := request[self._keys]):
            return
        runs = (decision.runs.get(decision.primary), decision.runs.get(decision.prefill))
        for endpoint in {run.candidates.snapshot.endpoints[run.row] for run in runs if run is not None}:
            for size in by_size:
                self._held.expect(by_size[size], endpoint.owner, size)

    def _matched(
        self,
        request: Request,
        candidates: Candidates,
        view: HeldView,
        prompts: Sequence[PromptTokens],
        adapter: str,
        approximate: PrefixMatch | None,
    ) -> PrefixMatch:
        """Returns a match in blocks of one size: by events for followed endpoints, approximate for all others."""
        servers = self._blocks(view, server_blocks(candidates.snapshot))
        chains: dict[int, list[Hashes]] = {size: [] for size in view.sizes}
        matches = [self._match_of(prompt, request.cache_salt, adapter, view, servers, chains) for prompt in prompts]
        request[self._keys] = {size: each[0] if len(each) == 1 else np.concatenate(each) for size, each in chains.items()}
        match = matches[0] if len(matches) == 1 else joined(matches)
        if approximate is not None and not view.whole.all():
            match.add(approximate, view.whole)
        match.why = view.why
        return match

    def _adapter(self, model: str, view: HeldView) -> str | None:
        """Returns the adapter that a request's model names; BASE_MODEL if the model is no adapter; None if that is unknown: in a pool with
        adapters, an unknown name may be an adapter that no server has used yet, or a second name of the base model.
        """
        if adapter_word(model, self._secret) in view.adapters:
            return model
        return BASE_MODEL if not view.adapters or self._base_model in ("", model) else None

    def _match_of(
        self, prompt: PromptTokens, cache_salt: str, adapter: str, view: HeldView, servers: ServerBlocks, chains: dict[int, list[Hashes]]
    ) -> PrefixMatch:
        """Returns the match of one prompt, and adds its keys to `chains`: block size -> keys of each prompt."""
        held, thousandths = np.zeros(len(view.why)), np.zeros(len(view.why))
        for size in view.sizes:
            chain = self._chain(prompt, cache_salt, size, self._root(adapter, size))
            chains[size].append(chain)
            blocks, weighted = self._held.match(view, chain, size)
            held += np.array(blocks) * size
            thousandths += np.array(weighted) * size
            if self._counts:
                self._count(blocks)
        if not view.followed.all():
            held, thousandths = held * view.followed, thousandths * view.followed
        unit, tokens = view.sizes[0], _length(prompt)
        found = held // unit if held.any() else None
        return PrefixMatch(found, chains[unit][-1], unit, tokens or 1, servers=servers, held=held, weighted=thousandths / WEIGHT_ONE)

    def _view(self, snapshot: Snapshot, now: float) -> HeldView:
        view, ranks = self._held.view(snapshot.endpoint_list, now), snapshot.values.get(CACHE_RANKS.name)
        if ranks is None:
            return view
        viewed = self._viewed
        if viewed is None or viewed[0] is not view or viewed[1] is not ranks:
            viewed = self._viewed = view, ranks, _of_one_cache(view, ranks)
        return viewed[2]

    def _blocks(self, view: HeldView, servers: ServerBlocks) -> ServerBlocks:
        """Returns the block sizes of the servers, which reuse only whole blocks: the larger of the sizes in their metrics and events."""
        seen = self._seen
        if seen is None or seen[0] is not view or seen[1] is not servers:
            seen = self._seen = view, servers, servers.by(np.array(view.block_tokens, dtype=np.float64))
        return seen[2]

    def _count(self, blocks: Sequence[int]) -> None:
        """Counts one look-up. Its hits are the largest number of blocks that an endpoint holds."""
        self._lookups.add()
        most = max(blocks, default=0)
        for count in self._hits:
            count.add(n=most)

    def _chain(self, prompt: PromptTokens, cache_salt: str, size: int, start: int) -> Hashes:
        assert prompt.token_ids is not None
        tokens = prompt.token_ids[: min(TOKENS_MAX, BLOCKS_MAX * size)]
        extras = request_extras(prompt.features, cache_salt, size, len(tokens) // size)
        return index_keys(held_links(tokens, size, start, self._secret, extras))

    def _root(self, adapter: str, size: int) -> int:
        key = (adapter, size)
        start = self._roots.get(key)
        if start is None:
            if len(self._roots) >= ROOTS_MAX:
                self._roots.clear()
            start = self._roots[key] = held_root(adapter, size, self._secret)
        return start


def _of_one_cache(view: HeldView, ranks: Floats) -> HeldView:
    """Returns the view in which no server with several caches is followed. `ranks`: how many caches each has; NaN if not known."""
    several = view.followed & (ranks > 1.0)
    if not several.any():
        return view
    followed, whole = view.followed & ~several, view.whole & ~several
    sizes = {size for size, kept in zip(view.block_tokens, followed.tolist(), strict=True) if kept}
    why = [of_ranks(count) or reason for reason, count in zip(view.why, ranks.tolist(), strict=True)]
    return view._replace(sizes=tuple(size for size in view.sizes if size in sizes), followed=followed, whole=whole, why=why)


def _length(prompt: PromptTokens) -> int:
    return len(prompt.token_ids) if prompt.token_ids is not None else 0


@plugin("precise-prefix-cache-producer")
class PrecisePrefix(_Precise):
    """Emits how many leading blocks of the prompt each endpoint holds (`PrefixMatch`), by the KV events that the endpoints publish.

    Each block counts with the weight of its tier. An endpoint with a gap in its event stream gets the approximate match.
    """


@plugin("precise-prefix-cache-scorer")
class PreciseScorer(_Precise, ScoresOwnMatches, Scorer):
    """The older form of precise-prefix-cache-producer: also scores endpoints by the share of the prompt that they hold.

    If a precise-prefix-cache-producer is configured, too, this plugin only scores, by that producer's matches.
    """

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        self._only_scores = False

    def producer(self, plugins: Sequence[Plugin]) -> str:
        return next((other.name for other in plugins if isinstance(other, PrecisePrefix)), self.name)

    def meet(self, plugins: Sequence[Plugin]) -> None:
        super().meet(plugins)
        producers = [other for other in plugins if isinstance(other, PrecisePrefix)]
        if producers:
            self._only_scores = True
            self._match = prefix_match(self.producer(plugins))
            self.consumes, self.optional, self.produces, self.keeps = (self._match,), (), (), ()
            self.without_effect = [f"parameters: have no effect; plugin '{producers[0].name}' produces the matches"] * (
                self.params != Parameters()
            )

    def produce(self, request: Request, candidates: Candidates) -> None:
        if not self._only_scores:
            super().produce(request, candidates)

    def before_send(self, request: Request, decision: Decision) -> None:
        if not self._only_scores:
            super().before_send(request, decision)

    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores | None:
        match = request[self._match]
        return None if match is None else match.share(candidates)


def kv_settings(plugins: Iterable[Plugin]) -> Settings | None:
    """Returns what the precise producers of a configuration require of the kv-events process; None without such a producer."""
    return next((plugin.settings for plugin in plugins if isinstance(plugin, _Precise) and plugin.produces), None)
