"""Finds out, in the parent, what has ended a worker: the request that the worker was deciding, and the pool of the plugin that was running.

A request that has ended two workers is refused (`workers.shared.query_of_death`). If there are several pools, a pool with plugins that have
ended two workers is taken out of service (`workers.shared.pool_crashes`).
"""

import contextlib
import time
from collections.abc import Iterator

import structlog

from workers.host.exit_codes import ExitCode
from workers.process.generations import GenerationLost
from workers.process.instance import Instance
from workers.process.pool_views import assigned_view, present
from workers.shared.documents import EMPTY
from workers.shared.pool_crashes import LOADING, RUNNING, PoolCrashes, culprit, named
from workers.shared.query_of_death import DECIDING, LISTED_S, Suspects

log = structlog.get_logger()


class Culprits:
    """Knows which requests and which pools have ended workers."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._suspects = Suspects(instance.words.queries_of_death, instance.memory.areas.scalars)
        self._crashes = PoolCrashes(instance.words.out_of_service)
        self._assigned = assigned_view(instance)

    def request_ended(self, ordinal: int) -> None:
        """Counts a crash against the request that the worker was deciding when the worker ended."""
        deciding = self._instance.memory.areas.scalars(DECIDING)[ordinal]
        if deciding and self._suspects.ended(deciding, time.monotonic()):
            fingerprint = f"{deciding & (1 << 64) - 1:016x}"
            log.error("a request has ended two workers: if it is sent again, it gets 400", fingerprint=fingerprint, for_s=LISTED_S)

    def pool_ended(self, ordinal: int, child: str, code: int, *, crashed: bool) -> int | None:
        """Counts the end of a worker against the pool that is to blame. Returns the pool's number, or None if the pool is not known or the
        picker has one pool.

        `crashed`: whether the worker crashed or hung. A plugin may also have ended the worker with the exit code of success.
        """
        areas = self._instance.memory.areas
        deciding, running, loading = (areas.scalars(name)[ordinal] for name in (DECIDING, RUNNING, LOADING))
        area = areas.area(ordinal)
        for name in (RUNNING, LOADING):  # no process uses the area at this moment; the successor must begin without a mark
            area.scalars[area.schema.scalar[name]] = 0
        found = culprit(deciding, running, loading)
        if found is None or not (crashed or (found.mark and code == ExitCode.OK)):
            return None
        view = present(self._instance).pools[found.pool]
        name, number = view.options.pool_name, view.number_in_force
        plugin = named(found.mark, _plugins(view))
        more = {"plugin": plugin} if plugin else {}
        log.error("a worker ended while it worked for a pool", child=child, pool=name, **more)
        if self._crashes.crashed(found, name, number, deciding, time.monotonic()):
            log.error("pool is out of service until its configuration changes: its plugins have ended two workers", pool=name, **more)
            self._instance.pipes.wake_workers()
        return found.pool

    def look(self, now: float) -> None:
        """Forgets requests that have ended no worker for a long time, and the crashes of pools that are gone."""
        self._suspects.look(now)
        if (names := self._assigned.names()) is None:
            return
        for pool in [pool for pool, name in self._crashes.seen.items() if names.get(pool, EMPTY).name != name]:
            self._crashes.renamed(pool)


def _plugins(view: Instance) -> Iterator[str]:
    """Yields the names of the plugins of a pool: of the configuration of its start, and of later ones, which the parent does not load."""
    yield from view.config.pipeline.plugins
    for later in (view.generations.current, view.generations.candidate):
        with contextlib.suppress(GenerationLost):
            yield from later().foreign
