"""Disables plugins that fail repeatedly in a worker's pipeline for a while.

`Isolation.fault` gets every fault and counts it for the plugin at fault. The fifth fault within a minute disables the plugin if the
pipeline works without it (`epp.points.isolation`). Open streams keep the pipeline that decided them, so that the plugin releases its
resources of these streams. After a minute the plugin returns on trial: then a single fault disables it again.

Each worker decides separately.
"""

from collections.abc import Callable
from functools import partial

from epp.metrics.request_series import ISOLATION
from epp.plugin import Plugin
from epp.points.isolation import PAUSE_S, Faults, culprit, dispensable
from shm.series import SeriesWriter
from workers.host.log import error_text
from workers.worker.extproc.pipelines import Pipelines

FAULTS, TIMES = ISOLATION.counters


class Isolation:
    """Isolates plugins in one worker. `on_fault` gets every fault with its plugin's name. `warn` logs plugins that are disabled or
    return.
    """

    def __init__(
        self,
        pipelines: Pipelines,
        series: SeriesWriter,
        *,
        now: Callable[[], float],
        later: Callable[[float, Callable[[], None]], object],
        on_fault: Callable[[BaseException, str], None],
        warn: Callable[..., object],
    ) -> None:
        self._pipelines = pipelines
        self._series = series
        self._now = now
        self._later = later
        self._on_fault = on_fault
        self._warn = warn
        self._faults = Faults()
        self._out: set[str] = set()

    def fault(self, problem: BaseException) -> None:
        """Counts an exception from the work on a request or its answer. Disables the plugin at fault if it fails too often."""
        plugin = culprit(problem)
        self._on_fault(problem, plugin.name if plugin is not None else "")
        if plugin is None or plugin.name not in self._pipelines.whole.plugins:
            return
        self._series.count(FAULTS.name, _labels(plugin))
        if plugin.name in self._out or not dispensable(plugin):
            return
        if self._faults.too_many(plugin.name, self._now()):
            self._leave(plugin, problem)

    def _leave(self, plugin: Plugin, problem: BaseException) -> None:
        self._out.add(plugin.name)
        self._pipelines.leave_out(self._out)
        self._series.count(TIMES.name, _labels(plugin))
        self._show(plugin, 1)
        self._warn(
            "a plugin failed too often: requests are routed without it for a while",
            plugin=plugin.name,
            type=plugin.type_name,
            seconds=PAUSE_S,
            last=error_text(problem),
        )
        self._later(PAUSE_S, partial(self._return, plugin))

    def _return(self, plugin: Plugin) -> None:
        self._out.discard(plugin.name)
        self._faults.tried_again(plugin.name, self._now())
        self._pipelines.leave_out(self._out)
        self._show(plugin, 0)
        self._warn("a plugin that had failed is tried again", plugin=plugin.name, type=plugin.type_name)

    def _show(self, plugin: Plugin, out: int) -> None:
        series = self._series
        series.words[series.block(_labels(plugin)) + series.gauge_at[ISOLATION.gauges[0].name]] = out


def _labels(plugin: Plugin) -> tuple[str, str]:
    return plugin.name, plugin.type_name
