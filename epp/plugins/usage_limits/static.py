"""One ceiling for all bands."""

from collections.abc import Sequence
from typing import Annotated

import msgspec

from epp.plugin import UsageLimitPolicy, plugin


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """`threshold`: the saturation from which on everybody waits."""

    threshold: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0


@plugin("static-usage-limit-policy")
class Static(UsageLimitPolicy):
    """Every band is served until the saturation reaches `threshold`."""

    Params = Parameters

    def ceilings(self, saturation: float, priorities: Sequence[int]) -> Sequence[float]:
        return (self.params.threshold,) * len(priorities)
