"""Keep endpoints by any number that they report."""

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
    """The attribute's value <operator> `value`."""

    operator: Operator
    value: float = 0.0


class Algorithm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`threshold` is the one that there is."""

    type: Literal["threshold"]
    threshold: Threshold


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """`on_missing`: what happens to endpoints without the attribute; "" stands for the default. `producer` as for the scorer."""

    attribute: Annotated[str, msgspec.Meta(min_length=1)]
    algorithm: Algorithm
    producer: str | None = None
    on_missing: Literal["Pass", "Fail", ""] = "Pass"
    fallback_on_empty: bool = False


@plugin("endpoint-attribute-filter")
class EndpointAttributeFilter(AttributeReader, Filter):
    """Keeps endpoints whose value compares true. Missing: as `onMissing` says; stale: kept.

    Nobody left: nobody, or with `fallbackOnEmpty` everyone.
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
        who = self._reporters.among(candidates)
        if who is not None:
            kept |= ~who.fresh
            if not self._pass_missing:
                kept &= ~who.missing
        if self._fallback and not kept.any():
            return np.ones(len(candidates), dtype=bool)
        return kept
