"""Extension points, in the order in which they run, and the `@plugin` decorator.

A plugin is a class that inherits one or more extension points, registered under the type name that configurations use:

    @plugin("queue-scorer")
    class QueueDepth(Scorer):
        consumes = (WAITING,)
        def score(self, request, candidates, profile): ...

Of one request, in this order (a point's own text says when it runs and what it may write):

    extension point     calls per request                                      in the order of
    Parser              1, when the whole body is in                           the longest path suffix that matches
    RequestHeader       1 each                                                 the configuration
    flow control        OrderingPolicy 1; the others as often as the gate is read: see each
    Screener            1 each, on all candidates                              the configuration
    DataProducer        1 each that somebody reads                             what they read of each other
    Admitter            1 each                                                 the configuration
    ProfileHandler      `pick` until it returns nothing, then `result` once    -
    Filter              1 each and profile run, on what the one before left    the profile
    Scorer              1 each and profile run; `static` ones less often       the profile
    Picker              1 per profile run                                      -
    PreRequest          1 each, if there is a target                           the configuration
    ResponseReceived    1 each, if there was a target and headers come         the configuration
    ResponseStreaming   1 each per body piece but the last, or for the first alone, if there was a target
    ResponseComplete    exactly 1 each, if there was a target, whatever ended the request

Rules that hold for all of them:
- The constructor is inert (no loop, thread, socket, randomness): it runs before the fork. `start(services)` runs after it, in
  every worker.
- `consumes`, `optional`, `produces` and `keeps` are the only way to data (`epp.data`); they may be set per instance in the
  constructor. A foreign plugin's reads and writes of anything else in `request.data` are refused and counted (`epp.guard`); a column
  that nobody declares is not scraped, and all 0.
- Parameters are a frozen msgspec struct named `Params` in the class; unknown fields are refused at start.
- Any of them up to PreRequest may raise `Refused`; the caller gets the answer that its cause stands for. Any other exception fails
  this request with 500 and is counted, but for a producer's `ProducerFailed`, which fails open. After the answer an exception is
  counted and costs nothing else.
- What a plugin keeps of a request lives in `request.data`, and is gone with the request, however that ends.
- A plugin that is in shadow profiles alone is a Filter, Scorer or Picker there and nothing else: it neither screens nor admits, and
  is not told of what is sent and answered.
- Everything runs on the worker's event loop: a plugin never blocks.
"""

import random
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from epp.candidates import Candidates, Endpoint, Mask, Scores
from epp.data import Datum, Key
from epp.decision import Decision, ProfileRun, Response
from epp.flows import BandView, Capability, FlowKey, FlowView, Queued
from epp.metrics import Metric
from epp.request import Request

Hashes = NDArray[np.uint64]


class NoParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """For plugins that take no parameters."""


class Load(Protocol):
    """This worker's counts of what is in flight, visible to all workers at once."""

    def add_tokens(self, endpoint: Endpoint, tokens: int) -> None:
        """Count tokens at an endpoint; negative takes back. Counts of an endpoint that is gone are dropped."""


class PrefixIndex(Protocol):
    """Which endpoint holds which blocks, shared by all workers."""

    def match(self, hashes: Hashes) -> Mapping[int, int]:
        """Index owner id -> number of leading blocks of the chain `hashes` that it holds."""

    def learn(self, hashes: Hashes, owner: int) -> None:
        """Tell the index writer that `owner` will hold these blocks. Never waits; what does not fit is dropped and counted."""

    def forget(self, hashes: Hashes, owner: int) -> None:
        """Take back what was learned: `owner` does not hold these blocks after all."""


class Measure(Protocol):
    """Where a plugin's own figures go; the handle of one declared metric."""

    def observe(self, value: float) -> None: ...


class Count(Protocol):
    """The handle of one declared counter."""

    def add(self, *labels: str, n: int = 1) -> None:
        """Move on by n, under these values of the metric's labels."""


class Waiting(Protocol):
    """What is not there yet; made by `Services` only. Awaiting it gives the result or raises what the work raised.

    Several requests may wait for the same. When the last of them has left, the work is cancelled.
    """

    def __await__(self) -> Any: ...
    def add_done_callback(self, call: Callable[[Any], object], /) -> Any: ...


class HttpAnswer(NamedTuple):
    """A server's answer to `Services.http`."""

    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes
    seconds: float = 0.0  # from the call to the answer's last byte


