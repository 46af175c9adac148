"""Finds endpoints without Kubernetes: in the flag --endpoints, or in a file (the file-discovery plugin)."""

import asyncio
import time
from collections.abc import Callable, Collection
from typing import Any, Final

from epp.plugins.discovery import FileDiscovery
from workers.process.instance import Instance
from workers.supervisor.background import Background
from workers.supervisor.endpoints.discovery import Discovery, EndpointSpec, Entry, parse_flag
from workers.supervisor.endpoints.endpoints import EndpointTable
from workers.supervisor.endpoints.endpoints_file import File, follow

WINDOW_S: Final = 10.0
MANY: Final = 10  # changes within WINDOW_S
REPORT_EVERY_S: Final = 60.0
WHY: Final = "each change is read and published: write the file once for several changes"


class Churn:
    """Reports an endpoints file that changes all the time. `now` is in monotonic seconds.

    The supervisor reads and publishes each change. So a program that rewrites the file without end costs the supervisor time, and endpoints
    may come and go. Routing continues meanwhile. Changes within a short time are read once.
    """

    def __init__(self, path: str, report: Callable[..., None], count: Callable[[], None], now: Callable[[], float]) -> None:
        """`count` is called for each change. `report(event, **fields)` is called at most every REPORT_EVERY_S."""
        self._path = path
        self._report = report
        self._count = count
        self._now = now
        self._since = 0.0
        self._changes = 0
        self._report_at = 0.0  # the earliest time of the next report

    def changed(self) -> None:
        """Counts one change of the file. Reports the file if it had MANY changes within WINDOW_S."""
        self._count()
        now = self._now()
        if now - self._since > WINDOW_S:
            self._since, self._changes = now, 0
        self._changes += 1
        if self._changes >= MANY and now >= self._report_at:
            self._report_at = now + REPORT_EVERY_S
            seconds = round(now - self._since, 1)
            self._report("the endpoints file changes often", file=self._path, reads=self._changes, seconds=seconds, why=WHY)


def bounded(pool: Instance, specs: Collection[EndpointSpec], report: Callable[..., None]) -> Collection[EndpointSpec]:
    """Drops the endpoints of one of several pools above its limit, so that no pool takes the slots of the others."""
    most = pool.options.max_endpoints
    if pool.pool is None or len(specs) <= most:
        return specs
    report("a pool has too many endpoints", pool=pool.options.pool_name, left_out=len(specs) - most, reason="raise its maxEndpoints")
    return sorted(specs)[:most]


async def follow_configured(
    instance: Instance,
    present: Callable[[], EndpointTable],
    background: Background,
    report: Callable[..., None],
    on_change: Callable[[], None],
    *,
    successor: bool,
) -> list[asyncio.Task[Any]]:
    """Publishes the endpoints to the table that `present` returns. Starts tasks that resolve host names again and, if the plugin says so,
    watch the file.

    Returns these tasks. `on_change` is called for each change of the file. Raises DiscoveryError for a bad flag or file. `successor`:
    whether the supervisor has a predecessor. If so, it keeps the predecessor's endpoints while the file is bad, and scrapes them at once,
    even if their names cannot be resolved.
    """
    tasks: list[asyncio.Task[Any]] = []
    pool = instance.pool or 0

    def apply(specs: Collection[EndpointSpec]) -> None:
        present().apply(bounded(instance, specs, report), complete=discovery.complete, pool=pool)

    discovery = Discovery(apply, report, pool)
    flag, plugin = instance.options.endpoints, instance.config.discovery
    entries: list[Entry] | None = None
    if flag:
        entries = parse_flag(flag)
    elif isinstance(plugin, FileDiscovery):
        churn = Churn(plugin.path, report, on_change, time.monotonic)
        expects = successor and bool(present().inherited(pool))
        file = File(plugin.path, report, clusters=plugin.clusters, on_change=churn.changed, expects=expects)
        entries = file.reload() if successor else file.load()
        tasks.append(background.keep(follow(file, discovery.use, watch=plugin.watch)))
    if entries is None:
        present().resume(pool)
    elif successor:
        discovery.resume(entries, present().inherited(pool))
        tasks.append(background.keep(discovery.use(entries)))
    else:
        await discovery.use(entries)
    if not flag or any(entry.names for entry in parse_flag(flag)):
        tasks.append(background.keep(discovery.resolve_forever()))
    return tasks
