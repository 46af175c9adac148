"""One ext_proc stream: gives each message of the gateway to one of its two phases.

    transport ─ message, half_closed, closed ─▶ ExtProcStream ─┬─▶ RequestPhase: body ─▶ intake ─▶ decide
                                                  │ decided ◀──┘
                                                  └──────────────▶ ResponsePhase: headers, chunks, usage, plugins, release

`shell` has the state and the ways to end, `epp.protocol.message_order` the legal order of messages, `app` what all streams of a worker
share. A piece of a body that needs no change is passed on unchanged.

A phase keeps no reference to its stream, but gets the stream with every call. So there are no reference cycles, and a stream is freed as
soon as it is over.
"""

from typing import Final

from compiled.calls import find
from epp.decision.decision import Decision
from epp.errors import Cause, Refused
from epp.protocol import codec, refusals
from epp.protocol.codec import REQUEST_BODY, REQUEST_HEADERS, REQUEST_TRAILERS, RESPONSE_BODY, RESPONSE_HEADERS, chunk_of_size
from epp.protocol.message_order import AWAIT_BODY, AWAIT_HEADERS, DECIDING, DONE, ENDED, ILLEGAL, NEXT, RESPONDING, ROUTED, violation
from epp.protocol.usage import ANSWER, KEY, SUSPECT
from workers.transport.interface import Metadata, Stream
from workers.worker.extproc.app import App
from workers.worker.extproc.request_phase import BESIDES_MAX, LONG_BODY, RequestPhase, too_much_besides
from workers.worker.extproc.reservation import Reservation
from workers.worker.extproc.response_phase import ResponsePhase
from workers.worker.extproc.shell import Shell
from workers.worker.telemetry.trace_context import gateway_context

PATH: Final = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
DEADLINE_EXCEEDED: Final = 4
RESOURCE_EXHAUSTED: Final = 8
UNAVAILABLE: Final = 14


def open_stream(app: App, path: str, metadata: Metadata, stream: Stream) -> "ExtProcStream | None":
    """Returns the handler of a new stream; None if `path` is not the ext_proc method."""
    if path != PATH:
        return None
    app.telemetry.opened()
    return ExtProcStream(app, stream, metadata)


