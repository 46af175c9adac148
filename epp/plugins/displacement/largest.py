"""Displace the largest item: the fewest requests give way."""

from epp.flows import Capability, FlowView, Queued
from epp.plugin import plugin
from epp.plugins.displacement import MostBytes


@plugin("largest-displacement-policy")
class Largest(MostBytes):
    """Of the flow with the most bytes queued, the item of the most bytes; of several such the newest."""

    queue_needs = Capability.SCAN

    def item(self, flow: FlowView) -> Queued | None:
        return max(flow.scan(), key=lambda item: (item.bytes, item.arrival), default=None)
