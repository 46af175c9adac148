"""Measures how long the calls of plugins take.

`CallTimers` wraps calls and keeps their durations until the worker's next heartbeat. `Timing` chooses which requests are timed, per
heartbeat, over all pools:

    the first EXACT requests                     timed, with weight 1
    then every SHARE-th request                  timed, with weight SHARE
    the SHARE - 1 requests after each of these   not timed

Timing all calls of a short request costs 7 us; for one request in eight, this is 1 us on average. The counts are at most SHARE - 1 requests
too high. If a plugin is not called for every request, its counts are right on average. A request uses one form of the pipeline to its end.
So either all calls of a request are timed or none.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from epp.decision.pipeline import Pipeline
from epp.plugin import Plugin
from epp.points.guard import within
from epp.points.instrument import C, Point, Wrap
from shm.areas import Area

SHARE: Final = 8
BLOCKING_S: Final = 0.05  # a call that uses the CPU for longer keeps all other requests of the worker waiting
EXACT: Final = 8  # the first requests after each heartbeat of the worker: all are timed and count once each

Call = Callable[..., Any]


# Each number of arguments has its own wrapper, because a call with `*args` leaves the interpreter's loop and enters it again, which costs
# as much as the timing itself. A call that raises is counted, too.


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


# Number of arguments -> wrapper, for the calls that `epp.plugin` declares; for producers see `CallTimers._producer`.
_TIMED: Final = {
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
    """Counts every call of every plugin by its duration. It is a `Wrap`.

    Several pools share one object. Otherwise, storing a few durations for each pool would cost a tenth of a request, and timing the first
    requests of each pool would time nearly all requests. `exact`: how many more requests until the next heartbeat are timed with weight 1.
    `left`: how many more requests the last sample stands for.

    It keeps durations until `store`, which the worker's heartbeat calls. Timing a call costs 0.17 us, and storing the duration with many
    others 0.05 us. Storing each duration alone would cost 0.27 us.
    """

    def __init__(
        self,
        area: Area,
        timers: Mapping[tuple[str, str], int],
        now: Callable[[], float],
        on_blocking: Callable[[Plugin, str, float], None] = lambda _plugin, _point, _seconds: None,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        """`on_blocking` gets the plugin, the extension point and the CPU seconds of a call that kept the event loop busy for more than
        BLOCKING_S. `cpu`: CPU seconds of this thread.
        """
        self._area = area
        self._timers = timers
        self._now = now
        self._on_blocking = on_blocking
        self._cpu = cpu
        self._stored_at, self._cpu_at = now(), cpu()
        # Histogram -> its plugin and extension point. Producers are missing, because they may wait.
        self._owners: dict[int, tuple[Plugin, str]] = {}
        self._kept: dict[int, dict[int, list[float]]] = {}  # weight -> histogram -> durations
        self._once = self.counting(1)
        self.exact = EXACT
        self.left = 0
        self._beat_at = 0.0

    def __call__(self, point: Point, plugin: Plugin, call: C, /) -> C:
        return self._once(point, plugin, call)

    def counting(self, calls: int) -> Wrap:
        """Returns a `Wrap` that counts each call as `calls` calls."""
        kept = self._kept.setdefault(calls, {index: [] for index in self._timers.values()})

        def wrap(point: Point, plugin: Plugin, call: C, /) -> C:
            index = self._timers[point.value, plugin.name]
            keep = kept[index].append
            if point is Point.PRODUCER:
                return self._producer(call, keep, plugin)
            self._owners[index] = plugin, point.value
            return _TIMED[point](call, self._now, keep)  # type: ignore[return-value]

        return wrap

    def heartbeat(self, now: float) -> None:
        """Calls `store` once for all pools that call this with the same `now`."""
        if now != self._beat_at:
            self._beat_at = now
            self.store()

    def store(self) -> None:
        """Stores the kept durations in the area, and reports calls that were too long. Times the next EXACT requests with weight 1."""
        self.exact = EXACT
        stood_still_s = self._stood_still_s()
        self._stored_at, self._cpu_at = self._now(), self._cpu()
        for weight, histograms in self._kept.items():
            for index, kept in histograms.items():
                if kept:
                    busy_s = max(kept) - stood_still_s
                    if busy_s > BLOCKING_S and (owner := self._owners.get(index)) is not None:
                        self._on_blocking(*owner, busy_s)
                    self._area.observe_all(index, kept, weight)
                    kept.clear()

    def _stood_still_s(self) -> float:
        """Returns how long this thread was idle, frozen, or waiting for a core since the last `store`.

        A call that took `s` seconds has used the CPU for at least `s` minus this time. Reading the CPU clock around each call would cost 3
        us.
        """
        return self._now() - self._stored_at - (self._cpu() - self._cpu_at)

    def _producer(self, call: C, keep: Callable[[float], None], plugin: Plugin) -> C:
        """Times a producer. If the producer waits, the time of waiting is included."""
        now = self._now

        def timed(*args: Any) -> Any:
            start = now()
            waiting = None
            try:
                waiting = call(*args)
            finally:
                spent = now() - start
                if spent > BLOCKING_S and (busy_s := spent - self._stood_still_s()) > BLOCKING_S:
                    self._on_blocking(plugin, Point.PRODUCER.value, busy_s)
                if waiting is None:
                    keep(spent)
                else:
                    waiting.add_done_callback(lambda _: keep(now() - start))
            return waiting

        return timed  # type: ignore[return-value]


class Timing:
    """Chooses the requests of one worker that are timed. `guarded`: the other wrapper of all calls; `epp.points.instrument.bare` for
    none.
    """

    def __init__(self, timers: CallTimers, guarded: Wrap, pipeline: Pipeline) -> None:
        """`pipeline`: its calls have both wrappers already: `guarded`, and `timers` with weight 1."""
        self.timers = timers
        self._sampled = within(guarded, timers.counting(SHARE))
        self._untimed = guarded
        self.use(pipeline)

    def use(self, pipeline: Pipeline) -> None:
        """Sets the pipeline of later requests. Its calls are timed already."""
        self._forms = (pipeline, pipeline.wrapped(self._sampled), pipeline.wrapped(self._untimed))

    def turn(self) -> Pipeline:
        """Returns the form of the pipeline for the next request."""
        timers = self.timers
        if timers.left:
            timers.left -= 1
            return self._forms[2]
        if timers.exact:
            timers.exact -= 1
            return self._forms[0]
        timers.left = SHARE - 1
        return self._forms[1]
