"""Prefer the endpoint that holds the longest cached prefix of the prompt."""

from typing import Annotated

import msgspec
import numpy as np

from epp.candidates import Candidates, Scores
from epp.plugin import Profile, Scorer, plugin
from epp.prefix.match import APPROXIMATE, prefix_match
from epp.request import Request


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """`match_length_weight`: how much the absolute length counts beside the share of the prompt."""

    prefix_match_info_producer_name: str = APPROXIMATE
    match_length_weight: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    match_length_scale_tokens: Annotated[int, msgspec.Meta(ge=0)] = 8192


@plugin("prefix-cache-scorer")
class PrefixCache(Scorer):
    """w * min(1, matched tokens / scale)^2 + (1 - w) * matched / total; no match: 0."""

    Params = Parameters

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        if params.match_length_weight and not params.match_length_scale_tokens:
            raise ValueError("matchLengthScaleTokens: must be above 0 where matchLengthWeight is")
        self._match = prefix_match(params.prefix_match_info_producer_name or APPROXIMATE)
        self.consumes = (self._match,)
        self._weight = params.match_length_weight
        self._scale = params.match_length_scale_tokens

    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores | None:
        match = request[self._match]
        if match is None or match.blocks is None:
            return None
        blocks = candidates.narrow(match.blocks)
        share: Scores = blocks / match.total
        if not self._weight:
            return share
        length = np.minimum(1.0, blocks * (match.block_tokens / self._scale)) ** 2
        return self._weight * length + (1.0 - self._weight) * share
