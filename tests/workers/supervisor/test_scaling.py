"""The scaling signal in the supervisor: what it reads from shared memory, and what it shows."""

from types import SimpleNamespace
from typing import Any

from epp.data import KV_USAGE, RUNNING, WAITING
from epp.learning.model import LatencyModel
from shm.areas import Areas, AreaSchema
from shm.documents import DocumentSchema, DocumentWriter
from shm.segment import Region
from shm.table import State, TableSchema, TableWriter
from workers.process.layout import HEADROOM, REPLICAS_NEEDED, UNKNOWN_HEADROOM
from workers.shared.documents import ENDPOINTS, EndpointRecord, encode
from workers.supervisor.scaling import PoolSignal, PoolSignals, ScalingSignal

SLOTS = 4
COUNTERS = ("picks_total", "load_refusals_total", "failed_answers_total")
PRESENT = 0b111


def region(size: int) -> Region:
    return Region(memoryview(bytearray(size)))


class Site:
    """A pool of two servers in shared memory, with a worker. KV usage limits their batches: 20 requests fill a cache."""

    def __init__(self) -> None:
        table = TableSchema(tuple(column.name for column in (RUNNING, WAITING, KV_USAGE)), SLOTS)
        documents = DocumentSchema((4096, 1, 1, 1))
        areas = AreaSchema(SLOTS, (REPLICAS_NEEDED, HEADROOM), COUNTERS, (), areas=2)
        memory = SimpleNamespace(table=region(table.bytes), documents=region(documents.bytes), areas=Areas(areas, region(areas.bytes)))
        instance: Any = SimpleNamespace(
            layout=SimpleNamespace(table=table, documents=documents), memory=memory, pool=None, config=SimpleNamespace(flow=None)
        )
        self.instance = instance
        self.now, self.waiting, self.prompt_s = 100.0, 0, 0.0
        self.table = TableWriter(table, memory.table)
        self.handles = [self.table.take(9 + slot, lambda _: True) for slot in range(2)]
        records = [EndpointRecord("ns", str(slot), str(slot), 80, {}, slot, 1, 9 + slot) for slot in range(2)]
        DocumentWriter(documents, memory.documents).write(ENDPOINTS, encode(records))
        memory.areas.set_serving(1, True)
        self.worker, self.own = memory.areas.area(1), memory.areas.area(0)
        latency: Any = SimpleNamespace(model=LatencyModel(), prompt_s=lambda: self.prompt_s)
        self.signal = ScalingSignal(instance, self.own, latency, waiting=lambda: self.waiting, now=lambda: self.now)

    def shown(self) -> tuple[int, int]:
        """Returns the words for the replicas needed and the headroom."""
        scalars, place = self.own.scalars, self.own.schema.scalar
        return scalars[place[REPLICAS_NEEDED]], scalars[place[HEADROOM]]

    def run(self, *, running: float, picks: int = 10, refused: int = 0, failed: int = 0, seconds: int = 400) -> int:
        """Lets each second bring so many requests to the pool, and returns the replicas needed."""
        for handle in self.handles:
            assert handle is not None
            values = (running, 0.0, running / 20.0)
            self.table.write(
                handle, state=State.FRESH, flags=0, updated_at=self.now, inflight_at_scrape=0.0, values=values, present=PRESENT
            )
        for _ in range(seconds):
            self.worker.add(self.worker.schema.counter["picks_total"], picks)
            self.worker.add(self.worker.schema.counter["load_refusals_total"], refused)
            self.worker.add(self.worker.schema.counter["failed_answers_total"], failed)
            self.now += 1.0
            self.signal.look()
        return self.shown()[0]


def test_nothing_is_shown_before_the_work_is_known() -> None:
    site = Site()
    assert site.shown() == (0, UNKNOWN_HEADROOM)
    site.run(running=8.0, seconds=5)
    assert site.shown() == (0, UNKNOWN_HEADROOM)


def test_half_full_servers_are_enough_and_leave_headroom() -> None:
    site = Site()
    assert site.run(running=8.0) in (1, 2)
    assert 0 < site.shown()[1] < 1000


def test_full_servers_need_another_replica() -> None:
    site = Site()
    assert site.run(running=20.0) > 2
    assert site.shown()[1] < 0


def test_requests_that_are_refused_for_load_count_as_work() -> None:
    served, refusing = Site(), Site()
    assert refusing.run(running=16.0, refused=10) >= 2 * served.run(running=16.0) - 1


