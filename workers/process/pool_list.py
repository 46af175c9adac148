"""The list of the pools of a --pools-file: which pool has which place. The list changes like a configuration, and has its own generations.

    pools file ─ trial: placed ─▶ PoolList ─ publish ─▶ all processes: relisted(instance, PoolList)

A picker has a place for each pool of the file at the start, and SPARE further places. A pool keeps its place while the file contains the
pool. When a pool is removed from the file, a later pool can take its place. The picker serves a new pool as soon as its configuration is in
force.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Final

import msgspec

from epp.config.pools_file import KubePool, PoolEntry, PoolsFile
from epp.request.pool_choice import Matched

SPARE: Final = 8
RESTART: Final = "restart the picker"


class Listed(msgspec.Struct, frozen=True, array_like=True):
    """One pool in its place. `since`: the number of the list that added the pool. `config_file`: "" if the pool's configuration is in no
    file.

    The other fields are as in `PoolEntry`, with the pool's limit of endpoints.
    """

    name: str
    port: int = 0
    authorities: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    endpoints: str = ""
    max_endpoints: int = 0
    kube: tuple[str, str, str, tuple[int, ...], int] | None = None
    since: int = 1
    config_file: str = ""

    @property
    def matched(self) -> Matched:
        """Returns the rules that say which requests are for the pool."""
        return Matched(self.name, self.port, self.authorities, self.models)

    @property
    def kube_pool(self) -> KubePool | None:
        return None if self.kube is None else KubePool(*self.kube)


PoolList = Mapping[int, Listed]  # by place


class Misplaced(Exception):
    """Raised if a change of the pools file needs a restart. `entry`: the pool that needs the restart."""

    def __init__(self, entry: PoolEntry, why: str) -> None:
        super().__init__(f"pool '{entry.name}': {why}: {RESTART}")
        self.entry = entry


def listed(file: str, entry: PoolEntry, max_endpoints: int, since: int) -> Listed:
    """Returns a pool of the file as an entry of the list. `file`: the path of the file. `max_endpoints`: the limit of the pool."""
    config_file = os.path.join(os.path.dirname(file), entry.config_file) if entry.config_file else ""
    kube = tuple(entry.kube) if entry.kube is not None else None
    endpoints = ",".join(entry.endpoints)
    matchers = entry.port, entry.authorities, entry.models
    return Listed(entry.name, *matchers, endpoints, max_endpoints, kube, since, config_file)  # type: ignore[arg-type]


def placed(pool_list: PoolList, room: Sequence[int], ports: Collection[int], file: PoolsFile, number: int) -> dict[int, Listed]:
    """Returns the list for the pools of a changed file. `pool_list`: the present list. `number`: the number of the new list.

    `room`: the number of endpoints for which each place has memory. `ports`: the ports on which the picker listens for single pools.

    Raises Misplaced for a change that needs a restart.
    """
    present = {each.name: (place, each) for place, each in pool_list.items()}
    named = {entry.name for entry in file.pools}
    kept = {place for place, each in present.values() if each.name in named}
    for _, each in present.values():
        if each.kube is not None and each.name not in named:
            raise Misplaced(_gone(each), "its endpoints come from Kubernetes, and it is removed")
    free = iter(sorted(set(range(len(room))) - kept))
    found: dict[int, Listed] = {}
    for entry in file.pools:
        known = present.get(entry.name)
        before = known[1] if known is not None else None
        place = known[0] if known is not None else next(free, None)
        if entry.port and entry.port not in ports:
            raise Misplaced(entry, f"port {entry.port} is new, and the picker listens at the ports that it had at the start")
        if (before.kube if before is not None else None) != (tuple(entry.kube) if entry.kube is not None else None):
            raise Misplaced(entry, "'poolName', 'namespace', 'selector', 'targetPorts' or the port of a pool in Kubernetes changes")
        if place is None:
            raise Misplaced(entry, f"all {len(room)} places for pools are taken")
        most = entry.max_endpoints or room[place]
        if max(most, len(entry.endpoints)) > room[place]:
            why = f"it has up to {max(most, len(entry.endpoints))} endpoints, and there is memory for {room[place]} of it"
            raise Misplaced(entry, why)
        found[place] = listed(file.source, entry, most, number if before is None else before.since)
    return found


def _gone(before: Listed) -> PoolEntry:
    return PoolEntry(before.name, before.port, (), (), None, "", (), 0)
