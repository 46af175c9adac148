"""Follows the Kubernetes API for the supervisor. It is used only if the endpoints come from Kubernetes.

    InferencePool, its pods                     ─▶ endpoint table
    InferenceObjective, InferenceModelRewrite   ─▶ ObjectsWatch
    Lease                                       ◀▶ Candidacy            only with --ha-enable-leader-election
    Event on the pool                           ◀─ ReloadEvents         how each change of the configuration ended

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
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any, Final

import structlog

from epp.config.written import STANDBY_GATE
from shm.areas import Area
from shm.documents import DocumentReader
from workers.process.instance import Instance
from workers.process.layout import LEADS_UNTIL
from workers.shared import reload_status
from workers.shared.reload_status import ReloadStatus
from workers.supervisor.background import Background
from workers.supervisor.endpoints.endpoints import EndpointTable
from workers.supervisor.kube.api import Api
from workers.supervisor.kube.discovery import KubernetesDiscovery, wanted
from workers.supervisor.kube.election import NEVER, Election
from workers.supervisor.kube.events import Events
from workers.supervisor.kube.lease import Candidacy
from workers.supervisor.kube.object_kinds import PoolName
from workers.supervisor.kube.object_watch import KubeObjects
from workers.supervisor.kube.pool import protocol_mismatch
from workers.supervisor.kube.reflect import Outage
from workers.supervisor.objects_of_pools import PoolsObjects
from workers.supervisor.objects_watch import ObjectsWatch
from workers.supervisor.predecessor import Predecessor
from workers.supervisor.readiness import Readiness

RESIGN_LOOK_S = 0.1
GOODBYE_S = 2.0
LOOK_S: Final = 1.0
RELOADED: Final = "ConfigurationReloaded"
REFUSED: Final = "ConfigurationRefused"
ROLLED_BACK: Final = "ConfigurationRolledBack"
TAKEN_BACK: Final = "error[rolled-back]"

log = structlog.get_logger()


class ReloadEvents:
    """Tells how each change of the configuration ended, once, as an event on the pool (`workers.supervisor.kube.events`).

    The state that it finds when it is created causes no event: a predecessor has told it already, or nothing was reloaded yet.
    """

    def __init__(self, read: Callable[[], ReloadStatus | None], events: Events) -> None:
        self._read = read
        self._events = events
        status = read()
        self._finished = status.finished if status is not None else 0

    def look(self) -> None:
        """Tells how the last attempt ended, if it has ended since the last call."""
        status = self._read()
        if status is None or status.busy or status.finished == self._finished:
            return
        self._finished = status.finished
        generation = f"generation {status.generation} ({status.hash})"
        if status.successful:
            tried = status.tryout
            beside = f"; candidate {tried.generation} ({tried.hash}) is tried {tried.share}" if tried is not None else ""
            self._events.tell(RELOADED, f"{generation} is in force{beside}", warning=False)
            return
        reason = ROLLED_BACK if TAKEN_BACK in status.text else REFUSED
        self._events.tell(reason, f"{generation} is in force: {status.text}", warning=True)


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
    ) -> None:
        """`present`: returns the instance under the configuration that is used now. `area` is the supervisor's."""
        instance = self._instance = present()
        self._present = present
        self._predecessor = predecessor
        self._readiness = readiness
        self._background = background
        self._report = report
        self._outage = Outage(report)
        self.api: Api | None = None  # None until `connect`
        self._discovery: KubernetesDiscovery | None = None
        self.candidacy: Candidacy | None = None  # None without leader election
        if instance.options.ha_enable_leader_election:
            self.candidacy = _candidacy(instance, area, predecessor)
            readiness.require(self.candidacy.missing)

    def start(self) -> None:
        """Starts to check whether the picker stops. If so, it resigns at once, so that another picker leads while these workers drain."""
        if self.candidacy is not None:
            self._background.every(RESIGN_LOOK_S, self._resign_if_leaving)

    def refusals(self) -> Mapping[str, str]:
        """Returns resource -> why the API server refuses to let this picker follow it."""
        return self._outage.refusals()

    def unserved(self) -> Mapping[str, str]:
        """Returns InferencePool -> why it is not served although it names this picker; none if the picker has one pool."""
        return {}

    async def connect(self) -> None:
        """Connects to the API server and joins the election. Raises ValueError if there is no API server or no client library."""
        self.api = await Api.connect(os.environ)
        if self.candidacy is not None:
            self._background.keep(self.candidacy.run(self.api))

    def follow_objects(self, watch: ObjectsWatch | PoolsObjects | None) -> None:
        """Gives the pool's objectives and model rewrites to `watch`. Does nothing for a pod selector, which has none."""
        instance = self._instance
        if not isinstance(watch, ObjectsWatch) or not instance.sources.asks_objects:
            return
        options = instance.options
        objects = KubeObjects(
            self._connected(),
            options.pool_namespace,
            {PoolName(options.pool_name, options.pool_group): (watch.set_api_objects,)},
            report=self._report,
            outage=self._outage,
            expects=watch.expects,
        )
        self._background.keep(self._once_allowed(objects.run))
        if not self._predecessor.knew_endpoints:  # otherwise the predecessor's objects serve until the API answers
            self._readiness.require(objects.missing)

    def follow_endpoints(self, present: Callable[[], EndpointTable]) -> None:
        """Keeps the endpoints in the table that `present` returns equal to the pods of the pool."""
        if self._predecessor.existed:
            present().resume()
        instance, readiness = self._instance, self._readiness
        discovery = self._discovery = KubernetesDiscovery(
            self._connected(),
            wanted(instance.options),
            apply=lambda specs, **more: present().apply(specs, **more),
            state_changed=functools.partial(self._pool_state_changed, present),
            mismatch=lambda pool: protocol_mismatch(pool, self._parsers()),
            report=self._report,
            outage=self._outage,
            successor=self._predecessor.existed,
        )
        # A successor inherits `loaded` from its predecessor. So it is ready at once, until discovery finds that something is missing.
        readiness.require(lambda: "" if readiness.loaded else discovery.missing())
        self._background.keep(self._once_allowed(discovery.run))

    def tell_reloads(self) -> None:
        """Reports how each change of the configuration ended, as an event on the pool. Does nothing if there is only a pod selector."""
        instance, options = self._instance, self._instance.options
        if not instance.sources.asks_objects:
            return
        events = Events(
            options.pool_namespace,
            PoolName(options.pool_name, options.pool_group),
            reporter=os.environ.get("POD_NAME") or socket.gethostname(),
            uid=lambda: self._discovery.pool_uid if self._discovery is not None else "",
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

    def _parsers(self) -> list[tuple[str, Collection[str]]]:
        """Returns name and protocols of each parser of the present configuration."""
        return [(parser.name, parser.app_protocols) for parser in self._present().config.pipeline.wiring.parsers]

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

    def _pool_state_changed(self, present: Callable[[], EndpointTable], missing: str) -> None:
        """Notes that the pool or its pods have changed. `missing`: what the picker still lacks before it can serve; "" for nothing."""
        self._readiness.loaded = not missing
        if missing:
            log.warning("not ready", why=missing)
        else:
            log.info("endpoints are known", endpoints=len(present()))


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
