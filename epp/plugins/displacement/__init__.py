"""Displacement policies: who gives way when something more important finds all queues full.

Two tiers: which flow of the band, and which of its items.
"""

from collections.abc import Iterable
from heapq import nlargest
from typing import Any

from epp.flows import BandView, FlowView, Queued
from epp.plugin import DisplacementPolicy

FEW = 64


class MostBytes(DisplacementPolicy):
    """Takes from the flow with the most bytes queued, so that who fills the queues gives way first.

    Of a band with more than FEW flows, FEW victims in a row come from the FEW flows that had the most at the first of them.
    """

    def __init__(self, name: str, params: Any) -> None:
        super().__init__(name, params)
        self._band: BandView | None = None
        self._heaviest: list[FlowView] = []
        self._looks = 0

    def victim(self, band: BandView) -> Queued | None:
        flows = band.flows
        most = _most(flows if len(flows) <= FEW else self._of_many(band))
        if most is None and len(band):  # those that were remembered are empty by now
            self._looks = 0
            most = _most(self._of_many(band))
        return None if most is None else self.item(most)

    def item(self, flow: FlowView) -> Queued | None:
        """Which item of the flow gives way."""
        raise NotImplementedError

    def _of_many(self, band: BandView) -> list[FlowView]:
        if self._band is not band or not self._looks:
            self._band, self._looks = band, FEW
            self._heaviest = nlargest(FEW, band.flows, key=lambda flow: flow.bytes)
        self._looks -= 1
        return self._heaviest


def _most(flows: Iterable[FlowView]) -> FlowView | None:
    most: FlowView | None = None
    most_bytes = -1
    for flow in flows:
        its_bytes = flow.bytes
        if its_bytes > most_bytes and len(flow):
            most, most_bytes = flow, its_bytes
    return most
