"""How full the pool is by what the picker itself has in flight: requests, tokens, or the worse of both."""

from typing import Annotated, Literal

import msgspec
import numpy as np

from epp.candidates import Candidates, Floats, Mask
from epp.data import INFLIGHT_REQUESTS, INFLIGHT_TOKENS
from epp.inflight_load import named_load
from epp.plugin import Filter, Profile, SaturationDetector, plugin
from epp.request import Request


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """What counts as full, per endpoint. `headroom`: by how much of it the filter lets an endpoint be above it, 0.2 for 20 %."""

    concurrency_mode: Literal["requests", "tokens", "hybrid"] = "requests"
    max_concurrency: Annotated[int, msgspec.Meta(gt=0)] = 100
    max_token_concurrency: Annotated[int, msgspec.Meta(gt=0)] = 1_000_000
    headroom: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    in_flight_load_producer_name: str = ""


@plugin("concurrency-detector")
class Concurrency(SaturationDetector, Filter):
    """In flight / what all endpoints may have in flight; `hybrid`: the mean of each endpoint's worse ratio. 1 for no endpoints.

    Nothing scraped is read, so nothing can be stale. As a filter it keeps endpoints below their limit x (1 + headroom), rounded
    down; nobody may be left.
    """

    Params = Parameters

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        mode = params.concurrency_mode
        full = {INFLIGHT_REQUESTS: params.max_concurrency, INFLIGHT_TOKENS: params.max_token_concurrency}
        by = {"requests": (INFLIGHT_REQUESTS,), "tokens": (INFLIGHT_TOKENS,)}.get(mode, tuple(full))
        self.consumes = by if mode == "requests" else tuple(full)
        self._full = [(column, float(full[column])) for column in by]
        self._limits = [(column, int(full[column] * (1.0 + params.headroom))) for column in by]
        self.needs = named_load(params.in_flight_load_producer_name)

    def saturation(self, candidates: Candidates) -> float:
        size = len(candidates)
        if not size:
            return 1.0
        worst: Floats = candidates[self._full[0][0]] / self._full[0][1]
        for column, full in self._full[1:]:
            np.maximum(worst, candidates[column] / full, out=worst)
        return max(0.0, float(np.add.reduce(worst))) / size

    def step(self, candidates: Candidates) -> float:
        size, steps = len(candidates), [0.0]
        for column, full in self._full if size else ():
            each = 1.0
            if column is INFLIGHT_TOKENS:  # nobody knows how many the next one has: as many as those in flight
                requests, tokens = candidates[INFLIGHT_REQUESTS].sum(), candidates[column].sum()
                each = float(tokens / requests) if requests > 0 else 0.0
            steps.append(each / (full * size))
        return max(steps)

    def keep(self, request: Request, candidates: Candidates, profile: Profile) -> Mask:
        mask: Mask = candidates[self._limits[0][0]] < self._limits[0][1]
        for column, limit in self._limits[1:]:
            mask &= candidates[column] < limit
        return mask
