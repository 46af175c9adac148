"""Session affinity: finds the endpoint to which a client's session is pinned, for the scorer and the filter.

Two strategies find the pinned endpoint of a request:

- `EncodedEndpoint`: the client keeps the endpoint. The response header has `base64(<namespace>/<name>)`, and the client sends it back.
  The picker stores nothing, so every worker and every picker finds the same endpoint.
- `Bindings`: the client sends a session id, and the picker stores a binding. A session is bound to the endpoint to which its first
  request was sent, however this endpoint was picked. It is bound again only if its endpoint is not among the candidates.

A session's requests may arrive at different workers, so bindings are in the shared prefix index. A binding is an entry of the index: its
block hash is made of (profile, tenant, session id, epoch), and its owner is the endpoint. So no tenant can find or make the bindings of
another tenant, even if it knows session ids of the other tenant. An epoch lasts half the time to live. All workers, including restarted
workers, see a new binding once the index writer has read the bus, a few milliseconds later. Guarantee: workers that see the same
candidates agree on a session's endpoint. If two workers both get a session's first requests within those milliseconds, they may bind the
session twice. The binding of the later epoch then wins; within one epoch, all workers compute the same order of bindings. So the workers
agree again. A binding lives for 1 to 1.5 times the time to live after its last use, unless the index is full and gives its entry to newer
blocks. It ends when its endpoint leaves.

In addition, each worker keeps the bindings that it made itself, at most SESSIONS_MAX, and drops the least recently used first. It needs
its own bindings while they are still on the bus, or if the bus has lost them. The index takes precedence.

An endpoint that is down is treated as absent. This module does not pick an endpoint for a session that is not bound.
"""

import base64
import binascii
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from xxhash import xxh3_64_intdigest

from compiled.classes import subclassed
from epp.candidates import Candidates, Endpoint, EndpointList
from epp.data import Datum
from epp.decision.decision import ERRORS_FROM, Decision, Response
from epp.plugin import Plugin, PrefixIndex, PreRequest, ResponseReceived, Services
from epp.plugins._parameters import AFFINITY_COUNTS_WITH, TOKEN_HEADER, AffinityParameters, SessionParameters, Source
from epp.prefix.blocks import NARROW
from epp.request import Request

SESSION_HEADER: Final = "x-session-id"
SESSIONS_MAX: Final = 65_536
SWEPT_MAX: Final = 4_096  # bindings that one sweep looks at; a sweep runs between requests
EPOCHS: Final = (0, 1, 2)  # ages of the epochs that are looked up, starting with the current one
EPOCH_STEP: Final = 0x9E3779B97F4A7C15
MASK: Final = (1 << 64) - 1


class Strategy(Protocol):
    """Finds the pinned endpoint of a request. `consumes`, `keeps`: data that the plugin must declare for the strategy."""

    consumes: Sequence[Datum[str]]
    keeps: Sequence[Datum[Any]]

    def start(self, services: Services) -> None: ...
    def pinned(self, request: Request, candidates: Candidates, profile: str) -> int:
        """Returns the index of the pinned candidate, or -1."""

    def sent(self, request: Request, decision: Decision) -> None: ...
    def answered(self, decision: Decision, response: Response) -> None: ...


def strategy(name: str, params: AffinityParameters) -> Strategy:
    """Makes the configured strategy for the plugin with this name. Raises ValueError with the parameter's path."""
    if params.strategy == "session_id":
        return Bindings(name, params.session_id_config, params.profile_name)
    return EncodedEndpoint(params.encoded_endpoint_header_config.header, params.profile_name)


def attribute(name: str, producer: str) -> Datum[str]:
    """Returns the key of the text datum `name` that a plugin emits for a request. `producer`: the plugin, if it is a part of the key."""
    return Datum(f"{name}/{producer}" if producer else name, str)


def session_id(producer: str) -> Datum[str]:
    """Returns the key of the session id that this `session-id-producer` emits. The id is empty if the request has no session."""
    return attribute("SessionIDDataKey", producer)


def header_name(name: str, default: str) -> str:
    """Returns the name of a header in the form for look-ups (lower case, no blanks), or the default if the name is empty."""
    return name.strip().lower() or default


def place_of(row: int | None, candidates: Candidates) -> int:
    """Returns the index of a snapshot's row among the candidates; -1 without a row, or if the row is no candidate or down."""
    if row is None or candidates.snapshot.down[row]:
        return -1
    if candidates.rows is None:
        return row
    places = np.flatnonzero(candidates.rows == row)
    return int(places[0]) if len(places) else -1


