"""The request phase of a stream: collects the body, parses it, decides, and answers with the target.

    headers ─▶ pieces of the body ─▶ unpack ─▶ intake ─▶ decide ─▶ answer: headers, then the pieces unchanged
                                       └ for a long body, other streams get a turn of the loop between the steps

This module steps the coroutine `decide` itself. This takes 0.4 us per request, while a task would take 3.1 us. The coroutine either ends at
once or yields a future, and the callback of that future steps the coroutine again. If the stream is given up, the coroutine is closed.
"""

import uuid
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

from xxhash import xxh3_64

from compiled.calls import step
from epp.decision import if_available
from epp.decision.decide import decide
from epp.decision.decision import Decision
from epp.errors import Cause, ProtocolViolation, Refused
from epp.plugin import Parser
from epp.protocol import codec
from epp.protocol.codec import PIECE_BYTES_MAX
from epp.protocol.inflate import Unpacking, body_slices
from epp.protocol.message_order import AWAIT_BODY, DECIDING, ROUTED
from epp.protocol.rewrite import BEGIN_BYTES, REMOVED, ModelRestorer
from epp.request import Subset, Tenant
from epp.request.client_headers import OBJECTIVE, PREFER
from epp.request.intake import REQUEST_ID, REQUEST_ID_NEEDLE
from epp.request.paths import DEFAULT_PATH, inferred_path
from epp.request.renaming import CONTENT_ENCODING, Renamed
from workers.worker.extproc.app import App
from workers.worker.extproc.pipelines import Lease
from workers.worker.extproc.shell import SHORTEST_ENVELOPE, Shell
from workers.worker.telemetry.trace_context import GatewayContext

PREFERS: Final = codec.needle(PREFER)[:-1]
ENCODED: Final = CONTENT_ENCODING.encode()
NO_HEADERS: Final = codec.Headers(b"", 0, 0)
LONG_BODY: Final = 1 << 20  # bytes; the work for a longer body is spread over several turns of the loop
# A piece is small if its message has fewer bytes. Small pieces are joined, because each piece costs 2 us when the body is complete.
SMALL_PIECE: Final = 1024
SMALL_PIECES_MAX: Final = 1024  # this number of small pieces in a row is joined into one
ORIGIN_CHARS_MAX: Final = 64
# Limit for the bytes of a message beside the body: headers and metadata; gateways send some KiB.
BESIDES_MAX: Final = 1 << 20

# A piece of the body: (message, start, end, begin, stop). The HttpBody is message[start:end], the body's bytes are message[begin:stop].
Piece = tuple[bytes, int, int, int, int]


