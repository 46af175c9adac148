"""Elects a leader with a Lease of `coordination.k8s.io/v1`: sends the requests that `Election` decides on.

    Election (workers.supervisor.kube.election)  ─ Read, Write ─▶  API server       GET, and PUT or POST with the version that was read
             ◀─ saw, wrote, conflicted, failed ─
    watch of the lease         ─ look ─▶ Election               only a hint: without a watch, the lease is read every 2 s

`run` ends after `resign`, which gives the lease back so that another picker takes it at once. Each request has a time-out. While the
API server is away, the clock decides: a leader stops leading when its time is over.

`keep` is called with each new value of `leads_until` before this process acts on it. A successor of this process begins with the last
value.

The Lease contains wall time for people. The picker never reads it.
"""

import asyncio
import contextlib
import datetime
import random
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Final

import msgspec
import structlog

from epp.errors import UNREADABLE
from workers.host.log import Rarely
from workers.supervisor.kube.api import Api, Resource
from workers.supervisor.kube.election import NEVER, Done, Election, Lease, Read, Wait, Write
from workers.supervisor.kube.errors import ApiError, Unreachable

NAMESPACED: Final = Resource("coordination.k8s.io", "v1", "leases", "")
RESIGN_S: Final = 2.0
WATCH_S: Final = 300  # the server ends a watch after this time, and the picker begins a new one
WATCH_PAUSE_S: Final = 30.0  # the pause before the next watch after the server refused one or the connection broke

log = structlog.get_logger()


class _Meta(msgspec.Struct, rename="camel"):
    resource_version: str = ""


class _Spec(msgspec.Struct, rename="camel"):
    """The spec of a Lease. Every field may be null."""

    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    lease_transitions: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None


class _Object(msgspec.Struct):
    metadata: _Meta
    spec: _Spec = msgspec.field(default_factory=_Spec)


_decoder = msgspec.json.Decoder(_Object)


def lease_name(namespace: str, pool: str) -> str:
    """Returns the name of a pool's lease. The reference picker uses the same name, so that only one picker of either kind leads."""
    return f"epp-{namespace}-{pool}.llm-d.ai"


