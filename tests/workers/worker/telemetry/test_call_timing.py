"""Which requests have timed plugin calls: the first ones of a heartbeat, then one in eight, which counts for eight."""

from collections import Counter
from collections.abc import Callable

import pytest

from epp.decision.pipeline import Pipeline
from epp.plugin import NoParams, Plugin
from epp.plugins.scorers.reported import QueueDepth
from epp.points.guard import within
from epp.points.instrument import C, Point, bare
from shm.areas import Areas, AreaSchema
from shm.segment import Region
from tests.bench.micro import pipeline as compiled
from tests.fakes import FakeServices, request
from workers.worker.telemetry.call_timing import EXACT, SHARE, CallTimers, Timing


class World:
    """A pipeline with timed calls and a clock that stands still. `requests` calls the profile handler once per request."""

    def __init__(self) -> None:
        plain = compiled(FakeServices())
        points = plain.timed_points()
        names = tuple((f"{point}@{plugin.name}", (0.1, 1.0)) for point, plugin in points)
        schema = AreaSchema(1, (), (), names, areas=1)
        self.areas = Areas(schema, Region(memoryview(bytearray(schema.bytes))))
        places = {(point, plugin.name): index for index, (point, plugin) in enumerate(points)}
        self.calls = CallTimers(self.areas.area(0), places, lambda: 0.0, cpu=lambda: 0.0)
        self.asked = f"{Point.PROFILE_PICKER.value}@{plain.wiring.handler.name}"
        self.guarded: Counter[Point] = Counter()
        self.timing = Timing(self.calls, self._guard, plain.wrapped(within(self._guard, self.calls)))

    def _guard(self, point: Point, plugin: Plugin, call: C, /) -> C:
        self.guarded[point] += 1
        return bare(point, plugin, call)

    def requests(self, count: int) -> list[Pipeline]:
        forms = [self.timing.turn() for _ in range(count)]
        for form in forms:
            form.pick_profiles(request(), form.profiles, {})
        return forms

    def counted(self) -> int:
        self.calls.store()
        return sum(self.areas.histograms()[self.asked][0])


def test_with_few_requests_every_call_is_timed_and_counts_once() -> None:
    world = World()
    for heartbeat in range(1, 4):
        world.requests(EXACT)
        assert world.counted() == heartbeat * EXACT
        world.timing.timers.store()


def test_with_many_requests_one_in_eight_is_timed_and_counts_for_the_next_ones() -> None:
    world = World()
    forms = world.requests(EXACT + 5 * SHARE)
    assert world.counted() == EXACT + 5 * SHARE
    assert len({id(form) for form in forms[:EXACT]}) == 1
    sampled = forms[EXACT::SHARE]
    assert len({id(form) for form in sampled}) == 1
    assert {id(form) for form in forms[EXACT:]} - {id(sampled[0])} == {id(forms[-1])}


def test_pools_share_the_first_requests_and_the_samples_of_a_heartbeat() -> None:
    world = World()
    plain = compiled(FakeServices())
    pools = [Timing(world.calls, bare, plain.wrapped(world.calls)) for _ in range(4)]
    for number in range(EXACT + 2 * SHARE):
        form = pools[number % 4].turn()
        form.pick_profiles(request(), form.profiles, {})
    assert world.counted() == EXACT + 2 * SHARE
    exact = [timing.turn() for timing in pools]
    world.calls.store()
    assert [form is timing._forms[0] for form, timing in zip(exact, pools, strict=True)] == [True] * 4
    pools[0].timers.heartbeat(5.0)
    taken = [pools[0].turn() for _ in range(EXACT)]
    pools[1].timers.heartbeat(5.0)
    assert pools[1].turn() is not pools[1]._forms[0], "the first pool has taken them all"
    pools[1].timers.heartbeat(5.1)
    world.calls.left = 0
    assert pools[1].turn() is pools[1]._forms[0] and len(taken) == EXACT


