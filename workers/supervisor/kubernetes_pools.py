"""Follows the Kubernetes API for the supervisor of several pools: one watch per resource and namespace for all of them.

    InferencePools and pods of a namespace        ─▶ endpoint table, by pool        `kube.pools_discovery`
    InferenceObjective, InferenceModelRewrite     ─▶ an ObjectsWatch for each pool

A pool that is not as expected changes nothing for the others: the log says why, and the pool has the endpoints that can be found. The
picker is ready when the API server has listed everything for the first time.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import structlog

from workers.process.instance import Instance
from workers.supervisor.configured_endpoints import Bounded
from workers.supervisor.endpoints.endpoints import EndpointTable
from workers.supervisor.kube.discovery import wanted
from workers.supervisor.kube.object_kinds import Found, PoolName
from workers.supervisor.kube.object_watch import KubeObjects
from workers.supervisor.kube.pool import InferencePool, protocol_mismatch
from workers.supervisor.kube.pools_discovery import PoolsDiscovery
from workers.supervisor.kubernetes import Kubernetes
from workers.supervisor.objects_watch import RETRY_S, ObjectsWatch, objects_watch, pool_name

UNEXPECTED: Final = "a pool is not as expected"

log = structlog.get_logger()


class KubernetesPools(Kubernetes):
    """Follows endpoints and objects of several pools. See `Kubernetes` for the order of the calls."""

    _discoveries: Sequence[PoolsDiscovery] = ()

    def follow_objects(self, _watch: ObjectsWatch | None) -> None:
        """Follows objectives and model rewrites of all pools that are InferencePools."""
        watches = {
            pool: watch for pool in self._instance.pools if pool.sources.asks_objects and (watch := objects_watch(pool, self._report))
        }
        for namespace, pools in by_namespace(list(watches)).items():
            changed: dict[PoolName, list[Callable[[Found, bool], None]]] = defaultdict(list)
            for pool in pools:
                watches[pool].start(successor=self._predecessor.existed)
                changed[pool_name(pool)].append(watches[pool].set_api_objects)
            expects = {kind for pool in pools for kind in watches[pool].expects}
            objects = KubeObjects(self._connected(), namespace, changed, report=self._report, outage=self._outage, expects=expects)
            self._background.keep(self._once_allowed(objects.run))
            if not self._predecessor.knew_endpoints:
                self._readiness.require(objects.missing)
        self._background.keep(provide_places(list(watches.values())))

    def follow_endpoints(self, present: Callable[[], EndpointTable]) -> None:
        """Keeps the endpoints of each pool in the table that `present` returns equal to its pods."""
        pools = [pool for pool in self._instance.pools if pool.sources.in_kubernetes]
        if self._predecessor.existed:
            for pool in pools:
                present().resume(pool.pool or 0)
        self._discoveries = [self._discovery_of(namespace, each, present) for namespace, each in by_namespace(pools).items()]
        self._readiness.require(lambda: "" if self._readiness.loaded else self._missing())
        for discovery in self._discoveries:
            self._background.keep(self._once_allowed(discovery.run))

    def tell_reloads(self) -> None:
        """Does nothing: configurations do not change."""

    def _discovery_of(self, namespace: str, pools: Sequence[Instance], present: Callable[[], EndpointTable]) -> PoolsDiscovery:
        bounded = {pool.pool or 0: Bounded(pool, self._report) for pool in pools}
        expected = Expected(pools, self._report)

        def listed() -> None:
            for number in bounded.keys() - discovery.pools.keys():
                present().apply((), pool=number)  # its endpoints were those of a predecessor
            expected.look(discovery.pools, discovery.unread)
            self._listed(present)

        def choose(known: Mapping[str, InferencePool]) -> Mapping[int, InferencePool]:
            chosen = expected.choose(known)
            if self._readiness.loaded:
                expected.look(chosen, discovery.unread)
            return chosen

        discovery = PoolsDiscovery(
            self._connected(),
            namespace,
            choose,
            asks=any(pool.sources.asks_objects for pool in pools),
            apply=lambda specs, number: present().apply(bounded[number](specs), pool=number),
            listed=listed,
            report=self._report,
            outage=self._outage,
            successor=self._predecessor.existed,
        )
        return discovery

    def _missing(self) -> str:
        return next(filter(None, (discovery.missing() for discovery in self._discoveries)), "")

    def _listed(self, present: Callable[[], EndpointTable]) -> None:
        if not self._missing():
            self._readiness.loaded = True
            log.info("endpoints are known", endpoints=len(present()))


class Expected:
    """Compares the InferencePools with what the pools of the picker expect, and reports each difference once."""

    def __init__(self, pools: Sequence[Instance], report: Callable[..., None]) -> None:
        """`pools`: those of one namespace."""
        self._pools = pools
        self._report = report
        self._fixed = {pool.pool or 0: fixed for pool in pools if (fixed := wanted(pool.options).fixed) is not None}
        self._said: dict[int, str] = {}

    def choose(self, known: Mapping[str, InferencePool]) -> Mapping[int, InferencePool]:
        """Returns the InferencePool of each pool that has one. `known`: all of the namespace, by name."""
        named = {pool.pool or 0: pool.kube.name for pool in self._pools if pool.kube is not None and pool.kube.name}
        return self._fixed | {number: known[name] for number, name in named.items() if name in known}

    def look(self, chosen: Mapping[int, InferencePool], unread: Callable[[str], str]) -> None:
        """Reports what has become different. `unread` returns why there is no InferencePool of a name."""
        for pool in self._pools:
            number = pool.pool or 0
            why = self._difference(pool, chosen.get(number), unread)
            if why != self._said.get(number, ""):
                self._said[number] = why
                if why:
                    self._report(UNEXPECTED, pool=pool.options.pool_name, reason=why)
                else:
                    log.info("the pool is as expected again", pool=pool.options.pool_name)

    def _difference(self, pool: Instance, found: InferencePool | None, unread: Callable[[str], str]) -> str:
        kube = pool.kube
        assert kube is not None
        if found is None:
            return f"InferencePool '{kube.name}' in namespace {pool.options.pool_namespace} is not known: {unread(kube.name)}"
        parsers = [(parser.name, parser.app_protocols) for parser in pool.config.pipeline.wiring.parsers]
        if mismatch := protocol_mismatch(found, parsers):
            return mismatch
        if kube.own_port and found.port not in (0, kube.own_port):
            return (
                f"InferencePool '{kube.name}' names port {found.port} of its picker, and the pools file says {kube.own_port}: requests "
                "arrive only if the Service leads from one to the other"
            )
        return ""


def by_namespace(pools: Sequence[Instance]) -> Mapping[str, Sequence[Instance]]:
    """Returns pools in Kubernetes by their namespace."""
    found: dict[str, list[Instance]] = defaultdict(list)
    for pool in pools:
        found[pool.options.pool_namespace].append(pool)
    return found


async def provide_places(watches: Sequence[ObjectsWatch]) -> None:
    """Gives bands that wait for a place one that has become free, until it is cancelled."""
    while watches:
        await asyncio.sleep(RETRY_S)
        for watch in watches:
            watch.look_for_places()
