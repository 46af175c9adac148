"""The services that a worker gives its plugins: randomness, load, the prefix index, metric handles, background work and HTTP."""

import asyncio
import copy
import os
import random
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final

import structlog

from epp.errors import PluginFault
from epp.metrics import Metric
from epp.plugin import HeldBlocks, Learning, LoadCounts, Plugin, Prefills, PrefixIndex
from epp.points.isolation import culprit
from epp.prefix.match import CutsPrompts
from shm.areas import Area
from shm.series import SeriesWriter
from workers.host.log import error_text, stack
from workers.worker.plugin_handles import AreaLoad, AreaMeasure, IndexTier, SeriesCount, SeriesGauge
from workers.worker.plugin_http import HttpClient
from workers.worker.plugin_work import Background, Work

WARN_EVERY_S: Final = 10.0

log = structlog.get_logger()


class Warnings:
    """Logs warnings of plugins: at most one per plugin and WARN_EVERY_S. The configuration bounds the number of plugins."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._last: dict[str, tuple[float, int]] = {}  # plugin -> the end of its silence, the number of dropped lines

    def warn(self, plugin: Plugin, event: str, **fields: object) -> None:
        now = self._now()
        silent_until, left_out = self._last.get(plugin.name, (now, 0))
        if now < silent_until:
            self._last[plugin.name] = (silent_until, left_out + 1)
            return
        self._last[plugin.name] = (now + WARN_EVERY_S, 0)
        log.warning(event, plugin=plugin.name, left_out=left_out, **fields)


class WorkerServices:
    """Implements `epp.plugin.Services`. Background work needs a running loop. Call `close` at the worker's end."""

    def __init__(
        self,
        area: Area,
        prefix_index: PrefixIndex,
        *,
        prefix_seed: int,
        held_blocks: HeldBlocks,
        prefills: Prefills,
        learning: Learning,
        rng: random.Random,
        measures: Mapping[tuple[str, str], int],
        labelled: Mapping[str, SeriesWriter],
        now: Callable[[], float],
    ) -> None:
        self.rng = rng
        self.load: LoadCounts = AreaLoad(area)
        self.prefix_index = prefix_index
        self.prefix_seed = prefix_seed
        self.held_blocks = held_blocks
        self.prefills = prefills
        self.learning = learning
        self._area = area
        self._measures = measures
        self._labelled = labelled
        self.environment: Mapping[str, str] = os.environ
        self.warn = Warnings(now).warn
        self._background = Background(work_failed)
        # At most one client, created for the first HTTP request, and shared by all copies (see `of`).
        self._clients: list[HttpClient] = []
        self._owner: Plugin | None = None

    def of(self, plugin: Plugin) -> "WorkerServices":
        """Returns the same services for one plugin. Exceptions of its background work are then counted as its faults.

        A prefix producer sees only its own tier of the index.
        """
        services = copy.copy(self)
        services._owner = plugin
        if isinstance(plugin, CutsPrompts) and plugin.tier:
            services.prefix_index = IndexTier(self.prefix_index, plugin.tier)
        return services

    def spawn(self, work: Coroutine[Any, Any, Any], timeout_s: float) -> Work:
        return self._background.spawn(work, timeout_s, owner=self._owner)

    def after(self, seconds: float) -> Work:
        return self._background.after(seconds)

    def every(self, seconds: float, act: Callable[[], object]) -> None:
        self._background.every(seconds, act, owner=self._owner)

    def http(self, method: str, url: str, headers: Mapping[str, str] | None = None, body: bytes = b"", *, timeout_s: float) -> Work:
        if not self._clients:
            self._clients.append(HttpClient())
        fetched = self._clients[0].fetch(method, url, headers, body)
        return self._background.spawn(fetched, timeout_s, f"{method} {url}", owner=self._owner)

    def stop(self) -> None:
        """Ends all work of plugins soon, because a later step of their configuration has failed."""
        self._stopping = asyncio.get_running_loop().create_task(self.close())

    async def close(self) -> None:
        """Ends all work of plugins. Called at the worker's end."""
        await self._background.close(self._clients[0].close if self._clients else None)

    def measure(self, plugin: Plugin, metric: Metric) -> AreaMeasure:
        if (plugin.name, metric.name) not in self._measures:
            raise PluginFault(undeclared("histogram", plugin, metric))
        return AreaMeasure(self._area, self._measures[plugin.name, metric.name])

    def count(self, plugin: Plugin, metric: Metric) -> SeriesCount:
        return SeriesCount(self._series("counter", plugin, metric), plugin, metric)

    def gauge(self, plugin: Plugin, metric: Metric) -> SeriesGauge:
        return SeriesGauge(self._series("gauge", plugin, metric), plugin, metric)

    def _series(self, kind: str, plugin: Plugin, metric: Metric) -> SeriesWriter:
        if metric.kind != kind or metric.name not in self._labelled:
            raise PluginFault(undeclared(kind, plugin, metric))
        return self._labelled[metric.name]


def undeclared(kind: str, plugin: Plugin, metric: Metric) -> str:
    """Returns the error text for a plugin that asks for a metric of this kind without declaring it."""
    return f"'{metric.name}' is no {kind} in the `metrics` of class {type(plugin).__name__}"


def work_failed(problem: BaseException) -> None:
    """Logs the failure of background work that no request awaits."""
    plugin = culprit(problem)
    name = {"plugin": plugin.name} if plugin is not None else {}
    log.error("work of a plugin failed", error=error_text(problem), exception=stack(problem), **name)
