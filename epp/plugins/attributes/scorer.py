"""Score endpoints by any metric that they report."""

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
    """The values that score 0 and 1. Values outside the range are clipped.

    min: The lower end.
    max: The upper end.
    """

    min: float = 0.0
    max: float = 0.0


class AdaptiveRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The range goes from the smallest to the largest value among the candidates."""


class Normalization(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Which values score 0 and 1. Give at most one of the two ranges.

    fixed_range: A range that does not change.
    adaptive_range: The range of the candidates' values. The default.
    """

    fixed_range: FixedRange | None = None
    adaptive_range: AdaptiveRange | None = None


class Algorithm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to turn a value into a score.

    type: Whether low or high values are better.
    normalization: Which values score 0 and 1.
    """

    type: Literal["linear_lower_is_better", "linear_higher_is_better"]
    normalization: Normalization = Normalization()


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Says which attribute to score, and how.

    attribute_key: The attribute to score.
    algorithm: How a value becomes a score.
    producer: The extractor that produces the attribute. Default: the core metrics extractor. Empty: any extractor that has the attribute.
    """

    attribute_key: Annotated[str, msgspec.Meta(min_length=1)]
    algorithm: Algorithm
    producer: str | None = None


@plugin("endpoint-attribute-scorer")
class EndpointAttributeScorer(AttributeReader, Scorer):
    """Scores endpoints by the value of an attribute: x = (value - min) / (max - min), clipped to [0, 1].

    The score is x if higher values are better, else 1 - x. With a fixed range, min and max are configured. With an adaptive range, they
    are the smallest and largest fresh value of the candidates; if all fresh values are equal, the score is 1. A missing value scores 0.
    A stale value gets the score of the worst fresh value, or 1 if no value is fresh.
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
                f"algorithm.normalization.fixedRange: min {fixed.min:g} must be less than max {fixed.max:g}, by a finite difference"
            )
        self._range = (fixed.min, fixed.max) if fixed else None
        self._lower = params.algorithm.type == LOWER
        self.look_at(Attribute("attributeKey", params.attribute_key, params.producer))

    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores:
        values = candidates[self._column]
        reports = self._reporters.among(candidates)
        if reports is None:
            return self._scores(values)
        fresh, missing = reports
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
            if most - least == inf:  # the difference of two finite values may be infinite
                return self._scores(values * 0.5)
        else:
            least, most = self._range
        x: Scores = most - values if self._lower else values - least
        x /= most - least
        if self._range is not None:
            np.minimum(x, 1.0, out=x)
            np.maximum(x, 0.0, out=x)
        return x
