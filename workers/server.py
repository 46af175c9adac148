"""ext_proc streams: bytes -> request -> decision -> bytes, and the response phase.

One `ExtProcStream` serves one stream; `workers.app` is what all streams of a worker share. The order of messages is judged by
`epp.protocol.stream`, the decision taken by `epp.decide`; this file joins them with the transport, the lane and the clock.

Invariants: every stream gets exactly one answer to its request (a target, an error, or the stream's end); what a decision
reserved is released exactly once, however the stream ends; a body piece that needs no change is passed on as it came.
"""

import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Final

from epp import client_headers, if_available
from epp.decide import decide
from epp.decision import SERVED, Decision, Response
from epp.errors import Cause, ProtocolViolation, Refused
from epp.flow.eviction import Victim
from epp.paths import DEFAULT_PATH
from epp.pipeline import ParseCall, Pipeline
from epp.plugin import Parser
from epp.protocol import codec, refusals
from epp.protocol.codec import (
    PIECE_BYTES_MAX,
    REQUEST_BODY,
    REQUEST_HEADERS,
    REQUEST_TRAILERS,
    RESPONSE_BODY,
    RESPONSE_HEADERS,
    RESPONSE_TRAILERS,
    chunk_of_size,
    learn_chunk,
)  # fmt: skip
from epp.protocol.inflate import Unpacking, body_slices
from epp.protocol.rewrite import REMOVED, ModelRestorer
from epp.protocol.stream import (
    AWAIT_BODY,
    AWAIT_HEADERS,
    DECIDING,
    DONE,
    ENDED,
    ILLEGAL,
    NEXT,
    RESPONDING,
    ROUTED,
    violation,
)  # fmt: skip
from epp.protocol.usage import ANSWER, KEY, SUSPECT, Scanner, UsageScanner
from epp.request import DEFAULT_FLOW, Request, Subset
from epp.tokens import let_go
from workers.app import App
from workers.renaming import CONTENT_ENCODING, MENTIONED, UNSIZED, parse_renamed, restorable
from workers.request_metrics import Exchange
from workers.tracing import Trace
from workers.transport.interface import Stream

PATH: Final = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
REQUEST_ID: Final = "x-request-id"
PATH_NEEDLE: Final = codec.needle(":path")
REQUEST_ID_NEEDLE: Final = codec.needle(REQUEST_ID)
STATUS_NEEDLE: Final = codec.needle(":status")
STATUS_OK: Final = STATUS_NEEDLE + b"\x03200"
ASKS: Final = b"x-llm-d-"  # how the headers begin by which a request asks for something
ASKED: Final = b"x-gateway-"  # and their older names
FAIRNESS: Final = b"-inference-fairness-id"  # how both names of the header end
OBJECTIVE: Final = b"-inference-objective"  # likewise
TTL: Final = client_headers.TTL_MS[0].encode()
PREFERS: Final = codec.needle(if_available.PREFER)[:-1]
EVENT_STREAM: Final = b"text/event-stream"
ENCODED: Final = CONTENT_ENCODING.encode()
MODEL_SERVER_ERROR: Final = "ModelServerError"
UNKNOWN_ERROR: Final = "Unknown"
INTERNAL_ERROR: Final = "Internal"
NOT_SCHEDULED: Final = frozenset((Cause.NO_CANDIDATES, Cause.NO_ENDPOINT_LEFT))
ERRORS_FROM: Final = 400
ERROR_STATUS: Final = "4"  # of three digits, the least that is an error
NO_HEADERS: Final = codec.Headers(b"", 0, 0)
LONG_BODY: Final = 1 << 20  # bytes; from here on, what is done for a body is spread over turns of the loop
SMALL_PIECE: Final = 1024  # bytes of a message; each costs 2 us once more when the body is whole, however small it is
SMALL_PIECES_MAX: Final = 1024  # one behind the other; so many become one
BESIDES_MAX: Final = 1 << 20  # bytes of a message besides a body's: headers and metadata; gateways send some KiB
SHORTEST_ENVELOPE: Final = 6  # tag and length of a message that holds its payload alone take 2 to 6 bytes
INVALID_ARGUMENT: Final = 3
INTERNAL: Final = 13
DEADLINE_EXCEEDED: Final = 4