@pytest.mark.parametrize("extra", range(1, SHARE + 1))
def test_a_sample_counts_for_requests_of_the_next_heartbeat_too_so_counts_are_at_most_seven_ahead(extra: int) -> None:
    world = World()
    world.requests(EXACT + extra)
    assert world.counted() == EXACT + SHARE
    world.timing.timers.store()
    world.requests(SHARE - extra)
    assert world.counted() == EXACT + SHARE
    world.requests(1)
    assert world.counted() == EXACT + SHARE + 1


def test_a_new_pipeline_is_used_in_all_its_forms_from_the_next_request_on() -> None:
    world = World()
    other = compiled(FakeServices()).wrapped(world.calls)
    world.timing.use(other)
    forms = world.requests(EXACT + SHARE)
    assert {form.wiring for form in forms} == {other.wiring} and forms[0] is other


def test_every_form_keeps_the_other_wrapper_of_the_calls() -> None:
    world = World()
    assert world.guarded and all(count % 3 == 0 for count in world.guarded.values())


class Blocking:
    """Times calls of one plugin, which work and stand still as the test says. `blocked`: what was reported."""

    def __init__(self) -> None:
        self.now = self.busy = 7.0
        self.blocked: list[tuple[str, str, float]] = []
        schema = AreaSchema(1, (), (), (("a", (1.0,)), ("p", (1.0,))), areas=1)
        self.timers = CallTimers(
            Areas(schema, Region(memoryview(bytearray(schema.bytes)))).area(0),
            {("Scorer", "s"): 0, ("DataProducer", "s"): 1},
            lambda: self.now,
            lambda plugin, point, seconds: self.blocked.append((plugin.name, point, round(seconds, 3))),
            lambda: self.busy,
        )
        plugin = QueueDepth("s", NoParams())
        self.score: Callable[..., None] = self.timers(Point.SCORER, plugin, lambda *_: self.spend(*self.costs))
        self.produce: Callable[..., None] = self.timers(Point.PRODUCER, plugin, lambda *_: self.spend(*self.costs))
        self.costs = (0.0, 0.0)

    def spend(self, busy_s: float, still_s: float = 0.0) -> None:
        self.now += busy_s + still_s
        self.busy += busy_s

    def calls(self, busy_s: float, still_s: float = 0.0) -> list[tuple[str, str, float]]:
        """What is reported of a call of the scorer and one of the producer."""
        self.costs, self.blocked = (busy_s, still_s), []
        self.score(None, None, None)
        self.timers.store()
        self.produce(None, None)
        self.timers.store()
        return self.blocked


def test_calls_that_use_the_cpu_for_long_are_named_with_their_plugin_and_point() -> None:
    world = Blocking()
    assert world.calls(0.01) == []
    assert world.calls(0.06) == [("s", "Scorer", 0.06), ("s", "DataProducer", 0.06)]
    assert world.calls(0.2) == [("s", "Scorer", 0.2), ("s", "DataProducer", 0.2)]
    world.timers.store()
    assert world.calls(0.01) == []


def test_a_call_is_named_among_others_that_keep_the_worker_busy() -> None:
    world = Blocking()
    world.spend(0.09)
    assert world.calls(0.06) == [("s", "Scorer", 0.06), ("s", "DataProducer", 0.06)]


@pytest.mark.parametrize("still_s", [0.05, 0.5, 30.0])
def test_a_call_in_which_the_worker_stood_still_is_not_named(still_s: float) -> None:
    world = Blocking()
    world.spend(0.09)  # other work of the worker
    assert world.calls(0.04, still_s) == []


def test_the_cpu_clock_is_not_read_for_a_call() -> None:
    world = Blocking()
    reads = world.busy
    world.timers._cpu = lambda: pytest.fail("a call has read the CPU clock")
    world.costs = (0.04, 0.0)
    world.score(None, None, None)
    world.produce(None, None)
    assert world.busy > reads
