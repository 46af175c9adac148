"""ext_proc streams: bytes -> request -> decision -> bytes, and the response phase.

One `ExtProcStream` serves one stream; `App` is what all streams of a worker share. The order of messages is judged by
`epp.protocol.stream`, the decision taken by `epp.decide`; this file joins them with the transport, the lane and the clock.

Invariants: every stream gets exactly one answer to its request (a target, an error, or the stream's end); what a decision
reserved is released exactly once, however the stream ends; a body piece that needs no change is passed on as it came.
"""

import random
import uuid
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

from epp.decide import decide
from epp.decision import Decision
from epp.errors import Cause, ProtocolViolation, Refused
from epp.pipeline import Pipeline
from epp.plugin import Parser
from epp.protocol import codec, refusals
from epp.protocol.codec import PIECE_BYTES_MAX, Kind, chunk_of_size, learn_chunk
from epp.protocol.stream import ILLEGAL, NEXT, State, violation
from epp.protocol.usage import KEY, SUSPECT, UsageScanner
from epp.request import EMPTY_PROMPT, Request, Subset
from shm.lanes import Lane
from workers.pool import SharedPool
from workers.transport.interface import Stream

PATH: Final = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
DEFAULT_PATH: Final = "/v1/completions"
REQUEST_ID: Final = "x-request-id"
PATH_NEEDLE: Final = codec.needle(":path")
REQUEST_ID_NEEDLE: Final = codec.needle(REQUEST_ID)
NO_HEADERS: Final = codec.Headers(b"", 0, 0)
SHORTEST_ENVELOPE: Final = 6  # tag and length of a message that holds its payload alone take 2 to 6 bytes
INVALID_ARGUMENT: Final = 3
INTERNAL: Final = 13
PARSERS_MAX: Final = 1024
DESTINATIONS_MAX: Final = 16384


class Counters:
    """Indices of this worker's counters and histograms in its lane."""

    __slots__ = (
        "cached_tokens", "completion_tokens", "faults", "picks", "prompt_tokens", "refusals", "request_processing", "response_processing",
        "scheduler_e2e", "streams", "violations",
    )  # fmt: skip

    def __init__(self, lane: Lane) -> None:
        counter, histogram = lane.schema.counter, lane.schema.histogram
        self.streams = counter["streams_total"]
        self.picks = counter["picks_total"]
        self.refusals = counter["refusals_total"]
        self.faults = counter["faults_total"]
        self.violations = counter["violations_total"]
        self.prompt_tokens = counter["prompt_tokens_total"]
        self.cached_tokens = counter["cached_prompt_tokens_total"]
        self.completion_tokens = counter["completion_tokens_total"]
        self.request_processing = histogram["request_processing_duration_seconds"]
        self.response_processing = histogram["response_processing_duration_seconds"]
        self.scheduler_e2e = histogram["scheduler_e2e_duration_seconds"]


class App:
    """What the streams of one worker share."""

    def __init__(
        self,
        pipeline: Pipeline,
        pool: SharedPool,
        lane: Lane,
        *,
        body_bytes_max: int,
        now: Callable[[], float],
        rng: random.Random,
        on_fault: Callable[[BaseException], None],
    ) -> None:
        self.pipeline = pipeline
        self.pool = pool
        self.lane = lane
        self.counters = Counters(lane)
        self.body_bytes_max = body_bytes_max
        self.now = now
        self.rng = rng
        self.on_fault = on_fault
        self._parsers: dict[str, Parser | None] = {}
        self._suffixes = sorted(
            ((suffix.strip("/"), p) for p in reversed(pipeline.parsers) for suffix in p.paths),
            key=lambda entry: len(entry[0]),
            reverse=True,
        )
        self._fallback = next((p for p in pipeline.parsers if not p.paths), None)
        self._destinations: dict[str, codec.Destination] = {}

    def open(self, path: str, metadata: Sequence[tuple[bytes, bytes]], stream: Stream) -> "ExtProcStream | None":
        """A new stream of the transport; None: not a method of ours."""
        if path != PATH:
            return None
        self.lane.counters[self.counters.streams] += 1
        return ExtProcStream(self, stream)

    def parser(self, path: str) -> Parser:
        """The parser with the longest claimed suffix of the path. Raises Refused."""
        parser = self._parsers.get(path)
        if parser is None:
            trimmed = path.removesuffix("/")
            parser = next((p for suffix, p in self._suffixes if trimmed.endswith(suffix)), self._fallback)
            if parser is None:
                raise Refused(Cause.NO_PARSER, path)
            if len(self._parsers) >= PARSERS_MAX:  # paths come from clients: bounded
                self._parsers.clear()
            self._parsers[path] = parser
        return parser

    def destination(self, decision: Decision) -> codec.Destination:
        """The answer's constant part for these targets."""
        targets = decision.targets
        addresses = targets[0].address if len(targets) == 1 else ",".join(t.address for t in targets)
        found = self._destinations.get(addresses)
        if found is None:
            if len(self._destinations) >= DESTINATIONS_MAX:
                self._destinations.clear()
            found = self._destinations[addresses] = codec.Destination(addresses)
        return found


