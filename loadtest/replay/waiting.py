"""Flow control and other waits of a replay, in virtual time: the controller of workers, as the only shard.

    decide ── enter, turn ──▶ Queue ── passes, enqueue_and_wait ──▶ FlowController ──▶ Waited ── set ──▶ the replay resumes the request
                                                                         └ PoolProbe ──▶ fleet, detector

The owner calls `look` every LOOK_S while requests wait, as a worker does.
"""

from collections.abc import Callable, Generator
from typing import Any

from epp.config.load import EffectiveConfig
from epp.decision.admission import OPEN, Admission
from epp.decision.decision import Ticket
from epp.flow.controller import FlowController
from epp.flow.gate import PoolGate
from epp.flow.outcomes import Outcome
from epp.flow.plan import FlowPlan
from epp.flow.ports import Elsewhere, Head, Held, Reading, Wanted
from epp.plugins.fairness.token_weighted import Alone
from epp.request import Request
from epp.request.flows import FlowKey, Item
from loadtest.replay.fleet import Fleet
from shm.flow_areas import DISPATCHED
from workers.cli.offline import OfflineError
from workers.worker.extproc.shedding import Shedding
from workers.worker.flow.flow_control import LOOK_S, FlowTicket, QueuedRequest
from workers.worker.flow.probe import PoolProbe

__all__ = ["LOOK_S", "Pause", "Queue", "Waited", "admission_of"]


class Pause:
    """A wait in virtual time. Implements `epp.plugin.Waiting`: awaiting it yields it to the replay."""

    def __init__(self, seconds: float, call_after: Callable[[float, Callable[[], object]], object]) -> None:
        """`call_after`: calls a function after a number of seconds."""
        self.seconds = seconds
        self._call_after = call_after

    def __await__(self) -> Generator["Pause", None, None]:
        yield self

    def add_done_callback(self, call: Callable[..., object], /) -> None:
        self._call_after(self.seconds, lambda: call(self))


class Waited:
    """The future of a request that waits in a queue. Implements `epp.flow.ports.Future`. `resume`: called once, when the future is set."""

    def __init__(self, set_: Callable[["Waited"], object]) -> None:
        self._set = set_
        self._done = False

    def __await__(self) -> Generator["Waited", None, None]:
        if not self._done:
            yield self

    def set_result(self, result: Any, /) -> None:
        self._done = True
        self._set(self)

    def done(self) -> bool:
        return self._done


class _Alone:
    """The peers of a shard that is the only one, so there are none. Implements `epp.flow.ports.Peers`, and keeps the counts that the probe
    reads.
    """

    def __init__(self) -> None:
        self._passed = self._pending = 0

    def total(self, word: int) -> int:
        return self._passed if word == DISPATCHED else self._pending

    def waiting(self) -> int:
        return 0

    def totals(self) -> tuple[int, int]:
        return 0, 0

    def band(self, priority: int) -> tuple[int, int]:
        return 0, 0

    def shards(self) -> tuple[int, ...]:
        return ()

    def held(self, shard: int, priority: int) -> Held:
        return Held()

    def heads(self) -> tuple[Head, ...]:
        return ()

    def elsewhere(self) -> Elsewhere | None:
        return None

    def progress(self, shard: int) -> int:
        return 0

    def yields(self, shard: int) -> int:
        return 0

    def asked(self, shard: int, priority: int) -> tuple[int, int]:
        return 0, 0

    def ledger(self, priority: int, policy: str) -> Alone:
        return Alone()

    def demands(self) -> tuple[Wanted, ...]:
        return ()

    def publish(self, priority: int, requests: int, bytes: int, oldest: float) -> None: ...
    def head(self, priority: int | None, claim: float) -> None: ...
    def let_through(self, pending: int) -> None:
        self._passed += 1
        self._pending = pending

    def pending(self, count: int) -> None:
        self._pending = count

    def yielded(self) -> None: ...
    def demand(self, shard: int, wanted: Wanted) -> None: ...
    def answered(self, wanted: Wanted) -> None: ...
    def wake(self, shard: int) -> None: ...


class _Silent:
    """Implements `epp.flow.ports.Observer` without effect, because the replay counts by itself."""

    def ended(self, key: FlowKey, outcome: Outcome, waited_s: float, bytes: int) -> None: ...
    def queued(self, key: FlowKey, requests: int, bytes: int) -> None: ...
    def blocked(self, reading: Reading, priority: int) -> None: ...
    def cycled(self, seconds: float, /) -> None: ...
    def policy_failed(self, plugin: str, problem: BaseException) -> None:
        raise OfflineError(f"the policy '{plugin}' failed: {problem!r}") from problem


class Queue:
    """Flow control as one worker runs it. Implements `epp.decision.admission.Admission`."""

    def __init__(self, plan: FlowPlan, fleet: Fleet, priorities: set[int], freed: Callable[[Waited], object]) -> None:
        """`priorities`: the priorities of the requests that will come. `freed`: is called with each future that is set."""
        observer, peers = _Silent(), _Alone()
        probe = PoolProbe(fleet.candidates, plan.detector, peers)
        gate = PoolGate(probe, plan.usage_limits, plan.detector.name, now=fleet.now, report=observer.policy_failed)
        self._now = fleet.now
        self._controller = FlowController(
            plan, gate, peers, observer, now=fleet.now, make_future=self._future
        )  # fmt: skip
        self._freed = freed
        self._controller.provision(sorted(priorities - plan.static()))

    @property
    def waiting(self) -> int:
        return self._controller.waiting

    def enter(self, request: Request) -> Ticket | None:
        return FlowTicket(self._controller) if self._controller.passes(request.priority, self._now()) else None

    async def turn(self, request: Request) -> Ticket:
        queued = QueuedRequest(self._controller, request, self._now())
        await self._controller.enqueue_and_wait(queued)
        if queued.waited:
            request.now = self._now()
        return queued

    def passed(self) -> Ticket:
        raise AssertionError("each request of a replay enters")

    def look(self) -> None:
        """Looks for room, and ends requests that have waited too long."""
        self._controller.sweep(self._now())
        self._controller.woken()

    def _future(self, item: Item) -> Waited:
        assert isinstance(item, QueuedRequest)
        item.waited = True
        return Waited(self._freed)


def admission_of(config: EffectiveConfig, fleet: Fleet, priorities: set[int], freed: Callable[[Waited], object]) -> Admission:
    """Returns the admission that a worker would have with this configuration."""
    if config.flow is not None:
        return Queue(config.flow, fleet, priorities, freed)
    return Shedding(fleet, config.saturation) if config.saturation is not None else OPEN
