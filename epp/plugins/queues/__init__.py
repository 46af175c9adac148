"""Queues: the items of one flow in one worker, in the order in which they leave."""

from epp.flows import Queued


class Handle:
    """What a queue gives for an item: opaque, and void once the queue does not know it any more."""

    __slots__ = ("size",)

    def __init__(self, item: Queued) -> None:
        self.size = item.bytes  # as it was when it came: the sum stays exact whatever the item says later