class ExtProcStream:
    """One ext_proc stream; the transport calls `message`, `half_closed` and `closed`."""

    __slots__ = (
        "_app",
        "_body_bytes",
        "_coroutine",
        "_decision",
        "_headers",
        "_parser",
        "_passing",
        "_pieces",
        "_received_at",
        "_request",
        "_reserved",
        "_response_at",
        "_scanner",
        "_send",
        "_state",
        "_stream",
        "_subset",
        "_trailers",
    )  # fmt: skip

    def __init__(self, app: App, stream: Stream) -> None:
        self._app = app
        self._stream = stream
        self._send = stream.send_raw
        self._state: int = State.AWAIT_HEADERS
        self._passing = False  # chunks of the answer pass unseen by plugins
        self._headers = NO_HEADERS
        self._pieces: list[tuple[bytes, int, int, int, int]] = []  # message, HttpBody's span, its bytes' span
        self._body_bytes = 0
        self._subset: Sequence[str] | None = None
        self._trailers = False
        self._request: Request | None = None
        self._parser: Parser | None = None
        self._decision: Decision | None = None
        self._coroutine: Coroutine[Any, Any, Decision] | None = None
        self._reserved = -1
        self._scanner: UsageScanner | None = None
        self._received_at = 0.0
        self._response_at = 0.0

    # What the transport calls.

    def message(self, message: bytes) -> None:
        """One whole ProcessingRequest."""
        chunk = chunk_of_size(len(message))
        if (
            chunk is not None and self._passing and message.startswith(chunk.head)
        ):  # hot: one chunk of a streamed answer
            self._send(chunk.prefix + message[chunk.start :])
            scanner = self._scanner
            if scanner is not None and (scanner.pending or KEY in message or message[-1] in SUSPECT):
                scanner.feed(message[chunk.begin :])
            return
        try:
            kind, start, end = codec.split(message)
            state = self._state
            following = NEXT[state][kind]
            if following == ILLEGAL:
                raise violation(state, kind)
            if kind == Kind.RESPONSE_BODY:
                if state == State.RESPONDING:
                    self._on_response_body(message, start, end)
            elif state == State.ENDED:
                return
            elif kind == Kind.REQUEST_BODY:
                if state == State.AWAIT_BODY:
                    self._on_request_body(message, start, end)
            else:
                self._state = following
                _ON[kind](self, message, start, end, state)
        except ProtocolViolation as problem:
            self._app.lane.add(self._app.counters.violations)
            self._end(INVALID_ARGUMENT, str(problem))
        except Exception as problem:  # ours: fails this stream only
            self._fail(problem)

    def half_closed(self) -> None:
        """The gateway has nothing more to say; it no longer waits for a decision either."""
        if self._state != State.ENDED:
            self._end(0, "")

    def closed(self) -> None:
        """The stream is gone."""
        self._state = State.ENDED
        self._finish()

    # Request phase.

    def _on_request_headers(self, message: bytes, start: int, end: int, _state: int) -> None:
        self._received_at = self._app.now()
        self._headers = codec.Headers(message, start, end)
        if start > SHORTEST_ENVELOPE or end != len(message):
            self._subset = codec.subset(message)
        if codec.end_of_stream(message, start, end):
            self._state = State.DECIDING
            self._route_without_body()

    def _on_request_body(self, message: bytes, start: int, end: int) -> None:
        begin, stop, last = codec.body(message, start, end)
        self._body_bytes += stop - begin
        if self._body_bytes > self._app.body_bytes_max:
            self._pieces.clear()
            self._refuse(Refused(Cause.BODY_TOO_LARGE, str(self._app.body_bytes_max)))
            return
        self._pieces.append((message, start, end, begin, stop))
        if last:
            self._state = State.DECIDING
            if start > SHORTEST_ENVELOPE or end != len(message):  # fields beside the body: metadata, attributes
                hint = codec.subset(message)
                self._subset = hint if hint is not None else self._subset
            self._start_deciding()

    def _on_request_trailers(self, _message: bytes, _start: int, _end: int, state: int) -> None:
        self._trailers = True
        if state == State.AWAIT_BODY:
            self._start_deciding()
        elif state >= State.ROUTED:
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
        now = app.now()
        request = self._request = Request(
            id=headers.find(REQUEST_ID_NEEDLE) or "",
            path=path,
            headers=headers,
            now=now,
            body_bytes=self._body_bytes,
            subset=Subset(self._subset) if self._subset is not None else None,
        )
        self._received_at = now
        try:
            parser = self._parser = app.parser(path)
            parser.parse(request, path, self._body())
            self._coroutine = decide(app.pipeline, request, app.pool)
            self._step(None)
        except Refused as refused:
            self._refuse(refused)

    def _body(self) -> memoryview | bytes:
        if len(self._pieces) == 1:
            message, _, _, begin, stop = self._pieces[0]
            return memoryview(message)[begin:stop]
        return b"".join([memoryview(message)[begin:stop] for message, _, _, begin, stop in self._pieces])

    def _step(self, _future: object) -> None:
        """Runs the decision until it ends or waits for a future, whose callback steps again."""
        coroutine = self._coroutine
        if coroutine is None:
            return  # given up meanwhile
        try:
            waiting = coroutine.send(None)
        except StopIteration as done:
            self._coroutine = None
            self._decided(done.value)
        except Refused as refused:
            self._coroutine = None
            self._refuse(refused)
        except Exception as problem:
            self._coroutine = None
            self._fail(problem)
        else:
            waiting.add_done_callback(self._step)

    def _decided(self, decision: Decision) -> None:
        app = self._app
        self._decision = decision
        self._reserved = slot = decision.targets[0].slot
        app.lane.inflight[slot] += 1
        request = self._request
        if not (request.id if request is not None else self._headers.find(REQUEST_ID_NEEDLE)):
            decision.headers[REQUEST_ID] = str(uuid.UUID(int=app.rng.getrandbits(128), version=4))
        send = self._send
        send(codec.request_headers_answer(app.destination(decision), self._body_bytes, decision.headers))
        for message, start, end, begin, stop in self._pieces:
            if end - start <= PIECE_BYTES_MAX:
                send(codec.request_body_answer(message, start, end))
            else:
                last = not self._trailers and message is self._pieces[-1][0]
                send(codec.body_pieces(memoryview(message)[begin:stop], last, request=True))
        if self._trailers:
            send(codec.REQUEST_TRAILERS_ANSWER)
        self._state = State.ROUTED
        self._pieces.clear()  # a long answer must not keep the request's bytes alive
        spent = app.now() - self._received_at
        lane, counters = app.lane, app.counters
        lane.counters[counters.picks] += 1
        if request is not None:
            request.prompt = EMPTY_PROMPT
            lane.observe(counters.scheduler_e2e, spent)
        lane.observe(counters.request_processing, spent)

    # Response phase.

    def _on_response_headers(self, message: bytes, start: int, end: int, state: int) -> None:
        app = self._app
        if state != State.ROUTED:  # a local reply of the gateway: it no longer waits for a decision
            self._give_up()
        self._response_at = app.now()
        decision, request = self._decision, self._request
        if decision is not None and request is not None:
            if self._parser is not None and self._parser.reads_usage:
                self._scanner = UsageScanner()
            if app.pipeline.response_received:
                self._tell_received(codec.Headers(message, start, end), request, decision)
        self._send(codec.RESPONSE_HEADERS_ANSWER)
        if codec.end_of_stream(message, start, end):
            self._finish()
            self._state = State.DONE
        else:
            self._passing = not app.pipeline.response_streaming

    def _tell_received(self, headers: codec.Headers, request: Request, decision: Decision) -> None:
        request.now = self._response_at
        if "text/event-stream" in headers.get("content-type", ""):
            request.streaming = True
        status = headers.get(":status", "")
        for received in self._app.pipeline.response_received:
            received(request, decision, int(status) if status.isdecimal() else 0)

    def _on_response_body(self, message: bytes, start: int, end: int) -> None:
        begin, stop, last = codec.body(message, start, end)
        if end - start <= PIECE_BYTES_MAX:
            self._send(codec.response_body_answer(message, start, end))
        else:
            self._send(codec.body_pieces(memoryview(message)[begin:stop], last, request=False))
        if self._scanner is not None:
            self._scanner.feed(message[begin:stop])
        if last:
            self._finish()
            self._state = State.DONE
            return
        learn_chunk(len(message))
        if not self._passing and self._decision is not None and self._request is not None:
            for streaming in self._app.pipeline.response_streaming:
                streaming(self._request, self._decision)

    def _on_response_trailers(self, _message: bytes, _start: int, _end: int, _state: int) -> None:
        self._finish()
        self._send(codec.RESPONSE_TRAILERS_ANSWER)

    # Endings.

    def _refuse(self, refused: Refused) -> None:
        app = self._app
        answer = refusals.answer(refused)
        app.lane.add(app.counters.refusals)
        app.lane.observe(app.counters.request_processing, app.now() - self._received_at)
        self._send(codec.immediate_answer(answer.status, answer.headers, answer.body))
        self._end(0, "")

    def _fail(self, problem: Exception) -> None:
        """A bug of ours or of a plugin: 500 while the request is unanswered, else the stream's end."""
        app = self._app
        app.lane.add(app.counters.faults)
        app.on_fault(problem)
        if self._state < State.ROUTED:
            answer = refusals.answer(Refused(Cause.INTERNAL, f"{type(problem).__name__} in the endpoint picker"))
            self._send(codec.immediate_answer(answer.status, answer.headers, answer.body))
            self._end(0, "")
        elif self._state != State.ENDED:
            self._end(INTERNAL, f"{type(problem).__name__} in the endpoint picker")

    def _end(self, status: int, text: str) -> None:
        self._state = State.ENDED
        self._finish()
        self._stream.end(status, text)

    def _give_up(self) -> None:
        coroutine, self._coroutine = self._coroutine, None
        if coroutine is not None:
            coroutine.close()
        self._pieces.clear()

    def _finish(self) -> None:
        """Releases what the stream holds; does nothing the second time."""
        self._passing = False
        if self._coroutine is not None or self._pieces:
            self._give_up()
        slot, self._reserved = self._reserved, -1
        if slot < 0:
            return
        app = self._app
        app.lane.inflight[slot] -= 1
        decision, request = self._decision, self._request
        if decision is None or request is None:
            return
        usage = self._scanner.usage if self._scanner is not None else None
        if usage is not None:
            totals, counters = app.lane.counters, app.counters
            totals[counters.prompt_tokens] += usage.prompt or 0
            totals[counters.cached_tokens] += usage.cached or 0
            totals[counters.completion_tokens] += usage.completion or 0
        if self._response_at:
            app.lane.observe(app.counters.response_processing, app.now() - self._response_at)
        for complete in app.pipeline.response_complete:
            try:
                complete(request, decision, usage)
            except Exception as problem:  # one plugin's fault must not keep the others from releasing
                app.lane.add(app.counters.faults)
                app.on_fault(problem)


_ON: Final[dict[int, Callable[[ExtProcStream, bytes, int, int, int], None]]] = {
    Kind.REQUEST_HEADERS: ExtProcStream._on_request_headers,
    Kind.REQUEST_TRAILERS: ExtProcStream._on_request_trailers,
    Kind.RESPONSE_HEADERS: ExtProcStream._on_response_headers,
    Kind.RESPONSE_TRAILERS: ExtProcStream._on_response_trailers,
}
