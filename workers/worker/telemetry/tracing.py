"""Traces a sample of the requests: where the time went, and why the endpoint was picked.

The sampled flag of the parent decides whether a request is sampled. The parent is the request's header `traceparent`. If the header is
missing or malformed, it is the `traceparent` in the metadata of the ext_proc stream: a gateway that traces puts its own context there, and
adds it to the request only later. Without a parent, or if the sampler does not follow parents, a ratio of the trace ids decides. A request
that is not sampled costs only this check: it has no span and no other call. A sampled request is decided by a second pipeline. That
pipeline has the same plugins, with wrapped calls (`TracedCalls`), which find the trace in `request.data`. The spans:

    gateway.request                          the whole stream
    └─ gateway.request_orchestration         the last piece of the body .. answer or refusal
       └─ run_scheduler_profile              once per run of a profile; begins when the handler, or the previous profile, is done
          ├─ filter_endpoints                first filter .. last one, or the one that leaves no endpoint; absent without filters
          ├─ llm_d.epp.scoring               filters done .. picker; absent without scorers
          │  └─ llm_d.epp.scorer.<type>      one call
          └─ pick_endpoints

A scorer that is not called has no span. The scores of static scorers stay valid from one scrape to the next, and a trace shows only the
work for its own request. `llm_d.epp.scoring` then names these scorers in `llm_d.epp.scoring.kept_scorers`. Shadow profiles have no spans
either, because they decide nothing.

The model server gets a `traceparent` with the parent `gateway.request`; if the request is not sampled, the `traceparent` of the parent.
`tracestate` has the same source as the parent. `baggage` passes unchanged. Text from clients is cut to `VALUE_CHARS_MAX` characters, so
spans stay small. A trace keeps no reference to its request. So there are no reference cycles, and a trace is freed with its stream. This
module does not know OpenTelemetry: `workers.worker.telemetry.tracing_export` exports the spans.
"""

import random
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar, cast

import numpy as np

from epp.candidates import Candidates, Scores
from epp.decision.decision import Decision
from epp.decision.pipeline import Pipeline, WiredProfile
from epp.plugin import Plugin, Profile, Scorer
from epp.points.instrument import Point, Wrap
from epp.protocol import codec
from epp.request import Request
from workers.host.log import words
from workers.worker.telemetry.trace_context import MENTION, NEEDLE, TRACEPARENT, GatewayContext, parse_traceparent

REQUEST: Final = "gateway.request"
ORCHESTRATION: Final = "gateway.request_orchestration"
PROFILE: Final = "run_scheduler_profile"
FILTERS: Final = "filter_endpoints"
SCORING: Final = "llm_d.epp.scoring"
SCORER: Final = "llm_d.epp.scorer."
PICK: Final = "pick_endpoints"
TRACE: Final = "trace"  # the key of the trace in the data of a traced request
REQUEST_ID: Final = "x-request-id"
VALUE_CHARS_MAX: Final = 128
TOP: Final = 5

# the most frequent form
_UNSAMPLED: Final = re.compile("00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f][02468ace]")
_LOW_BITS: Final = (1 << 64) - 1
_DEPTH_REQUEST: Final = 1
_DEPTH_ORCHESTRATION: Final = 2
_DEPTH_PROFILE: Final = 3

C = TypeVar("C", bound=Callable[..., Any])


class Span:
    """One span. Times are nanoseconds since the epoch. `parent`: a span id; 0 for a root.

    `remote`: whether the parent is a span of another process.
    """

    __slots__ = (
        "attributes", "end", "error", "name", "parent", "problem", "remote", "span_id", "start", "trace_id",
    )  # fmt: skip

    def __init__(self, name: str, trace_id: int, span_id: int, parent: int, start: int, attributes: dict[str, Any]) -> None:
        self.name = name
        self.trace_id = trace_id
        self.span_id = span_id
        self.parent = parent
        self.start = start
        self.end = 0
        self.attributes = attributes
        self.remote = False
        self.error = ""
        self.problem = ""  # the type of the exception, or ""

    def fail(self, problem: BaseException) -> None:
        """Marks the span as failed by this exception."""
        self.problem = type(problem).__name__
        self.error = words(problem)[:VALUE_CHARS_MAX] or self.problem