class RequestPhase:
    """Handles one request from its headers to its answer.

    `pieces`: the body, until it is passed on. `parser`: the parser that reads the body; None if there is no body.
    `restorer`: puts the client's model name back into the answer; None if the model was not renamed.
    """

    __slots__ = (
        "_coroutine", "_hash", "_headers", "_inserted", "_place", "_renamed", "_small", "_subset", "_tenant", "_trailers", "_uncounted",
        "body_bytes", "buffered", "gateway", "kept", "parser", "pieces", "restorer",
    )  # fmt: skip

    def __init__(self) -> None:
        self._headers = NO_HEADERS
        self.pieces: list[Piece] = []
        self._hash: xxh3_64 | None = None  # the hash of the pieces so far; None for at most one piece
        self._small = 0  # the number of small pieces since the last piece that is not small
        self._subset: Sequence[str] | None = None
        self._tenant: Tenant | None = None  # None if no tenants are configured
        self._trailers = False
        self._uncounted = 0  # bytes of the piece that completed the body, because the transport treats only earlier bytes as held
        self._place = 0  # the index of the parser's call in `Pipeline.parses`
        self._coroutine: Coroutine[Any, Any, Decision] | None = None
        self.body_bytes = 0
        self.buffered = 0  # the body mode if the gateway buffers the body, else 0; see `epp.protocol.codec.modes`
        self.gateway: GatewayContext | None = None  # the gateway's trace context, or None, also if traces are off
        self.parser: Parser | None = None
        self.restorer: ModelRestorer | None = None
        self._renamed: bytes | None = None  # the whole body after its model or salt was changed; None if `pieces` are the client's
        self._inserted = 0, b""  # a place in the first piece's bytes, and what to insert there
        # The bytes, compressed and not, that a complete body holds while it waits for its turn or for a decision; 0 until then. It means
        # nothing once the request is decided.
        self.kept = 0

    # Messages.

    def on_headers(self, stream: Shell, message: bytes, start: int, end: int) -> None:
        stream.received_at = stream.app.clock.now
        self.identify(stream, message, start, end)
        if start > SHORTEST_ENVELOPE or end != len(message):
            self._subset = codec.subset(message)
        last = codec.end_of_stream(message, start, end)
        if not message.endswith(codec.ALL_DUPLEX) and end != len(message):
            self._take_modes(stream, message, last)
        if last:
            stream.state = DECIDING
            self._route_without_body(stream)

    def identify(self, stream: Shell, message: bytes, start: int, end: int) -> None:
        """Reads the headers: hides the headers to ignore, begins the trace, and finds the tenant. Raises Refused."""
        app = stream.app
        hidden = app.guards.hidden_headers
        headers = codec.Unseen(message, start, end, hidden) if hidden else codec.Headers(message, start, end)
        self._headers = headers
        if app.pipelines.tracer is not None:
            stream.trace = app.pipelines.tracer.begin(headers, self.gateway)
        if app.tenants is not None:
            self._tenant = app.tenants.of(headers, message)

    def request_id(self) -> str:
        """Returns the id that the gateway gives the request; "" without one."""
        return self._headers.get(REQUEST_ID, "")[:ORIGIN_CHARS_MAX]

    def origin(self) -> str:
        """Returns the request's id and its client for the log, as the gateway gives them."""
        found = (self._headers.get(name, "")[:ORIGIN_CHARS_MAX] for name in (REQUEST_ID, "x-forwarded-for"))
        number, client = (value or "unknown" for value in found)
        return f"request {number} of client {client}"

    def pool_of(self, app: App) -> tuple[int, str]:
        """Returns number and name of the pool; UNDECIDED and "" if the pool is not known yet. An only pool has the name ""."""
        return app.number, app.name

    def _take_modes(self, stream: Shell, message: bytes, last: bool) -> None:
        """Adapts the stream to the body modes that the gateway names. `last`: whether no body follows.

        Raises Refused for a mode that cannot work.
        """
        modes = codec.body_modes(message)
        if modes is None:
            return
        request_mode, response_mode = modes
        unanswered = response_mode != codec.DUPLEX and not stream.app.request_phase_only
        if unanswered or (request_mode != codec.DUPLEX and not last):
            stream.app.telemetry.not_duplex()
        stream.duplex = response_mode == codec.DUPLEX
        if last or request_mode == codec.DUPLEX:
            return
        if request_mode not in (codec.BUFFERED, codec.BUFFERED_PARTIAL):
            raise Refused(Cause.BODY_MODE, codec.mode_name(request_mode))
        self.buffered = request_mode
        stream.send(codec.headers_passed(request_mode, response_mode))

    def on_body(self, stream: Shell, message: bytes, start: int, end: int) -> None:
        begin, stop, last = codec.body(message, start, end)
        size = len(message)
        if size - (stop - begin) > BESIDES_MAX:
            raise too_much_besides()
        self.body_bytes += stop - begin
        limit = stream.app.guards.body_bytes_max
        if self.body_bytes > limit:
            self.pieces.clear()
            raise Refused(Cause.BODY_TOO_LARGE, str(limit))
        self.pieces.append((message, start, end, begin, stop))
        if not last or self._hash is not None:  # hashed piece by piece, while each is in the CPU cache
            if self._hash is None:
                self._hash = stream.app.guards.deciding.hashing()
            self._hash.update(memoryview(message)[begin:stop])
        if not last and self.buffered == codec.BUFFERED_PARTIAL:
            raise Refused(Cause.BODY_CUT_OFF, str(self.body_bytes))
        if not last and not self.buffered:
            self._small = self._small + 1 if size < SMALL_PIECE else 0
            if self._small == SMALL_PIECES_MAX:
                self._small = 0
                _join_last(self.pieces, SMALL_PIECES_MAX)
            # The piece keeps the whole message in memory. At the limit, `hold` ends the costliest unfinished requests. This one may be
            # among them.
            if not stream.transport.hold(size) and stream.state == AWAIT_BODY:
                raise stream.too_much_held()
        else:
            stream.state = DECIDING
            self._uncounted = size
            if start > SHORTEST_ENVELOPE or end != len(message):  # there are other fields: metadata, attributes
                hint = codec.subset(message)
                self._subset = hint if hint is not None else self._subset
            self._body_complete(stream)

    def on_trailers(self, stream: Shell, before: int) -> None:
        """Handles the request's trailers. `before`: the state of the stream before they came."""
        self._trailers = True
        if before == AWAIT_BODY:
            self._body_complete(stream)
        elif before >= ROUTED:
            stream.send(codec.REQUEST_TRAILERS_ANSWER)

    # Deciding.

    def _route_without_body(self, stream: Shell) -> None:
        stream.decided(_at_random(stream.app, self._subset))

    def _body_complete(self, stream: Shell) -> None:
        turns = stream.app.turns
        if self.body_bytes > LONG_BODY:  # put off, because collecting a long body has taken much of this turn already
            self._keep(stream)
            stream.later(self._start_deciding, stream)
        elif turns is None or turns.takes(stream.app.clock.now):
            self._start_deciding(stream)
        else:
            self._keep(stream)
            turns.soon(stream.resume, self._start_deciding, stream)

    def _keep(self, stream: Shell, unpacked: int = 0) -> None:
        """Counts a complete body as held while it waits. Raises Refused if the limit for held bytes leaves no room for it.

        `unpacked`: how many bytes of the body were unpacked since the last call.
        """
        count = unpacked
        if not self.kept:
            self.kept = self.body_bytes
            count += self._uncounted
        self.kept += unpacked
        # At the limit, `hold` ends the costliest unfinished requests. This one may be among them.
        if count and not stream.transport.hold(count) and stream.state == DECIDING:
            raise stream.too_much_held()

    def _start_deciding(self, stream: Shell) -> None:
        app, headers = stream.app, self._headers
        request = stream.request = app.intake.begin(headers, app.clock.now, self.body_bytes, self._subset, self._tenant)
        if stream.trace is not None:
            stream.trace.deciding(request)
        prefers, encoded = headers.mentions(PREFERS), headers.mentions(ENCODED)
        conditional = prefers and if_available.requested(headers)
        stream.lease = Lease(app.pipelines, stream.trace is not None, conditional)
        deciding = app.guards.deciding
        try:
            self.parser, self._place = app.pipelines.parser(request.path or DEFAULT_PATH)
            body = whole(self.pieces)
            digest = deciding.digest(body) if self._hash is None else self._hash.intdigest()
            stream.fingerprint = deciding.begin(request, digest, prefers or encoded or request.wishes)
            # The body is unpacked only for the parser. The gateway gets the compressed body back.
            if encoded and self.parser.paths and (packed := self._packed(stream, body)) is not None:
                self._unpack(stream, packed, self._read_plain)
            else:
                self._read(stream, body)
        finally:
            deciding.word[0] = 0

    def _packed(self, stream: Shell, body: bytes | memoryview) -> Unpacking | None:
        """Returns the compressed body, to be decompressed in parts, or None if it is not compressed or its encoding is unknown."""
        return body_slices(body, self._headers.get(CONTENT_ENCODING) or "", stream.app.guards.body_bytes_max)

    def _unpack(self, stream: Shell, packed: Unpacking, then: Callable[[Shell, bytes], None]) -> None:
        """Decompresses one part of the body. Other streams get their turn before the next part. `then` gets the whole body."""
        try:
            count = next(packed)
        except StopIteration as done:
            then(stream, done.value)
            return
        self._keep(stream, count)
        if stream.state == DECIDING:
            stream.later(self._unpack, stream, packed, then)

    def _read_plain(self, stream: Shell, body: bytes) -> None:
        assert stream.request is not None
        stream.request.body_bytes = len(body)  # the body is kept while the request waits in a queue
        self._read(stream, body, unpacked=True)

    def _read(self, stream: Shell, body: bytes | memoryview, *, unpacked: bool = False) -> None:
        """Parses the body and starts the decision. `unpacked`: whether `pieces` have the body in compressed form."""
        app, request, lease, parser = stream.app, stream.request, stream.lease, self.parser
        assert request is not None
        assert lease is not None
        assert parser is not None
        if not request.path:
            request.path = inferred_path(body)
            parser, self._place = app.pipelines.parser(request.path)
            self.parser = parser
        renamed = app.intake.read(request, self._headers, lease.pipeline, (parser, self._place), body)
        if renamed is not None:
            self._change(renamed, unpacked=unpacked)
        tenant = request.tenant
        if tenant is not None and tenant.budget is not None and app.budgets is not None:
            stream.charge = app.budgets.enter(request, tenant, tenant.budget)
        self._coroutine = decide(lease, request, app.pool, app.admission)
        self._step(stream)

    def _step(self, stream: Shell) -> None:
        """Runs the decision until it ends or waits for a future. The future's callback steps it again."""
        coroutine, self._coroutine = self._coroutine, None
        if coroutine is None:
            return  # the request was given up meanwhile
        ended, value = step(coroutine)
        if ended:
            stream.decided(value)
            return
        self._coroutine = coroutine
        if not self.kept:
            self._keep(stream)
            if stream.state != DECIDING:
                return  # the request was given up to free memory
        value.add_done_callback(lambda _future: stream.resume(self._step, stream))

    @property
    def open(self) -> bool:
        """Whether `give_up` can drop a request."""
        return self._coroutine is not None or bool(self.pieces)

    def give_up(self) -> None:
        """Drops a request that is not decided yet."""
        coroutine, self._coroutine = self._coroutine, None
        if coroutine is not None:
            coroutine.close()
        self.pieces.clear()

    def _change(self, renamed: Renamed, *, unpacked: bool) -> None:
        """Notes what to send instead of the body: text to insert into the first piece, or another whole body."""
        self.restorer = renamed.restorer
        _, _, _, begin, stop = self.pieces[0]
        same = not (unpacked or self.buffered or renamed.restorer is not None)
        if same and renamed.text and renamed.at <= min(stop - begin, BEGIN_BYTES):
            self._inserted = renamed.at, renamed.text
            self.body_bytes += len(renamed.text)
        else:
            body = self._renamed = renamed.whole()
            self.pieces[:] = [_piece(body, not self._trailers)]
            self.body_bytes = len(body)

    # The answer.

    def send_answer(self, stream: Shell, decision: Decision) -> None:
        """Answers the request's headers with the target, then passes on the body. Raises ProtocolViolation if a header is malformed."""
        app, send, request = stream.app, stream.send, stream.request
        # Not checked earlier, because a plugin may be the first to read a malformed header. If this raises, the stream releases what
        # plugins hold.
        if self._headers.problem is not None:
            raise self._headers.problem
        if self.restorer is not None:
            decision.removed_headers += REMOVED
        elif self._renamed is not None and self._headers.mentions(ENCODED):
            decision.removed_headers += (CONTENT_ENCODING,)  # the body is passed on unpacked
        if isinstance(self._headers, codec.Unseen):
            decision.removed_headers += self._headers.removed()
            if self._tenant is not None and self._tenant.objectives and not self._tenant.may_send(self._headers):
                decision.removed_headers += OBJECTIVE
        if not (request.id if request is not None else self._headers.find(REQUEST_ID_NEEDLE)):
            decision.headers[REQUEST_ID] = str(uuid.UUID(int=app.rng.getrandbits(128), version=4))
        if stream.trace is not None:
            stream.trace.routed(request, decision)
        elif self.gateway is not None:
            self.gateway.pass_on(self._headers, decision)
        scores = app.scores(decision) if app.emit_scores else None
        target = app.destination(decision)
        if self.buffered:
            send(codec.buffered_answer(target, self._renamed, decision.headers, scores, decision.removed_headers))
        else:
            send(codec.request_headers_answer(target, self.body_bytes, decision.headers, scores, decision.removed_headers))
            _send_body(stream, self.pieces, self._inserted, ends=not self._trailers)
        if self._trailers:
            send(codec.REQUEST_TRAILERS_ANSWER)


