"""Minimal policies of flow control, and plans with them."""

from collections.abc import Callable, Sequence
from typing import Any

from epp.flow.fifo_queue import FifoQueue
from epp.flow.plan import BandPlan, FlowPlan
from epp.plugin import DisplacementPolicy, FairnessPolicy, FlowQueue, NoParams, OrderingPolicy, SaturationDetector, UsageLimitPolicy
from epp.request.flows import BandView, Capability, FlowKey, FlowView, Queued


class Plain(FlowQueue):
    capabilities = Capability.HEAD | Capability.TAIL | Capability.SCAN

    def make(self, key: Callable[[Queued], Any]) -> FifoQueue:
        return FifoQueue(self.name)


class ByArrival(OrderingPolicy):
    def key(self, item: Queued) -> Any:
        return item.arrival


class InTurn(FairnessPolicy):
    """The flow that was served longest ago."""

    def share(self, key: Callable[[Queued], Any]) -> "Turns":
        return Turns()


class Turns:
    def __init__(self) -> None:
        self.waiting: dict[FlowKey, FlowView] = {}

    def changed(self, flow: FlowView) -> None:
        if not len(flow):
            del self.waiting[flow.key]
        else:
            self.waiting.setdefault(flow.key, flow)

    def pick(self, now: float) -> FlowView | None:
        return next(iter(self.waiting.values()), None)

    def dispatched(self, flow: FlowView, item: Queued, now: float) -> None:
        self.waiting[flow.key] = self.waiting.pop(flow.key)

    def forget(self, key: FlowKey) -> None:
        assert key not in self.waiting


class Newest(DisplacementPolicy):
    """The last request of the flow with the most bytes."""

    def victim(self, band: BandView) -> Queued | None:
        largest = max(band.flows, key=lambda flow: flow.bytes, default=None)
        return largest.tail if largest is not None else None


class ToTheCeiling(UsageLimitPolicy):
    """A ceiling of 1.0 for all priorities, or one per priority."""

    def __init__(self, ceilings: dict[int, float] | None = None) -> None:
        super().__init__("limits", NoParams())
        self.by_priority = ceilings or {}

    def ceilings(self, saturation: float, priorities: Sequence[int]) -> Sequence[float]:
        return [self.by_priority.get(priority, 1.0) for priority in priorities]


def band(priority: int = 0, **fields: Any) -> BandPlan:
    defaults: dict[str, Any] = {
        "max_requests": 5_000,
        "max_bytes": 1_000_000_000,
        "request_ttl_s": None,
        "queue": Plain("plain", NoParams()),
        "ordering": ByArrival("by-arrival", NoParams()),
        "fairness": InTurn("in-turn", NoParams()),
        "displacement": Newest("newest", NoParams()),
    }
    return BandPlan(priority=priority, **{**defaults, **fields})


def plan(*bands: BandPlan, **fields: Any) -> FlowPlan:
    defaults: dict[str, Any] = {
        "template": band(),
        "negative_template": None,
        "max_requests": 0,
        "max_bytes": 0,
        "request_ttl_s": 60.0,
        "no_endpoint_ttl_s": 60.0,
        "detector": SaturationDetector("detector", NoParams()),
        "usage_limits": ToTheCeiling(),
        "eviction": False,
    }
    return FlowPlan(bands=bands, **{**defaults, **fields})
