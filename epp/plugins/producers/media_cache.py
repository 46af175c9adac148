"""Encoder-cache affinity: knows which images, audio and video of a request were sent to which endpoint before.

The hashes that the token producer finds identify media. The shared prefix index stores to which endpoints each item was sent. An item is
a chain of one block there: a hash of the item, the request's cache salt and the deployment's secret. So other workers find an item a few
milliseconds later, a restarted worker finds it, too, and the index forgets an endpoint that leaves. An endpoint's encoder cache may drop
an item long before the index does, so a match is a guess.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
from xxhash import xxh3_64_intdigest

from epp.candidates import Candidates, Floats
from epp.data import Datum
from epp.decision.decision import Decision
from epp.metrics import OTHER, buckets, counter, histogram
from epp.plugin import Count, DataProducer, Measure, PrefixIndex, PreRequest, Services, plugin
from epp.prefix.blocks import NARROW
from epp.request import Request
from epp.request.tokens import NO_MEDIA, TOKENS, Feature, MediaMatch, media_match

CACHE_MB = 4096
ITEMS_MAX = 128  # media items of one request that are looked up
MODALITIES = frozenset(("image", "audio", "video"))  # values of the metric's label; clients may send any name

QUERIES = counter("encoder_cache_queries_total", "Media items that were looked up.", "modality")
HITS = counter("encoder_cache_hits_total", "Media items that the chosen endpoint was sent before.", "pod", "modality")
HIT_RATIO = histogram("encoder_cache_hit_ratio", "Matched media items over all of the request, at the chosen endpoint.", buckets.RATIO)


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """How much a server's encoder cache holds.

    cache_size_in_mb_per_server: Accepted, without effect: all servers share one index of a fixed size (--index-entries), and the oldest
      entries leave first.
    """

    cache_size_in_mb_per_server: int = msgspec.field(default=CACHE_MB, name="cacheSizeInMBPerServer")


class Item:
    """Holds one distinct media item. `key`: the item's hash in the index. `holders`: the owner ids of the endpoints that hold the item."""

    __slots__ = ("holders", "key", "modality")

    def __init__(self, key: int, modality: str, holders: frozenset[int]) -> None:
        self.key = key
        self.modality = modality
        self.holders = holders


@plugin("mm-embeddings-cache-producer")
class MediaCache(DataProducer, PreRequest):
    """Emits how many media items of a request each endpoint has probably encoded (`MediaMatch`), by what was sent to it."""

    Params = Parameters
    metrics = (QUERIES, HITS, HIT_RATIO)

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        self._match = media_match(name)
        self._items: Datum[list[Item]] = Datum(f"media_items/{name}", list)
        self.consumes = (TOKENS,)
        self.produces = (self._match,)
        self.keeps = (self._items,)
        self._index: PrefixIndex
        self._secret = 0
        self._queries: Count
        self._hits: Count
        self._ratio: Measure

    def start(self, services: Services) -> None:
        self._index = services.prefix_index
        self._secret = services.prefix_seed
        self._queries = services.count(self, QUERIES)
        self._hits = services.count(self, HITS)
        self._ratio = services.measure(self, HIT_RATIO)

    def produce(self, request: Request, candidates: Candidates) -> None:
        tokenized = request[TOKENS]
        features = {f.hash: f for prompt in tokenized.prompts for f in prompt.features if f.hash} if tokenized else None
        if not features:
            request[self._match] = NO_MEDIA
            return
        items = [self._look_up(feature, tokenized.cache_salt) for feature in list(features.values())[:ITEMS_MAX]]
        request[self._items] = items
        request[self._match] = MediaMatch(self._held(items, candidates), len(items))

    def before_send(self, request: Request, decision: Decision) -> None:
        items = request[self._items]
        if not items:
            return
        keys = np.array([item.key for item in items], dtype=np.uint64)
        for target in decision.targets:
            self._index.learn(keys, target.owner)
        chosen = decision.targets[0]
        held = [item for item in items if chosen.owner in item.holders]
        for item in held:
            self._hits.add(chosen.name, item.modality)
        self._ratio.observe(len(held) / len(items))

    def _look_up(self, feature: Feature, cache_salt: str) -> Item:
        modality = feature.modality if feature.modality in MODALITIES else OTHER
        self._queries.add(modality)
        salt = cache_salt.encode()
        key = xxh3_64_intdigest(b"media %d:%b%b" % (len(salt), salt, feature.hash.encode()), self._secret) & NARROW
        return Item(key, modality, frozenset(self._index.match(np.array([key], dtype=np.uint64))))

    def _held(self, items: Sequence[Item], candidates: Candidates) -> Floats | None:
        """Returns how many items each endpoint holds. Returns None if no endpoint holds an item."""
        rows = candidates.snapshot.endpoint_list.row_of_owner
        at = [rows[owner] for item in items for owner in item.holders if owner in rows]
        return np.bincount(at, minlength=len(rows)).astype(np.float64) if at else None
