"""Follows the Kubernetes API for the supervisor of several pools: one watch per resource and namespace for all of them.

    InferencePools and pods of a namespace        ─▶ endpoint table, by pool        `kube.pools_discovery`
    InferenceObjective, InferenceModelRewrite     ─▶ `objects_of_pools`
    InferencePools with the picker's Service      ─▶ the places of pools            `kube.placing`, if pools are found while the picker runs

A pool that is not as expected changes nothing for the others: the log says why, and the pool has the endpoints that can be found. The
picker is ready when the API server has listed everything for the first time.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import structlog

from workers.process.instance import Instance
from workers.process.pools import assigned_view, tell_assigned
from workers.shared.pool_names import NONE, Names
from workers.supervisor.configured_endpoints import Bounded
from workers.supervisor.endpoints.discovery import EndpointSpec
from workers.supervisor.endpoints.endpoints import EndpointTable
from workers.supervisor.kube.discovery import wanted
from workers.supervisor.kube.object_watch import KubeObjects
from workers.supervisor.kube.placing import Placing
from workers.supervisor.kube.pool import InferencePool, protocol_mismatch
from workers.supervisor.kube.pool_ports import Ports
from workers.supervisor.kube.pools_discovery import PoolsDiscovery
from workers.supervisor.kubernetes import Kubernetes
from workers.supervisor.objects_of_pools import PoolsObjects
from workers.supervisor.objects_watch import ObjectsWatch

UNEXPECTED: Final = "a pool is not as expected"

log = structlog.get_logger()


class KubernetesPools(Kubernetes):
    """Follows endpoints and objects of several pools. See `Kubernetes` for the order of the calls."""

    def __init__(self, *parts: Any, assign: Callable[[Names], None]) -> None:
        """`parts`: as for `Kubernetes`. `assign`: makes the supervisor use other names of pools."""
        super().__init__(*parts)
        self._assign = assign
        self._discoveries: Sequence[PoolsDiscovery] = ()
        self._objects: PoolsObjects | None = None
        self._placing: Placing | None = None
        if (places := self._instance.places) is not None:
            instance, names = self._instance, assigned_view(self._instance).names() or NONE
            ports = Ports(places.ports, instance.sockets.later, instance.lock.info["ports"]["grpc"])
            for number, placed in names.items():
                ports.take(placed.port, number)
            self._placing = Placing(places, names, self._report, ports)

    def follow_objects(self, pools: ObjectsWatch | PoolsObjects | None) -> None:
        """Gives the objectives and model rewrites of all pools that are InferencePools to `pools`."""
        assert isinstance(pools, PoolsObjects)
        self._objects = pools
        for namespace, changed in pools.asking.items():
            objects = KubeObjects(
                self._connected(), namespace, changed, report=self._report, outage=self._outage, expects=pools.expects(namespace)
            )
            pools.on_change(objects.notify_soon)
            self._background.keep(self._once_allowed(objects.run))
            if not self._predecessor.knew_endpoints:
                self._readiness.require(objects.missing)

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

    def unserved(self) -> Mapping[str, str]:
        return self._placing.unserved if self._placing is not None else {}

    def _discovery_of(self, namespace: str, pools: Sequence[Instance], present: Callable[[], EndpointTable]) -> PoolsDiscovery:
        numbers = [pool.pool or 0 for pool in pools]
        expected = Expected(lambda: [self._present().pools[number] for number in numbers], self._report)

        def listed() -> None:
            for number in set(numbers) - discovery.pools.keys():
                present().apply((), pool=number)  # its endpoints were those of a predecessor
            expected.look(discovery.pools, discovery.unread)
            self._listed(present)

        def choose(known: Mapping[str, InferencePool]) -> Mapping[int, InferencePool]:
            if self._placing is not None and self._placing.place(known):
                self._use(self._placing.names)
                discovery.apply_all()
            chosen = expected.choose(known)
            if self._readiness.loaded:
                expected.look(chosen, discovery.unread)
            return chosen

        def apply(specs: Collection[EndpointSpec], number: int) -> None:
            bounded = Bounded(self._present().pools[number], self._report)
            present().apply(bounded(specs), pool=number)

        discovery = PoolsDiscovery(
            self._connected(),
            namespace,
            choose,
            asks=any(pool.sources.asks_objects for pool in pools),
            apply=apply,
            listed=listed,
            report=self._report,
            outage=self._outage,
            successor=self._predecessor.existed,
        )
        return discovery

    def _use(self, names: Names) -> None:
        self._assign(names)
        tell_assigned(self._instance, names)
        log.info("pools that are served", pools=sorted(placed.name for placed in names.values()))
        if self._objects is not None:
            self._objects.use(self._present().pools)

    def _missing(self) -> str:
        return next(filter(None, (discovery.missing() for discovery in self._discoveries)), "")

    def _listed(self, present: Callable[[], EndpointTable]) -> None:
        if not self._missing():
            self._readiness.loaded = True
            log.info("endpoints are known", endpoints=len(present()))


class Expected:
    """Compares the InferencePools with what the pools of the picker expect, and reports each difference once."""

    def __init__(self, pools: Callable[[], Sequence[Instance]], report: Callable[..., None]) -> None:
        """`pools` returns those of one namespace. Pools without a name are empty places."""
        self._pools = pools
        self._report = report
        self._fixed = {pool.pool or 0: fixed for pool in pools() if (fixed := wanted(pool.options).fixed) is not None}
        self._said: dict[str, str] = {}

    def choose(self, known: Mapping[str, InferencePool]) -> Mapping[int, InferencePool]:
        """Returns the InferencePool of each pool that has one. `known`: all of the namespace, by name."""
        named = {pool.pool or 0: pool.kube.name for pool in self._pools() if pool.kube is not None and pool.kube.name}
        return self._fixed | {number: known[name] for number, name in named.items() if name in known}

    def look(self, chosen: Mapping[int, InferencePool], unread: Callable[[str], str]) -> None:
        """Reports what has become different. `unread` returns why there is no InferencePool of a name."""
        before, self._said = self._said, {}
        for pool in self._pools():
            name = pool.options.pool_name
            if name and (why := self._difference(pool, chosen.get(pool.pool or 0), unread)):
                self._said[name] = why
                if before.get(name) != why:
                    self._report(UNEXPECTED, pool=name, reason=why)
        for name in before.keys() - self._said.keys():
            log.info("the pool is as expected again", pool=name)

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
