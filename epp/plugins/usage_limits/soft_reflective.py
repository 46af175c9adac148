"""Slow lower bands down gradually as the pool fills, instead of stopping them at a fixed ceiling."""

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from epp.plugin import UsageLimitPolicy, plugin


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """None."""


@plugin("soft-reflective-ceiling-policy")
class SoftReflective(UsageLimitPolicy):
    """Slows lower bands down as the pool fills; the highest band always has the ceiling 1.

    The band with rank i of N has the limit 1 - i x saturation / (N - 1); rank 0 is the highest band. While the saturation is below its
    limit, a band is served (ceiling 1). If the saturation is 1 or more, it is not served (ceiling 0). In between it is served at one of
    round(saturation / (1 - saturation)) readings of the saturation, the same reading for all such bands.
    """

    Params = Parameters

    def __init__(self, name: str, params: Any) -> None:
        super().__init__(name, params)
        self._tick = 0

    def ceilings(self, saturation: float, priorities: Sequence[int]) -> Sequence[float]:
        last = len(priorities) - 1
        if last < 1:
            return (1.0,) * len(priorities)
        between = 0.0
        # The tick advances only while the pool is not full and the saturation is at or above the limit of the lowest band.
        if 1.0 - saturation <= saturation < 1.0:
            self._tick += 1
            period = max(1, math.floor(saturation / (1.0 - saturation) + 0.5))
            between = 1.0 if self._tick % period == 0 else 0.0
        return [1.0 if not rank or saturation < 1.0 - rank * saturation / last else between for rank in range(last + 1)]
