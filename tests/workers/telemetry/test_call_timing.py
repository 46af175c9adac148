"""Which requests have timed plugin calls: the first ones of a beat, then one in eight, which counts for eight."""

from collections import Counter
from collections.abc import Callable

import pytest

from epp.guard import within
from epp.instrument import C, Point, bare
from epp.pipeline import Pipeline
from epp.plugin import NoParams, Plugin
from epp.plugins.scorers.queue_depth import QueueDepth
from shm.lanes import Lanes, LaneSchema
from shm.segment import Region
from tests.bench.micro import pipeline as compiled
from tests.fakes import FakeServices, request
from workers.telemetry.call_timing import EXACT, SHARE, CallTimers, Timing


class World:
    """A pipeline with timed calls and a clock that stands still. `requests` calls the profile handler once per request."""

    def __init__(self) -> None:
        plain = compiled(FakeServices())
        points = plain.timed_points()
        names = tuple((f"{point}@{plugin.name}", (0.1, 1.0)) for point, plugin in points)
        schema = LaneSchema(1, (), (), names, lanes=1)
        self.lanes = Lanes(schema, Region(memoryview(bytearray(schema.bytes))))
        places = {(point, plugin.name): index for index, (point, plugin) in enumerate(points)}
        self.calls = CallTimers(self.lanes.lane(0), places, lambda: 0.0)
        self.asked = f"{Point.PROFILE_PICKER.value}@{plain.recipe.handler.name}"
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
        return sum(self.lanes.histograms()[self.asked][0])


def test_with_few_requests_every_call_is_timed_and_counts_once() -> None:
    world = World()
    for beat in range(1, 4):
        world.requests(EXACT)
        assert world.counted() == beat * EXACT
        world.timing.beat()


def test_with_many_requests_one_in_eight_is_timed_and_counts_for_the_next_ones() -> None:
    world = World()
    forms = world.requests(EXACT + 5 * SHARE)
    assert world.counted() == EXACT + 5 * SHARE
    assert len({id(form) for form in forms[:EXACT]}) == 1
    sampled = forms[EXACT::SHARE]
    assert len({id(form) for form in sampled}) == 1
    assert {id(form) for form in forms[EXACT:]} - {id(sampled[0])} == {id(forms[-1])}


@pytest.mark.parametrize("extra", range(1, SHARE + 1))
def test_a_sample_counts_for_requests_of_the_next_beat_too_so_counts_are_at_most_seven_ahead(extra: int) -> None:
    world = World()
    world.requests(EXACT + extra)
    assert world.counted() == EXACT + SHARE
    world.timing.beat()
    world.requests(SHARE - extra)
    assert world.counted() == EXACT + SHARE
    world.requests(1)
    assert world.counted() == EXACT + SHARE + 1


def test_a_new_pipeline_is_used_in_all_its_forms_from_the_next_request_on() -> None:
    world = World()
    other = compiled(FakeServices()).wrapped(world.calls)
    world.timing.use(other)
    forms = world.requests(EXACT + SHARE)
    assert {form.recipe for form in forms} == {other.recipe} and forms[0] is other


def test_every_form_keeps_the_other_wrapper_of_the_calls() -> None:
    world = World()
    assert world.guarded and all(count % 3 == 0 for count in world.guarded.values())


def test_calls_that_block_are_named_with_their_plugin_and_point() -> None:
    times = iter([0.0, 0.06, 1.0, 1.01, 2.0, 2.2])
    blocked: list[tuple[str, str, float]] = []
    schema = LaneSchema(1, (), (), (("a", (1.0,)), ("p", (1.0,))), lanes=1)
    timers = CallTimers(
        Lanes(schema, Region(memoryview(bytearray(schema.bytes)))).lane(0),
        {("Scorer", "s"): 0, ("DataProducer", "s"): 1},
        lambda: next(times),
        lambda plugin, point, seconds: blocked.append((plugin.name, point, round(seconds, 3))),
    )
    plugin = QueueDepth("s", NoParams())
    score: Callable[..., None] = timers(Point.SCORER, plugin, lambda *_: None)
    for _ in range(2):
        score(None, None, None)
    timers.store()
    timers.store()
    produce: Callable[..., None] = timers(Point.PRODUCER, plugin, lambda *_: None)
    produce(None, None)
    assert blocked == [("s", "Scorer", 0.06), ("s", "DataProducer", 0.2)]
