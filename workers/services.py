"""What a worker's plugins get: randomness, the load lane, the prefix index, the handles of their metrics, work beside the requests and
HTTP; and their calls timed.
"""

import os
import random
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import structlog

from epp.candidates import Endpoint
from epp.errors import PluginFault
from epp.instrument import C, Point, Wrap
from epp.isolation import culprit
from epp.metrics import Metric
from epp.plugin import Hashes, Load, Plugin, PrefixIndex
from shm.lanes import Lane
from shm.prefix_index import IndexReader
from shm.series import SeriesWriter
from workers.bus import BusWriter
from workers.log import stack, told
from workers.plugin_http import HttpClient
from workers.plugin_work import Background, Work

WARN_EVERY_S = 10.0

log = structlog.get_logger()

Call = Callable[..., Any]


class LaneLoad:
    """Tokens in flight, in this worker's lane."""

    def __init__(self, lane: Lane) -> None:
        self._tokens = lane.tokens

    def add_tokens(self, endpoint: Endpoint, tokens: int) -> None:
        self._tokens[endpoint.slot] += tokens


class SharedPrefixIndex:
    """Matches against shared memory, learns over the bus."""

    def __init__(self, reader: IndexReader, bus: BusWriter) -> None:
        self.match: Callable[[Hashes], Mapping[int, int]] = reader.match
        self.learn: Callable[[Hashes, int], None] = bus.learn
        self.forget: Callable[[Hashes, int], None] = bus.forget


class LaneMeasure:
    """One histogram of this worker's lane."""

    __slots__ = ("_index", "_lane")

    def __init__(self, lane: Lane, index: int) -> None:
        self._lane = lane
        self._index = index

    def observe(self, value: float) -> None:
        self._lane.observe(self._index, value)


class SeriesCount:
    """One counter that a plugin declares, in this worker's series."""

    __slots__ = ("_at", "_fixed", "_series")

    def __init__(self, series: SeriesWriter, plugin: Plugin, metric: Metric) -> None:
        self._series = series
        self._fixed = (plugin.name, plugin.type_name)
        self._at = series.counter_at[metric.name]

    def add(self, *labels: str, n: int = 1) -> None:
        series = self._series
        series.words[series.block((*self._fixed, *labels)) + self._at] += n


class Warnings:
    """What plugins say in the log, seldom: keyed by their names, which the configuration bounds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._said: dict[str, tuple[float, int]] = {}  # plugin -> when it may speak again, lines left out

    def warn(self, plugin: Plugin, text: str, **more: str) -> None:
        now = self._now()
        silent_until, left_out = self._said.get(plugin.name, (now, 0))
        if now < silent_until:
            self._said[plugin.name] = (silent_until, left_out + 1)
            return
        self._said[plugin.name] = (now + WARN_EVERY_S, 0)
        log.warning(text, plugin=plugin.name, left_out=left_out, **more)


class WorkerServices:
    """Implements `epp.plugin.Services`. What runs beside the requests needs a running loop, and `close` at its end."""

    def __init__(
        self,
        lane: Lane,
        prefix_index: PrefixIndex,
        *,
        prefix_seed: int,
        rng: random.Random,
        measures: Mapping[tuple[str, str], int],
        counters: Mapping[str, SeriesWriter],
        now: Callable[[], float],
    ) -> None:
        self.rng = rng
        self.load: Load = LaneLoad(lane)
        self.prefix_index = prefix_index
        self.prefix_seed = prefix_seed
        self._lane = lane
        self._measures = measures
        self._counters = counters
        self.environment: Mapping[str, str] = os.environ
        self.warn = Warnings(now).warn
        self._background = Background(unheard)
        self.spawn: Callable[[Coroutine[Any, Any, Any], float], Work] = self._background.spawn
        self.after = self._background.after
        self.every = self._background.every
        self._client: HttpClient | None = None

    def http(
        self, method: str, url: str, headers: Mapping[str, str] | None = None, body: bytes = b"", *, timeout_s: float
    ) -> Work:
        client = self._client
        if client is None:
            client = self._client = HttpClient()
        return self._background.spawn(client.fetch(method, url, headers, body), timeout_s, f"{method} {url}")

    async def close(self) -> None:
        """At the worker's end: nothing of the plugins goes on."""
        await self._background.close(self._client.close if self._client is not None else None)

    def measure(self, plugin: Plugin, metric: Metric) -> LaneMeasure:
        if (plugin.name, metric.name) not in self._measures:
            raise PluginFault(undeclared(plugin, metric))
        return LaneMeasure(self._lane, self._measures[plugin.name, metric.name])

    def count(self, plugin: Plugin, metric: Metric) -> SeriesCount:
        if metric.name not in self._counters:
            raise PluginFault(undeclared(plugin, metric))
        return SeriesCount(self._counters[metric.name], plugin, metric)