def target_of(decision: Decision, profile: str) -> Endpoint | None:
    """Returns the endpoint that a profile picked first; None if it did not run or found no endpoint. "" means the primary profile."""
    if not profile:
        return decision.targets[0]
    run = decision.runs.get(profile)
    return run.candidates.endpoint(run.picked[0]) if run is not None else None


class EncodedEndpoint:
    """Finds the endpoint without storing anything: the client sends back the endpoint of its last answer."""

    consumes: Sequence[Datum[str]] = ()
    keeps: Sequence[Datum[Any]] = ()

    def __init__(self, header: str, profile: str) -> None:
        self._header = header_name(header, TOKEN_HEADER)
        self._profile = profile
        self._endpoint_list: EndpointList | None = None
        self._rows: dict[str, int] = {}

    def start(self, services: Services) -> None:
        """Does nothing: this strategy needs no services."""

    def pinned(self, request: Request, candidates: Candidates, profile: str) -> int:
        token = request.headers.get(self._header)
        if not token:
            return -1
        try:
            name = base64.b64decode(token, validate=True).decode()
        except (binascii.Error, ValueError):  # clients may send anything; an invalid token means no affinity
            return -1
        endpoint_list = candidates.snapshot.endpoint_list
        if endpoint_list is not self._endpoint_list:
            self._endpoint_list = endpoint_list
            self._rows = {f"{e.namespace}/{e.name}": row for row, e in enumerate(endpoint_list.endpoints)}
        return place_of(self._rows.get(name), candidates)

    def sent(self, request: Request, decision: Decision) -> None:
        """Does nothing: the picker stores nothing."""

    def answered(self, decision: Decision, response: Response) -> None:
        target = target_of(decision, self._profile)
        # an endpoint that fails requests shall not bind its clients
        if target is not None and response.status < ERRORS_FROM:
            name = f"{target.namespace}/{target.name}"
            response.set_headers[self._header] = base64.b64encode(name.encode()).decode()


class Binding(NamedTuple):
    """Holds a binding that this worker made. `used`: the time of its last use, in monotonic seconds."""

    endpoint: Endpoint
    used: float


class Lookup(NamedTuple):
    """Holds what one profile run found out about a session. `root`: the hash of profile and session id.

    `owner`: the owner id of the candidate to which the session is bound; 0 if it is not bound. `current`: whether the index has the
    binding of the current epoch.
    """

    root: int
    owner: int
    current: bool