class Tracer:
    """Chooses the requests that are traced. `emit` gets every span when the span ends, and must not block or raise."""

    def __init__(
        self,
        pipeline: Pipeline,
        timers: Wrap,
        emit: Callable[[Span], None],
        *,
        ratio: float,
        parent_based: bool = True,
        rng: random.Random,
        clock: Callable[[], int] = time.monotonic_ns,
        wall: Callable[[], int] = time.time_ns,
    ) -> None:
        self._timers = timers
        self.use(pipeline)
        self.emit = emit
        self.bits = rng.getrandbits
        self.clock = clock
        self.wall = wall
        self._parent_based = parent_based
        self._sampled_below = round(ratio * (1 << 64))

    def use(self, pipeline: Pipeline) -> None:
        """Uses `pipeline` from now on: traced requests get a form of it with traced calls."""
        self.pipeline = traced(pipeline, self._timers)
        self.statics = {wired.name: static_scorers(wired) for wired in pipeline.wiring.profiles}

    def begin(self, headers: codec.Headers, gateway: GatewayContext | None = None) -> "Trace | None":
        """Begins the trace of a request with these headers. Returns None if the request is not sampled.

        `gateway`: the trace context of the gateway; None without one. This context is used only if the headers have no parent.
        """
        parent = None
        if headers.mentions(MENTION):
            text = headers.find(NEEDLE) or ""
            if self._parent_based and _UNSAMPLED.fullmatch(text):
                return None
            parent = parse_traceparent(text)
        if parent is not None:
            gateway = None
        elif gateway is not None:
            parent = gateway.parent
        if parent is None:
            trace_id = self.bits(128)
            return Trace(self, trace_id, 0) if trace_id & _LOW_BITS < self._sampled_below else None
        sampled = parent.sampled if self._parent_based else parent.trace_id & _LOW_BITS < self._sampled_below
        return Trace(self, parent.trace_id, parent.span_id, gateway) if sampled else None