def clock() -> float:
    """Returns the seconds of a monotonic clock that also counts while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Candidacy:
    """One picker's part in the election of a pool's leader. `run` takes and renews the lease. `leads` says whether this picker leads."""

    def __init__(
        self,
        election: Election,
        namespace: str,
        pool: str,
        *,
        keep: Callable[[float], None] = lambda leads_until: None,
        now: Callable[[], float] = clock,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`keep`: stores the time until which this picker leads. `now`: the clock of `election`, in seconds. `wall`: Unix time."""
        self.election = election
        self.name = lease_name(namespace, pool)
        self._server: Api
        self._collection = NAMESPACED._replace(namespace=namespace).path
        self._keep, self._now, self._wall = keep, now, wall
        self._hint = asyncio.Event()
        self._elected = asyncio.Event()
        self._over = asyncio.Event()
        self._resigned = False
        self._led = self.leads
        if self._led:
            self._elected.set()
        self._holder = ""
        self._trouble = ""
        self._rarely = Rarely("requests for the lease that failed", log.warning)

    @property
    def leads(self) -> bool:
        """Whether this picker leads now."""
        return self.election.leads(self._now())

    def by_lease(self) -> dict[str, Callable[[], bool]]:
        """Returns, for the metrics page, the name of the lease and a function that says whether this picker leads."""
        return {self.name: lambda: self.leads}

    def missing(self) -> str:
        """Returns why this picker does not lead, or ""."""
        if self.leads:
            return ""
        if self._resigned:
            return "not the leader: this picker has given the lease back"
        holder = self.election.holder
        if holder and holder != self.election.identity:
            return f"not the leader: held by {holder}"
        why = f" ({self._trouble})" if self._trouble else ""
        if holder:
            return f"not the leader any more: the lease {self.name} cannot be renewed{why}"
        return f"not the leader yet: the lease {self.name} is not taken{why}"

    async def elected(self) -> None:
        """Waits until this picker leads for the first time."""
        await self._elected.wait()

    async def run(self, server: Api) -> None:
        """Takes part in the election until this picker has resigned and does not hold the lease any more."""
        self._server = server
        watch = asyncio.get_running_loop().create_task(self._watch())
        try:
            while not isinstance(action := self.election.decide(self._now()), Done):
                await self._act(action)
                self._log_changes()
        finally:
            watch.cancel()
            self._over.set()

    async def given_back(self) -> None:
        """Waits until `run` has ended, for at most RESIGN_S."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RESIGN_S):
                await self._over.wait()

    def resign(self) -> None:
        """Stops leading at once. `run` then gives the lease back and ends."""
        if not self._resigned:
            self._resigned = True
            self.election.resign(self._now())
            self._keep(NEVER)
            self._hint.set()

    async def _act(self, action: Read | Write | Wait) -> None:
        if isinstance(action, Wait):
            await self._wait(action.until)
            return
        sent = self._now()
        try:
            if isinstance(action, Read):
                await self._read()
            else:
                await self._write(action, sent)
            self._trouble = ""
        except (ApiError, Unreachable) as failure:
            now = self._now()
            if isinstance(failure, ApiError) and failure.status == HTTPStatus.CONFLICT:
                self.election.conflicted(now)
                return
            self.election.failed(sent, now)
            self._trouble = str(failure)
            self._rarely.tell(now, self._trouble)
        finally:
            self._keep(self.election.leads_until)

    async def _read(self) -> None:
        try:
            answer = await self._request("GET", self._path)
        except ApiError as failure:
            if failure.status != HTTPStatus.NOT_FOUND:
                raise
            self.election.saw(None, self._now())
        else:
            self.election.saw(decoded(answer), self._now())

    async def _write(self, action: Write, sent: float) -> None:
        body = encoded(action, self.name, self._wall())
        try:
            if action.before.version:
                answer = await self._request("PUT", self._path, body)
            else:
                answer = await self._request("POST", self._collection, body)
        except ApiError as failure:
            if failure.status != HTTPStatus.NOT_FOUND or not action.before.version:
                raise
            self.election.saw(None, self._now())  # another client has deleted it
        else:
            self.election.wrote(decoded(answer), sent, self._now())

    async def _request(self, verb: str, path: str, body: bytes | None = None) -> bytes:
        timeout_s = min(RESIGN_S, self.election.times.request_s) if self._resigned else self.election.times.request_s
        return await self._server.request(verb, path, body=body, timeout_s=timeout_s)

    @property
    def _path(self) -> str:
        return f"{self._collection}/{self.name}"

    async def _wait(self, until: float) -> None:
        """Waits until `until`, until the lease may have changed, or until this picker's time as a leader is over."""
        now = self._now()
        if now < self.election.leads_until < until:
            until = self.election.leads_until
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(until - now):
                await self._hint.wait()
        if self._hint.is_set():
            self._hint.clear()
            self.election.look(self._now())

    async def _watch(self) -> None:
        """Watches the lease and sets `_hint` when it changes. A failure here only delays the next read of the lease."""
        query = {"watch": "true", "fieldSelector": f"metadata.name={self.name}", "timeoutSeconds": str(WATCH_S)}
        while True:
            try:
                lines = self._server.lines(self._collection, query=query, idle_s=WATCH_S + self.election.times.request_s)
                async with contextlib.aclosing(lines) as events:
                    async for _ in events:
                        self._hint.set()
                pause_s = self.election.times.retry_s
            except (ApiError, Unreachable) as failure:
                log.debug("the lease cannot be watched", why=str(failure))
                pause_s = WATCH_PAUSE_S
            await asyncio.sleep(pause_s * (0.5 + random.random()))

    def _log_changes(self) -> None:
        """Logs a new leader, or that this picker has begun or ceased to lead."""
        leads, holder = self.leads, self.election.holder
        if leads != self._led:
            self._led = leads
            if leads:
                self._elected.set()
                log.info("this picker leads", lease=self.name, identity=self.election.identity)
            else:
                write = log.info if self._resigned else log.warning
                write("this picker does not lead any more", lease=self.name, why=self.missing())
        if holder != self._holder:
            self._holder = holder
            if holder and holder != self.election.identity:
                log.info("another picker leads", lease=self.name, holder=holder)


def decoded(answer: bytes) -> Lease:
    """Decodes a Lease object (JSON). Raises Unreachable if the answer is not a Lease."""
    try:
        found = _decoder.decode(answer)
    except UNREADABLE as bad:
        raise Unreachable(f"the API server's answer is not a Lease: {bad}") from bad
    spec = found.spec
    return Lease(
        found.metadata.resource_version,
        spec.holder_identity or "",
        float(max(0, spec.lease_duration_seconds or 0)),
        spec.lease_transitions or 0,
        spec.acquire_time or "",
        spec.renew_time or "",
    )


def encoded(action: Write, name: str, wall: float) -> bytes:
    """Encodes the Lease object (JSON) for a write. `wall`: its renew time, as Unix time. The acquire time changes only with the holder."""
    before, at = action.before, micro_time(wall)
    metadata = {"name": name}
    if before.version:
        metadata["resourceVersion"] = before.version
    kept = before.holder == action.holder and before.acquired
    spec = {
        "holderIdentity": action.holder or None,
        "leaseDurationSeconds": max(1, round(action.promised_s)),
        "leaseTransitions": action.transitions,
        "acquireTime": before.acquired if kept else at,
        "renewTime": at,
    }
    return msgspec.json.encode({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec})


def micro_time(wall: float) -> str:
    """Formats Unix time as the MicroTime of Kubernetes, always with six digits of a second."""
    return datetime.datetime.fromtimestamp(wall, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