class ExtProcStream(Shell):
    """One ext_proc stream. The transport calls `message`, `half_closed` and `closed`."""

    __slots__ = ("request_phase", "response_phase")

    def __init__(self, app: App, transport: Stream, metadata: Metadata, phase: RequestPhase | None = None) -> None:
        """`metadata`: the names and values that the gateway sent with the call. `phase`: None for a stream with a known pool."""
        super().__init__(app, transport)
        self.request_phase = RequestPhase() if phase is None else phase
        if app.pipelines.tracer is not None:
            self.request_phase.gateway = gateway_context(metadata)
        # Set when the request is routed, or when the gateway answers by itself.
        self.response_phase: ResponsePhase | None = None

    @property
    def done(self) -> bool:
        """Whether the request was answered and the response has ended."""
        return self.state >= DONE

    # Calls of the transport.

    def message(self, message: bytes) -> None:
        """Handles one whole ProcessingRequest."""
        if self.passing:  # hot: chunks of a streamed answer skip the steps that other messages need
            size = len(message)
            chunk = chunk_of_size(size)
            if chunk is not None and message.startswith(chunk[0]):
                _, prefix, start, begin = chunk  # reading attributes would cost 0.1 us more
                now = self.app.now
                begun = now()
                self.send(prefix + message[start:])
                answer = self.response_phase
                assert answer is not None
                exchange, scanner = answer.exchange, answer.scanner
                if exchange is not None:
                    exchange.chunk(size - begin)
                if scanner is not None:
                    try:
                        if scanner.pending or find(message, KEY) >= 0 or message[-1] in SUSPECT:
                            scanner.feed(message[begin:])
                    except Exception as problem:
                        answer.leave_out_scanner(self, problem)
                answer.taken += now() - begun
                return
        try:
            kind, start, end = codec.split(message)
            state = self.state
            following = NEXT[state][kind]
            if following == ILLEGAL:
                raise violation(state, kind)
            if kind == RESPONSE_BODY:
                if state == RESPONDING and self.response_phase is not None:
                    self.response_phase.on_body(self, message, start, end)
            elif state == ENDED:
                return
            elif kind == REQUEST_BODY:
                if state == AWAIT_BODY:
                    self.request_phase.on_body(self, message, start, end)
            elif len(message) > BESIDES_MAX:
                raise too_much_besides()
            else:
                self.state = following
                if kind == REQUEST_HEADERS:
                    self.request_phase.on_headers(self, message, start, end)
                elif kind == RESPONSE_HEADERS:
                    self._begin_answer(message, start, end, state)
                elif kind == REQUEST_TRAILERS:
                    self.request_phase.on_trailers(self, state)
                elif self.response_phase is not None:
                    self.response_phase.on_trailers(self)
        except Exception as problem:
            self.stopped(problem)

    def half_closed(self) -> None:
        """Handles the end of the gateway's messages. If the request is complete, the gateway may still wait for the answer, as NGINX
        Gateway Fabric does.
        """
        if self.state == DECIDING:
            self.half = True
        elif self.state != ENDED:
            self.end(0, "")

    def closed(self) -> None:
        """Releases what the stream holds, because the stream is gone."""
        self.state = ENDED
        self.finish()

    def request_id(self) -> str:
        return self.request_phase.request_id()

    # From one phase to the other.

    def _begin_answer(self, message: bytes, start: int, end: int, before: int) -> None:
        """Handles the response's headers. `before`: the state of the stream before they came."""
        if before == AWAIT_HEADERS and (modes := codec.body_modes(message)) is not None:
            self.duplex = modes[1] == codec.DUPLEX
        if before != ROUTED:  # the gateway answers by itself, so it no longer waits for a decision
            self.request_phase.give_up()
        if self.response_phase is None:
            self.response_phase = ResponsePhase()
        self.response_phase.on_headers(self, message, start, end)

    def decided(self, decision: Decision) -> None:
        """Counts the load, answers the request, and begins the response phase."""
        app, phase, request = self.app, self.request_phase, self.request
        reservation = Reservation(app, decision.ticket, request, self.fingerprint)
        pipeline = self.lease.pipeline if self.lease is not None else None
        answer = ResponsePhase(request, decision, pipeline, phase.parser, reservation, phase.restorer)
        self.response_phase = answer  # from here on, `finish` releases what the decision holds, also after a failure below
        reservation.place(decision)
        phase.send_answer(self, decision)
        self.state = ROUTED
        self.transport.release()
        phase.pieces.clear()  # a long answer does not keep the request's bytes in memory
        used = self.lease.used if self.lease is not None else None
        answer.exchange = app.telemetry.routed(request, decision, used, self.received_at)
        if self.charge is not None:
            self.charge.exchange = answer.exchange
        if request is not None and app.evictions is not None:
            reservation.victim = app.evictions.track(request, request.sent_at, self.evict)
        if app.request_phase_only or self.half or (request is not None and (handling := request[ANSWER]) is not None and handling.skip):
            if answer.exchange is not None:
                answer.exchange.served()
            self.end(0, "")  # the gateway passes the answer on without the picker

    # Endings.

    def awaited(self) -> int:
        """Returns how many bytes of an incomplete request have arrived; -1 if the request is complete."""
        waits = self.state in (AWAIT_HEADERS, AWAIT_BODY)
        return self.request_phase.body_bytes + self.transport.gathered() if waits else -1

    def unfinished(self) -> int:
        """Returns how many bytes the request holds if it is incomplete, or waits with a long body; otherwise -1.

        With several pools, waiting requests with short bodies are included, too, because otherwise a pool could hold any number of bytes in
        short bodies.
        """
        least = LONG_BODY if self.app.turns is None else 0
        if self.state == DECIDING and self.request_phase.kept > least:
            return self.request_phase.kept
        return self.awaited()

    def origin(self) -> str:
        """Returns the request's id and its client, as the gateway gives them, the address of the gateway, and the pool if there are
        several, for the log.
        """
        name = self.pool_name
        return f"{self.request_phase.origin()}, from {self.transport.peer() or 'unknown'}{f', pool {name}' if name else ''}"

    @property
    def pool(self) -> int:
        """The number of the pool, or UNDECIDED if the pool is not known yet."""
        return self.request_phase.pool_of(self.app)[0]

    @property
    def pool_name(self) -> str:
        return self.request_phase.pool_of(self.app)[1]

    def give_up_waiting(self, seconds: float) -> None:
        """Ends the stream, because its request stays incomplete: the gateway has sent too little for `seconds`."""
        if self.state == AWAIT_BODY:
            self.refuse(Refused(Cause.BODY_STALLED, f"{seconds:g}"))
        else:
            self.end(DEADLINE_EXCEEDED, f"no request came for {seconds:g} seconds")

    def give_up_body(self) -> None:
        """Ends this request to free the memory of its body. Answers 429 if an answer is possible."""
        if self.state in (AWAIT_BODY, DECIDING):
            self.refuse(self.too_much_held())
        else:
            self.end(RESOURCE_EXHAUSTED, "too many bytes of unfinished requests are held")

    def refuse_waiting(self) -> bool:
        """Refuses an undecided request because the worker leaves. Returns False if the request is decided or has not begun."""
        queued = self.state == DECIDING
        return self.refuse_undecided(Refused(Cause.SHUTTING_DOWN, "request evicted from queue" if queued else "request rejected pre-queue"))

    def leave(self, refused: Refused) -> None:
        """Ends a request that has no endpoint yet, because its pool is gone."""
        if self.state == AWAIT_HEADERS:
            self.end(UNAVAILABLE, refused.detail)
        else:
            self.refuse_undecided(refused)

    def refuse_undecided(self, refused: Refused) -> bool:
        """Refuses the request. Returns False if it is decided or has not begun."""
        waits = self.state in (AWAIT_BODY, DECIDING)
        if waits:
            self.refuse(refused)
        return waits

    def evict(self) -> bool:
        """Ends the request in favour of a more important one. Returns False if its answer is already over.

        Before the answer's headers, the client gets an error answer of the picker. After the headers, the gateway cuts the answer off. In
        both cases the model server stops working for the request.
        """
        if self.state not in (ROUTED, RESPONDING):
            return False
        answer = refusals.EVICTED
        self.error = answer.code
        self.send(codec.immediate_answer(answer.status, answer.headers, answer.body))
        self.end(0, "")
        return True

    def finish(self) -> None:
        """Releases what the stream holds. A second call has no effect."""
        self.passing = False
        try:
            self._end_request()
        except Exception as problem:  # the load is still to be released
            self.fault(problem)
        if self.response_phase is not None:
            self.response_phase.finish(self)
        charge, self.charge = self.charge, None
        if charge is not None:
            charge.end(self.app.clock.now)

    def _end_request(self) -> None:
        """Drops a request that is not decided, ends the trace, and counts an error."""
        trace, self.trace = self.trace, None
        error, self.error = self.error, ""
        if self.request_phase.open:
            self.request_phase.give_up()
        if trace is not None:
            trace.end(error)
        if error:
            self.app.telemetry.failed(self.request, error)
