"""Measures the cost of flow control per request: straight through, through the queue, and the choice among 100,000 waiting requests.

The controller, its gate and the default policies are real. The pool and the other shards are stubs that cost nothing.
"""

from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from epp.flow.controller import FlowController
from epp.flow.gate import PoolGate
from epp.flow.outcomes import Outcome
from epp.flow.ports import PoolLoad
from epp.plugin import FairnessPolicy, Ledger, Plugin
from epp.plugins.displacement import Newest
from epp.plugins.fairness.global_strict import GlobalStrict
from epp.plugins.fairness.round_robin import RoundRobin
from epp.plugins.fairness.token_weighted import Alone as OwnLedger
from epp.plugins.fairness.token_weighted import TokenWeighted
from epp.plugins.ordering import FirstCome
from epp.plugins.queues import Fifo
from epp.plugins.usage_limits import Static
from epp.request.flows import FlowKey
from tests.bench.cases import Case
from tests.epp.flow.policies import band, plan
from tests.epp.flow.shards import Board, BoardPeers, Clock, FakeFuture, Recorder

FAST_US, QUEUED_US, PICK_US = 5.0, 20.0, 10.0
FLOWS, ITEMS = 10_000, 100_000


class Item:
    """A waiting request."""

    __slots__ = ("bytes", "flow", "ttl_s")

    def __init__(self, fairness_id: str) -> None:
        self.flow = FlowKey(fairness_id, 0)
        self.bytes = 1_000
        self.ttl_s: float | None = None


class SingleShard(BoardPeers):
    """Stands for the peers of the only shard, so that publishing costs nothing."""

    def waiting(self) -> int:
        return 0

    def totals(self) -> tuple[int, int]:
        return 0, 0

    def band(self, priority: int) -> tuple[int, int]:
        return 0, 0

    def publish(self, priority: int, requests: int, bytes: int, oldest: float) -> None: ...
    def let_through(self, pending: int) -> None: ...
    def pending(self, count: int) -> None: ...
    def ledger(self, priority: int, policy: str = "") -> Ledger:
        return OwnLedger()


class NullRecorder(Recorder):
    """Records nothing."""

    def ended(self, key: FlowKey, outcome: Outcome, waited_s: float, bytes: int) -> None: ...
    def queued(self, key: FlowKey, requests: int, bytes: int) -> None: ...
    def blocked(self, reading: object, priority: int) -> None: ...


class Pool:
    """A pool that is full or not, as the benchmark sets it."""

    def __init__(self) -> None:
        self.full = False

    def load(self) -> PoolLoad:
        return PoolLoad(1.0 if self.full else 0.9, step=1e-7)

    def dispatched(self) -> int:
        return 0

    def pending(self) -> int:
        return 0


def default(kind: type[Plugin]) -> Any:
    return kind(kind.type_name, kind.Params())


class Bench:
    """A controller, and callers that wait in it."""

    def __init__(self, fairness: type[FairnessPolicy]) -> None:
        self.pool, self.clock = Pool(), Clock()
        template = band(
            max_requests=10**6, queue=default(Fifo), ordering=default(FirstCome), fairness=default(fairness), displacement=default(Newest)
        )
        gate = PoolGate(self.pool, default(Static), "detector", now=self.clock, report=lambda name, problem: None)
        self.controller = FlowController(
            plan(template=template), gate, SingleShard(Board(1)), NullRecorder(), now=self.clock, make_future=lambda _item: FakeFuture()
        )
        self.items = [Item(f"tenant-{i}") for i in range(FLOWS)]
        self.calls: list[Coroutine[Any, Any, Outcome]] = []
        self.turn = 0

    def straight(self) -> None:
        try:
            self.controller.enqueue_and_wait(self.items[0]).send(None)
        except StopIteration:
            self.controller.settled(placed=True)

    def queued(self) -> None:
        """Enqueues a request while the pool is full, and serves it when a response ends."""
        self.turn += 1
        self.pool.full = True
        self.clock.now += 0.002
        call = self.controller.enqueue_and_wait(self.items[self.turn % 100])
        call.send(None)
        self.pool.full = False
        self.controller.released()
        try:
            call.send(None)
        except StopIteration:
            self.controller.settled(placed=True)

    def fill(self) -> None:
        self.pool.full = True
        self.clock.now += 0.002
        for i in range(ITEMS):
            call = self.controller.enqueue_and_wait(self.items[i % FLOWS])
            call.send(None)
            self.calls.append(call)

    def pick(self) -> Callable[[], object]:
        self.fill()
        waiting = self.controller._registry.order[0]
        return lambda: waiting.pick(self.clock.now)


def flow_cases() -> Iterator[Case]:
    """Yields the cases: whole passes with the token-weighted policy, and picks with each fairness policy."""
    bench = Bench(TokenWeighted)
    yield Case("flow control: straight through", bench.straight, FAST_US)
    yield Case("flow control: enqueue, then dispatch (two readings)", bench.queued, QUEUED_US)
    for fairness in (TokenWeighted, RoundRobin, GlobalStrict):
        yield Case(f"flow control: pick of {ITEMS} items, {fairness.type_name}", Bench(fairness).pick(), PICK_US)
