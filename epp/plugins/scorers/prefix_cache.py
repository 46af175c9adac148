"""Prefer the endpoint with the longest cached prefix of the prompt."""

import numpy as np

from epp.candidates import Candidates, Scores
from epp.plugin import Profile, Scorer, plugin
from epp.plugins._parameters import PrefixCacheParameters
from epp.prefix.match import APPROXIMATE, FollowsMatches, PrefixMatch, prefix_match
from epp.request import Request


@plugin("prefix-cache-scorer")
class PrefixCache(FollowsMatches, Scorer):
    """Scores endpoints by their cached tokens of the prompt, as a share of the most that a server can reuse; 0 without a match.

    With a weight w of the match's length: w * min(1, cached tokens / scale)^2 + (1 - w) * cached / most. A server reuses whole blocks of
    its own size and never the last token of a prompt. So an endpoint scores 1 if it can reuse all tokens that a server can ever reuse.
    """

    Params = PrefixCacheParameters

    def __init__(self, name: str, params: PrefixCacheParameters) -> None:
        super().__init__(name, params)
        if params.match_length_weight and not params.match_length_scale_tokens:
            raise ValueError("matchLengthScaleTokens: must be above 0 if matchLengthWeight is above 0")
        self._match = prefix_match(params.prefix_match_info_producer_name or APPROXIMATE)
        self.consumes = (self._match,)
        self._weight = params.match_length_weight
        self._scale = params.match_length_scale_tokens

    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores | None:
        match: PrefixMatch | None = request[self._match]
        shares = None if match is None else match.share(candidates)
        if shares is None or not self._weight:
            return shares
        assert match is not None
        assert match.counted is not None
        length = np.minimum(1.0, candidates.narrow(match.counted) / self._scale) ** 2
        return self._weight * length + (1.0 - self._weight) * shares


@plugin("multicluster-prefix-cache-scorer")
class MulticlusterPrefixCache(PrefixCache):
    """Does the same as prefix-cache-scorer for endpoints that are clusters."""