class Services(Protocol):
    """What `start` hands to a plugin."""

    rng: random.Random
    load: Load
    prefix_index: PrefixIndex
    prefix_seed: int
    environment: Mapping[str, str]  # for plugins whose settings the field keeps there

    def measure(self, plugin: "Plugin", metric: Metric) -> Measure:
        """The handle of a histogram that the plugin's class declares."""

    def count(self, plugin: "Plugin", metric: Metric) -> Count:
        """The handle of a counter that the plugin's class declares."""

    def warn(self, plugin: "Plugin", text: str) -> None:
        """Says something in the log: of one plugin a line every 10 seconds at most, with how many were left out."""

    def spawn(self, work: Coroutine[Any, Any, Any], timeout_s: float) -> Waiting:
        """Runs a coroutine beside the requests; it is cancelled after `timeout_s` (then awaiting raises TimeoutError).

        Work that nobody awaits runs on, and what it raises is logged. Raises ProducerFailed while too much is under way.
        """

    def http(
        self, method: str, url: str, headers: Mapping[str, str] | None = None, body: bytes = b"", *, timeout_s: float
    ) -> Waiting:
        """One HTTP request; awaiting gives an `HttpAnswer`. Raises TimeoutError, and OSError when there is no answer."""

    def after(self, seconds: float) -> Waiting:
        """Done so many seconds from now."""

    def every(self, seconds: float, act: Callable[[], object]) -> None:
        """Calls `act` again and again until the worker ends: for sweeps and flushes. `act` never blocks."""


class Plugin:
    """What all extension points share."""

    type_name: ClassVar[str] = ""
    aliases: ClassVar[tuple[str, ...]] = ()
    Params: ClassVar[type[msgspec.Struct]] = NoParams
    metrics: ClassVar[tuple[Metric, ...]] = ()
    consumes: Sequence[Key[Any]] = ()
    produces: Sequence[Key[Any]] = ()
    optional: Sequence[Datum[Any]] = ()  # read where somebody produces it; its default elsewhere
    keeps: Sequence[Datum[Any]] = ()  # what it keeps of a request for itself, from one of its calls to the next
    without_effect: Sequence[str] = ()  # `parameter: why it has no effect`, said at start
    deprecated: Sequence[str] = ()  # `parameter: what to write instead`, said at start
    needs: Mapping[
        str, "Need"
    ] = {}  # other plugins that parameters name; checked before the fork, then given to `resolve`

    def __init__(self, name: str, params: Any) -> None:
        self.name = name
        self.params = params

    def meet(self, plugins: Sequence["Plugin"]) -> None:
        """Before the fork: all that the configuration lists, for who adapts what it reads to what is there."""

    def resolve(self, found: Mapping[str, "Plugin"]) -> None:
        """Before the fork: the plugins that `needs` names, by the same keys."""

    def start(self, services: Services) -> None:
        """After the fork, once in every worker, before the first request."""


class Need(NamedTuple):
    """A plugin that a parameter names. `parameter` is the parameter's path, as in `deciders.prefill`."""

    parameter: str
    name: str
    kind: type[Plugin]


class Parser(Plugin):
    """Request bodies -> `Request`. Once per request, when the whole body is in; chosen by the longest claimed path suffix.

    A parser without `paths` is the fallback. `parse` raises `Refused` (INVALID_BODY with a text, or MODEL_MISSING). How token usage
    is read out of the answer it says by `request[ANSWER]` (`epp.protocol.usage`), where that is not the usual way.

    With `names_model` its bodies are JSON objects whose member `model` names the model, so that the runtime can put another one there;
    that MODEL_MISSING is the last thing it finds, since then the name may come from elsewhere.
    """

    paths: ClassVar[tuple[str, ...]] = ()
    app_protocols: ClassVar[tuple[str, ...]] = ()
    reads_usage: ClassVar[bool] = False
    names_model: ClassVar[bool] = False

    def parse(self, request: Request, path: str, body: bytes | memoryview) -> None:
        """Fills model, prompt, streaming, max_tokens and cache_salt of `request`. `path` has no query string."""
        raise NotImplementedError


class RequestHeader(Plugin):
    """Once per request, after it was parsed and before anybody looks at endpoints.

    Reads the request with its headers; may set `request.fairness_id` and what it declares.
    """

    def read(self, request: Request) -> None:
        raise NotImplementedError


class Screener(Plugin):
    """Once per request. Each sees all candidates; what all of them keep goes on. Nobody left: refused as no endpoint."""

    def screen(self, request: Request, candidates: Candidates) -> Mask:
        """A bool array, one per candidate."""
        raise NotImplementedError