class Trace:
    """The spans of one request. The stream calls `deciding`, then `routed` or `failed`, and `end` once. Wrapped calls use the other
    methods.
    """

    __slots__ = (
        "_between", "_gateway", "_kept", "_offset", "_open", "_profile", "_ready", "_tracer", "about", "trace_id",
    )  # fmt: skip

    def __init__(self, tracer: Tracer, trace_id: int, parent: int, gateway: GatewayContext | None = None) -> None:
        """`gateway`: the context with the parent; None if the parent comes from the request's headers, or if there is no parent."""
        self._tracer = tracer
        self._gateway = gateway
        # Read once, so that a step of the wall clock does not distort spans.
        self._offset = tracer.wall() - tracer.clock()
        self._open: list[Span] = []
        self._profile: Profile | None = None
        self._between = 0  # the time at which the handler or the last profile was done
        self._ready = 0  # the time at which the profile could begin to score
        self._kept: list[str] = []  # the profile's static scorers, until one of them is called
        self.trace_id = trace_id
        self.about: Mapping[str, Any] = {}  # the attributes of all spans
        root = self.start(REQUEST)
        root.parent, root.remote = parent, parent != 0

    # Calls of the stream.

    def deciding(self, request: Request) -> None:
        """Opens the span of the decision. Called when the request is complete."""
        self.start(ORCHESTRATION)
        request.data[TRACE] = self

    def routed(self, request: Request | None, decision: Decision) -> None:
        """Ends the span of the decision. Adds the trace context for the model server to the decision's headers."""
        if request is not None:
            self._learn(request, decision.headers.get(REQUEST_ID, ""))
        self._finish_to(_DEPTH_REQUEST)
        decision.headers[TRACEPARENT] = f"00-{self.trace_id:032x}-{self._open[0].span_id:016x}-01"
        if self._gateway is not None:
            self._gateway.pass_state_on(decision)

    def failed(self, request: Request | None, problem: BaseException) -> None:
        """Marks all open spans as failed, and ends all but the root. Called when the request was refused or has failed."""
        if request is not None:
            self._learn(request, "")
        for span in self._open:
            span.fail(problem)
        self._finish_to(_DEPTH_REQUEST)

    def end(self, error: str) -> None:
        """Ends the trace with its stream. `error`: the error code, or ""."""
        root = self._open[0]
        root.error = root.error or error
        self._finish_to(0)

    def _learn(self, request: Request, new_id: str) -> None:
        request.data.pop(TRACE, None)  # the request may live longer than its trace
        self.about = about(request, new_id)
        if len(self._open) >= _DEPTH_ORCHESTRATION:
            self._open[_DEPTH_ORCHESTRATION - 1].attributes = {
                "target_model": request.target_model[:VALUE_CHARS_MAX],
                "request_prio": request.priority,
            }

    # Methods for wrapped calls.

    def start(self, name: str, at: int = 0, attributes: dict[str, Any] | None = None) -> Span:
        """Opens a span inside the span that was opened last. `at`: its start; 0 means now."""
        tracer, opened = self._tracer, self._open
        begin = at or tracer.clock() + self._offset
        parent = opened[-1].span_id if opened else 0
        span = Span(name, self.trace_id, tracer.bits(64) or 1, parent, begin, attributes if attributes is not None else {})
        opened.append(span)
        return span

    def finish(self) -> int:
        """Ends the span that was opened last. Returns its end time."""
        span = self._open.pop()
        span.end = self._tracer.clock() + self._offset
        span.attributes |= self.about
        self._tracer.emit(span)
        return span.end

    def _finish_to(self, depth: int) -> None:
        while len(self._open) > depth:
            self.finish()

    def between_profiles(self, request: Request) -> None:
        """Called before each call of the profile handler. Ends the span of a profile that is open because its filters left no endpoint."""
        if not self.about:
            self.about = about(request, "")
        self._leave_profile()

    def handled(self) -> None:
        """Called after each call of the profile handler."""
        self._between = self._tracer.clock() + self._offset

    def filtering(self, profile: Profile, candidates: int) -> None:
        """Called before each filter. Opens the filters' span before the first one."""
        self._enter_profile(profile)
        if len(self._open) == _DEPTH_PROFILE:
            self.start(FILTERS, attributes={"llm_d.epp.filter.candidate_endpoints": candidates})

    def filtered(self, left: int) -> None:
        """Called after the last filter that runs. Ends the filters' span."""
        self._open[-1].attributes["llm_d.epp.filter.filtered_endpoints"] = left
        self._ready = self.finish()

    def scoring(self, profile: Profile, candidates: int, *, static: bool) -> None:
        """Called before each scorer. Opens the scorers' span before the first one."""
        self._enter_profile(profile)
        self._begin_scoring(profile, candidates)
        if static:
            self._kept = []

    def picking(self, profile: Profile, candidates: int, attributes: dict[str, Any]) -> None:
        """Called before the picker. Ends the scorers' span and opens the picker's."""
        self._enter_profile(profile)
        if profile.scorers or profile.static_scorers:
            self._begin_scoring(profile, candidates)
            if self._kept:
                self._open[-1].attributes["llm_d.epp.scoring.kept_scorers"] = self._kept
            self.finish()
        self.start(PICK, attributes=attributes)

    def picked(self) -> None:
        """Called after the picker. Ends its span and the profile's."""
        self.finish()
        self._leave_profile()

    def _enter_profile(self, profile: Profile) -> None:
        if self._profile is not profile:
            self._leave_profile()
            self._profile = profile
            self._ready = self._between
            self._kept = self._tracer.statics[profile.name]
            self.start(PROFILE, self._between, {"llm_d.epp.scheduling.profile.name": profile.name})

    def _begin_scoring(self, profile: Profile, candidates: int) -> None:
        if len(self._open) == _DEPTH_PROFILE:
            count = len(profile.scorers) + len(profile.static_scorers)
            attributes = {"llm_d.epp.scorer.count": count, "llm_d.epp.scoring.candidate_endpoints": candidates}
            self.start(SCORING, self._ready, attributes)

    def _leave_profile(self) -> None:
        self._profile = None
        while len(self._open) > _DEPTH_ORCHESTRATION:
            self._between = self.finish()


def about(request: Request, new_id: str) -> dict[str, Any]:
    """Returns the attributes that all spans of a request share. `new_id`: the id that the picker gave to a request without one."""
    attributes = {"gen_ai.request.model": request.target_model, "gen_ai.request.id": request.id or new_id}
    return {name: value[:VALUE_CHARS_MAX] for name, value in attributes.items() if value}


def traced(pipeline: Pipeline, timers: Wrap) -> Pipeline:
    """Returns the pipeline for sampled requests: the same calls, traced and also timed."""
    return replace(pipeline.wrapped(TracedCalls(timers)), shadows=pipeline.shadows)


