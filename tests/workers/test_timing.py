"""Whose plugin calls are timed: all while they are few, then one in eight, which counts for all."""

from collections import Counter

import pytest

from epp.guard import within
from epp.instrument import C, Point, bare
from epp.pipeline import Pipeline
from epp.plugin import Plugin
from shm.lanes import Lanes, LaneSchema
from shm.segment import Region
from tests.bench.micro import pipeline as compiled
from tests.fakes import FakeServices
from workers.services import CallTimers
from workers.timing import EXACT, SHARE, Timing


class World:
    """A pipeline whose calls are timed, by a clock that stands; `requests` come and have their profile handler asked once."""

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
            form.pick_profiles(None, form.profiles, {})  # type: ignore[arg-type]
        return forms

    def counted(self) -> int:
        self.calls.store()
        return sum(self.lanes.histograms()[self.asked][0])


def test_of_few_requests_every_call_counts_once() -> None:
    world = World()
    for beat in range(1, 4):
        world.requests(EXACT)
        assert world.counted() == beat * EXACT
        world.timing.beat()


def test_of_many_requests_one_in_eight_is_timed_and_counts_for_those_that_follow_it() -> None:
    world = World()
    forms = world.requests(EXACT + 5 * SHARE)
    assert world.counted() == EXACT + 5 * SHARE
    assert len({id(form) for form in forms[:EXACT]}) == 1
    sampled = forms[EXACT::SHARE]
    assert len({id(form) for form in sampled}) == 1
    assert {id(form) for form in forms[EXACT:]} - {id(sampled[0])} == {id(forms[-1])}


@pytest.mark.parametrize("extra", range(1, SHARE + 1))
def test_a_sample_stands_for_requests_of_the_next_beat_too_so_no_more_than_seven_are_ahead(extra: int) -> None:
    world = World()
    world.requests(EXACT + extra)
    assert world.counted() == EXACT + SHARE
    world.timing.beat()
    world.requests(SHARE - extra)
    assert world.counted() == EXACT + SHARE
    world.requests(1)
    assert world.counted() == EXACT + SHARE + 1


def test_another_pipeline_is_used_from_the_next_request_on_in_all_its_forms() -> None:
    world = World()
    other = compiled(FakeServices()).wrapped(world.calls)
    world.timing.use(other)
    forms = world.requests(EXACT + SHARE)
    assert {form.recipe for form in forms} == {other.recipe} and forms[0] is other


def test_what_stands_around_calls_besides_is_there_in_every_form() -> None:
    world = World()
    assert world.guarded and all(count % 3 == 0 for count in world.guarded.values())
