"""Usage-limit policies set the ceiling of each band: the saturation up to which the band is served."""

import math
from collections.abc import Sequence
from typing import Any

from epp.plugin import plugin
from epp.plugins._parameters import HoldbackParameters, NoParameters, UsageLimitParameters
from epp.points.flow import UsageLimitPolicy


@plugin("static-usage-limit-policy")
class Static(UsageLimitPolicy):
    """Serves every band until the saturation reaches `threshold`."""

    Params = UsageLimitParameters

    def ceilings(self, saturation: float, priorities: Sequence[int]) -> Sequence[float]:
        return (self.params.threshold,) * len(priorities)


@plugin("priority-holdback-policy")
class PriorityHoldback(UsageLimitPolicy):
    """Gives lower bands lower ceilings: linear from `maxCeiling` for the highest band to `minCeiling` for the lowest.

    A single band has `maxCeiling`.
    """

    Params = HoldbackParameters

    def __init__(self, name: str, params: HoldbackParameters) -> None:
        super().__init__(name, params)
        if params.min_ceiling >= params.max_ceiling:
            raise ValueError(
                f"minCeiling: {params.min_ceiling:g} is not below maxCeiling {params.max_ceiling:g}; lower bands need a lower ceiling"
            )
        self._bands: tuple[int, ...] = ()
        self._ceilings: Sequence[float] = ()

    def ceilings(self, saturation: float, priorities: Sequence[int]) -> Sequence[float]:
        bands = tuple(priorities)
        if bands != self._bands:
            self._bands, self._ceilings = bands, tuple(self._spread(bands))
        return self._ceilings

    def _spread(self, bands: Sequence[int]) -> list[float]:
        low, high = self.params.min_ceiling, self.params.max_ceiling
        reach = bands[0] - bands[-1] if bands else 0
        if not reach:
            return [high] * len(bands)
        if self.params.domain == "value":
            return [low + (priority - bands[-1]) / reach * (high - low) for priority in bands]
        return [high - index * (high - low) / (len(bands) - 1) for index in range(len(bands))]


@plugin("soft-reflective-ceiling-policy")
class SoftReflective(UsageLimitPolicy):
    """Slows lower bands down as the pool fills; the highest band always has the ceiling 1.

    The band with rank i of N has the limit 1 - i x saturation / (N - 1); rank 0 is the highest band. While the saturation is below this
    limit, the band is served (ceiling 1). If the saturation is 1 or more, the band is not served (ceiling 0). In between, the band is
    served at one of round(saturation / (1 - saturation)) readings of the saturation; this is the same reading for all such bands.
    """

    Params = NoParameters

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
