"""Prefer the endpoint with the fewest prompt tokens in flight, including those of this request."""

from compiled.calls import token_load
from epp.candidates import Candidates, Scores
from epp.data import INFLIGHT_TOKENS
from epp.plugin import Profile, Scorer, plugin
from epp.plugins._parameters import QUEUE_TOKENS, TokenLoadParameters
from epp.points.parameters import named_load
from epp.prefix.deciding import FollowsDecisions
from epp.prefix.match import APPROXIMATE, PrefixMatch, prefix_match
from epp.request import Request
from epp.request.tokens import TOKENS, token_count


@plugin("token-load-scorer")
class TokenLoad(FollowsDecisions, Scorer):
    """Scores endpoints by their tokens t in flight, including uncached tokens of this prompt: 1 - min(t, threshold) / threshold.

    Prompts are counted as `inflight-load-producer` counts them. If that producer estimates output tokens, they are part of the tokens in
    flight. This request's own output tokens are not added, because they would be the same for all endpoints.
    """

    Params = TokenLoadParameters
    consumes = (INFLIGHT_TOKENS,)

    def __init__(self, name: str, params: TokenLoadParameters) -> None:
        super().__init__(name, params)
        self._match = prefix_match(APPROXIMATE)
        # Cached tokens are subtracted only if a prefix producer runs for another plugin. This scorer alone makes no prefix producer run.
        self.optional = (self._match, TOKENS)
        self.needs = named_load(params.in_flight_load_producer_name)
        threshold = params.queue_threshold_tokens
        self._threshold = float(threshold if threshold > 0 else QUEUE_TOKENS)

    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores:
        tokens = token_count(request)
        ahead = candidates[INFLIGHT_TOKENS]
        match: PrefixMatch | None = request[self._match]
        cached = None if match is None or match.counted is None else candidates.narrow(match.counted)
        return token_load(ahead, tokens, cached, 1.0, self._threshold)