class DataProducer(Plugin):
    """Once per request, after the candidates are known, in the order that declared data require.

    Sets `request[datum]` for what it declares; per-candidate values have the shape of the whole snapshot
    (`candidates.narrow` cuts them). May return what `services` made to wait for (the request waits, others do not), and sets its
    data before that is done; otherwise None. After a wait the load in flight is read again. A wait that ends in TimeoutError
    fails open, as ProducerFailed does.
    """

    def produce(self, request: Request, candidates: Candidates) -> Waiting | None:
        raise NotImplementedError


class Admitter(Plugin):
    """Once per request, after the producers. Returns, or raises `Refused(Cause.NOT_ADMITTED, reason)`."""

    def admit(self, request: Request, candidates: Candidates) -> None:
        raise NotImplementedError


class ProfileHandler(Plugin):
    """Which profiles run next, and what their runs mean. `pick` is called until it returns nothing, then `result` once.

    Profiles that are returned together run in that order. What a later profile's plugins are to know of earlier ones the handler
    says by data that it declares (`produces`) and sets in `pick`. Shadow profiles are never offered to it.
    """

    def check(self, profiles: Sequence[str]) -> str | None:
        """Before the fork: why this handler cannot work with these profiles, or None."""
        return None

    def reaches(self, profiles: Sequence[str]) -> Collection[str] | None:
        """Before the fork: which of these profiles it will ever run, or None if it cannot say."""
        return None

    def idle(self, profiles: Sequence[str]) -> Sequence[str]:
        """Before the fork: what has no effect with these profiles, and why; said at start."""
        return ()

    def pick(
        self, request: Request, profiles: Mapping[str, "Profile"], runs: Mapping[str, ProfileRun | None]
    ) -> Sequence["Profile"]:
        """The profiles to run now, in order; none ends the rounds."""
        raise NotImplementedError

    def result(self, request: Request, runs: Mapping[str, ProfileRun | None]) -> Decision:
        """All runs -> one decision. Raises Refused(NO_ENDPOINT_LEFT) when no run that it needs found a target."""
        raise NotImplementedError


class Decider(Plugin):
    """Whether a stage of a disaggregated request is to run; asked by the profile handler that names it, once per request."""

    def wanted(self, request: Request, run: ProfileRun | None) -> bool:
        """`run` is that of the decode profile; None where the stage comes before it."""
        raise NotImplementedError


class Filter(Plugin):
    """Once per profile run, in the order configured; sees what the previous filter left."""

    def keep(self, request: Request, candidates: Candidates, profile: "Profile") -> Mask:
        """A bool array, one per candidate; nothing left is an answer, not an error."""
        raise NotImplementedError


class Scorer(Plugin):
    """Once per profile run, on what the filters left.

    `static` scorers read scraped columns and nothing else (not the request, not what is in flight): while all candidates are
    left, one call serves all decisions until the next scrape.
    """

    static: ClassVar[bool] = False

    def score(self, request: Request, candidates: Candidates, profile: "Profile") -> Scores | None:
        """A new float64 array in [0, 1], one per candidate in order; None stands for 0 for everyone and costs nothing.

        Foreign plugins are clipped, NaN counts as 0.
        """
        raise NotImplementedError


class Picker(Plugin):
    """Once per profile run, last."""

    def pick(self, request: Request, candidates: Candidates, totals: Scores, profile: "Profile") -> Sequence[int]:
        """Indices of candidates, best first: at least one, none twice.

        Several are for gateways that take a list, as `deploy/envoy-retry.yaml` does; for others it is no address.
        """
        raise NotImplementedError


class PreRequest(Plugin):
    """Once per request that got an endpoint, before the answer goes to the gateway. May set `decision.headers`."""

    def before_send(self, request: Request, decision: Decision) -> None:
        raise NotImplementedError


class ResponseReceived(Plugin):
    """Once per request whose response headers arrived. May put headers for the client into `response.set_headers`."""

    def response_received(self, request: Request, decision: Decision, response: Response) -> None:
        raise NotImplementedError


class ResponseStreaming(Plugin):
    """Once per response body chunk that is not the last, when it has arrived at `request.now`.

    With `first_chunk_only` once per response, for the first chunk that is not empty: the others then pass unseen by plugins,
    at a tenth of the cost.
    """

    first_chunk_only: ClassVar[bool] = False

    def response_streaming(self, request: Request, decision: Decision) -> None:
        raise NotImplementedError


class ResponseComplete(Plugin):
    """Exactly once per request that got an endpoint, whatever ended it; a plugin that is a PreRequest too hears of none that
    it was not told of.

    `response.status` is 0 where no response came, `response.usage` None where none was reported. It runs before the last piece of
    the body is passed on, and may put metadata for the gateway into `response.metadata`.

    `failures_only`: called only where no response came or its status is 400 or more; the others then cost nothing.
    `reads_answer` is False for who only wants to know that the request is over: status and headers may then be missing.
    """

    failures_only: ClassVar[bool] = False
    reads_answer: ClassVar[bool] = True

    def response_complete(self, request: Request, decision: Decision, response: Response) -> None:
        raise NotImplementedError


