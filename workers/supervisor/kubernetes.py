"""Follows the Kubernetes API for the supervisor. It is used only if endpoints come from Kubernetes.

    InferencePools and pods of a namespace      ─▶ endpoint table, by pool        `kube.discovery`
    InferenceObjective, InferenceModelRewrite   ─▶ `objects_of_pools`
    InferencePools with the picker's Service    ─▶ the places of pools            `kube.placing`, if pools are found while the picker runs
    Lease                                       ◀▶ Candidacy                      only with --ha-enable-leader-election
    Event on the only pool                      ◀─ ReloadEvents                   how each change of the configuration ended

One watch per resource and namespace serves all pools. If one of several pools is not as expected, the others are not affected: the log has
the reason, and the pool has the endpoints that can be found. The picker is then ready after the first lists of all resources.

Each part adds a condition to the readiness: endpoints, objects, leadership. If the feature gate `haPopulateNonLeaderDatastore` is off,
a picker that does not lead follows the pool and the objects only after it has led for the first time.
A successor uses its predecessor's endpoints until the API answers. It also continues to lead: the area has the time until which the
predecessor was the leader.
"""

import asyncio
import contextlib
import functools
import os
import random
import socket
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, Final

import structlog

from epp.config.written import STANDBY_GATE
from shm.areas import Area
from shm.documents import DocumentReader
from workers.process.instance import Instance
from workers.process.layout import LEADS_UNTIL
from workers.process.pool_views import assigned_view
from workers.shared import reload_status
from workers.shared.documents import NONE_PLACED, PlacedPools
from workers.supervisor.background import Background
from workers.supervisor.configured_endpoints import bounded
from workers.supervisor.endpoints.discovery import EndpointSpec
from workers.supervisor.endpoints.endpoints import EndpointTable
from workers.supervisor.kube.api import Api
from workers.supervisor.kube.discovery import KubernetesDiscovery, WantedPools
from workers.supervisor.kube.election import NEVER, Election
from workers.supervisor.kube.events import PoolEvents, ReloadEvents
from workers.supervisor.kube.expected import ExpectedPools, parser_mismatch
from workers.supervisor.kube.lease import Candidacy
from workers.supervisor.kube.object_kinds import PoolName
from workers.supervisor.kube.object_watch import KubeObjects
from workers.supervisor.kube.placing import Placing, Ports
from workers.supervisor.kube.pool import InferencePool
from workers.supervisor.kube.reflect import Outage, Reflector
from workers.supervisor.objects_of_pools import PoolsObjects
from workers.supervisor.predecessor import Predecessor
from workers.supervisor.readiness import Readiness

RESIGN_LOOK_S = 0.1
GOODBYE_S = 2.0
LOOK_S: Final = 1.0

log = structlog.get_logger()


