"""The interface of plugins: the extension points, in the order in which they run, and the `@plugin` decorator.

This module also exports the extension points of flow control (`epp.points.flow`), and the base class and the services of plugins
(`epp.points.base`).

A plugin is a class that inherits one or more extension points. `@plugin` registers it under the type name that configurations use:

    @plugin("queue-scorer")
    class QueueDepth(Scorer):
        consumes = (WAITING,)
        def score(self, request, candidates, profile): ...

The calls for one request, in this order (the docstring of an extension point says when it runs and what it may write):

    extension point     calls per request                                          order of the plugins
    Parser              1, of one parser, when the whole body has arrived          -
    RequestHeader       1 per plugin                                               the configuration
    flow control        OrderingPolicy 1; the others: see `epp.points.flow`        -
    Screener            1 per plugin, on all candidates                            the configuration
    DataProducer        1 per plugin, if another plugin reads its data             the dependencies of their data
    Admitter            1 per plugin; again after a hold, as the two before it     the configuration
    ProfileHandler      `pick` until it returns no profile, then `result` once     -
    Decider             1 for each stage that the profile handler asks about       -
    Filter              1 per profile run, on what the filter before it kept       the profile
    Scorer              1 per profile run; `static` scorers less often             the profile
    Picker              1 per profile run                                          -
    PreRequest          1 per plugin, if the request got an endpoint               the configuration
    ResponseReceived    1 per plugin, when response headers arrive                 the configuration
    ResponseStreaming   1 per plugin and body chunk except the last                the configuration
    ResponseComplete    exactly 1 per plugin, if the request got an endpoint       the configuration

Rules for all extension points:
- The constructor runs before the fork and must be inert: no event loop, thread, socket or randomness. `start(services)` runs after
  the fork, once in each worker.
- Parameters are a frozen msgspec struct, `Params` in the class. Unknown fields are refused at start.
- A plugin declares the data that it uses in `consumes`, `optional`, `produces` and `keeps` (see `Plugin`), as class attributes or
  in the constructor. If a foreign plugin accesses other data of the request, the access is refused and counted (`epp.points.guard`).
  Reading a column of the candidates without declaring it in `consumes` raises PluginFault.
- Data of one request live in `request[DATUM]` and end with the request, however it ends.
- Up to PreRequest a plugin may raise `Refused`: the client gets the error answer of its cause. Any other exception is counted and fails
  this request with 500, except in two cases. ProducerFailed and TimeoutError of a data producer fail open: readers of its data get the
  defaults. If a scorer raises, the request is routed without that scorer. After the picker's answer, an exception is counted and has no
  other effect. If a plugin fails repeatedly, the picker may disable it for a while (`epp.points.isolation`).
- A plugin that is only in shadow profiles acts there only as Filter, Scorer or Picker. It does not screen or admit, and gets no calls of
  PreRequest or the response.
- Everything runs on the worker's event loop: a plugin must not block. Work that waits goes through `Services`.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

from epp.candidates import Candidates, Mask, Scores
from epp.decision.decision import Decision, ProfileRun, Response
from epp.decision.profile import FilterCall, PickCall, Profile, ScorerCall
from epp.points.base import (
    Count,
    Gauge,
    Hashes,
    HeldBlocks,
    HeldView,
    HttpAnswer,
    Learning,
    LoadCounts,
    Measure,
    Need,
    NoParams,
    Plugin,
    Prefills,
    PrefixIndex,
    Services,
    Waiting,
    foreign,
    plugin,
)
from epp.points.flow import (
    DisplacementPolicy,
    EvictionFilter,
    EvictionOrder,
    FairnessPolicy,
    FairShare,
    FlowQueue,
    Ledger,
    OrderingPolicy,
    Queue,
    RankedShare,
    SaturationDetector,
    UsageLimitPolicy,
)
from epp.request import Request

__all__ = [
    "EXTENSION_POINTS",
    "Admitter",
    "Count",
    "DataProducer",
    "DataSource",
    "Decider",
    "Discovery",
    "DisplacementPolicy",
    "EvictionFilter",
    "EvictionOrder",
    "Extractor",
    "FairShare",
    "FairnessPolicy",
    "Filter",
    "FilterCall",
    "FlowQueue",
    "Gauge",
    "Hashes",
    "HeldBlocks",
    "HeldView",
    "HttpAnswer",
    "Learning",
    "Ledger",
    "LoadCounts",
    "Measure",
    "Need",
    "NoParams",
    "OrderingPolicy",
    "Parser",
    "PickCall",
    "Picker",
    "Plugin",
    "PreRequest",
    "Prefills",
    "PrefixIndex",
    "Profile",
    "ProfileHandler",
    "Queue",
    "RankedShare",
    "RequestHeader",
    "ResponseComplete",
    "ResponseReceived",
    "ResponseStreaming",
    "SaturationDetector",
    "Scorer",
    "ScorerCall",
    "Screener",
    "Services",
    "Syncer",
    "UsageLimitPolicy",
    "Waiting",
    "foreign",
    "plugin",
]


class Parser(Plugin):
    """Reads request bodies, when the whole body has arrived.

    `paths`: path suffixes. The parser with the longest matching suffix reads the request, and the runtime unpacks compressed bodies for
    it. A parser without `paths` reads all other requests, and gets compressed bodies unchanged.
    `app_protocols`: values of the InferencePool's `appProtocol` that the parser can serve; empty for all values.
    `reads_usage`: whether the runtime searches responses for token usage. If responses report usage in another form than a JSON object
    `usage`, `parse` sets `request[ANSWER]` (`epp.protocol.usage`).
    `names_model`: whether the runtime may replace the model's name. The parser then promises that bodies are JSON objects with the name
    in the member `model`. It also promises that MODEL_MISSING is the last check of `parse`, because a header or a rule may give the name.
    `salt_member`: the member of bodies that has the cache salt, which the runtime may set. The parser then promises that bodies are JSON
    objects. If it is "", the runtime sets no salt.
    """

    paths: ClassVar[tuple[str, ...]] = ()
    app_protocols: ClassVar[tuple[str, ...]] = ()
    reads_usage: ClassVar[bool] = False
    names_model: ClassVar[bool] = False
    salt_member: ClassVar[str] = ""

    def parse(self, request: Request, path: str, body: bytes | memoryview) -> None:
        """Sets model, target_model, prompt, streaming, max_tokens and cache_salt of `request`, as far as the body has them.

        `path` has no query string. Raises Refused(INVALID_BODY, text) or Refused(MODEL_MISSING). Keep `body` in `request.prompt` only,
        which is dropped after the decision: a reference to `body` keeps the whole message in memory.

        If the body has no member `salt_member`, in no spelling and not as null, `parse` may set `request.salted` to False. Otherwise the
        runtime searches the body for the member. `parse` may be called twice, if it refuses the body or the runtime has changed it.
        """
        raise NotImplementedError


class RequestHeader(Plugin):
    """Reads the parsed request and its headers. Called once per request, before admission and before candidates are known."""

    def read(self, request: Request) -> None:
        """May set `request.fairness_id` and declared data."""
        raise NotImplementedError


class Screener(Plugin):
    """Restricts the candidates of all profiles. Called once per request, after its admission (`epp.decision.admission`).

    Each screener gets all candidates. A candidate stays if all screeners keep it. If none stays, the request is refused with 503.
    """

    def screen(self, request: Request, candidates: Candidates) -> Mask:
        """Returns whether to keep each candidate: bool, shape (candidates,)."""
        raise NotImplementedError


class DataProducer(Plugin):
    """Computes data that other plugins read. Called once per request, when the candidates are known.

    Producers run in the order of their dependencies. A producer runs only if a plugin reads its data.
    """

    def produce(self, request: Request, candidates: Candidates) -> Waiting | None:
        """Sets `request[DATUM]` for the data in `produces`.

        Values per endpoint have the snapshot's shape (endpoints,), not (candidates,); readers reduce them with `candidates.narrow`.

        Returns None if the data are set, or a `Waiting` of `services` whose work sets them. Only this request waits for that work; then
        the load in flight is read again. ProducerFailed and TimeoutError, raised here or by the `Waiting`, fail open: readers get the
        datum's default.
        """
        raise NotImplementedError


class Admitter(Plugin):
    """Accepts, holds or refuses a request. Called after the producers and before profiles run: once, and again after each hold."""

    def admit(self, request: Request, candidates: Candidates) -> Waiting | None:
        """Returns None to accept. Raises Refused(Cause.NOT_ADMITTED, reason) to refuse: the client gets 429.

        Returns a `Waiting` of `services` to hold the request: when it is over, `request.now` is the time of that moment, screeners and
        producers run again, and all admitters are asked again. A request can be held at most 64 times; then it is refused.
        """
        raise NotImplementedError


class ProfileHandler(Plugin):
    """Chooses the profiles to run, and makes the decision from their runs. A configuration has exactly one.

    Per request `pick` is called until it returns no profile (at most 16 times), then `result` once. To pass data of earlier runs to the
    plugins of a later profile, a handler declares the data in `produces` and sets them in `pick` (`Request.give`). A handler never gets
    shadow profiles.
    """

    def check(self, profiles: Sequence[str]) -> str | None:
        """Says why this handler cannot work with profiles of these names. Returns None if it can. Called once, before the fork."""
        return None

    def reaches(self, profiles: Sequence[str]) -> Collection[str] | None:
        """Returns which of these profiles the handler may ever run; None if that is unknown. Called once, before the fork."""
        return None

    def idle(self, profiles: Sequence[str]) -> Sequence[str]:
        """Returns settings that have no effect with these profiles: one text each, with the reason, logged at start.

        Called before the fork.
        """
        return ()

    def pick(self, request: Request, profiles: Mapping[str, "Profile"], runs: Mapping[str, ProfileRun | None]) -> Sequence["Profile"]:
        """Returns the profiles to run in this round, in order; an empty sequence ends the rounds.

        `profiles`: all profiles by name. `runs`: profile name -> its run in an earlier round, or None if its filters left no candidate.
        """
        raise NotImplementedError

    def result(self, request: Request, runs: Mapping[str, ProfileRun | None]) -> Decision:
        """Makes the decision from all runs. Raises Refused(NO_ENDPOINT_LEFT) if a run that it needs has no target."""
        raise NotImplementedError


class Decider(Plugin):
    """Decides whether a stage of a disaggregated request (prefill, encode) runs. A profile handler names the decider in its parameters, and
    calls it once per request and stage.

    The runtime does not see this call: it is not timed, traced or guarded.
    """

    def wanted(self, request: Request, run: ProfileRun | None) -> bool:
        """Returns whether the stage runs. `run`: the run of the decode profile; None for a stage before decode."""
        raise NotImplementedError


class Filter(Plugin):
    """Drops candidates of a profile. Called once per profile run, in configured order, with the candidates that remain."""

    def keep(self, request: Request, candidates: Candidates, profile: "Profile") -> Mask:
        """Returns whether to keep each candidate: bool, shape (candidates,). If no candidate remains, the profile has no target."""
        raise NotImplementedError


class Scorer(Plugin):
    """Scores the candidates that the filters kept. Called once per profile run.

    `static`: the scorer reads scraped columns only, neither the request nor load in flight. Then one call serves all decisions until
    the next scrape, as long as no filter drops a candidate.
    """

    static: ClassVar[bool] = False

    def score(self, request: Request, candidates: Candidates, profile: "Profile") -> Scores | None:
        """Returns a new float64 array in [0, 1] of shape (candidates,); higher is better. Returns None if every candidate scores 0.

        The runtime multiplies the array by the weight that the profile gives the scorer. If the scorer is a foreign plugin, scores are
        clipped to [0, 1], and a NaN becomes 0.
        """
        raise NotImplementedError


class Picker(Plugin):
    """Picks from the scored candidates. Called once per profile run, last. Each profile has exactly one picker."""

    def pick(self, request: Request, candidates: Candidates, totals: Scores, profile: "Profile") -> Sequence[int]:
        """Returns indices of candidates, best first: at least one, all different. `totals`: weighted sums of scores, shape (candidates,).

        Return several indices only for a gateway that accepts a list of addresses, as in `deploy/envoy-retry.yaml`.
        """
        raise NotImplementedError


class PreRequest(Plugin):
    """Prepares the request for its endpoint. Called once per request that got an endpoint, before the picker answers the gateway."""

    def before_send(self, request: Request, decision: Decision) -> None:
        """May set `decision.headers`, the headers that the model server gets.

        An exception fails the request: it is not sent, and the calls of ResponseComplete follow (see `ResponseComplete`).
        """
        raise NotImplementedError


class ResponseReceived(Plugin):
    """Reads the response headers. Called once per request with an endpoint when the headers arrive, for any status."""

    def response_received(self, request: Request, decision: Decision, response: Response) -> None:
        """May set `response.set_headers`: headers that are set in the response to the client."""
        raise NotImplementedError


class ResponseStreaming(Plugin):
    """Follows the response's body. Called once per chunk, except the last. `request.now` is the chunk's time of arrival.

    Not called for a response with an error status, 400 or more: its chunks are no tokens.

    `first_chunk_only`: whether the plugin is called only once per response, for the first chunk that is not empty. A chunk without a call
    of a plugin takes a tenth of the time.
    """

    first_chunk_only: ClassVar[bool] = False

    def response_streaming(self, request: Request, decision: Decision) -> None:
        """Called when a chunk has arrived; does not get its content. This call runs for every chunk, so it must be fast."""
        raise NotImplementedError


class ResponseComplete(Plugin):
    """Learns how a request ended. Called exactly once per request that got an endpoint: complete, cut short, failed, or never sent.

    One exception: a plugin that is also a PreRequest is not called if its own `before_send` did not run for this request.

    `reads_answer`: set it to False if the plugin needs no headers of the response. `response.headers` may then be empty, and
    `response.status` 200 may be wrong; any other status is right.
    """

    reads_answer: ClassVar[bool] = True

    def response_complete(self, request: Request, decision: Decision, response: Response) -> None:
        """May set `response.metadata`, because the end of the answer is passed on to the gateway after this call.

        `response.status` is 0 if no response arrived. `response.usage` is None if no usage was reported.
        """
        raise NotImplementedError


class DataSource(Plugin):
    """Says how the values of endpoints are fetched. Only the supervisor uses data sources: `MetricsDataSource` and its subclasses.

    `scrapes`: False for a source that fetches nothing; a configuration may still list it. `takes_extractors`: whether the source's entry
    in the configuration may name extractors.
    """

    scrapes: ClassVar[bool] = True
    takes_extractors: ClassVar[bool] = True


class Extractor(Plugin):
    """Reads columns from the pages of a data source. Only the supervisor uses extractors: `CoreMetricsExtractor` and its subclasses.

    `reads_pages`: False for an extractor that needs no data source, because other plugins read its settings before the start.
    """

    reads_pages: ClassVar[bool] = True


class Discovery(Plugin):
    """Says where the list of endpoints comes from. Only the supervisor uses discoveries: `FileDiscovery` and its subclasses."""


class Syncer(Plugin):
    """Shares state between the replicas of a picker. A configuration may name a syncer, but the picker never calls it."""


EXTENSION_POINTS: tuple[type[Plugin], ...] = (
    Parser, RequestHeader,
    FlowQueue, OrderingPolicy, FairnessPolicy, DisplacementPolicy, SaturationDetector, UsageLimitPolicy, EvictionFilter, EvictionOrder,
    Screener, DataProducer, Admitter, ProfileHandler, Decider, Filter, Scorer, Picker, PreRequest,
    ResponseReceived, ResponseStreaming, ResponseComplete,
    DataSource, Extractor, Discovery, Syncer,
)  # fmt: skip