def undeclared(plugin: Plugin, metric: Metric) -> str:
    """Why there is no handle."""
    return f"'{metric.name}' is no {metric.kind} of the `metrics` that class {type(plugin).__name__} declares"


def unheard(problem: BaseException) -> None:
    """Work that nobody awaits has failed."""
    plugin = culprit(problem)
    whose = {"plugin": plugin.name} if plugin is not None else {}
    log.error("work of a plugin failed", error=told(problem), exception=stack(problem), **whose)


# One form per number of arguments: a call with `*args` leaves the interpreter's loop and enters it anew, which costs as much as
# the timing itself. In each, a call that raises is a call too.


def _timed_1(call: Call, now: Callable[[], float], keep: Callable[[float], None]) -> Call:
    def timed(a: Any) -> Any:
        start = now()
        try:
            return call(a)
        finally:
            keep(now() - start)

    return timed


def _timed_2(call: Call, now: Callable[[], float], keep: Callable[[float], None]) -> Call:
    def timed(a: Any, b: Any) -> Any:
        start = now()
        try:
            return call(a, b)
        finally:
            keep(now() - start)

    return timed


def _timed_3(call: Call, now: Callable[[], float], keep: Callable[[float], None]) -> Call:
    def timed(a: Any, b: Any, c: Any) -> Any:
        start = now()
        try:
            return call(a, b, c)
        finally:
            keep(now() - start)

    return timed


def _timed_4(call: Call, now: Callable[[], float], keep: Callable[[float], None]) -> Call:
    def timed(a: Any, b: Any, c: Any, d: Any) -> Any:
        start = now()
        try:
            return call(a, b, c, d)
        finally:
            keep(now() - start)

    return timed


_TIMED = {  # as `epp.plugin` declares the calls; a producer's form is its own
    Point.PARSER: _timed_3,
    Point.REQUEST_HEADER: _timed_1,
    Point.SCREENER: _timed_2,
    Point.ADMITTER: _timed_2,
    Point.PROFILE_PICKER: _timed_3,
    Point.PROFILES_RESULT: _timed_2,
    Point.FILTER: _timed_3,
    Point.SCORER: _timed_3,
    Point.PICKER: _timed_4,
    Point.PRE_REQUEST: _timed_2,
    Point.RESPONSE_RECEIVED: _timed_3,
    Point.RESPONSE_STREAMING: _timed_2,
    Point.RESPONSE_COMPLETE: _timed_3,
}


class CallTimers:
    """A `Wrap` that counts every call of every plugin by its duration.

    Durations are kept back until `store`, which the worker's beat calls: 0.17 us a call, and 0.05 us when many are stored
    together, instead of 0.27.
    """

    def __init__(self, lane: Lane, timers: Mapping[tuple[str, str], int], now: Callable[[], float]) -> None:
        self._lane = lane
        self._timers = timers
        self._now = now
        self._kept: dict[int, dict[int, list[float]]] = {}  # weight -> histogram -> durations
        self._once = self.standing_for(1)

    def __call__(self, point: Point, plugin: Plugin, call: C, /) -> C:
        return self._once(point, plugin, call)

    def standing_for(self, calls: int) -> Wrap:
        """A `Wrap` whose every call counts as so many."""
        kept = self._kept[calls] = {index: [] for index in self._timers.values()}

        def wrap(point: Point, plugin: Plugin, call: C, /) -> C:
            keep = kept[self._timers[point.value, plugin.name]].append
            if point is Point.PRODUCER:
                return self._producer(call, keep)
            return _TIMED[point](call, self._now, keep)  # type: ignore[return-value]

        return wrap

    def store(self) -> None:
        """Count what was kept back."""
        for weight, histograms in self._kept.items():
            for index, kept in histograms.items():
                if kept:
                    self._lane.observe_all(index, kept, weight)
                    kept.clear()

    def _producer(self, call: C, keep: Callable[[float], None]) -> C:
        """A producer that waits is timed until it has what it waits for."""
        now = self._now

        def timed(*args: Any) -> Any:
            start = now()
            waiting = None
            try:
                waiting = call(*args)
            finally:
                if waiting is None:
                    keep(now() - start)
                else:
                    waiting.add_done_callback(lambda _: keep(now() - start))
            return waiting

        return timed  # type: ignore[return-value]