class DataSource(Plugin):
    """Where and how an endpoint's values are fetched; read by the supervisor only, which knows `MetricsDataSource` and heirs of it."""


class Extractor(Plugin):
    """Pages of a data source -> columns; runs in the supervisor only, which knows `CoreMetricsExtractor` and heirs of it."""


class Discovery(Plugin):
    """Where endpoints come from; read by the supervisor only, which knows `FileDiscovery` and heirs of it."""


class SaturationDetector(Plugin):
    """How full the pool is: once per gate reading of flow control, and per sheddable request without it."""

    def saturation(self, candidates: Candidates) -> float:
        """0 (idle) to 1 (full) and above; 1 for no candidates. Stale and unknown endpoints count by what is in flight alone."""
        raise NotImplementedError

    def step(self, candidates: Candidates) -> float:
        """How much one request more adds at most, about: between two readings the gate counts with it.

        0: not known; the gate then lets one through at a time, the next when an endpoint is chosen for it and the pool is read again.
        """
        return 0.0

    def stale(self, candidates: Candidates) -> int:
        """How many of these count by what is in flight alone, because what is known of them is stale or nothing; for metrics."""
        return 0


class UsageLimitPolicy(Plugin):
    """Up to which saturation each band is served; once per reading of the gate."""

    def ceilings(self, saturation: float, priorities: Sequence[int]) -> Sequence[float]:
        """One ceiling per priority, in order; `priorities` go from high to low. A band waits while saturation >= its ceiling."""
        raise NotImplementedError


class Queue(Protocol):
    """The items of one flow in one worker. A handle is bound to its queue, and void once its item has left by any way."""

    bytes: int

    def __len__(self) -> int: ...
    def offer(self, item: Queued) -> Any:
        """Takes an item in; returns its opaque handle."""

    def head(self) -> Queued | None: ...
    def tail(self) -> Queued | None: ...
    def take(self) -> Queued:
        """Removes and returns the head. Raises IndexError when empty."""

    def remove(self, handle: Any) -> Queued:
        """Removes the item of a handle, in O(log n). Raises `HandleVoid` for one that is void or another queue's."""

    def void(self, handle: Any) -> None:
        """Removes the item if it is still there; harmless otherwise."""

    def scan(self) -> Iterable[Queued]: ...


class FlowQueue(Plugin):
    """A kind of queue. The first one that has what a band's policies need is taken, unless the band names one."""

    capabilities: ClassVar[Capability]

    def make(self, key: Callable[[Queued], Any]) -> Queue:
        """An empty queue; `key` is the ordering policy's."""
        raise NotImplementedError


class OrderingPolicy(Plugin):
    """What goes first within one flow. One instance may serve several bands."""

    queue_needs: ClassVar[Capability] = Capability.HEAD | Capability.PRIORITY_ORDER

    def key(self, item: Queued) -> Any:
        """Once per item, when it arrives: the smallest goes first. Keys of one policy type compare with each other."""
        raise NotImplementedError


class FairShare(Protocol):
    """Whose turn it is in one band of one worker; made by a `FairnessPolicy`, told of every change."""

    def changed(self, flow: FlowView) -> None:
        """The flow's head is another one, or the flow has become empty or is so no more."""

    def pick(self, now: float) -> FlowView | None:
        """Whose head goes next; None: nothing waits. Does not change whose turn it is: `dispatched` does."""

    def dispatched(self, flow: FlowView, item: Queued, now: float) -> None:
        """The head of `flow` has left to be served (called before `changed`)."""

    def forget(self, key: FlowKey) -> None:
        """The flow was idle for long: nothing of it need be kept."""


class Ledger(Protocol):
    """How far the flows of one band have got, over all workers: positions on one scale, which only grow, and marks that name flows.

    What is read is the furthest that any other worker has shown. What is shown of a flow may be lost where very many are
    known; its position is -inf then, as that of a flow which nobody else knows.
    """

    def served(self) -> int:
        """Another number whenever other workers have served something: until then the rest need not be read again."""

    def mark(self, flow: FlowKey) -> int: ...
    def position(self, mark: int) -> float: ...
    def time(self) -> float: ...
    def end(self) -> float:
        """The furthest position of any flow."""

    def backlogged(self) -> int:
        """So many flows wait for their turn in the other worker where they are the most."""

    def alone(self) -> bool:
        """Nothing waits in this band in other workers."""

    def move(self, mark: int, position: float) -> None: ...
    def show(self, time: float, end: float, backlogged: int) -> None: ...


