"""Keep endpoints by comparing one of their metrics with a value."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from epp.candidates import Candidates, Mask
from epp.plugin import Filter, Profile, plugin
from epp.plugins.attributes import Attribute, AttributeReader
from epp.request import Request

COMPARE: Mapping[str, Callable[[Any, float], Any]] = {
    "LessThan": np.less,
    "LessThanOrEqual": np.less_equal,
    "GreaterThan": np.greater,
    "GreaterThanOrEqual": np.greater_equal,
    "Equal": np.equal,
    "NotEqual": np.not_equal,
}
Operator = Literal["LessThan", "LessThanOrEqual", "GreaterThan", "GreaterThanOrEqual", "Equal", "NotEqual"]


class Threshold(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Keeps an endpoint if `<attribute> <operator> <value>` is true.

    operator: How attribute and value are compared.
    value: The number with which the attribute is compared.
    """

    operator: Operator
    value: float = 0.0


class Algorithm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to compare an attribute.

    type: The only type is `threshold`.
    threshold: The limit.
    """

    type: Literal["threshold"]
    threshold: Threshold


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Says what to compare, and what happens to endpoints without a value.

    attribute: The attribute to compare.
    algorithm: How to compare the attribute.
    producer: The extractor that produces the attribute. Default: the core metrics extractor. Empty: any extractor that has the attribute.
    on_missing: `Pass` (also if empty) keeps an endpoint without the attribute, `Fail` drops it.
    fallback_on_empty: Keep all endpoints if no endpoint meets the condition.
    """

    attribute: Annotated[str, msgspec.Meta(min_length=1)]
    algorithm: Algorithm
    producer: str | None = None
    on_missing: Literal["Pass", "Fail", ""] = "Pass"
    fallback_on_empty: bool = False


@plugin("endpoint-attribute-filter")
class EndpointAttributeFilter(AttributeReader, Filter):
    """Keeps the endpoints whose value of an attribute passes a comparison.

    `onMissing` decides about endpoints without a value. Endpoints with a stale value stay. If no endpoint passes, the filter keeps no
    endpoint, or all endpoints with `fallbackOnEmpty`.
    """

    Params = Parameters

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        threshold = params.algorithm.threshold
        self._compare = COMPARE[threshold.operator]
        self._value = threshold.value
        self._pass_missing = params.on_missing != "Fail"
        self._fallback = params.fallback_on_empty
        self.look_at(Attribute("attribute", params.attribute, params.producer))

    def keep(self, request: Request, candidates: Candidates, profile: Profile) -> Mask:
        kept: Mask = self._compare(candidates[self._column], self._value)
        reports = self._reporters.among(candidates)
        if reports is not None:
            kept |= ~reports.fresh
            if not self._pass_missing:
                kept &= ~reports.missing
        if self._fallback and not kept.any():
            return np.ones(len(candidates), dtype=bool)
        return kept
