"""Displace the newest item, which loses the least waiting time."""

from epp.plugin import plugin
from epp.plugins.displacement import MostBytes
from epp.request.flows import Capability, FlowView, Queued


@plugin("newest-displacement-policy")
class Newest(MostBytes):
    """Displaces the item that would leave last, in the flow with the most queued bytes: the newest one in a FIFO queue."""

    queue_needs = Capability.TAIL

    def item(self, flow: FlowView) -> Queued | None:
        return flow.tail
