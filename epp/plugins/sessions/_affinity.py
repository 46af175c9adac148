"""Sessions: which endpoint a client's session is pinned to, for the scorer and the filter that keep it there.

Two strategies find the pinned endpoint of a request:

- `EncodedEndpoint`: the client carries it. The response header says `base64(<namespace>/<name>)`, the client sends it back.
  Nothing is remembered, so every worker, and every picker, gives the same answer.
- `Bindings`: the client carries an id, the picker remembers where that session went. A session is bound to the endpoint that
  its first request was sent to, however that was picked, and bound anew only when its endpoint is not among the candidates.

A session's requests may arrive at different workers. Bindings therefore stand in the shared prefix index, as hashes of
(profile, session id, epoch) held by the endpoint, an epoch being half the time to live: what one worker binds, all others
follow once the index writer has read the bus, a few milliseconds later, and so does a worker that was restarted. What is
guaranteed across workers: they agree on a session's endpoint as long as they see the same candidates. Two workers that
both get a session's first requests within those milliseconds may bind it twice; the binding of the later epoch wins, and within
one epoch an order that all workers compute alike, so they agree again from then on. A binding lives for at least one and
at most one and a half times the time to live after its last use, unless the index is so full that it gives the entry to
newer blocks; it ends when its endpoint leaves.

Beside that each worker keeps its own bindings, at most SESSIONS_MAX, the least recently used leaving first: they answer
for what is still on the bus or was lost there. The index is asked first.

An endpoint that is down counts as absent. What this does not do: place a session that is not bound.
"""

import base64
import binascii
from collections import OrderedDict
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple, Protocol

import msgspec
import numpy as np
from xxhash import xxh3_64_intdigest

from epp.candidates import Candidates, Endpoint, Roster
from epp.data import Datum
from epp.decision import Decision, Response
from epp.plugin import PrefixIndex, PreRequest, ResponseReceived, Services
from epp.prefix.blocks import NARROW
from epp.request import Request

TOKEN_HEADER: Final = "x-session-token"
SESSION_HEADER: Final = "x-session-id"
SESSIONS_MAX: Final = 65_536
SWEPT_MAX: Final = 4_096  # bindings looked at by one sweep: it runs between requests
EPOCHS: Final = (0, 1, 2)  # this one and those before it that are looked up
EPOCH_STEP: Final = 0x9E3779B97F4A7C15
MASK: Final = (1 << 64) - 1

Seconds = Annotated[float, msgspec.Meta(ge=0)]


class EncodedParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """The header that carries the endpoint, in both directions; an empty name is the usual one."""

    header: str = TOKEN_HEADER


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Where a session id is read: a request header, or what a plugin found out (`attribute`, with its `producer` if it has one)."""

    header: str = ""
    attribute: str = ""
    producer: str = ""


class SessionParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """`sources` in order, the first that yields an id counts; none: the header `x-session-id`. Times of 0 are the usual ones."""

    sources: tuple[Source, ...] = ()
    eviction_ttl_seconds: Seconds = 300.0
    eviction_sweep_seconds: Seconds = 10.0


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Only the part that belongs to `strategy` counts. `profile_name`: whose target is pinned; empty: the primary profile's."""

    strategy: Literal["encoded_endpoint_header", "session_id"] = "encoded_endpoint_header"
    encoded_endpoint_header_config: EncodedParameters = EncodedParameters()
    session_id_config: SessionParameters = SessionParameters()
    profile_name: str = ""


class Strategy(Protocol):
    """What scorer and filter ask; `consumes` and `keeps` are what they have to declare for it."""

    consumes: Sequence[Datum[str]]
    keeps: Sequence[Datum[Any]]

    def start(self, services: Services) -> None: ...
    def pinned(self, request: Request, candidates: Candidates, profile: str) -> int:
        """The index of the pinned candidate, -1 for none."""

    def sent(self, request: Request, decision: Decision) -> None: ...
    def answered(self, decision: Decision, response: Response) -> None: ...


def strategy(name: str, params: Parameters) -> Strategy:
    """As configured, for the plugin of that name. Raises ValueError with the parameter's path."""
    if params.strategy == "session_id":
        return Bindings(name, params.session_id_config, params.profile_name)
    return EncodedEndpoint(params.encoded_endpoint_header_config.header, params.profile_name)


def attribute(name: str, producer: str) -> Datum[str]:
    """The key of a text that a plugin found out about the request, as configurations address it."""
    return Datum(f"{name}/{producer}" if producer else name, str)


def session_id(producer: str) -> Datum[str]:
    """The key under which a `session-id-producer` of that name emits the id; empty: the request has none."""
    return attribute("SessionIDDataKey", producer)


def header_name(given: str, usual: str) -> str:
    """As headers are looked up."""
    return given.strip().lower() or usual


def place_of(row: int | None, candidates: Candidates) -> int:
    """Where a row of the snapshot stands among the candidates; -1: it does not, or its endpoint is down."""
    if row is None or candidates.snapshot.down[row]:
        return -1
    if candidates.rows is None:
        return row
    found = np.flatnonzero(candidates.rows == row)
    return int(found[0]) if len(found) else -1


def target_of(decision: Decision, profile: str) -> Endpoint | None:
    """Where a profile (empty: the primary one) sends the request; None: it did not run, or found nobody."""
    if not profile:
        return decision.targets[0]
    run = decision.runs.get(profile)
    return run.candidates.endpoint(run.picked[0]) if run is not None else None


