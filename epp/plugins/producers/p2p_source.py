"""Names a server from which the server that computes the prompt may copy the prompt's cached blocks.

The routing sidecar reads the header KV_SOURCE, and fetches the cached blocks from the named server (peer to peer) before the prompt is
computed. Rules and defaults are those of the reference picker.
"""

import random
from typing import Annotated

import msgspec
import numpy as np

from epp.data import WAITING
from epp.decision.decision import Decision
from epp.plugin import PreRequest, Services, plugin
from epp.prefix.match import APPROXIMATE, FollowsMatches, prefix_match
from epp.request import Request
from epp.request.client_headers import KV_SOURCE


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """When a source is named, and for which server.

    prefix_match_info_producer_name: The producer of the prefix matches to read.
    min_cached_token_delta: How many cached tokens a source must have more than the server that computes the prompt.
    prefill_profile_name: The prefill profile of disaggregated serving. Its target computes the prompt; if it did not run, the primary one.
    """

    prefix_match_info_producer_name: str = ""
    min_cached_token_delta: Annotated[int, msgspec.Meta(ge=1)] = 1
    prefill_profile_name: str = "prefill"


@plugin("p2p-source-producer")
class P2pSource(FollowsMatches, PreRequest):
    """Sets the request header `x-kv-cache-source-host-port` to an endpoint with more of the prompt cached than the computing one.

    Possible sources are all endpoints with a match that is at most one block shorter than the longest match. One of them is drawn with the
    weight 1 / (1 + waiting requests), so that a popular prefix is not always copied from the same server. If a client sends this header, it
    is replaced or removed.
    """

    Params = Parameters

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        self._match = prefix_match(params.prefix_match_info_producer_name or APPROXIMATE)
        self._delta = params.min_cached_token_delta
        self._prefill = params.prefill_profile_name or "prefill"
        self.consumes = (self._match, WAITING)
        self._rng: random.Random

    def start(self, services: Services) -> None:
        self._rng = services.rng

    def before_send(self, request: Request, decision: Decision) -> None:
        source = self._source(request, decision)
        removed = tuple(name for name in decision.removed_headers if name != KV_SOURCE)
        if source is None:
            decision.headers.pop(KV_SOURCE, None)
            removed += (KV_SOURCE,)
        else:
            decision.headers[KV_SOURCE] = source
        decision.removed_headers = removed

    def _source(self, request: Request, decision: Decision) -> str | None:
        """Returns the address of the endpoint to copy from. Returns None if no endpoint has enough more of the prompt cached."""
        match, candidates = request[self._match], request.considered
        computing = decision.runs.get(self._prefill) or decision.runs.get(decision.primary)
        if match is None or match.counted is None or candidates is None or computing is None:
            return None
        cached = candidates.narrow(match.counted)
        longest = float(np.maximum.reduce(cached))
        if longest <= 0.0:
            return None
        near = np.flatnonzero((cached > 0.0) & (cached + match.block_tokens >= longest))
        odds = np.cumsum(1.0 / (1.0 + candidates[WAITING][near]))
        drawn = int(np.searchsorted(odds, self._rng.random() * odds[-1], side="right"))
        chosen = int(near[min(drawn, len(near) - 1)])
        source = candidates.endpoint(chosen)
        here = float(match.counted[computing.row])
        if source.slot == computing.candidates.endpoint(computing.picked[0]).slot or cached[chosen] - here < self._delta:
            return None
        return source.address
