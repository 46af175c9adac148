"""Follows objectives and model rewrites for all pools of the picker: an ObjectsWatch for each pool that may have some.

    directory ─ Folder ───────────────┐
                                      ├─▶ ObjectsWatch of each pool
    API server, by namespace ─────────┘

The directory is read once for all pools, and one timer looks for places of bands. At the first start, a bad file ends the instance, as a
bad endpoints file does. Pools that appear while the picker runs get the objects known so far.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Final

from workers.host.directory import LOOK_EVERY_S, changes
from workers.process.instance import FIRST, Instance
from workers.shared.objectives import static_bands
from workers.supervisor.kube.object_files import ANY_POOL, Folder
from workers.supervisor.kube.object_kinds import Found, PoolName
from workers.supervisor.objects_watch import NOTHING, ObjectsWatch, flow_areas, objects_watch, pool_name

READ_TRIES_MAX: Final = 3
RETRY_S: Final = 1.0  # how often to look for places while a band waits

Changed = Callable[[Found, bool], None]


class PoolsObjects:
    """The objectives and rewrites of all pools. Call `start` first, then `run`.

    `asking`: the pools with objects in an API server, by namespace and name, with the function to call when these objects change. A
    namespace stays the same mapping.
    """

    def __init__(self, instance: Instance, report: Callable[..., None]) -> None:
        folder = instance.options.objects_dir
        only = pool_name(instance) if instance.options.pool_given else ANY_POOL
        several = [pool_name(pool) for pool in instance.pools] or None
        self._folder = Folder(folder, report, several, only=only) if folder else None
        self._pools: Sequence[Instance] = instance.every
        self._report = report
        self._found: Sequence[Found] | None = None  # the directory's objects for each pool
        self._watches: dict[int, tuple[Instance, ObjectsWatch]] = {}
        self._tell: list[Callable[[], None]] = []
        self.asking: dict[str, dict[PoolName, list[Changed]]] = {}

    def start(self, *, successor: bool) -> None:
        """Publishes the first state. Raises DiscoveryError for a bad file, unless this is a successor."""
        if self._folder is not None:
            self._found = self._folder.reload() if successor else self._folder.load()
        self._watch(successor)

    def reconfigured(self, before: Instance, pool: Instance) -> None:
        """Gives places to the bands of a pool's later configuration. Bands of the configuration `before` keep their places."""
        number = pool.pool or 0
        known = self._watches.get(number)
        watch = known[1] if known is not None else objects_watch(before, self._report) or objects_watch(pool, self._report)
        if watch is None:
            return
        if known is None:
            watch.start(successor=pool.pool is None, directory=NOTHING)
        watch.use(static_bands(pool.config.flow), flow_areas(pool))
        self._watches[number] = pool, watch

    def use(self, pools: Sequence[Instance]) -> None:
        """Publishes the objects of these pools from now on, which replace pools in some places."""
        self._pools = pools
        if self._folder is not None:
            self._found = self._folder.split([pool_name(pool) for pool in pools])
        self._watch(False)
        for tell in self._tell:
            tell()

    def on_change(self, tell: Callable[[], None]) -> None:
        """Sets the function to call after a change of pools, so that new pools get the objects of the API server."""
        self._tell.append(tell)

    def expects(self, namespace: str) -> Collection[str]:
        """The kinds of objects that the API server must have given to a predecessor."""
        watches = [watch for pool, watch in self._watches.values() if pool.options.pool_namespace == namespace]
        return {kind for watch in watches for kind in watch.expects}

    async def run(self) -> None:
        """Follows the directory, and gives free places to bands that wait for a place, until it is cancelled."""
        folder = self._folder
        async with changes([folder.path] if folder is not None else []) as next_change:
            while True:
                waits = any(watch.waits for _, watch in self._watches.values())
                await next_change(RETRY_S if waits else LOOK_EVERY_S)
                if folder is not None:
                    await self._follow(folder)
                for _, watch in self._watches.values():
                    watch.look_for_places()

    def _watch(self, successor: bool) -> None:
        """Starts to publish for each pool that is new in its place."""
        for number, pool in enumerate(self._pools):
            before = self._watches.get(number)
            if before is not None and before[0].options.pool_name == pool.options.pool_name:
                continue
            self._watches.pop(number, None)
            # Without objects, the bands of the first configuration of several pools have places that need no document.
            published = pool.pool is None or pool.sources.has_objects or (successor and pool.number > FIRST)
            watch = objects_watch(pool, self._report) if published else None
            if watch is not None:
                watch.start(successor=successor, directory=self._of(number))
                self._watches[number] = pool, watch
        for asking in self.asking.values():
            asking.clear()
        for pool, watch in self._watches.values():
            if pool.sources.asks_objects:
                self.asking.setdefault(pool.options.pool_namespace, {}).setdefault(pool_name(pool), []).append(watch.set_api_objects)

    def _of(self, number: int) -> Found | None:
        """Returns the directory's objects of a pool, or None if the directory cannot be read."""
        if self._folder is None:
            return NOTHING
        return self._found[number] if self._found is not None else None

    async def _follow(self, folder: Folder) -> None:
        """Reads the directory again, and publishes what has changed."""
        for _ in range(READ_TRIES_MAX):
            pools = folder.pools
            # In a thread: reading a thousand long files takes seconds, and the event loop must keep its heartbeat.
            found = await asyncio.to_thread(folder.reload)
            if folder.pools is pools:
                break
        else:  # pools change all the time
            return
        if found is None or found == self._found:
            return
        self._found = found
        for number, (_, watch) in self._watches.items():
            watch.use_directory(found[number])