class EncodedEndpoint:
    """Stateless: the client brings what the last answer gave it."""

    consumes: Sequence[Datum[str]] = ()
    keeps: Sequence[Datum[Any]] = ()

    def __init__(self, header: str, profile: str) -> None:
        self._header = header_name(header, TOKEN_HEADER)
        self._profile = profile
        self._roster: Roster | None = None
        self._rows: dict[str, int] = {}

    def start(self, services: Services) -> None:
        """Needs nothing."""

    def pinned(self, request: Request, candidates: Candidates, profile: str) -> int:
        token = request.headers.get(self._header)
        if not token:
            return -1
        try:
            name = base64.b64decode(token, validate=True).decode()
        except (binascii.Error, ValueError):  # clients may send anything: no affinity then
            return -1
        roster = candidates.snapshot.roster
        if roster is not self._roster:
            self._roster = roster
            self._rows = {f"{e.namespace}/{e.name}": row for row, e in enumerate(roster.endpoints)}
        return place_of(self._rows.get(name), candidates)

    def sent(self, request: Request, decision: Decision) -> None:
        """Nothing is remembered."""

    def answered(self, decision: Decision, response: Response) -> None:
        target = target_of(decision, self._profile)
        if target is not None:
            name = f"{target.namespace}/{target.name}"
            response.set_headers[self._header] = base64.b64encode(name.encode()).decode()


class Binding(NamedTuple):
    """What a worker itself knows of a session."""

    endpoint: Endpoint
    used: float


class Found(NamedTuple):
    """A session as one profile run saw it. `owner` 0: not bound to any candidate. `current`: the index has it in this epoch."""

    root: int
    owner: int
    current: bool


class Bindings:
    """Remembers: in the shared index what all workers are to know, in this worker what it knows itself."""

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
        self._found: Datum[dict[str, Found]] = Datum(f"session_found/{name}", dict)
        self.keeps: Sequence[Datum[Any]] = (self._found,)
        self._own: OrderedDict[int, Binding] = OrderedDict()  # by root, the least recently used first
        self._now = 0.0
        self._index: PrefixIndex
        self._secret = 0

    def start(self, services: Services) -> None:
        self._index = services.prefix_index
        self._secret = services.prefix_seed
        services.every(self._sweep_s, self.sweep)

    def sweep(self) -> None:
        """Drops own bindings that are past their time. Time is that of the last request: without requests nothing grows."""
        oldest = self._now - self._ttl
        for _ in range(SWEPT_MAX):
            if not self._own or next(iter(self._own.values())).used >= oldest:
                return
            self._own.popitem(last=False)

    def __len__(self) -> int:
        return len(self._own)

    def pinned(self, request: Request, candidates: Candidates, profile: str) -> int:
        session = self._session(request)
        if not session:
            return -1
        root = xxh3_64_intdigest(f"session {len(self._profile)} {self._profile} {session}".encode(), self._secret)
        place, found = self._bound(root, candidates, request.now)
        seen = request[self._found]
        if seen is None:
            seen = request[self._found] = {}
        seen[profile] = found
        return place

    def sent(self, request: Request, decision: Decision) -> None:
        """Binds, or refreshes; a session whose endpoint was there and was not picked stays bound to it."""
        seen, target = request[self._found], target_of(decision, self._profile)
        if not seen or target is None:
            return
        found = seen.get(self._profile or decision.primary) or next(reversed(seen.values()))
        if found.owner not in (0, target.owner):
            return
        if not found.current or found.owner != target.owner:
            self._index.learn(_hash(found.root, self._epoch(request.now)), target.owner)
        own = self._own
        own[found.root] = Binding(target, request.now)
        own.move_to_end(found.root)
        if len(own) > SESSIONS_MAX:
            own.popitem(last=False)
        self._now = request.now

    def answered(self, decision: Decision, response: Response) -> None:
        """The client owns its session id."""

    def _session(self, request: Request) -> str:
        for source in self._sources:
            given = request.headers.get(source) if isinstance(source, str) else request[source]
            if given and (found := given.strip()):
                return found
        return ""

    def _epoch(self, now: float) -> int:
        return int(now * 2.0 / self._ttl)

    def _bound(self, root: int, candidates: Candidates, now: float) -> tuple[int, Found]:
        """Where the session is bound to among the candidates: by the index, the latest epoch first, else by this worker."""
        epoch, rows = self._epoch(now), candidates.snapshot.roster.row_of_owner
        for age in EPOCHS:
            holders = self._index.match(_hash(root, epoch - age))
            for owner in holders if len(holders) < 2 else sorted(holders, key=lambda owner: _rank(root, owner)):
                place = place_of(rows.get(owner), candidates)
                if place >= 0:
                    return place, Found(root, owner, age == 0)
        own = self._own.get(root)
        if own is not None and now - own.used <= self._ttl:
            owner = own.endpoint.owner
            place = place_of(rows.get(owner), candidates)
            if place >= 0 and candidates.endpoint(place).name == own.endpoint.name:  # owner ids are used again
                return place, Found(root, owner, False)
        return -1, Found(root, 0, False)


def _hash(root: int, epoch: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """A chain of one block: what the index keeps of a session in an epoch."""
    return np.array([(root + epoch * EPOCH_STEP) & NARROW], dtype=np.uint64)


def _rank(root: int, owner: int) -> int:
    """An order of the owners that differs by session and is the same in all workers."""
    return ((root ^ owner * EPOCH_STEP) * EPOCH_STEP) & MASK


class Pinning(PreRequest, ResponseReceived):
    """What filter and scorer share: a strategy that knows the pinned endpoint, and hears where requests went."""

    Params = Parameters

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        self.strategy = strategy(name, params)
        self.consumes = self.strategy.consumes
        self.keeps = self.strategy.keeps

    def start(self, services: Services) -> None:
        self.strategy.start(services)

    def before_send(self, request: Request, decision: Decision) -> None:
        self.strategy.sent(request, decision)

    def response_received(self, request: Request, decision: Decision, response: Response) -> None:
        self.strategy.answered(decision, response)
