"""Displace the newest item: it has lost the least by waiting."""

from epp.flows import Capability, FlowView, Queued
from epp.plugin import plugin
from epp.plugins.displacement import MostBytes


@plugin("newest-displacement-policy")
class Newest(MostBytes):
    """Of the flow with the most bytes queued, the item that would leave last: where arrival is the order, the newest."""

    queue_needs = Capability.TAIL

    def item(self, flow: FlowView) -> Queued | None:
        return flow.tail