class RankedShare(FairShare, Protocol):
    """A share whose turns compare over workers; `FairnessPolicy.ranks` promises it."""

    def meet(self, ledger: Ledger) -> None:
        """Called once, before anything waits."""

    def claim(self, flow: FlowView) -> float:
        """How early the turn of this flow, which was picked, is: over all workers the smallest goes first."""


class FairnessPolicy(Plugin):
    """Whose turn it is among the flows of a band. May be a ResponseComplete plugin too, to learn what requests have cost."""

    queue_needs: ClassVar[Capability] = Capability.HEAD
    isolates: ClassVar[bool] = True  # whether one flow cannot starve another
    ranks: bool = False  # whether its shares are `RankedShare`; else workers go by since when flows wait for a turn, or by arrival
    tolerance: float = 0.020  # claims of workers that differ by no more are equal: seconds, or what `claim` counts in

    def share(self, key: Callable[[Queued], Any]) -> FairShare:
        """The state of one band; `key` is the band's ordering. Of a policy that `ranks` a `RankedShare`."""
        raise NotImplementedError


class DisplacementPolicy(Plugin):
    """Who gives way when something more important finds a full queue: which flow of a band, and which of its items."""

    queue_needs: ClassVar[Capability] = Capability.TAIL

    def victim(self, band: BandView) -> Queued | None:
        """The next item of the band to give way; None: the band is empty. Called again for each that is needed."""
        raise NotImplementedError


class EvictionFilter(Plugin):
    """Which requests that are being served may be given up for more important ones that wait."""

    def evictable(self, flow: FlowKey) -> bool:
        raise NotImplementedError


class EvictionOrder(Plugin):
    """Which of them goes first."""

    def key(self, flow: FlowKey, dispatched_at: float) -> Any:
        """The smallest goes first; keys are numbers or tuples of them, and compare over all workers."""
        raise NotImplementedError


EXTENSION_POINTS: tuple[type[Plugin], ...] = (
    Parser, RequestHeader,
    FlowQueue, OrderingPolicy, FairnessPolicy, DisplacementPolicy, SaturationDetector, UsageLimitPolicy, EvictionFilter, EvictionOrder,
    Screener, DataProducer, Admitter, ProfileHandler, Decider, Filter, Scorer, Picker, PreRequest,
    ResponseReceived, ResponseStreaming, ResponseComplete,
    DataSource, Extractor, Discovery,
)  # fmt: skip


FilterCall = Callable[[Request, Candidates, "Profile"], Mask]
ScorerCall = Callable[[Request, Candidates, "Profile"], Scores | None]
PickCall = Callable[[Request, Candidates, Scores, "Profile"], Sequence[int]]


class Profile:
    """One compiled profile: bound methods in order, ready to call; scorers with their weights."""

    __slots__ = ("filters", "name", "pick", "picker", "scorers", "static_scorers")

    def __init__(
        self,
        name: str,
        filters: tuple[FilterCall, ...],
        scorers: tuple[tuple[ScorerCall, float], ...],
        picker: Picker,
        static_scorers: tuple[tuple[ScorerCall, float], ...] = (),
        *,
        pick: PickCall | None = None,
    ) -> None:
        self.name = name
        self.filters = filters
        self.scorers = scorers
        self.static_scorers = static_scorers
        self.picker = picker
        self.pick = pick or picker.pick


P = TypeVar("P", bound=type[Plugin])
REGISTERED: dict[str, type[Plugin]] = {}
OWN_PACKAGE = "epp.plugins."


def plugin(type_name: str, *aliases: str) -> Callable[[P], P]:
    """Registers a class under the type name of the configuration; a name given twice is an error."""

    def register(cls: P) -> P:
        for name in (type_name, *aliases):
            if not (isinstance(name, str) and name.isprintable() and name == name.strip() != ""):
                raise ValueError(
                    f"plugin type {name!r}: a type's name is a text that can be printed, without spaces around it"
                )
            other = REGISTERED.setdefault(name, cls)
            if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
                raise ValueError(f"plugin type '{name}' is registered by {other.__module__} and by {cls.__module__}")
            REGISTERED[name] = cls
        cls.type_name = type_name
        cls.aliases = aliases
        return cls

    return register


def foreign(cls: type[Plugin]) -> bool:
    """Whether a class is not one of ours."""
    return not cls.__module__.startswith(OWN_PACKAGE)
