"""The services that a worker gives to plugins, and the timing of plugin calls."""

import asyncio
from typing import Any

import pytest

from epp.plugin import NoParams, Plugin
from epp.points.instrument import Point
from shm.areas import Areas, AreaSchema
from shm.segment import Region
from tests.waiting import turns
from workers.worker.telemetry.call_timing import CallTimers

BOUNDS = (0.1, 1.0)


class Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def areas() -> Areas:
    schema = AreaSchema(1, (), (), (("scorer", BOUNDS), ("producer", BOUNDS)), areas=1)
    return Areas(schema, Region(memoryview(bytearray(schema.bytes))))


def counts(timers: CallTimers, of: Areas, name: str) -> tuple[list[int], float]:
    timers.store()
    return of.histograms()[name]


def test_every_call_is_counted_in_the_bucket_of_its_duration_and_returns_what_the_plugin_returned() -> None:
    clock, own = Clock(), areas()
    plugin = Plugin("s", NoParams())

    def call(seconds: float, candidates: int, profile: int) -> Any:
        clock.time += seconds
        return seconds, candidates, profile

    timers = CallTimers(own.area(0), {("Scorer", "s"): 0, ("DataProducer", "s"): 1}, clock)
    timed = timers(Point.SCORER, plugin, call)
    assert timed(0.1, 1, 2) == (0.1, 1, 2)
    timed(0.5, 1, 2)
    timed(7.0, 1, 2)
    assert counts(timers, own, "scorer") == ([1, 1, 1], 7.6)
    assert counts(timers, own, "scorer") == ([1, 1, 1], 7.6), "once"
    assert counts(timers, own, "producer") == ([0, 0, 0], 0.0)


def test_a_producer_that_waits_is_timed_until_it_has_its_result() -> None:
    clock, own = Clock(), areas()
    timers = CallTimers(own.area(0), {("DataProducer", "p"): 1}, clock)

    async def scenario() -> None:
        future = asyncio.get_running_loop().create_future()
        produce = timers(Point.PRODUCER, Plugin("p", NoParams()), lambda: future)
        assert produce() is future
        clock.time = 0.5
        assert counts(timers, own, "producer") == ([0, 0, 0], 0.0)
        future.set_result(None)
        await turns()
        assert counts(timers, own, "producer") == ([0, 1, 0], 0.5)
        assert timers(Point.PRODUCER, Plugin("p", NoParams()), lambda: None)() is None
        assert counts(timers, own, "producer") == ([1, 1, 0], 0.5)

    asyncio.run(scenario())


def test_a_call_that_raises_is_counted_too() -> None:
    own = areas()
    timers = CallTimers(own.area(0), {("Scorer", "s"): 0, ("DataProducer", "s"): 1}, Clock())

    def fails(*_: object) -> None:
        raise ZeroDivisionError

    for point, name in ((Point.SCORER, "scorer"), (Point.PRODUCER, "producer")):
        with pytest.raises(ZeroDivisionError):
            timers(point, Plugin("s", NoParams()), fails)(1, 2, 3)
        assert counts(timers, own, name) == ([1, 0, 0], 0.0)


def test_every_extension_point_has_a_timed_wrapper_with_the_right_number_of_arguments() -> None:
    timers = CallTimers(areas().area(0), {(point.value, "s"): 0 for point in Point}, Clock())
    arguments = {Point.REQUEST_HEADER: 1, Point.PICKER: 4} | dict.fromkeys(
        (Point.PARSER, Point.PROFILE_PICKER, Point.FILTER, Point.SCORER, Point.RESPONSE_RECEIVED, Point.RESPONSE_COMPLETE), 3
    )
    for point in Point:
        given = tuple(range(arguments.get(point, 2)))
        timed = timers(point, Plugin("s", NoParams()), lambda *args, point=point: None if point is Point.PRODUCER else args)
        assert timed(*given) == (None if point is Point.PRODUCER else given)
