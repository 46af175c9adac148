"""Reserve a part of the pool for important requests: the lower a band, the lower its ceiling."""

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from epp.plugin import UsageLimitPolicy, plugin


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """The ceilings of the bands.

    min_ceiling: The ceiling of the lowest band.
    max_ceiling: The ceiling of the highest band.
    shape: How the ceilings of the bands between grow with the priority.
    domain: How far apart the ceilings are: equally far (`rank`), or in proportion to the distances of the priorities (`value`).
    """

    min_ceiling: Annotated[float, msgspec.Meta(ge=0, lt=1)]
    max_ceiling: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    shape: Literal["linear"] = "linear"
    domain: Literal["rank", "value"] = "rank"


@plugin("priority-holdback-policy")
class PriorityHoldback(UsageLimitPolicy):
    """Gives lower bands lower ceilings: linear from `maxCeiling` for the highest band to `minCeiling` for the lowest.

    A single band has `maxCeiling`.
    """

    Params = Parameters

    def __init__(self, name: str, params: Parameters) -> None:
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
