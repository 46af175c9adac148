"""Fakes of everything that flow control uses, without processes: a clock, a pool, shared areas, futures, callers.

`Board` holds the areas of all shards. As in shared memory each shard writes only its own area, and the area of a shard that does
not serve is ignored. `Call` is one caller: it steps `enqueue_and_wait` like a stream and keeps the outcome.
"""

from collections import defaultdict
from collections.abc import Coroutine, Generator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from epp.flow.controller import FlowController
from epp.flow.outcomes import Outcome, Undispatched
from epp.flow.plan import FlowPlan
from epp.flow.ports import Elsewhere, Head, Held, PoolLoad, Reading, Wanted
from epp.plugin import Ledger
from epp.request.flows import FlowKey, rank
from tests.epp.flow.policies import plan

NOTHING = (0, 0)


class Clock:
    """A clock that moves only when a test sets `now`."""

    def __init__(self, now: float = 1_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@dataclass
class Thing:
    """A minimal item: flow control needs no other attributes."""

    fairness_id: str = "a"
    priority: int = 0
    bytes: int = 10
    ttl_s: float | None = None

    @property
    def flow(self) -> FlowKey:
        return FlowKey(self.fairness_id, self.priority)


class FakeGate:
    """Room for `places` requests; a test can close single bands."""

    def __init__(self, places: float = 0) -> None:
        self.places = places
        self.empty = False
        self.closed: set[int] = set()  # priorities without room, whatever `places` is
        self.priorities: Sequence[int] = ()
        self.freed_count = 0
        self.one_by_one = False

    def room(self, priority: int) -> bool:
        if self.places <= 0 or self.empty or priority in self.closed:
            return False
        self.places -= 1
        return True

    def read(self) -> Reading:
        return Reading(1.0, dict.fromkeys(self.priorities, 1.0), self.empty)

    def freed(self) -> None:
        self.freed_count += 1

    def bands(self, priorities: Sequence[int]) -> None:
        self.priorities = tuple(priorities)


@dataclass
class Area:
    """The words of one shard."""

    serving: bool = True
    fresh: bool = True  # whether its heartbeat is recent
    bands: dict[int, Held] = field(default_factory=dict)
    head: tuple[int, float] | None = None
    progress: int = 0
    yields: int = 0
    pending: int = 0
    answers: dict[int, tuple[int, int]] = field(default_factory=lambda: defaultdict(lambda: (0, 0)))
    positions: dict[int, float] = field(default_factory=dict)  # by flow hash
    times: dict[int, tuple[float, float, int]] = field(default_factory=dict)  # by band: time, end, backlogged


class Board:
    """The areas of all shards, and the shards to wake."""

    def __init__(self, shards: int) -> None:
        self.areas = [Area() for _ in range(shards)]
        self.wakes: list[int] = []
        self.elsewhere: Elsewhere | None = None
        self.asked: dict[tuple[int, int], tuple[int, int]] = {}  # (target, band) -> ever demanded by all areas together

    def successor(self, shard: int) -> None:
        """A new worker replaces one that died: its gauges are cleared, its counters continue."""
        area = self.areas[shard]
        area.bands, area.head, area.pending = {}, None, 0
        area.times = {priority: (time, end, 0) for priority, (time, end, _) in area.times.items()}
        area.serving = area.fresh = True
        for target, priority in self.asked:
            if target == shard:
                area.answers[priority] = self.asked[target, priority]

    def die(self, shard: int) -> None:
        self.areas[shard].serving = False

    def asked_ever(self, shard: int, priority: int) -> tuple[int, int]:
        return self.asked.get((shard, priority), (0, 0))

    def outstanding(self, shard: int, priority: int) -> tuple[int, int]:
        if (shard, priority) not in self.asked:
            return NOTHING
        asked, answered = self.asked[shard, priority], self.areas[shard].answers[priority]
        return max(0, asked[0] - answered[0]), max(0, asked[1] - answered[1])


class BoardPeers:
    """`Peers` of one shard, over a board."""

    def __init__(self, board: Board, shard: int = 0) -> None:
        self.board = board
        self.me = shard
        self.area = board.areas[shard]

    def _others(self) -> list[Area]:
        return [area for i, area in enumerate(self.board.areas) if i != self.me and area.serving]

    def waiting(self) -> int:
        return self.totals()[0] + (self.board.elsewhere is not None)

    def totals(self) -> tuple[int, int]:
        held = [held for area in self._others() for held in area.bands.values()]
        return sum(h.requests for h in held), sum(h.bytes for h in held)

    def band(self, priority: int) -> tuple[int, int]:
        held = [area.bands.get(priority, Held()) for area in self._others()]
        return sum(h.requests for h in held), sum(h.bytes for h in held)

    def shards(self) -> Sequence[int]:
        return [i for i, area in enumerate(self.board.areas) if i != self.me and area.serving]

    def held(self, shard: int, priority: int) -> Held:
        return self.board.areas[shard].bands.get(priority, Held())

    def heads(self) -> Sequence[Head]:
        areas = ((i, self.board.areas[i]) for i in self.shards())
        return [Head(i, *area.head) for i, area in areas if area.head is not None and area.fresh]

    def elsewhere(self) -> Elsewhere | None:
        return self.board.elsewhere

    def ledger(self, priority: int, policy: str = "") -> Ledger:
        return BoardLedger(self, priority)

    def progress(self, shard: int) -> int:
        return self.board.areas[shard].progress

    def yields(self, shard: int) -> int:
        return self.board.areas[shard].yields

    def asked(self, shard: int, priority: int) -> tuple[int, int]:
        return self.board.outstanding(shard, priority)

    def demands(self) -> Sequence[Wanted]:
        if not self.board.asked:
            return ()
        priorities = sorted((p for target, p in self.board.asked if target == self.me), key=rank, reverse=True)
        found = [Wanted(p, *self.board.outstanding(self.me, p)) for p in priorities]
        return [wanted for wanted in found if wanted.requests or wanted.bytes]

    def publish(self, priority: int, requests: int, bytes: int, oldest: float) -> None:
        self.area.bands[priority] = Held(requests, bytes, oldest)

    def head(self, priority: int | None, claim: float) -> None:
        self.area.head = None if priority is None else (priority, claim)

    def let_through(self, pending: int) -> None:
        self.area.progress += 1
        self.area.pending = pending

    def pending(self, count: int) -> None:
        self.area.pending = count

    def yielded(self) -> None:
        self.area.yields += 1

    def demand(self, shard: int, wanted: Wanted) -> None:
        requests, size = self.board.asked_ever(shard, wanted.priority)
        self.board.asked[shard, wanted.priority] = (requests + wanted.requests, size + wanted.bytes)

    def answered(self, wanted: Wanted) -> None:
        requests, size = self.area.answers[wanted.priority]
        self.area.answers[wanted.priority] = (requests + wanted.requests, size + wanted.bytes)

    def wake(self, shard: int) -> None:
        self.board.wakes.append(shard)


class BoardLedger:
    """`Ledger` of one band, over a board. It never loses an entry."""

    def __init__(self, peers: BoardPeers, priority: int) -> None:
        self._peers = peers
        self._own = peers.area
        self._priority = priority

    def _areas(self) -> list[Area]:
        return [area for area in self._peers.board.areas if area.serving and area is not self._own]

    def _shown(self) -> list[tuple[float, float, int]]:
        return [area.times.get(self._priority, (0.0, 0.0, 0)) for area in self._areas()]

    def served(self) -> int:
        return sum([area.progress for area in self._areas()])

    def flow_hash(self, flow: FlowKey) -> int:
        return hash((flow.fairness_id, self._priority))

    def position(self, flow_hash: int) -> float:
        return max([area.positions.get(flow_hash, -inf) for area in self._areas()], default=-inf)

    def time(self) -> float:
        return max((time for time, _, _ in self._shown()), default=0.0)

    def end(self) -> float:
        return max((end for _, end, _ in self._shown()), default=0.0)

    def backlogged(self) -> int:
        return max((count for _, _, count in self._shown()), default=0)

    def alone(self) -> bool:
        return not self._peers.band(self._priority)[0]

    def move(self, flow_hash: int, position: float) -> None:
        self._own.positions[flow_hash] = position

    def show(self, time: float, end: float, backlogged: int) -> None:
        self._own.times[self._priority] = (time, end, backlogged)


class FakePool:
    """Servers that take `each` requests each, as a probe sees them. The saturation is requests in flight over capacity."""

    def __init__(self, board: Board, pods: int = 1, each: int = 4, *, step: bool = True) -> None:
        self.board = board
        self.pods = pods
        self.each = each
        self.inflight = [0] * len(board.areas)
        self.reads = 0
        self._step = step

    def load(self) -> PoolLoad:
        self.reads += 1
        if not self.pods:
            return PoolLoad(1.0, empty=True)
        capacity = self.pods * self.each
        return PoolLoad(self.total() / capacity, step=1 / capacity if self._step else 0.0)

    def total(self) -> int:
        return sum(n for n, area in zip(self.inflight, self.board.areas, strict=True) if area.serving)

    def dispatched(self) -> int:
        return sum(area.progress for area in self.board.areas if area.serving)

    def pending(self) -> int:
        return sum(area.pending for area in self.board.areas if area.serving)


class Recorder:
    """An observer that keeps everything."""

    def __init__(self) -> None:
        self.outcomes: list[tuple[FlowKey, Outcome, float, int]] = []
        self.flows: dict[FlowKey, tuple[int, int]] = {}
        self.failures: list[tuple[str, str]] = []
        self.blocks: list[int] = []

    def ended(self, key: FlowKey, outcome: Outcome, waited_s: float, bytes: int) -> None:
        self.outcomes.append((key, outcome, waited_s, bytes))

    def queued(self, key: FlowKey, requests: int, bytes: int) -> None:
        self.flows[key] = (requests, bytes)

    def cycled(self, seconds: float, /) -> None: ...

    def policy_failed(self, plugin: str, problem: Exception) -> None:
        self.failures.append((plugin, str(problem)))

    def blocked(self, reading: Reading, priority: int) -> None:
        self.blocks.append(priority)

    @property
    def names(self) -> list[str]:
        return [outcome.value for _, outcome, _, _ in self.outcomes]


class FakeFuture:
    """Done when it is set. The waiting caller continues later, at its next step."""

    def __init__(self) -> None:
        self._done = False

    def __await__(self) -> Generator[Any, None, Any]:
        while not self._done:
            yield self

    def set_result(self, result: Any) -> None:
        assert not self._done, "a future is set once"
        self._done = True

    def done(self) -> bool:
        return self._done


class Call:
    """One caller of `enqueue_and_wait`."""

    def __init__(self, controller: FlowController, item: Any) -> None:
        self.item = item
        self.ended: Outcome | None = None
        self.error: Undispatched | None = None
        self.future: FakeFuture | None = None
        self._coroutine: Coroutine[Any, Any, Outcome] | None = controller.enqueue_and_wait(item)
        self.step()

    @property
    def outcome(self) -> str:
        """The name of the outcome; empty while the request waits."""
        self.step()
        return self.ended.value if self.ended is not None else ""

    @property
    def ready(self) -> bool:
        return self._coroutine is not None and (self.future is None or self.future.done())

    def step(self) -> None:
        if not self.ready:
            return
        assert self._coroutine is not None
        try:
            self.future = self._coroutine.send(None)
        except StopIteration as done:
            self.ended, self._coroutine = done.value, None
        except Undispatched as refusal:
            self.error, self.ended, self._coroutine = refusal, refusal.ending.outcome, None

    def leave(self) -> None:
        """The client leaves."""
        coroutine, self._coroutine = self._coroutine, None
        if coroutine is not None:
            coroutine.close()


def outcomes(*calls: Call) -> list[str]:
    return [call.outcome for call in calls]


class Shard:
    """One controller with its fakes. The gate is a `FakeGate` by default."""

    def __init__(
        self, made: FlowPlan | None = None, *, board: Board | None = None, number: int = 0, gate: Any = None, clock: Clock | None = None
    ) -> None:
        self.board = board or Board(1)
        self.peers = BoardPeers(self.board, number)
        self.clock = clock or Clock()
        self.gate = gate if gate is not None else FakeGate()
        self.seen = Recorder()
        self.calls: list[Call] = []
        self.controller = FlowController(
            made or plan(), self.gate, self.peers, self.seen,
            now=self.clock, make_future=lambda _item: FakeFuture(),
        )  # fmt: skip

    def call(self, fairness_id: str = "a", priority: int = 0, size: int = 10, ttl_s: float | None = None) -> Call:
        call = Call(self.controller, Thing(fairness_id, priority, size, ttl_s))
        self.calls.append(call)  # Python closes a coroutine without references
        return call

    def room(self, places: float) -> None:
        """Adds room for `places` requests and runs a cycle."""
        self.gate.places += places
        self.controller.woken()

    def after(self, seconds: float) -> None:
        """Advances the clock and sweeps."""
        self.clock.now += seconds
        self.controller.sweep(self.clock.now)
