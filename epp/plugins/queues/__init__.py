"""Queues hold the items of one flow in one worker, in the order in which they leave."""

from epp.request.flows import Queued


class Handle:
    """Identifies an item in its queue. A handle is opaque, and becomes void when its item leaves the queue."""

    __slots__ = ("size",)

    def __init__(self, item: Queued) -> None:
        # The size at arrival. The queue adds and subtracts this one, so its sum stays exact even if the item's size changes later.
        self.size = item.bytes
