"""Extension points, in the order in which they run, and the `@plugin` decorator.

A plugin is a class that inherits one or more extension points, registered under the type name that configurations use:

    @plugin("queue-scorer")
    class QueueDepth(Scorer):
        consumes = (WAITING,)
        def score(self, request, candidates, profile): ...

Rules that hold for all of them:
- The constructor is inert (no loop, thread, socket, randomness): it runs before the fork. `start(services)` runs after it, in
  every worker.
- `consumes` and `produces` are the only way to data (`epp.data`); they may be set per instance in the constructor.
- Parameters are a frozen msgspec struct named `Params` in the class; unknown fields are refused at start.
- An exception fails this request with 500 and is counted, but for a producer's `ProducerFailed`, which fails open.
- Everything runs on the worker's event loop: a plugin never blocks.
"""

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from epp.candidates import Candidates, Endpoint, Mask, Scores
from epp.data import Key
from epp.decision import Decision, ProfileRun
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


class Measure(Protocol):
    """Where a plugin's own figures go; the handle of one declared metric."""

    def observe(self, value: float) -> None: ...


class Services(Protocol):
    """What `start` hands to a plugin."""

    rng: random.Random
    load: Load
    prefix_index: PrefixIndex
    prefix_seed: int

    def measure(self, plugin: "Plugin", metric: Metric) -> Measure:
        """The handle of a metric that the plugin's class declares."""


class Plugin:
    """What all extension points share."""

    type_name: ClassVar[str] = ""
    aliases: ClassVar[tuple[str, ...]] = ()
    Params: ClassVar[type[msgspec.Struct]] = NoParams
    metrics: ClassVar[tuple[Metric, ...]] = ()
    consumes: Sequence[Key[Any]] = ()
    produces: Sequence[Key[Any]] = ()
    without_effect: Sequence[str] = ()  # `parameter: why it has no effect`, said at start

    def __init__(self, name: str, params: Any) -> None:
        self.name = name
        self.params = params

    def start(self, services: Services) -> None:
        """After the fork, once in every worker, before the first request."""


class Usage:
    """Tokens as the model server reports them; None where it does not."""

    __slots__ = ("cached", "completion", "prompt")

    def __init__(self, prompt: int | None = None, completion: int | None = None, cached: int | None = None) -> None:
        self.prompt = prompt
        self.completion = completion
        self.cached = cached

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Usage) and (self.prompt, self.completion, self.cached) == (
            other.prompt,
            other.completion,
            other.cached,
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Usage(prompt={self.prompt}, completion={self.completion}, cached={self.cached})"


class Parser(Plugin):
    """Request bodies -> `Request`. Once per request, when the whole body is in; chosen by the longest claimed path suffix.

    A parser without `paths` is the fallback. `parse` raises `Refused` (INVALID_BODY with a text, or MODEL_MISSING).
    """

    paths: ClassVar[tuple[str, ...]] = ()
    app_protocols: ClassVar[tuple[str, ...]] = ()
    reads_usage: ClassVar[bool] = False

    def parse(self, request: Request, path: str, body: bytes | memoryview) -> None:
        """Fills model, prompt, streaming, max_tokens and cache_salt of `request`. `path` has no query string."""
        raise NotImplementedError


class DataProducer(Plugin):
    """Once per request, after the candidates are known, in the order that declared data require.

    Sets `request[datum]` for what it declares; per-candidate values have the shape of the whole snapshot
    (`candidates.narrow` cuts them). May return an awaitable made by `services`; otherwise None.
    """

    def produce(self, request: Request, candidates: Candidates) -> Awaitable[None] | None:
        raise NotImplementedError


class ProfileHandler(Plugin):
    """Which profiles run next, and what their runs mean. `pick` is called until it returns nothing, then `result` once."""

    def check(self, profiles: Sequence[str]) -> str | None:
        """Before the fork: why this handler cannot work with these profiles, or None."""
        return None

    def pick(
        self, request: Request, profiles: Mapping[str, "Profile"], runs: Mapping[str, ProfileRun | None]
    ) -> Sequence["Profile"]:
        """The profiles to run now, in order; none ends the rounds."""
        raise NotImplementedError

    def result(self, request: Request, runs: Mapping[str, ProfileRun | None]) -> Decision:
        """All runs -> one decision. Raises Refused(NO_ENDPOINT_LEFT) when no run that it needs found a target."""
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
        """Indices of candidates, best first: at least one, none twice."""
        raise NotImplementedError


class PreRequest(Plugin):
    """Once per request that got an endpoint, before the answer goes to the gateway. May set `decision.headers`."""

    def before_send(self, request: Request, decision: Decision) -> None:
        raise NotImplementedError


class ResponseReceived(Plugin):
    """Once per request whose response headers arrived."""

    def response_received(self, request: Request, decision: Decision, status: int) -> None:
        raise NotImplementedError


class ResponseStreaming(Plugin):
    """Once per response body chunk that is not the last."""

    def response_streaming(self, request: Request, decision: Decision) -> None:
        raise NotImplementedError


class ResponseComplete(Plugin):
    """Exactly once per request that got an endpoint, whatever ended it. `usage` is None where none was reported."""

    def response_complete(self, request: Request, decision: Decision, usage: Usage | None) -> None:
        raise NotImplementedError


class DataSource(Plugin):
    """Where and how an endpoint's values are fetched; read by the supervisor only."""


class Extractor(Plugin):
    """Pages of a data source -> columns; runs in the supervisor only."""


class Discovery(Plugin):
    """Where endpoints come from; read by the supervisor only."""


class SaturationDetector(Plugin):
    """How full the pool is, 0 to 1 and above."""


EXTENSION_POINTS: tuple[type[Plugin], ...] = (
    Parser, DataProducer, ProfileHandler, Filter, Scorer, Picker, PreRequest, ResponseReceived, ResponseStreaming, ResponseComplete,
    DataSource, Extractor, Discovery, SaturationDetector,
)  # fmt: skip


FilterCall = Callable[[Request, Candidates, "Profile"], Mask]
ScorerCall = Callable[[Request, Candidates, "Profile"], Scores | None]


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
    ) -> None:
        self.name = name
        self.filters = filters
        self.scorers = scorers
        self.static_scorers = static_scorers
        self.picker = picker
        self.pick = picker.pick


P = TypeVar("P", bound=type[Plugin])
REGISTERED: dict[str, type[Plugin]] = {}


def plugin(type_name: str, *aliases: str) -> Callable[[P], P]:
    """Registers a class under the type name of the configuration; a name given twice is an error."""

    def register(cls: P) -> P:
        for name in (type_name, *aliases):
            if (other := REGISTERED.setdefault(name, cls)) is not cls and other.__module__ != cls.__module__:
                raise ValueError(f"plugin type '{name}' is registered by {other.__module__} and by {cls.__module__}")
            REGISTERED[name] = cls
        cls.type_name = type_name
        cls.aliases = aliases
        return cls

    return register
