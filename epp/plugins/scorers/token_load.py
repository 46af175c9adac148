"""Prefer the endpoint with the fewest prompt tokens ahead of it, this request's own included."""

from collections.abc import Sequence

import msgspec
import numpy as np

from epp.candidates import Candidates, Scores
from epp.data import INFLIGHT_TOKENS
from epp.inflight_load import named_load
from epp.plugin import Profile, Scorer, plugin
from epp.plugins.scorers import FEW
from epp.prefix.match import APPROXIMATE, prefix_match
from epp.request import Request
from epp.tokens import TOKENS, token_count

QUEUE_TOKENS = 4_194_304  # 128 requests of 32,768 tokens

# What is known of cached prefixes is taken off where somebody finds it out; this scorer is no reason to find it out.
MATCH = prefix_match(APPROXIMATE)


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """`queue_threshold_tokens`: the load that scores 0; 0 and less stand for the default."""

    queue_threshold_tokens: int = QUEUE_TOKENS
    in_flight_load_producer_name: str = ""


@plugin("token-load-scorer")
class TokenLoad(Scorer):
    """1 - min(t, threshold) / threshold; t = tokens in flight there + tokens of this prompt that are not cached there.

    Tokens are counted as `inflight-load-producer` counts prompts. Output tokens that it may estimate are in what is in flight,
    but not in what this request adds: they would be the same everywhere.
    """

    Params = Parameters
    consumes = (INFLIGHT_TOKENS,)
    optional = (MATCH, TOKENS)

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        self.needs = named_load(params.in_flight_load_producer_name)
        given = params.queue_threshold_tokens
        self._threshold = float(given if given > 0 else QUEUE_TOKENS)

    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores:
        tokens = token_count(request)
        ahead = candidates[INFLIGHT_TOKENS]
        match = request[MATCH]
        held, each = None, 0.0
        if match is not None and match.blocks is not None:
            held, each = candidates.narrow(match.blocks), float(match.block_tokens)
        if len(ahead) <= FEW:
            return _few(ahead.tolist(), tokens, None if held is None else held.tolist(), each, self._threshold)
        load: Scores = ahead + (float(tokens) if held is None else np.maximum(tokens - held * each, 0.0))
        np.minimum(load, self._threshold, out=load)
        np.maximum(load, 0.0, out=load)
        load *= -1.0 / self._threshold
        load += 1.0
        return load


def _few(ahead: Sequence[float], tokens: int, held: Sequence[float] | None, each: float, threshold: float) -> Scores:
    """The same in plain Python, which is faster on few values."""
    if held is None:
        loads = [load + tokens for load in ahead]
    else:
        loads = [
            load + left if (left := tokens - blocks * each) > 0.0 else load
            for load, blocks in zip(ahead, held, strict=True)
        ]
    slope = -1.0 / threshold
    return np.array([load * slope + 1.0 if 0.0 < load < threshold else (0.0 if load > 0.0 else 1.0) for load in loads])
