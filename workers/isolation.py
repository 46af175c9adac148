"""Plugins that fail again and again are left out of a worker's pipeline for a while.

`App.on_fault` leads here. A fault of a plugin is counted under its name; the fifth within a minute takes the plugin out, if the
pipeline can do without (`epp.isolation`), by compiling the pipeline without it and putting that in the place of the other. Streams
that are open keep the pipeline they began with, so that what was counted for them is released. After a minute the plugin is
tried again; then one fault suffices.

Each worker judges for itself.
"""

from collections.abc import Callable
from functools import partial

from epp.instrument import Wrap
from epp.isolation import PAUSE_S, Faults, culprit, dispensable, without
from epp.metrics import ISOLATION
from epp.pipeline import compile_pipeline
from epp.plugin import Plugin
from shm.series import SeriesWriter
from workers.app import App
from workers.log import told
from workers.tracing import static_scorers, traced

FAULTS, TIMES = range(len(ISOLATION.counters))


class Isolation:
    """One worker's. `told` hears of every fault, with the plugin that it came from; `warn` of plugins that leave and return."""

    def __init__(
        self,
        app: App,
        wrap: Wrap,
        series: SeriesWriter,
        *,
        now: Callable[[], float],
        later: Callable[[float, Callable[[], None]], object],
        told: Callable[[BaseException, str], None],
        warn: Callable[..., object],
    ) -> None:
        self._app = app
        self._whole = app.pipeline
        self._wrap = wrap
        self._series = series
        self._now = now
        self._later = later
        self._told = told
        self._warn = warn
        self._faults = Faults()
        self._out: set[str] = set()
        app.on_fault = self.fault

    def fault(self, problem: BaseException) -> None:
        """A request, or what is told of it, failed by this."""
        plugin = culprit(problem)
        self._told(problem, plugin.name if plugin is not None else "")
        if plugin is None or plugin.name not in self._whole.plugins:
            return
        self._count(plugin, FAULTS)
        if plugin.name in self._out or not dispensable(plugin):
            return
        if self._faults.too_many(plugin.name, self._now()):
            self._leave(plugin, problem)

    def _leave(self, plugin: Plugin, problem: BaseException) -> None:
        self._out.add(plugin.name)
        self._swap()
        self._count(plugin, TIMES)
        self._show(plugin, 1)
        self._warn(
            "a plugin failed too often: requests are routed without it for a while",
            plugin=plugin.name,
            type=plugin.type_name,
            seconds=PAUSE_S,
            last=told(problem),
        )
        self._later(PAUSE_S, partial(self._return, plugin))

    def _return(self, plugin: Plugin) -> None:
        self._out.discard(plugin.name)
        self._faults.tried_again(plugin.name, self._now())
        self._swap()
        self._show(plugin, 0)
        self._warn("a plugin that had failed is tried again", plugin=plugin.name, type=plugin.type_name)

    def _swap(self) -> None:
        app, whole = self._app, self._whole
        pipeline = compile_pipeline(without(whole.recipe, self._out), self._wrap) if self._out else whole
        app.use(pipeline)
        app.recent.use(pipeline, sorted(self._out))
        if app.tracer is not None:
            app.tracer.pipeline = traced(pipeline, self._wrap)
            app.tracer.statics = {wired.name: static_scorers(wired) for wired in pipeline.recipe.profiles}

    def _count(self, plugin: Plugin, which: int) -> None:
        series = self._series
        series.words[self._block(plugin) + series.counter_at[ISOLATION.counters[which].name]] += 1

    def _show(self, plugin: Plugin, out: int) -> None:
        series = self._series
        series.words[self._block(plugin) + series.gauge_at[ISOLATION.gauges[0].name]] = out

    def _block(self, plugin: Plugin) -> int:
        return self._series.block((plugin.name, plugin.type_name))