Piece = tuple[bytes, int, int, int, int]  # of a body: message, HttpBody's span, its bytes' span


def open_stream(app: App, path: str, metadata: Sequence[tuple[bytes, bytes]], stream: Stream) -> "ExtProcStream | None":
    """A new stream of the transport; None: not a method of ours."""
    if path != PATH:
        return None
    app.lane.counters[app.counters.streams] += 1
    return ExtProcStream(app, stream)


class ExtProcStream:
    """One ext_proc stream; the transport calls `message`, `half_closed` and `closed`."""

    __slots__ = (
        "_app",
        "_asks",
        "_body_bytes",
        "_coroutine",
        "_decision",
        "_error",
        "_exchange",
        "_fingerprint",
        "_headers",
        "_others",
        "_parser",
        "_passing",
        "_pieces",
        "_pipeline",
        "_received_at",
        "_request",
        "_reserved",
        "_response",
        "_response_at",
        "_restorer",
        "_scanner",
        "_send",
        "_small",
        "_state",
        "_stream",
        "_streaming",
        "_subset",
        "_taken",
        "_trace",
        "_trailers",
        "_victim",
    )  # fmt: skip

    def __init__(self, app: App, stream: Stream) -> None:
        self._app = app
        self._stream = stream
        self._send = stream.send_raw
        self._state: int = AWAIT_HEADERS
        self._passing = False  # chunks of the answer pass unseen by plugins
        self._streaming: tuple[Callable[[Request, Decision], None], ...] = ()  # who sees the next chunk
        self._headers = NO_HEADERS
        self._asks = False  # headers ask for something
        self._pieces: list[Piece] = []
        self._small = 0  # how many of the last pieces are small ones
        self._body_bytes = 0
        self._fingerprint = 0  # of the body, see `workers.query_of_death`
        self._subset: Sequence[str] | None = None
        self._trailers = False
        self._request: Request | None = None
        self._parser: Parser | None = None
        self._pipeline: Pipeline = app.pipeline  # from the decision to the end, whatever others get meanwhile
        self._decision: Decision | None = None
        self._coroutine: Coroutine[Any, Any, Decision] | None = None
        self._reserved = -1
        self._others: tuple[int, ...] = ()
        self._scanner: Scanner | None = None
        self._restorer: ModelRestorer | None = None
        self._response: Response | None = None
        self._exchange: Exchange | None = None
        self._trace: Trace | None = None
        self._error = ""
        self._received_at = 0.0
        self._response_at = 0.0
        self._taken = 0.0
        self._victim: Victim | None = None

    @property
    def done(self) -> bool:
        """Whether the request was answered and the response has ended."""
        return self._state >= DONE

    # What the transport calls.

    def message(self, message: bytes) -> None:
        """One whole ProcessingRequest."""
        if self._passing:  # hot: chunks of a streamed answer, without the calls of other messages
            size = len(message)
            chunk = chunk_of_size(size)
            if chunk is not None and message.startswith(chunk[0]):
                _, prefix, start, begin = chunk  # by names 0.1 us
                now = self._app.now
                begun = now()
                self._send(prefix + message[start:])
                exchange = self._exchange
                if exchange is not None:
                    exchange.chunk(size - begin)
                scanner = self._scanner
                if scanner is not None and (scanner.pending or KEY in message or message[-1] in SUSPECT):
                    scanner.feed(message[begin:])
                self._taken += now() - begun
                return
        try:
            kind, start, end = codec.split(message)
            state = self._state
            following = NEXT[state][kind]
            if following == ILLEGAL:
                raise violation(state, kind)
            if kind == RESPONSE_BODY:
                if state == RESPONDING:
                    self._on_response_body(message, start, end)
            elif state == ENDED:
                return
            elif kind == REQUEST_BODY:
                if state == AWAIT_BODY:
                    self._on_request_body(message, start, end)
            else:
                if len(message) > BESIDES_MAX:
                    raise _too_much_besides()
                self._state = following
                _ON[kind](self, message, start, end, state)
        except ProtocolViolation as problem:
            self._violated(problem)
        except Exception as problem:  # ours: fails this stream only
            self._fail(problem)

    def half_closed(self) -> None:
        """The gateway has nothing more to say; it no longer waits for a decision either."""
        if self._state != ENDED:
            self._end(0, "")

    def closed(self) -> None:
        """The stream is gone."""
        self._state = ENDED
        self._finish()

    # Request phase.

    def _on_request_headers(self, message: bytes, start: int, end: int, _state: int) -> None:
        self._received_at = self._app.clock.now
        hidden = self._app.hidden_headers
        self._headers = codec.Unseen(message, start, end, hidden) if hidden else codec.Headers(message, start, end)
        if self._app.tracer is not None:
            self._trace = self._app.tracer.begin(self._headers)
        if start > SHORTEST_ENVELOPE or end != len(message):
            self._subset = codec.subset(message)
        if codec.end_of_stream(message, start, end):
            self._state = DECIDING
            self._route_without_body()

    def _on_request_body(self, message: bytes, start: int, end: int) -> None:
        begin, stop, last = codec.body(message, start, end)
        size = len(message)
        if size - (stop - begin) > BESIDES_MAX:
            raise _too_much_besides()
        self._body_bytes += stop - begin
        if self._body_bytes > self._app.body_bytes_max:
            self._pieces.clear()
            self._refuse(Refused(Cause.BODY_TOO_LARGE, str(self._app.body_bytes_max)))
            return
        self._pieces.append((message, start, end, begin, stop))
        if not last:
            self._small = self._small + 1 if size < SMALL_PIECE else 0
            if self._small == SMALL_PIECES_MAX:
                self._join_small()
            if not self._stream.hold(size):  # the whole message is kept
                self._refuse(Refused(Cause.BODIES_HELD))
        else:
            self._state = DECIDING
            if start > SHORTEST_ENVELOPE or end != len(message):  # fields beside the body: metadata, attributes
                hint = codec.subset(message)
                self._subset = hint if hint is not None else self._subset
            self._body_complete()

    def _on_request_trailers(self, _message: bytes, _start: int, _end: int, state: int) -> None:
        self._trailers = True
        if state == AWAIT_BODY:
            self._body_complete()
        elif state >= ROUTED:
            self._send(codec.REQUEST_TRAILERS_ANSWER)

    def _route_without_body(self) -> None:
        """GET and the like: any endpoint that the gateway allows, at random."""
        app = self._app
        subset = Subset(self._subset) if self._subset is not None else None
        candidates = app.pool.candidates(subset)
        if not len(candidates):
            self._refuse(Refused(Cause.NO_CANDIDATES))
            return
        candidates = candidates.without_down()
        target = candidates.endpoint(app.rng.randrange(len(candidates)))
        self._decided(Decision((target,), {}, primary=""))

    def _body_complete(self) -> None:
        if self._body_bytes <= LONG_BODY:
            self._start_deciding()
        else:  # to gather it has taken its time already
            self._app.soon(self._in_a_later_turn, self._start_deciding)

    def _in_a_later_turn(self, act: Callable[[], None]) -> None:
        if self._state != DECIDING:
            return  # given up meanwhile
        word = self._app.deciding.word
        word[0] = self._fingerprint
        try:
            act()
        except Refused as refused:
            self._refuse(refused)
        except Exception as problem:  # nobody above would end the stream
            self._fail(problem)
        finally:
            word[0] = 0

    def _start_deciding(self) -> None:
        app = self._app
        headers = self._headers
        path = (
            headers.find(PATH_NEEDLE)
            or headers.get("x-original-path")
            or headers.get("x-forwarded-path")
            or DEFAULT_PATH
        )
        if "?" in path:
            path = path.partition("?")[0]
        now = app.clock.now
        asks = self._asks = headers.mentions(ASKS) or headers.mentions(ASKED)
        request = self._request = Request(
            id=headers.find(REQUEST_ID_NEEDLE) or "",
            path=path,
            headers=headers,
            now=now,
            body_bytes=self._body_bytes,
            subset=Subset(self._subset) if self._subset is not None else None,
            fairness_id=(asks and headers.mentions(FAIRNESS) and client_headers.fairness_id(headers)) or DEFAULT_FLOW,
        )
        if self._trace is not None:
            self._trace.deciding(request)
        pipeline = self._bound()
        try:
            self._parser, place = app.parser(path)
            parse = pipeline.parses[place]
            body = self._body()
            self._fingerprint = app.deciding.begin(body)
            if headers.mentions(ENCODED) and self._parser.paths:  # what goes on stays as it came
                packed = body_slices(body, headers.get(CONTENT_ENCODING) or "", app.body_bytes_max)
                if packed is not None:
                    self._unpack(packed, partial(self._read_body, request, pipeline, self._parser, parse))
                    return
            self._read_body(request, pipeline, self._parser, parse, body)
        except Refused as refused:
            self._refuse(refused)
        finally:
            app.deciding.word[0] = 0

    def _unpack(self, packed: Unpacking, read: Callable[[bytes], None]) -> None:
        """One step; others have their turn before the next one. Then the whole is read. Raises Refused."""
        try:
            next(packed)
        except StopIteration as done:
            read(done.value)
        else:
            self._app.soon(self._in_a_later_turn, partial(self._unpack, packed, read))

    def _read_body(
        self, request: Request, pipeline: Pipeline, parser: Parser, parse: ParseCall, body: bytes | memoryview
    ) -> None:
        """And decides by what it says. Raises Refused."""
        app, headers, asks = self._app, self._headers, self._asks
        named = asks and headers.mentions(MENTIONED)
        if named or app.rewrite is not None:
            self._parse_renamed(request, parser, parse, body, named)
        else:
            parse(request, request.path, body)
        if app.priorities is not None and asks and headers.mentions(OBJECTIVE):
            request.priority = app.priorities.of(headers)
        for read in pipeline.request_header:
            read(request)
        if app.flow is not None:
            ttl_ms = client_headers.ttl_ms(headers) if asks and headers.mentions(TTL) else None
            self._coroutine = app.flow.decided(pipeline, request, app.pool, ttl_ms, self._bound)
        else:
            if request.priority < 0 and app.shedding is not None:
                app.shedding.check(request)
            self._coroutine = decide(pipeline, request, app.pool)
        self._step()

    def _bound(self) -> Pipeline:
        """What decides the request: the worker's pipeline of this moment, which is the stream's from now on."""
        app, headers = self._app, self._headers
        pipeline = self._pipeline = app.pipeline if app.timing is None else app.timing.turn()
        if self._trace is not None:
            pipeline = self._trace.pipeline
        if headers.mentions(PREFERS) and if_available.asked(headers):
            pipeline = if_available.conditional(pipeline)
        return pipeline

    def _body(self) -> memoryview | bytes:
        if len(self._pieces) == 1:
            message, _, _, begin, stop = self._pieces[0]
            return memoryview(message)[begin:stop]
        return _joined(self._pieces)

    def _join_small(self) -> None:
        """A client that sends a body byte by byte must not hold up the loop when it is whole, nor be kept at 130 bytes for each."""
        small, self._small = self._small, 0
        data = _joined(self._pieces[-small:])
        message, begin = codec.as_body(data, False)
        self._pieces[-small:] = [(message, 0, len(message), begin, begin + len(data))]

    def _parse_renamed(
        self, request: Request, parser: Parser, parse: ParseCall, body: bytes | memoryview, named: bool
    ) -> None:
        found = parse_renamed(self._app.rewrite, parser, parse, request, body, header=named)
        if found is not None:
            renamed, self._restorer = found
            message, begin = codec.as_body(renamed, not self._trailers)
            self._pieces[:] = [(message, 0, len(message), begin, begin + len(renamed))]
            self._body_bytes = len(renamed)

    def _resume(self, _future: object) -> None:
        self._in_a_later_turn(self._step)

    def _step(self) -> None:
        """Runs the decision until it ends or waits for a future, whose callback steps again."""
        coroutine = self._coroutine
        if coroutine is None:
            return  # given up meanwhile
        try:
            waiting = coroutine.send(None)
        except StopIteration as done:
            self._coroutine = None
            decision: Decision = done.value
        except Refused as refused:
            self._coroutine = None
            self._refuse(refused)
            return
        except Exception as problem:
            self._coroutine = None
            self._fail(problem)
            return
        else:
            waiting.add_done_callback(self._resume)
            return
        try:  # a callback of a future comes here too: nobody above would end the stream
            self._decided(decision)
        except ProtocolViolation as problem:
            self._violated(problem)
        except Exception as problem:
            self._fail(problem)

    def _decided(self, decision: Decision) -> None:
        app = self._app
        self._decision = decision
        self._reserved = slot = decision.targets[0].slot
        app.lane.inflight[slot] += 1
        if len(decision.runs) > 1:
            self._reserve_others(decision)
        if app.flow is not None and self._request is not None:
            app.flow.settled()
        if self._headers.problem is not None:  # from here on all that plugins hold for the request is released
            raise self._headers.problem
        if self._restorer is not None:
            decision.removed_headers += REMOVED
        request = self._request
        if not (request.id if request is not None else self._headers.find(REQUEST_ID_NEEDLE)):
            decision.headers[REQUEST_ID] = str(uuid.UUID(int=app.rng.getrandbits(128), version=4))
        if self._trace is not None:
            self._trace.routed(request, decision)
        send = self._send
        scores = app.scores(decision) if app.emit_scores else None
        send(
            codec.request_headers_answer(
                app.destination(decision), self._body_bytes, decision.headers, scores, decision.removed_headers
            )
        )
        for message, start, end, begin, stop in self._pieces:
            if end - start <= PIECE_BYTES_MAX:
                send(codec.request_body_answer(message, start, end))
            else:
                last = not self._trailers and message is self._pieces[-1][0]
                send(codec.body_pieces(memoryview(message)[begin:stop], last, request=True))
        if self._trailers:
            send(codec.REQUEST_TRAILERS_ANSWER)
        self._state = ROUTED
        self._stream.release()
        self._pieces.clear()  # a long answer must not keep the request's bytes alive
        now, received_at = app.now(), self._received_at
        lane, counters = app.lane, app.counters
        lane.counters[counters.picks] += 1
        if request is not None:
            let_go(request)
            request.sent_at = now
            lane.observe(counters.scheduler_e2e, now - request.now)
            self._exchange = app.metrics.routed(request, decision.targets[0], received_at)
            app.recent.add(now, request, decision)
            if app.agreements is not None:
                app.agreements.count(decision)
            if app.evictions is not None:
                self._victim = app.evictions.track(request, now, self.evict)
        lane.observe(counters.request_processing, now - received_at)
        if app.request_phase_only or (request is not None and (answer := request[ANSWER]) is not None and answer.skip):
            self._end(0, "")  # the gateway passes the answer on without us

    def _reserve_others(self, decision: Decision) -> None:
        """Servers of profiles beside the primary one work for the request too, until the first piece of the answer."""
        inflight = self._app.lane.inflight
        others = [run for name, run in decision.runs.items() if run is not None and name != decision.primary]
        self._others = tuple(run.candidates.endpoint(run.picked[0]).slot for run in others)
        for slot in self._others:
            inflight[slot] += 1

    def _release_others(self) -> None:
        others, self._others = self._others, ()
        for slot in others:
            self._app.lane.inflight[slot] -= 1
        if others and self._app.flow is not None:
            self._app.flow.released()

    # Response phase.

    def _on_response_headers(self, message: bytes, start: int, end: int, state: int) -> None:
        app = self._app
        if state != ROUTED:  # a local reply of the gateway: it no longer waits for a decision
            self._give_up()
        self._response_at = app.clock.now
        decision, request = self._decision, self._request
        last = codec.end_of_stream(message, start, end)
        set_headers: Mapping[str, str] | None = None
        removed: tuple[str, ...] = ()
        if decision is not None and request is not None:
            gateway = None
            if start > SHORTEST_ENVELOPE or end != len(message):
                gateway = self._served_by(codec.gateway_metadata(message), decision)
            if self._restorer is not None and not last:
                if restorable(codec.Headers(message, start, end)):
                    removed = UNSIZED
                else:
                    self._restorer = None
            if self._parser is not None and self._parser.reads_usage:
                answer = request[ANSWER]
                self._scanner = UsageScanner() if answer is None or answer.scanner is None else answer.scanner()
            if message.find(EVENT_STREAM, start, end) >= 0:
                request.streaming = True
                if self._exchange is not None:
                    self._exchange.streaming = True
            if app.reads_response or message.find(STATUS_OK, start, end) < 0:
                set_headers = self._read_response(codec.Headers(message, start, end), request, decision, gateway)
        self._send(
            codec.response_headers_answer(set_headers or {}, removed)
            if set_headers or removed
            else codec.RESPONSE_HEADERS_ANSWER
        )
        if last:
            self._complete()
            self._state = DONE
        else:
            if decision is not None and request is not None:
                self._streaming = self._pipeline.response_streaming
            self._passing = not (self._streaming or self._others or self._restorer)

    def _served_by(self, gateway: Mapping[str, object] | None, decision: Decision) -> Mapping[str, object] | None:
        """Who really serves the request, where the gateway says so: what was reserved moves there, and plugins see it first."""
        said = gateway.get(SERVED) if gateway is not None else None
        if not isinstance(said, str) or said == decision.targets[0].address:
            return gateway
        run = decision.runs.get(decision.primary)
        everyone = decision.targets if run is None else (*decision.targets, *run.candidates.snapshot.endpoints)
        served = next((endpoint for endpoint in everyone if endpoint.address == said), None)
        if served is not None:
            inflight = self._app.lane.inflight
            inflight[self._reserved] -= 1
            inflight[served.slot] += 1
            self._reserved = served.slot
            decision.targets = (served, *(target for target in decision.targets if target is not served))
        return gateway

    def _read_response(
        self, headers: codec.Headers, request: Request, decision: Decision, gateway: Mapping[str, object] | None
    ) -> Mapping[str, str] | None:
        """What the plugins add to the response's headers; None: they were not asked."""
        app = self._app
        status = headers.find(STATUS_NEEDLE) or ""
        if headers.problem is not None:
            raise headers.problem
        if status >= ERROR_STATUS:
            self._error = MODEL_SERVER_ERROR
        number = int(status) if status.isdecimal() else 0
        response = self._response = Response(number, headers, streaming=request.streaming)
        response.gateway = gateway
        if not app.reads_response:
            return None
        request.now = self._response_at
        for received in self._pipeline.response_received:
            try:
                received(request, decision, response)
            except Exception as problem:  # the answer goes on without it
                self._fault(problem)
        return response.set_headers

    def _on_response_body(self, message: bytes, start: int, end: int) -> None:
        begun = self._app.now()
        begin, stop, last = codec.body(message, start, end)
        if self._others and begin != stop:
            self._release_others()
            self._passing = not (self._streaming or self._restorer)
        if self._exchange is not None and begin != stop:
            self._exchange.chunk(stop - begin)
        if self._scanner is not None:
            self._scanner.feed(message[begin:stop])
        self._taken += self._app.now() - begun
        if last:  # the plugins' last word goes with the last piece
            self._complete()
            self._state = DONE
        if self._restorer is not None:
            self._send_restored(self._restorer, memoryview(message)[begin:stop], last)
        elif last and self._response is not None and self._response.metadata:
            self._send(codec.last_pieces(memoryview(message)[begin:stop], self._response.metadata))
        elif end - start <= PIECE_BYTES_MAX:
            self._send(codec.response_body_answer(message, start, end))
        else:
            self._send(codec.body_pieces(memoryview(message)[begin:stop], last, request=False))
        if last:
            return
        learn_chunk(len(message))
        if self._streaming:
            self._chunk_seen(empty=begin == stop)

    def _send_restored(self, restorer: ModelRestorer, piece: memoryview, last: bool) -> None:
        data = restorer.feed(piece)
        if last:
            data += restorer.rest()
        if last and self._response is not None and self._response.metadata:
            self._send(codec.last_pieces(data, self._response.metadata))
        elif last or data:
            self._send(codec.body_pieces(data, last, request=False))

    def _chunk_seen(self, *, empty: bool) -> None:
        """Tells the plugins of a chunk; after the first that is not empty, only those that see all."""
        app, request, decision = self._app, self._request, self._decision
        assert request is not None
        assert decision is not None
        request.now = app.clock.now
        for streaming in self._pipeline.every_chunk if empty else self._streaming:
            try:
                streaming(request, decision)
            except Exception as problem:  # the answer goes on without it
                self._fault(problem)
        if not empty:
            self._streaming = self._pipeline.every_chunk
            self._passing = not (self._streaming or self._restorer)

    def _on_response_trailers(self, _message: bytes, _start: int, _end: int, _state: int) -> None:
        if self._restorer is not None and (rest := self._restorer.rest()):
            self._send(codec.body_pieces(rest, False, request=False))
        self._complete()
        self._send(codec.RESPONSE_TRAILERS_ANSWER)

    # Endings.

    def awaited(self) -> int:
        """How many bytes of the request's body have come while the gateway owes the rest; -1: it owes nothing."""
        return self._body_bytes if self._state in (AWAIT_HEADERS, AWAIT_BODY) else -1

    def give_up_waiting(self, seconds: float) -> None:
        """The gateway has sent nothing for so long, although it owes a part of the request."""
        if self._state == AWAIT_BODY:
            self._refuse(Refused(Cause.BODY_STALLED, f"{seconds:g}"))
        else:
            self._end(DEADLINE_EXCEEDED, f"no request came for {seconds:g} seconds")

    def refuse_waiting(self) -> bool:
        """The worker leaves: a request without a decision is refused; False: it has one, or has not begun."""
        waits = self._state in (AWAIT_BODY, DECIDING)
        if waits:
            queued = self._state == DECIDING
            self._refuse(
                Refused(Cause.SHUTTING_DOWN, "request evicted from queue" if queued else "request rejected pre-queue")
            )
        return waits

    def evict(self) -> bool:
        """The request gives its place to a more important one. False: its answer is complete, or it has none to come.

        Before the answer's headers the client gets ours instead; after them the gateway breaks the answer off, which frees the
        model server as well.
        """
        if self._state not in (ROUTED, RESPONDING):
            return False
        answer = refusals.EVICTED
        self._error = answer.code
        self._send(codec.immediate_answer(answer.status, answer.headers, answer.body))
        self._end(0, "")
        return True

    def _refuse(self, refused: Refused) -> None:
        app = self._app
        answer = refusals.answer(refused)
        self._error = answer.code
        if self._trace is not None:
            self._trace.failed(self._request, refused)
        app.lane.add(app.counters.refusals)
        if self._request is not None:
            app.recent.add(app.now(), self._request, None, refused)
            if refused.cause in NOT_SCHEDULED:
                app.metrics.not_scheduled(self._request.target_model)
        app.lane.observe(app.counters.request_processing, app.now() - self._received_at)
        self._send(codec.immediate_answer(answer.status, answer.headers, answer.body))
        self._end(0, "")

    def _violated(self, problem: ProtocolViolation) -> None:
        self._app.lane.add(self._app.counters.violations)
        self._error = UNKNOWN_ERROR
        self._end(INVALID_ARGUMENT, str(problem))

    def _fail(self, problem: Exception) -> None:
        """A bug of ours or of a plugin: 500 while the request is unanswered, else the stream's end."""
        self._fault(problem)
        self._error = INTERNAL_ERROR
        if self._trace is not None:
            self._trace.failed(self._request, problem)
        if self._state < ROUTED:
            answer = refusals.answer(Refused(Cause.INTERNAL, f"{type(problem).__name__} in the endpoint picker"))
            self._send(codec.immediate_answer(answer.status, answer.headers, answer.body))
            self._end(0, "")
        elif self._state != ENDED:
            self._end(INTERNAL, f"{type(problem).__name__} in the endpoint picker")

    def _fault(self, problem: Exception) -> None:
        """Counted and told."""
        self._app.lane.add(self._app.counters.faults)
        self._app.on_fault(problem)

    def _end(self, status: int, text: str) -> None:
        self._state = ENDED
        self._finish()
        self._stream.end(status, text)

    def _give_up(self) -> None:
        coroutine, self._coroutine = self._coroutine, None
        if coroutine is not None:
            coroutine.close()
        self._pieces.clear()

    def _complete(self) -> None:
        """The response has ended as it should."""
        exchange = self._exchange
        if exchange is not None:
            exchange.whole = True
            if self._scanner is not None:
                exchange.usage = self._scanner.usage
        if self._response is not None:
            self._response.whole = True
        self._finish()

    def _failed(self) -> bool:
        """No answer of the model server, or an error."""
        return not self._response_at or (self._response is not None and self._response.status >= ERRORS_FROM)

    def _finish(self) -> None:
        """Releases what the stream holds; does nothing the second time."""
        self._passing = False
        if self._coroutine is not None or self._pieces:
            self._give_up()
        trace, self._trace = self._trace, None
        if trace is not None:
            trace.end(self._error)
        if self._error:
            self._app.metrics.failed(self._request, self._error)
            self._error = ""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.close()
        if self._others:
            self._release_others()
        slot, self._reserved = self._reserved, -1
        if slot < 0:
            return
        app = self._app
        app.lane.inflight[slot] -= 1
        victim, self._victim = self._victim, None
        if victim is not None and app.evictions is not None:
            app.evictions.ended(victim)
        self._answered(app)
        if app.flow is not None:  # last: plugins have taken back their tokens
            app.flow.released()

    def _answered(self, app: App) -> None:
        """Counts what came of a request that was sent, and tells the plugins."""
        decision, request = self._decision, self._request
        if decision is None or request is None:
            return
        usage = self._scanner.usage if self._scanner is not None else None
        if usage is not None:
            totals, counters = app.lane.counters, app.counters
            totals[counters.prompt_tokens] += usage.prompt or 0
            totals[counters.cached_tokens] += usage.cached or 0
            totals[counters.completion_tokens] += usage.completion or 0
            if app.comparison is not None:
                app.comparison.answered(request, decision, usage)
        if self._response_at:
            # Of a streamed answer what its chunks took here, not the time until the model server had them all.
            taken = self._taken if request.streaming else app.now() - self._response_at
            app.lane.observe(app.counters.response_processing, taken)
        pipeline = self._pipeline
        told = pipeline.response_complete
        if pipeline.response_failed and self._failed():
            told += pipeline.response_failed
        if not told:
            return
        request.now = app.now()
        response = self._response = self._response or Response()
        response.usage = usage
        for complete in told:
            try:
                complete(request, decision, response)
            except Exception as problem:  # one plugin's fault must not keep the others from releasing
                self._fault(problem)


def _joined(pieces: Sequence[Piece]) -> bytes:
    return b"".join([memoryview(message)[begin:stop] for message, _, _, begin, stop in pieces])


def _too_much_besides() -> ProtocolViolation:
    return ProtocolViolation(f"malformed message: more than {BESIDES_MAX} bytes besides a body's")


_ON: Final[dict[int, Callable[[ExtProcStream, bytes, int, int, int], None]]] = {
    REQUEST_HEADERS: ExtProcStream._on_request_headers,
    REQUEST_TRAILERS: ExtProcStream._on_request_trailers,
    RESPONSE_HEADERS: ExtProcStream._on_response_headers,
    RESPONSE_TRAILERS: ExtProcStream._on_response_trailers,
}
