"""Finds the pool with the plugin that has ended a worker, in the parent, and takes a pool out of service if its plugins have ended two
(`workers.shared.pool_crashes`).
"""

import time

import structlog

from workers.host.exit_codes import ExitCode
from workers.process.instance import Instance
from workers.process.pools import assigned_view, present
from workers.shared.pool_crashes import LOADING, RUNNING, PoolCrashes, culprit, named
from workers.shared.pool_names import EMPTY
from workers.shared.query_of_death import DECIDING

log = structlog.get_logger()


class Culprits:
    """Knows the crashes of each of several pools."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._crashes = PoolCrashes(instance.words.out_of_service)
        self._assigned = assigned_view(instance) if instance.places is not None else None

    def ended(self, ordinal: int, child: str, code: int, *, crashed: bool) -> int | None:
        """Acts on the end of a worker. Returns the number of the pool that is to blame; None: not known.

        `crashed`: whether the worker crashed or hung. A plugin may also have ended it with the code of success.
        """
        areas = self._instance.memory.areas
        deciding, running, loading = (areas.scalars(name)[ordinal] for name in (DECIDING, RUNNING, LOADING))
        area = areas.area(ordinal)
        for name in (RUNNING, LOADING):  # until a successor has the area, no process writes there, and its crash must count as another one
            area.scalars[area.schema.scalar[name]] = 0
        found = culprit(deciding, running, loading)
        if found is None or not (crashed or (found.mark and code == ExitCode.OK)):
            return None
        view = present(self._instance).pools[found.pool]
        name, number = view.options.pool_name, view.number_in_force
        plugin = named(found.mark, view.config.pipeline.plugins)
        more = {"plugin": plugin} if plugin else {}
        log.error("a worker ended while it worked for a pool", child=child, pool=name, **more)
        if self._crashes.crashed(found, name, number, deciding, time.monotonic()):
            log.error("pool is out of service until its configuration changes: its plugins have ended two workers", pool=name, **more)
            self._instance.pipes.wake_workers()
        return found.pool

    def look(self) -> None:
        """Forgets the crashes of pools that are gone."""
        if self._assigned is None or (names := self._assigned.names()) is None:
            return
        for pool in [pool for pool, name in self._crashes.seen.items() if names.get(pool, EMPTY).name != name]:
            self._crashes.renamed(pool)
