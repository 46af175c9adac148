"""Measures the saturation by requests in flight, tokens in flight, or the larger ratio of both, as the picker counts them."""

from typing import Annotated, ClassVar, Literal

import msgspec
import numpy as np

from epp.candidates import Candidates, Floats, Mask
from epp.data import INFLIGHT_REQUESTS, INFLIGHT_TOKENS
from epp.plugin import Filter, Profile, SaturationDetector, plugin
from epp.points.parameters import named_load, tuned
from epp.request import Request


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """When an endpoint is full.

    concurrency_mode: What is counted in flight: requests, tokens, or whichever fills the endpoint more.
    max_concurrency: Requests in flight at which an endpoint is full.
    max_token_concurrency: Tokens in flight at which an endpoint is full.
    headroom: How far above the limit the filter still keeps an endpoint, 0.2 for 20 %.
    in_flight_load_producer_name: A listed `inflight-load-producer`. The name changes nothing: the picker counts the load for all plugins.
    """

    concurrency_mode: Literal["requests", "tokens", "hybrid"] = "requests"
    max_concurrency: Annotated[int, msgspec.Meta(gt=0), tuned(1, 1_024)] = 100
    max_token_concurrency: Annotated[int, msgspec.Meta(gt=0), tuned(4_096, 8_388_608)] = 1_000_000
    headroom: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    in_flight_load_producer_name: str = ""


@plugin("concurrency-detector")
class Concurrency(SaturationDetector, Filter):
    """Computes the saturation as requests or tokens in flight / the most that all endpoints may have in flight.

    In mode `hybrid`, the saturation is the mean, over the endpoints, of the larger of the endpoint's two ratios. Without endpoints, the
    saturation is 1. Stale metrics do not matter, because no scraped value is read. As a filter, this plugin keeps the endpoints below their
    limit x (1 + headroom), rounded down; maybe no endpoint.
    """

    Params = Parameters
    counts_with: ClassVar = {
        "maxConcurrency": ("concurrencyMode", ("requests", "hybrid")),
        "maxTokenConcurrency": ("concurrencyMode", ("tokens", "hybrid")),
    }

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
            # Assume that the next request has as many tokens as a request in flight has on average.
            if column is INFLIGHT_TOKENS:
                requests, tokens = candidates[INFLIGHT_REQUESTS].sum(), candidates[column].sum()
                each = float(tokens / requests) if requests > 0 else 0.0
            steps.append(each / (full * size))
        return max(steps)

    def keep(self, request: Request, candidates: Candidates, profile: Profile) -> Mask:
        mask: Mask = candidates[self._limits[0][0]] < self._limits[0][1]
        for column, limit in self._limits[1:]:
            mask &= candidates[column] < limit
        return mask
