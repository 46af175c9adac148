"""Serves streams while there is a candidate beside the configuration in force.

    open_tried ─▶ TriedStream ── headers ─▶ share: which app decides the request ── its end ─▶ figures of that configuration
                                   └ share 0: after the real decision, the candidate decides a copy of the request (`Tryout.shadow`)

Such streams exist only while there is a candidate, so at other times requests cost no more. `Tryout.chosen` chooses the app when the
headers arrive, and this app serves the stream to its end.

A shadow has no effect: it calls no plugin that admits, sends or follows requests. So the candidate does not learn from its own decisions.
"""

from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, Final

from epp.decision.decide import choose
from epp.decision.decision import Decision
from epp.decision.pipeline import Pipeline
from epp.decision.tryout import BY_FLOW, Share
from epp.errors import Refused
from epp.protocol import codec
from epp.protocol.codec import REQUEST_HEADERS
from epp.protocol.message_order import AWAIT_HEADERS
from epp.request import Request, client_headers
from epp.request.intake import REQUEST_ID_NEEDLE
from workers.transport.interface import Metadata, Stream
from workers.worker.extproc.app import App
from workers.worker.extproc.request_phase import RequestPhase
from workers.worker.extproc.shell import UNKNOWN_ERROR
from workers.worker.extproc.stream import PATH, ExtProcStream
from workers.worker.telemetry.alternatives import TryoutFigures, agrees

# Limit for shadow decisions that wait for a producer; at the limit, requests get no shadow decision.
SHADOWS_MAX: Final = 256
RANDOM_BITS: Final = 64


class Tryout:
    """Tries a candidate configuration in one worker. `app`: the candidate's app, which decides the requests of its share."""

    def __init__(
        self, app: App, share: Share, *, seed: int, figures: TryoutFigures, later: Callable[[Coroutine[Any, Any, None]], object]
    ) -> None:
        """`seed`: a number that is the same in all workers, so that all choose the same requests. `later` runs a coroutine in the event
        loop.
        """
        self.app = app
        self.figures = figures
        self._share = share
        self._seed = seed
        self._later = later
        self._waiting = 0
        # The candidate's pipeline, and the same pipeline without effects.
        self._bare: tuple[Pipeline, Pipeline] | None = None

    def chosen(self, headers: codec.Headers, tenant: str = "") -> bool:
        """Returns whether the candidate decides the request with these headers. `tenant`: the name of its tenant, or "" if no tenants are
        configured.

        If the share is by flow, the tenant determines the choice, or else the fairness id. Otherwise, or without both, the request's id
        does.
        """
        share = self._share
        if not share.millionths:
            return False
        key = (tenant or client_headers.fairness_id(headers)) if share.by == BY_FLOW else ""
        key = key or headers.find(REQUEST_ID_NEEDLE) or str(self.app.rng.getrandbits(RANDOM_BITS))
        return share.takes(key, self._seed)

    def copy(self, request: Request) -> Request | None:
        """Copies the request for a shadow decision. To be called before the real decision is answered, which drops the prompt.

        Returns None if the candidate decides a share itself, and so makes no shadow decisions, or if too many shadow decisions are under
        way.
        """
        if self._share.millionths or self._waiting >= SHADOWS_MAX:
            return None
        copied = Request(
            id=request.id,
            path=request.path,
            headers=request.headers,
            now=request.now,
            model=request.model,
            body_bytes=request.body_bytes,
            subset=request.subset,
            fairness_id=request.fairness_id,
            priority=request.priority,
            ttl_s=request.ttl_s,
        )
        copied.target_model, copied.wishes, copied.tenant = request.target_model, request.wishes, request.tenant
        copied.prompt, copied.cache_salt = request.prompt, request.cache_salt
        copied.streaming, copied.max_tokens = request.streaming, request.max_tokens
        return copied

    def shadow(self, request: Request, real: Decision) -> None:
        """Lets the candidate decide a copied request, and compares the result with the real decision."""
        self._later(self._decide(request, real))
        self._waiting += 1

    def _without_effects(self) -> Pipeline:
        current, bare = self.app.pipelines.current.pipeline, self._bare
        if bare is None or bare[0] is not current:
            bare = self._bare = current, without_effects(current)
        return bare[1]

    async def _decide(self, request: Request, real: Decision) -> None:
        app, outcome = self.app, "failed"
        begun = app.now()
        try:
            request.now = begun
            pipeline = self._without_effects()
            for read in pipeline.request_header:
                read(request)
            decision = await choose(pipeline, request, app.pool)
            outcome = "agreed" if same(real, decision) else "differed"
        except Refused:
            outcome = "differed"  # the real decision has a target, and the candidate refuses
        except Exception as problem:
            app.guards.on_fault(problem)
        finally:
            self._waiting -= 1
            self.figures.compared(outcome)
            self.figures.decided(True, app.now() - begun)