def _at_random(app: App, subset: Sequence[str] | None) -> Decision:
    """Chooses a random endpoint that the gateway allows, for a request without a body, such as a GET."""
    candidates = app.pool.candidates(Subset(subset) if subset is not None else None)
    if not len(candidates):
        raise Refused(Cause.NO_CANDIDATES)
    candidates = candidates.without_down()
    target = candidates.endpoint(app.rng.randrange(len(candidates)))
    decision = Decision((target,), {}, primary="")
    decision.ticket = app.admission.passed()
    return decision


def whole(pieces: Sequence[Piece]) -> memoryview | bytes:
    """Returns the bytes of a whole body."""
    if len(pieces) == 1:
        message, _, _, begin, stop = pieces[0]
        return memoryview(message)[begin:stop]
    return _joined(pieces)


def _join_last(pieces: list[Piece], count: int) -> None:
    """Joins the last `count` pieces, which are small, into one, because each would cost 2 us and 130 bytes."""
    pieces[-count:] = [_piece(_joined(pieces[-count:]), False)]


def _piece(data: bytes, last: bool) -> Piece:
    message, begin = codec.as_body(data, last)
    return message, 0, len(message), begin, begin + len(data)


def _joined(pieces: Sequence[Piece]) -> bytes:
    return b"".join([memoryview(message)[begin:stop] for message, _, _, begin, stop in pieces])


def _send_body(stream: Shell, pieces: Sequence[Piece], inserted: tuple[int, bytes], *, ends: bool) -> None:
    """Passes on the pieces of a body. `inserted`: a position in the bytes of the first piece, and the text to insert. `ends`: whether no
    trailers follow.
    """
    at, text = inserted
    for message, start, end, begin, stop in pieces:
        if not text and end - start <= PIECE_BYTES_MAX:
            stream.send(codec.request_body_answer(message, start, end))
            continue
        last = ends and message is pieces[-1][0]
        front = message[begin : begin + at] + text
        begin += at
        if stop - begin + len(front) <= PIECE_BYTES_MAX:
            stream.send(codec.request_body_behind(front, message, begin, stop, last))
        else:
            stream.transport.send_parts(codec.body_pieces(memoryview(message)[begin:stop], last, request=True, front=front))
        at, text = 0, b""


def too_much_besides() -> ProtocolViolation:
    """Returns the error for a message that has too many bytes beside the body."""
    return ProtocolViolation(f"malformed message: more than {BESIDES_MAX} bytes besides a body's")
