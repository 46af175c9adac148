"""Prefer endpoints by any number that they report."""

from math import inf
from typing import Annotated, Literal

import msgspec
import numpy as np

from epp.candidates import Candidates, Scores
from epp.plugin import Profile, Scorer, plugin
from epp.plugins.attributes import Attribute, AttributeReader
from epp.request import Request

LOWER = "linear_lower_is_better"


class FixedRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What counts as 0 and as 1; beyond is cut."""

    min: float = 0.0
    max: float = 0.0


class AdaptiveRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """From the least to the greatest value among the candidates."""


class Normalization(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """At most one of the two; none is `adaptiveRange`."""

    fixed_range: FixedRange | None = None
    adaptive_range: AdaptiveRange | None = None


class Algorithm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a value becomes a score."""

    type: Literal["linear_lower_is_better", "linear_higher_is_better"]
    normalization: Normalization = Normalization()


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """`producer`: the extractor that the attribute comes from; not given: the core metrics extractor; "": whichever has it."""

    attribute_key: Annotated[str, msgspec.Meta(min_length=1)]
    algorithm: Algorithm
    producer: str | None = None


@plugin("endpoint-attribute-scorer")
class EndpointAttributeScorer(AttributeReader, Scorer):
    """x = (value - min) / (max - min), cut to 0..1: the score where higher is better, 1 - x where lower is.

    Fixed range: min and max as configured. Adaptive: of the candidates that report the value freshly; all equal: 1. Missing: 0;
    stale: the least score of the fresh ones, 1 where there are none.
    """

    Params = Parameters

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        normalization = params.algorithm.normalization
        fixed = normalization.fixed_range
        if fixed and normalization.adaptive_range:
            raise ValueError("algorithm.normalization: has fixedRange and adaptiveRange; keep one of them")
        if fixed and not 0.0 < fixed.max - fixed.min < inf:
            raise ValueError(
                f"algorithm.normalization.fixedRange: min {fixed.min:g} is not less than max {fixed.max:g}, or too far from it"
            )
        self._range = (fixed.min, fixed.max) if fixed else None
        self._lower = params.algorithm.type == LOWER
        self.look_at(Attribute("attributeKey", params.attribute_key, params.producer))

    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores:
        values = candidates[self._column]
        who = self._reporters.among(candidates)
        if who is None:
            return self._scores(values)
        fresh, missing = who
        if not fresh.any():
            return np.where(missing, 0.0, 1.0)
        of_fresh = self._scores(values[fresh])
        scores = np.full(len(candidates), of_fresh.min())
        scores[fresh] = of_fresh
        scores[missing] = 0.0
        return scores

    def _scores(self, values: Scores) -> Scores:
        if self._range is None:
            least, most = float(np.minimum.reduce(values)), float(np.maximum.reduce(values))
            if least == most:
                return np.ones(len(values))
            if most - least == inf:  # servers may report anything finite
                return self._scores(values * 0.5)
        else:
            least, most = self._range
        x: Scores = most - values if self._lower else values - least
        x /= most - least
        if self._range is not None:
            np.minimum(x, 1.0, out=x)
            np.maximum(x, 0.0, out=x)
        return x