class Kubernetes:
    """Follows endpoints and objects, and takes part in the election of a leader.

    Call `start` and `connect` first, then the `follow_...` methods, and `leave` at the end.
    """

    def __init__(
        self,
        present: Callable[[], Instance],
        area: Area,
        predecessor: Predecessor,
        readiness: Readiness,
        background: Background,
        report: Callable[..., None],
        assign: Callable[[PlacedPools], None],
    ) -> None:
        """`present`: returns the instance under the present configuration. `area`: the area of the supervisor.

        `assign`: makes the picker use other InferencePools in its places.
        """
        instance = self._instance = present()
        self._present = present
        self._predecessor = predecessor
        self._readiness = readiness
        self._background = background
        self._report = report
        self._outage = Outage(report)
        self.api: Api | None = None  # None until `connect`
        self._discoveries: Sequence[KubernetesDiscovery] = ()
        self._assign = assign
        self._placing: Placing | None = None
        if (places := instance.places) is not None:
            names = assigned_view(instance).names() or NONE_PLACED
            ports = Ports(places.ports, instance.sockets.later, instance.lock.info["ports"]["grpc"])
            for number, placed in names.items():
                ports.take(placed.port, number)
            self._placing = Placing(places, names, report, ports)
        self.candidacy: Candidacy | None = None  # None without leader election
        if instance.options.ha_enable_leader_election:
            self.candidacy = _candidacy(instance, area, predecessor)
            readiness.require(self.candidacy.missing)

    def start(self) -> None:
        """Starts to check whether the picker stops. When it stops, gives the lease up at once, so that another picker leads while these
        workers drain.
        """
        if self.candidacy is not None:
            self._background.every(RESIGN_LOOK_S, self._resign_if_leaving)

    def refusals(self) -> Mapping[str, str]:
        """Returns resource -> why the API server refuses to let this picker follow it."""
        return self._outage.refusals()

    def unserved(self) -> Mapping[str, str]:
        """Returns InferencePool -> why it is not served although it names this picker. Empty if the picker has one pool."""
        return self._placing.unserved if self._placing is not None else {}

    async def connect(self) -> None:
        """Connects to the API server and joins the election. Raises ValueError if there is no API server or no client library."""
        self.api = await Api.connect(os.environ)
        if self.candidacy is not None:
            self._background.keep(self.candidacy.run(self.api))

    def follow_objects(self, objects: PoolsObjects) -> None:
        """Gives `objects` the objectives and model rewrites of all pools that are InferencePools. A pod selector has none."""
        for namespace, changed in objects.asking.items():
            found = KubeObjects(
                self._connected(), namespace, changed, report=self._report, outage=self._outage, expects=objects.expects(namespace)
            )
            objects.on_change(found.notify_soon)
            self._background.keep(self._once_allowed(found.run))
            if not self._predecessor.knew_endpoints:  # otherwise the predecessor's objects serve until the API answers
                self._readiness.require(found.missing)

    def follow_endpoints(self, present: Callable[[], EndpointTable]) -> None:
        """Keeps the endpoints of each pool in the table that `present` returns equal to its pods."""
        pools: dict[str, list[Instance]] = defaultdict(list)  # by their namespace
        for pool in self._instance.every:
            if pool.sources.in_kubernetes:
                pools[pool.options.pool_namespace].append(pool)
                if self._predecessor.existed:
                    present().resume(pool.pool or 0)
        self._discoveries = [self._discovery_of(namespace, each, present) for namespace, each in pools.items()]
        # A successor inherits `loaded` from its predecessor. So it is ready at once, until discovery finds that something is missing.
        self._readiness.require(lambda: "" if self._readiness.loaded else self._missing())
        for discovery in self._discoveries:
            self._background.keep(self._once_allowed(discovery.run))

    def _discovery_of(self, namespace: str, pools: Sequence[Instance], present: Callable[[], EndpointTable]) -> KubernetesDiscovery:
        numbers = [pool.pool or 0 for pool in pools]
        expected = ExpectedPools(lambda: [self._present().every[number] for number in numbers], self._report)

        def choose(known: Mapping[str, InferencePool]) -> Mapping[int, InferencePool]:
            if self._placing is not None and self._placing.place(known):
                self._assign(self._placing.names)
                discovery.apply_all()
            chosen = expected.choose(known)
            if self._readiness.loaded:
                expected.look(chosen, discovery.unread)
            return chosen

        def apply(specs: Collection[EndpointSpec], number: int) -> None:
            present().apply(bounded(self._present().every[number], specs, self._report), pool=number)

        def state_changed(missing: str) -> None:
            if missing:
                self._readiness.loaded = False
                log.warning("not ready", why=missing)
                return
            expected.look(discovery.pools, discovery.unread)
            if not self._missing():
                self._readiness.loaded = True
                log.info("endpoints are known", endpoints=len(present()))

        discovery = KubernetesDiscovery(
            functools.partial(Reflector, self._connected(), report=self._report, outage=self._outage),
            WantedPools(
                namespace,
                numbers,
                asks=any(pool.sources.asks_objects for pool in pools),
                only=None if self._instance.pools else expected.name_of(self._instance),
            ),
            choose,
            apply=apply,
            state_changed=state_changed,
            mismatch=lambda pool: parser_mismatch(self._present(), pool),
            successor=self._predecessor.existed,
        )
        return discovery

    def apply_all(self) -> None:
        """Applies the endpoints of all pools soon, under the present limits."""
        for discovery in self._discoveries:
            discovery.apply_all()

    def _missing(self) -> str:
        return next(filter(None, (discovery.missing() for discovery in self._discoveries)), "")

    def tell_reloads(self) -> None:
        """Reports how each change of the only pool's configuration ended, as an event on its InferencePool, if it has one."""
        instance, options = self._instance, self._instance.options
        if instance.pools or not instance.sources.asks_objects:
            return
        events = PoolEvents(
            options.pool_namespace,
            PoolName(options.pool_name, options.pool_group),
            reporter=os.environ.get("POD_NAME") or socket.gethostname(),
            uid=lambda: next((pool.uid for discovery in self._discoveries for pool in discovery.pools.values()), ""),
            report=self._report,
        )
        status = DocumentReader(instance.layout.status, instance.memory.reload)
        reloads = ReloadEvents(functools.partial(reload_status.read, status), events)
        self._background.every(LOOK_S, reloads.look)
        self._background.keep(events.run(self._connected()))

    async def leave(self) -> None:
        """Gives the lease back if the whole picker ends, cancels every request to the API, and closes the connections."""
        if self.candidacy is not None and self._readiness.leaving:
            self.candidacy.resign()
            await self.candidacy.given_back()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                await self._background.cancel_tasks()
                await self._connected().close()

    def _connected(self) -> Api:
        assert self.api is not None, "`connect` comes first"
        return self.api

    def _resign_if_leaving(self) -> None:
        if self.candidacy is not None and self._readiness.leaving:
            self.candidacy.resign()

    async def _once_allowed(self, follow: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs `follow`. If the feature gate is off, first waits until this picker is elected, unless a predecessor knew endpoints."""
        standby_follows = self._predecessor.knew_endpoints or self._instance.config.gates[STANDBY_GATE]
        if self.candidacy is not None and not standby_follows:
            await self.candidacy.elected()
        await follow()


def _candidacy(instance: Instance, area: Area, predecessor: Predecessor) -> Candidacy:
    """Creates this picker's part in the election of a leader. It leads from the start if its predecessor did."""
    options, leads_until_ms = instance.options, predecessor.leads_until_ms
    scalars, place = area.scalars, area.schema.scalar[LEADS_UNTIL]

    def keep(leads_until: float) -> None:
        scalars[place] = max(0, int(max(leads_until, 0.0) * 1e3))

    leads_until = leads_until_ms / 1e3 if leads_until_ms else NEVER
    election = Election(instance.identity, leads_until=leads_until, random=random.random)
    keep(leads_until)
    return Candidacy(election, options.pool_namespace, options.pool_name, keep=keep)
