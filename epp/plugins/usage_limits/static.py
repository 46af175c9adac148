"""Gives all bands the same ceiling."""

from collections.abc import Sequence

from epp.plugin import plugin
from epp.plugins._parameters import UsageLimitParameters
from epp.points.flow import UsageLimitPolicy


@plugin("static-usage-limit-policy")
class Static(UsageLimitPolicy):
    """Serves every band until the saturation reaches `threshold`."""

    Params = UsageLimitParameters

    def ceilings(self, saturation: float, priorities: Sequence[int]) -> Sequence[float]:
        return (self.params.threshold,) * len(priorities)