def static_scorers(wired: WiredProfile) -> list[str]:
    """Returns the names of a profile's static scorers."""
    return [plugin.name for plugin, _ in wired.members if isinstance(plugin, Scorer) and plugin.static]


class TracedCalls:
    """A `Wrap` for the pipeline of traced requests. It applies another `Wrap`, `inner`, to all calls. Then it adds spans to the calls of
    profile handlers, filters, scorers and pickers.
    """

    def __init__(self, inner: Wrap) -> None:
        self._inner = inner
        self._kinds: Mapping[Point, Callable[[Plugin, Callable[..., Any]], Callable[..., Any]]] = {
            Point.PROFILE_PICKER: _handler,
            Point.PROFILES_RESULT: _handler,
            Point.FILTER: _filter,
            Point.SCORER: _scorer,
            Point.PICKER: _picker,
        }

    def __call__(self, point: Point, plugin: Plugin, call: C, /) -> C:
        call = self._inner(point, plugin, call)
        kind = self._kinds.get(point)
        return call if kind is None else cast("C", kind(plugin, call))


def _handler(_plugin: Plugin, call: Callable[..., Any]) -> Callable[..., Any]:
    def traced(request: Request, *arguments: Any) -> Any:
        trace: Trace = request.data[TRACE]
        trace.between_profiles(request)
        result = call(request, *arguments)
        trace.handled()
        return result

    return traced


def _filter(_plugin: Plugin, call: Callable[..., Any]) -> Callable[..., Any]:
    def traced(request: Request, candidates: Candidates, profile: Profile) -> Any:
        trace: Trace = request.data[TRACE]
        trace.filtering(profile, len(candidates))
        mask = call(request, candidates, profile)
        left = int(np.count_nonzero(mask))
        if not left or profile.filters[-1] is traced:
            trace.filtered(left)
        return mask

    return traced


def _scorer(plugin: Plugin, call: Callable[..., Any]) -> Callable[..., Any]:
    static = isinstance(plugin, Scorer) and plugin.static

    def traced(request: Request, candidates: Candidates, profile: Profile) -> Any:
        trace: Trace = request.data[TRACE]
        trace.scoring(profile, len(candidates), static=static)
        span = trace.start(SCORER + plugin.type_name)
        try:
            scores = call(request, candidates, profile)
        except Exception as problem:  # the request is routed without this scorer
            span.fail(problem)
            trace.finish()
            raise
        weight = next(w for score, w in (profile.static_scorers if static else profile.scorers) if score is traced)
        span.attributes = scorer_attributes(plugin, weight, len(candidates), scores)
        trace.finish()
        return scores

    return traced


def _picker(_plugin: Plugin, call: Callable[..., Any]) -> Callable[..., Any]:
    def traced(request: Request, candidates: Candidates, totals: Scores, profile: Profile) -> Any:
        trace: Trace = request.data[TRACE]
        trace.picking(profile, len(candidates), picker_attributes(candidates, totals))
        picked = call(request, candidates, totals, profile)
        trace.picked()
        return picked

    return traced


def scorer_attributes(plugin: Plugin, weight: float, candidates: int, scores: Scores | None) -> dict[str, Any]:
    """Returns the attributes of a scorer's span. `scores`: None if the scorer abstains."""
    attributes: dict[str, Any] = {
        "llm_d.epp.scorer.type": plugin.type_name,
        "llm_d.epp.scorer.name": plugin.name,
        "llm_d.epp.scorer.weight": float(weight),
        "llm_d.epp.scorer.candidate_endpoints": candidates,
    }
    if scores is not None:
        attributes |= {
            "llm_d.epp.scorer.score.max": float(scores.max()),
            "llm_d.epp.scorer.score.avg": float(scores.mean()),
            "llm_d.epp.scorer.endpoints_scored": len(scores),
        }
    return attributes


def picker_attributes(candidates: Candidates, totals: Scores) -> dict[str, Any]:
    """Returns the attributes of a picker's span: the number of candidates, and the best of them with their totals."""
    best = np.argsort(-totals, kind="stable")[:TOP].tolist()
    endpoints = [candidates.endpoint(index) for index in best]
    return {
        "llm_d.epp.picker.candidate_endpoints": len(candidates),
        "llm_d.epp.picker.top_endpoints": [f"{e.namespace}/{e.name}"[:VALUE_CHARS_MAX] for e in endpoints],
        "llm_d.epp.picker.top_scores": [float(totals[index]) for index in best],
    }
