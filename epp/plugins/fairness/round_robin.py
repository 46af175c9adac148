"""Serves one request of each flow in turn (round robin)."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from epp.plugin import FairnessPolicy, plugin
from epp.request.flows import FlowKey, FlowView, Queued


@plugin("round-robin-fairness-policy")
class RoundRobin(FairnessPolicy):
    """Picks the flow that was served longest ago. A flow that was empty and gets a request goes behind all other flows.

    All requests count the same, whatever they cost.
    """

    def share(self, key: Callable[[Queued], Any]) -> "Ring":
        return Ring()


class Ring:
    """Keeps the non-empty flows in the order of their turns. Every operation is O(1)."""

    __slots__ = ("_flows",)

    def __init__(self) -> None:
        self._flows: OrderedDict[FlowKey, FlowView] = OrderedDict()

    def changed(self, flow: FlowView) -> None:
        if len(flow):
            self._flows[flow.key] = flow
        else:
            self._flows.pop(flow.key, None)

    def pick(self, now: float) -> FlowView | None:
        return next(iter(self._flows.values()), None)

    def dispatched(self, flow: FlowView, item: Queued, now: float) -> None:
        if flow.key in self._flows:
            self._flows.move_to_end(flow.key)

    def forget(self, key: FlowKey) -> None:
        """Does nothing, because an empty flow has no state."""