class Bindings:
    """Stores bindings in the shared index for all workers, and in this worker's memory."""

    def __init__(self, name: str, params: SessionParameters, profile: str) -> None:
        for number, source in enumerate(params.sources):
            if bool(source.header) == bool(source.attribute):
                raise ValueError(f"sessionIdConfig.sources[{number}]: give exactly one of header and attribute")
        sources = params.sources or (Source(header=SESSION_HEADER),)
        self._sources: tuple[str | Datum[str], ...] = tuple(
            header_name(s.header, SESSION_HEADER) if s.header else attribute(s.attribute, s.producer) for s in sources
        )
        self.consumes: Sequence[Datum[str]] = tuple(s for s in self._sources if isinstance(s, Datum))
        self._profile = profile
        self._ttl = params.eviction_ttl_seconds or 300.0
        self._sweep_s = params.eviction_sweep_seconds or 10.0
        self._lookups: Datum[dict[str, Lookup]] = Datum(f"session_found/{name}", dict)
        self.keeps: Sequence[Datum[Any]] = (self._lookups,)
        self._local: OrderedDict[int, Binding] = OrderedDict()  # by `Lookup.root`; the least recently used first
        self._now = 0.0
        self._index: PrefixIndex
        self._secret = 0

    def start(self, services: Services) -> None:
        self._index = services.prefix_index
        self._secret = services.prefix_seed
        services.every(self._sweep_s, self.sweep)

    def take_over(self, predecessor: "Bindings") -> None:
        """Continues with the bindings that the predecessor made in this worker."""
        self._local = OrderedDict(predecessor._local)
        self._now = predecessor._now

    def sweep(self) -> None:
        """Drops those of this worker's bindings that, at the time of the last request, had expired. Without requests, there are no new
        bindings to drop.
        """
        oldest = self._now - self._ttl
        for _ in range(SWEPT_MAX):
            if not self._local or next(iter(self._local.values())).used >= oldest:
                return
            self._local.popitem(last=False)

    def __len__(self) -> int:
        return len(self._local)

    def pinned(self, request: Request, candidates: Candidates, profile: str) -> int:
        session = self._session(request)
        if not session:
            return -1
        tenant = "" if request.tenant is None else f"{len(request.tenant.name)} {request.tenant.name} "
        root = xxh3_64_intdigest(f"session {len(self._profile)} {self._profile} {tenant}{session}".encode(), self._secret)
        place, lookup = self._bound(root, candidates, request.now)
        lookups = request[self._lookups]
        if lookups is None:
            lookups = request[self._lookups] = {}
        lookups[profile] = lookup
        return place

    def sent(self, request: Request, decision: Decision) -> None:
        """Creates or refreshes the binding to the target. If the session is bound to another candidate, its binding stays as it is."""
        lookups, target = request[self._lookups], target_of(decision, self._profile)
        if not lookups or target is None:
            return
        lookup = lookups.get(self._profile or decision.primary) or next(reversed(lookups.values()))
        if lookup.owner not in (0, target.owner):
            return
        if not lookup.current or lookup.owner != target.owner:
            self._index.learn(_hash(lookup.root, self._epoch(request.now)), target.owner)
        local = self._local
        local[lookup.root] = Binding(target, request.now)
        local.move_to_end(lookup.root)
        if len(local) > SESSIONS_MAX:
            local.popitem(last=False)
        self._now = request.now

    def answered(self, decision: Decision, response: Response) -> None:
        """Does nothing: the client chooses its session id."""

    def _session(self, request: Request) -> str:
        for source in self._sources:
            value = request.headers.get(source) if isinstance(source, str) else request[source]
            if value and (session := value.strip()):
                return session
        return ""

    def _epoch(self, now: float) -> int:
        return int(now * 2.0 / self._ttl)

    def _bound(self, root: int, candidates: Candidates, now: float) -> tuple[int, Lookup]:
        """Returns the index of the bound candidate, or -1, and the lookup.

        Searches the shared index, latest epoch first, then the bindings that this worker made.
        """
        epoch, rows = self._epoch(now), candidates.snapshot.endpoint_list.row_of_owner
        for age in EPOCHS:
            holders = self._index.match(_hash(root, epoch - age))
            for owner in holders if len(holders) < 2 else sorted(holders, key=lambda owner: _rank(root, owner)):
                place = place_of(rows.get(owner), candidates)
                if place >= 0:
                    return place, Lookup(root, owner, age == 0)
        local = self._local.get(root)
        if local is not None and now - local.used <= self._ttl:
            owner = local.endpoint.owner
            place = place_of(rows.get(owner), candidates)
            # Compare the names, because another endpoint may have got the owner id.
            if place >= 0 and candidates.endpoint(place).name == local.endpoint.name:
                return place, Lookup(root, owner, False)
        return -1, Lookup(root, 0, False)


def _hash(root: int, epoch: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Returns the hash of a session in an epoch, as a chain of one block for the index."""
    return np.array([(root + epoch * EPOCH_STEP) & NARROW], dtype=np.uint64)


def _rank(root: int, owner: int) -> int:
    """Returns a sort key of owners: a different order for each session, the same order in all workers."""
    return ((root ^ owner * EPOCH_STEP) * EPOCH_STEP) & MASK


@subclassed
class Pinning(PreRequest, ResponseReceived):
    """Base class of the session filter and scorer: has the strategy, and tells it to which endpoint each request was sent."""

    Params = AffinityParameters
    counts_with = AFFINITY_COUNTS_WITH

    def __init__(self, name: str, params: AffinityParameters) -> None:
        super().__init__(name, params)
        self.strategy = strategy(name, params)
        self.consumes = self.strategy.consumes
        self.keeps = self.strategy.keeps

    def start(self, services: Services) -> None:
        self.strategy.start(services)

    def take_over(self, predecessor: Plugin) -> None:
        if isinstance(predecessor, Pinning) and self._binds_as(predecessor):
            assert isinstance(self.strategy, Bindings)
            assert isinstance(predecessor.strategy, Bindings)
            self.strategy.take_over(predecessor.strategy)

    def _binds_as(self, other: "Pinning") -> bool:
        both = isinstance(self.strategy, Bindings) and isinstance(other.strategy, Bindings)
        return both and self.params.profile_name == other.params.profile_name

    def before_send(self, request: Request, decision: Decision) -> None:
        self.strategy.sent(request, decision)

    def response_received(self, request: Request, decision: Decision, response: Response) -> None:
        self.strategy.answered(decision, response)
