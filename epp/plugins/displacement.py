"""Displacement policies decide which waiting request gives way when a more important request arrives and all queues are full.

The built-in policies first choose a flow of the band, then an item of the flow. Eviction policies decide which requests in service may be
ended, and which of these is ended first.
"""

from collections.abc import Iterable
from heapq import nlargest
from typing import Any

from epp.plugin import DisplacementPolicy, EvictionFilter, EvictionOrder, plugin
from epp.request.flows import BandView, Capability, FlowKey, FlowView, Queued, rank, sheddable

FEW = 64


class MostBytes(DisplacementPolicy):
    """Chooses the flow with the most queued bytes, so that the flow that fills the queues gives way first.

    In a band with more than FEW flows, a scan of all flows for every victim would cost too much. In such a band, one scan finds the FEW
    flows with the most bytes, and the next FEW victims come from these flows.
    """

    def __init__(self, name: str, params: Any) -> None:
        super().__init__(name, params)
        self._band: BandView | None = None
        self._heaviest: list[FlowView] = []
        self._scans_left = 0

    def victim(self, band: BandView) -> Queued | None:
        flows = band.flows
        most = _most(flows if len(flows) <= FEW else self._of_many(band))
        if most is None and len(band):  # the remembered flows are empty by now, but other flows are not
            self._scans_left = 0
            most = _most(self._of_many(band))
        return None if most is None else self.item(most)

    def item(self, flow: FlowView) -> Queued | None:
        """Returns the item of the flow that gives way, or None if the flow is empty."""
        raise NotImplementedError

    def _of_many(self, band: BandView) -> list[FlowView]:
        if self._band is not band or not self._scans_left:
            self._band, self._scans_left = band, FEW
            self._heaviest = nlargest(FEW, band.flows, key=lambda flow: flow.bytes)
        self._scans_left -= 1
        return self._heaviest


def _most(flows: Iterable[FlowView]) -> FlowView | None:
    most: FlowView | None = None
    most_bytes = -1
    for flow in flows:
        its_bytes = flow.bytes
        if its_bytes > most_bytes and len(flow):
            most, most_bytes = flow, its_bytes
    return most


@plugin("largest-displacement-policy")
class Largest(MostBytes):
    """Displaces the largest item of the flow with the most queued bytes. If several are equally large, displaces the newest of them."""

    queue_needs = Capability.SCAN

    def item(self, flow: FlowView) -> Queued | None:
        return max(flow.scan(), key=lambda item: (item.bytes, item.arrival), default=None)


@plugin("newest-displacement-policy")
class Newest(MostBytes):
    """Displaces the item that would leave last in the flow with the most queued bytes: in a FIFO queue, the newest item."""

    queue_needs = Capability.TAIL

    def item(self, flow: FlowView) -> Queued | None:
        return flow.tail


@plugin("priority-then-time-eviction-order-policy", "eviction-priority-then-time-ordering")
class PriorityThenTime(EvictionOrder):
    """Evicts the request with the lowest priority first; among equal priorities, the request dispatched last."""

    def key(self, flow: FlowKey, dispatched_at: float) -> tuple[int, float]:
        return (-rank(flow.priority), -dispatched_at)


@plugin("sheddable-eviction-filter", "eviction-sheddable-filter")
class Sheddable(EvictionFilter):
    """Allows the eviction of requests with a priority below 0."""

    def evictable(self, flow: FlowKey) -> bool:
        return sheddable(flow.priority)
