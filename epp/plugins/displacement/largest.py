"""Displace the largest item, so that as few requests as possible give way."""

from epp.plugin import plugin
from epp.plugins.displacement import MostBytes
from epp.request.flows import Capability, FlowView, Queued


@plugin("largest-displacement-policy")
class Largest(MostBytes):
    """Displaces the largest item of the flow with the most queued bytes. Among equally large ones, displaces the newest."""

    queue_needs = Capability.SCAN

    def item(self, flow: FlowView) -> Queued | None:
        return max(flow.scan(), key=lambda item: (item.bytes, item.arrival), default=None)
