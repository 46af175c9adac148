"""Finds endpoints without Kubernetes: in the flag --endpoints, or in a file (the file-discovery plugin)."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from epp.plugins.discovery import FileDiscovery
from workers.process.instance import Instance
from workers.supervisor.background import Background
from workers.supervisor.endpoints.churn import Churn
from workers.supervisor.endpoints.discovery import Discovery, Entry, parse_flag
from workers.supervisor.endpoints.endpoints import EndpointTable
from workers.supervisor.endpoints.endpoints_file import File, follow


async def follow_configured(
    instance: Instance,
    table: EndpointTable,
    background: Background,
    report: Callable[..., None],
    on_change: Callable[[], None],
    *,
    successor: bool,
) -> list[asyncio.Task[Any]]:
    """Gives `table` the endpoints. Starts tasks that resolve host names again and, if the plugin says so, watch the file.

    Returns these tasks. `on_change` is called for each change of the file. Raises DiscoveryError for a bad flag or file. `successor`:
    whether the supervisor has a predecessor. If so, it keeps the predecessor's endpoints while the file is bad, and scrapes them at once,
    even if their names cannot be resolved.
    """
    tasks: list[asyncio.Task[Any]] = []
    discovery = Discovery(lambda specs: table.apply(specs, complete=discovery.complete), report)
    flag, plugin = instance.options.endpoints, instance.config.discovery
    entries: list[Entry] | None = None
    if flag:
        entries = parse_flag(flag)
    elif isinstance(plugin, FileDiscovery):
        churn = Churn(plugin.path, report, on_change, time.monotonic)
        expects = successor and bool(table.inherited())
        file = File(plugin.path, report, clusters=plugin.clusters, on_change=churn.changed, expects=expects)
        entries = file.reload() if successor else file.load()
        tasks.append(background.keep(follow(file, discovery.use, watch=plugin.watch)))
    if entries is None:
        table.resume()
    elif successor:
        discovery.resume(entries, table.inherited())
        tasks.append(background.keep(discovery.use(entries)))
    else:
        await discovery.use(entries)
    tasks.append(background.keep(discovery.resolve_forever()))
    return tasks