def test_requests_that_a_server_fails_are_no_work() -> None:
    """Otherwise they make the others look cheap, and each would count with the time of a prompt."""
    for prompt_s, waiting in ((0.25, 0), (0.0, 1200)):
        healthy, failing = Site(), Site()
        healthy.prompt_s = failing.prompt_s = prompt_s
        healthy.waiting = failing.waiting = waiting
        assert failing.run(running=16.0, picks=90, failed=80) == healthy.run(running=16.0)


def test_requests_that_wait_in_the_picker_count_as_work() -> None:
    calm, waiting = Site(), Site()
    waiting.waiting = 1200
    assert waiting.run(running=16.0) > calm.run(running=16.0)


def test_servers_that_only_compute_prompts_need_as_many_replicas_as_the_prompts_take() -> None:
    site = Site()
    site.prompt_s = 0.25
    assert site.run(running=1.0, picks=16) == 5  # 16 prompts a second take 4 replicas, of which 80 % may be used


class Pools(Site):
    """Two pools of one server each: the slots 0 and 1."""

    def __init__(self) -> None:
        super().__init__()
        records = [EndpointRecord("ns", str(slot), str(slot), 80, {}, slot, 1, 9 + slot, pool=slot) for slot in range(2)]
        DocumentWriter(self.instance.layout.documents, self.instance.memory.documents).write(ENDPOINTS, encode(records))
        self.views = [SimpleNamespace(**(vars(self.instance) | {"pool": pool})) for pool in range(2)]
        latency: Any = SimpleNamespace(model=LatencyModel(), prompt_s=lambda: 0.0)
        self.signals = [PoolSignal(lambda pool=pool: pool, latency, now=lambda: self.now) for pool in self.views]

    def serve(self, seconds: int, *served: int) -> list[int]:
        """Lets each second bring so many requests to the pools. Returns the replicas that they need."""
        for _ in range(seconds):
            self.now += 1.0
            for slot, count in enumerate(served):
                self.worker.served[slot] += count
                handle = self.handles[slot]
                assert handle is not None
                values = (float(count), 0.0, count / 20.0)
                self.table.write(
                    handle, state=State.FRESH, flags=0, updated_at=self.now, inflight_at_scrape=0.0, values=values, present=PRESENT
                )
            for signal in self.signals:
                signal.look()
        return [signal.needed for signal in self.signals]


def test_each_pool_has_a_signal_of_the_requests_at_its_own_endpoints() -> None:
    site = Pools()
    assert site.serve(3, 5, 0) == [0, 0], "not known yet"
    busy, idle = site.serve(400, 60, 1)
    assert busy > idle == 1


def test_a_pool_without_endpoints_has_no_signal() -> None:
    site = Pools()
    DocumentWriter(site.instance.layout.documents, site.instance.memory.documents).write(ENDPOINTS, encode([]))
    assert site.serve(200, 5, 5) == [0, 0]


class Listed(Pools):
    """The same pools, as the supervisor sees them. `keepers`: the keeper of each pool. `of_all`: the signals of all pools."""

    def __init__(self) -> None:
        super().__init__()
        self.keepers = [self.keeper(), self.keeper()]
        self.of_all = PoolSignals(lambda: self.views, lambda: dict(enumerate(self.keepers)), lambda: self.now)
        self.signals.clear()

    def keeper(self) -> Any:
        """Returns the keeper of a new pool."""
        return SimpleNamespace(model=LatencyModel(), prompt_s=lambda: 0.0)

    def needed(self, seconds: int, *served: int) -> dict[int, int]:
        """Lets each second bring so many requests to the pools. Returns the replicas that are shown, by pool."""
        for _ in range(seconds):
            self.serve(1, *served)
            self.of_all.look()
        return {pool: needed for pool, needed, _ in self.of_all.shown()}


def test_a_pool_that_gets_the_place_of_another_pool_begins_with_a_signal_of_its_own() -> None:
    site = Listed()
    assert site.needed(400, 60, 60).keys() == {0, 1}
    site.keepers[1] = site.keeper()
    assert site.needed(3, 60, 60).keys() == {0}, "nothing is known of the new pool yet"
    found = site.needed(400, 60, 1)
    assert found[0] > found[1] == 1


def test_requests_that_wait_count_as_work_also_if_a_reload_has_switched_flow_control_on() -> None:
    found = []
    for flow in (None, object()):
        site = Listed()
        site.needed(1, 16, 0)
        memory = SimpleNamespace(**vars(site.instance.memory), flow=SimpleNamespace(total=lambda _word: 1200))
        later = {"memory": memory, "config": SimpleNamespace(flow=flow)}
        site.views = [SimpleNamespace(**(vars(view) | later)) for view in site.views]
        found.append(site.needed(400, 16, 0)[0])
    calm, waiting = found
    assert waiting > calm