def without_effects(pipeline: Pipeline) -> Pipeline:
    """Returns the pipeline without the calls that may refuse or remember a request."""
    return replace(pipeline, admitters=(), shadows=(), pre_request=())


def same(real: Decision, candidate: Decision) -> bool:
    """Returns whether the candidate chose the same endpoint, or gives the endpoint of the real decision the same score as its own
    choice.
    """
    if real.targets[0].address == candidate.targets[0].address:
        return True
    run, other = real.runs.get(real.primary), candidate.runs.get(candidate.primary)
    if run is None or other is None:
        return False
    same_endpoint_list = run.candidates.snapshot.endpoint_list.endpoints == other.candidates.snapshot.endpoint_list.endpoints
    return same_endpoint_list and agrees(run, other)


def open_tried(tryout: Tryout, app: App, path: str, metadata: Metadata, stream: Stream) -> ExtProcStream | None:
    """Returns the handler of a new stream; None if `path` is not the ext_proc method. `app`: the app of the configuration in force."""
    if path != PATH:
        return None
    app.telemetry.opened()
    return TriedStream(app, stream, metadata, tryout)


class TriedStream(ExtProcStream):
    """A stream whose result is counted, and whose request the candidate may decide."""

    __slots__ = ("_counted", "_cut", "_tried", "_tryout")

    def __init__(self, app: App, transport: Stream, metadata: Metadata, tryout: Tryout | None, phase: RequestPhase | None = None) -> None:
        """`tryout`: None until the pool is known. `phase`: as in `ExtProcStream`."""
        super().__init__(app, transport, metadata, phase)
        self._tryout = tryout
        self._tried = False
        self._counted = False
        self._cut = False  # whether the gateway has given the stream up

    def message(self, message: bytes) -> None:
        if self.state == AWAIT_HEADERS and self._tryout is not None:
            self._choose(self._tryout, message)
        super().message(message)

    def enter(self, tryout: Tryout | None, message: bytes) -> None:
        """Notes that the pool is known. `tryout`: the tryout of its candidate, or None. `message`: the message with the headers."""
        self._tryout = tryout
        if tryout is not None:
            self._choose(tryout, message)

    def _choose(self, tryout: Tryout, message: bytes) -> None:
        try:
            kind, start, end = codec.split(message)
            if kind != REQUEST_HEADERS:
                return
            hidden = self.app.guards.hidden_headers
            headers = codec.Unseen(message, start, end, hidden) if hidden else codec.Headers(message, start, end)
            tenants = self.app.tenants
            if tryout.chosen(headers, tenants.of(headers, message).name if tenants is not None else ""):
                self._tried = True
                self.app = tryout.app
        except Exception:  # the request phase reads the message again, and answers the error
            return

    def decided(self, decision: Decision) -> None:
        request, copy, tryout = self.request, None, self._tryout
        if tryout is None:
            super().decided(decision)
            return
        try:
            copy = tryout.copy(request) if request is not None else None
        except Exception as problem:  # a fault of a tryout must not affect the request
            self.fault(problem)
        super().decided(decision)
        try:
            if request is not None:
                tryout.figures.decided(self._tried, request.sent_at - self.received_at)
            if copy is not None:
                tryout.shadow(copy, decision)
        except Exception as problem:
            self.fault(problem)

    def closed(self) -> None:
        self._cut = True
        super().closed()

    def finish(self) -> None:
        try:
            if not self._counted and self._tryout is not None:
                self._count(self._tryout)
        except Exception as problem:
            self.fault(problem)
        super().finish()

    def _count(self, tryout: Tryout) -> None:
        """Counts the result of the request at its end. Errors of the gateway are counted for neither configuration."""
        answer = self.response_phase
        exchange = answer.exchange if answer is not None else None
        if exchange is not None:
            first_s, usage = exchange.first_s, exchange.usage
            # If the gateway gave up before the first token, the token would have taken at least this long.
            if self._cut and first_s != first_s:
                first_s = self.app.now() - self.received_at
            tryout.figures.ended(self._tried, failed=bool(self.error), first_token_s=first_s, usage=usage)
            self._counted = True
        elif self.error and self.error != UNKNOWN_ERROR:
            tryout.figures.ended(self._tried, failed=True, first_token_s=0.0, usage=None)
            self._counted = True
