"""The response phase of a stream: passes the model server's answer on, calls plugins, and releases what the request holds.

    routed ─▶ headers ─▶ chunks ─▶ last chunk or trailers ─▶ finish: release, usage, ResponseComplete plugins
                           └ `ExtProcStream.message` passes most streamed chunks on without this module

A fault of a plugin here does not disturb the answer: the fault is counted, and the answer continues.
"""

from collections.abc import Mapping
from typing import Final

from compiled.calls import find
from epp.decision.decision import ERRORS_FROM, SERVED, SERVER_ERRORS_FROM, Decision, Response, Usage
from epp.decision.pipeline import DecisionCall, Pipeline
from epp.decision.receipt import HEADER as RECEIPT
from epp.errors import blame
from epp.plugin import Parser
from epp.protocol import codec
from epp.protocol.codec import PIECE_BYTES_MAX, learn_chunk
from epp.protocol.message_order import DONE
from epp.protocol.rewrite import ModelRestorer
from epp.protocol.usage import ANSWER, Scanner, UsageScanner
from epp.protocol.usage_bounds import bounded, implausible
from epp.request import Request
from epp.request.client_headers import wants_receipt
from epp.request.renaming import UNSIZED, restorable
from workers.shared.outliers import EMPTY
from workers.worker.extproc.reservation import Reservation
from workers.worker.extproc.shell import SHORTEST_ENVELOPE, Shell
from workers.worker.telemetry.request_metrics import Exchange

STATUS_NEEDLE: Final = codec.needle(":status")
STATUS_OK: Final = STATUS_NEEDLE + b"\x03200"
EVENT_STREAM: Final = b"text/event-stream"
MODEL_SERVER_ERROR: Final = "ModelServerError"
STATUS_DIGITS: Final = 3
OK: Final = 200
OK_TEXT: Final = "200"
DATE: Final = b"\x0a\x04date"
ERROR_STATUS: Final = "4"  # a status of three digits is an error if, compared as text, it is not less


class ResponsePhase:
    """Handles one answer. Without arguments: an answer of the gateway itself, to a request that was not routed."""

    __slots__ = (
        "_begun_at", "_decision", "_empty", "_parser", "_pipeline", "_request", "_reservation", "_response", "_restorer", "_streaming",
        "_whole", "exchange", "scanner", "taken",
    )  # fmt: skip

    def __init__(
        self,
        request: Request | None = None,
        decision: Decision | None = None,
        pipeline: Pipeline | None = None,
        parser: Parser | None = None,
        reservation: Reservation | None = None,
        restorer: ModelRestorer | None = None,
    ) -> None:
        self._request = request
        self._decision = decision
        self._pipeline = pipeline
        self._parser = parser
        self._reservation = reservation
        self._restorer = restorer
        self._response: Response | None = None
        self._begun_at = 0.0
        self._whole = False
        self._empty = False
        # calls of the plugins that see the next chunk
        self._streaming: tuple[DecisionCall, ...] = ()
        self.exchange: Exchange | None = None
        self.scanner: Scanner | None = None
        self.taken = 0.0  # the time that this process has spent on chunks, in seconds

    # Messages.

    def on_headers(self, stream: Shell, message: bytes, start: int, end: int) -> None:
        self._begun_at = stream.app.clock.now
        last = codec.end_of_stream(message, start, end)
        set_headers: Mapping[str, str] | None = None
        removed: tuple[str, ...] = ()
        decision, request = self._decision, self._request
        if decision is not None and request is not None:
            gateway = None
            if start > SHORTEST_ENVELOPE or end != len(message):
                gateway = _served_by(codec.gateway_metadata(message), decision, self._reservation)
            if self._restorer is not None and not last:
                if restorable(codec.Headers(message, start, end)):
                    removed = UNSIZED
                else:
                    self._restorer = None
            if self._parser is not None and self._parser.reads_usage:
                self._make_scanner(stream, request)
            if find(message, EVENT_STREAM, start, end) >= 0:
                request.streaming = True
                if self.exchange is not None:
                    self.exchange.streaming = True
            reads = self._pipeline is not None and self._pipeline.reads_response
            status = OK_TEXT if find(message, STATUS_OK, start, end) >= 0 else ""
            if reads or not status:
                headers = codec.Headers(message, start, end)
                set_headers = self._read_headers(stream, headers, status, request, decision, gateway)
            elif self._reservation is not None:
                self._reservation.outcome(OK, sent=True)
            if self.exchange is not None and self.exchange.unnamed is not None and not stream.error:
                _name(stream, self.exchange)
            if request.wishes and stream.app.receipts is not None and wants_receipt(request.headers):
                set_headers = _with_receipt(stream, self._pipeline, request, decision, set_headers)
        metadata = b""
        if last:  # plugins are called first, because their metadata go with these headers
            self._complete(stream)
            stream.state = DONE
            metadata = _metadata(stream, self._response)
        stream.send(
            codec.response_headers_answer(set_headers or {}, removed, metadata)
            if set_headers or removed or metadata
            else codec.RESPONSE_HEADERS_ANSWER
        )
        if last:
            return
        if decision is not None and self._pipeline is not None and not stream.error:
            self._streaming = self._pipeline.response_streaming
        secondary = self._reservation is not None and self._reservation.secondary
        stream.passing = stream.duplex and not (self._streaming or secondary or self._restorer)

    def _read_headers(
        self, stream: Shell, headers: codec.Headers, status: str, request: Request, decision: Decision, gateway: Mapping[str, object] | None
    ) -> Mapping[str, str] | None:
        """Returns the headers that plugins add to the response; None if no plugin was called. Raises ProtocolViolation.

        `status`: "" if the status must still be read from the headers.
        """
        status = status or headers.find(STATUS_NEEDLE) or ""
        if headers.problem is not None:
            raise headers.problem
        if status >= ERROR_STATUS:
            stream.error = MODEL_SERVER_ERROR
        # A gateway may be configured to omit the status (Envoy: forward_rules). Then headers and a body are treated as success.
        number = OK if status in (OK_TEXT, "") else _number(status)
        if self._reservation is not None and number:
            # A server dates its answers (RFC 9110, 6.6.1). When a connection fails, the gateway answers by itself, and its answer has no
            # date at this point.
            sent = number < SERVER_ERRORS_FROM or headers.mentions(DATE)
            self._reservation.outcome(number, sent=sent)
        response = self._response = Response(number, headers, streaming=request.streaming)
        response.gateway = gateway
        pipeline = self._pipeline
        if pipeline is None or not pipeline.reads_response:
            return None
        request.now = self._begun_at
        for received in pipeline.response_received:
            try:
                received(request, decision, response)
            except Exception as problem:  # the answer continues without this plugin
                self._fault(stream, received, problem)
        return response.set_headers

    def on_body(self, stream: Shell, message: bytes, start: int, end: int) -> None:
        now = stream.app.now
        begun = now()
        begin, stop, last = codec.body(message, start, end)
        empty = begin == stop
        if not empty:
            if self._reservation is not None and self._reservation.secondary:
                self._reservation.free_secondary()
                stream.passing = stream.duplex and not (self._streaming or self._restorer)
            if self.exchange is not None:
                self.exchange.chunk(stop - begin)
        if self.scanner is not None:
            try:
                self.scanner.feed(message[begin:stop])
            except Exception as problem:
                self.leave_out_scanner(stream, problem)
        self.taken += now() - begun
        if last:  # plugins are called first, because the metadata that they set goes with the last piece
            self._complete(stream)
            stream.state = DONE
        self._pass_on(stream, message, (start, end), (begin, stop), last)
        if last:
            return
        learn_chunk(len(message))
        if self._streaming:
            self._chunk_seen(stream, empty=empty)

    def _pass_on(self, stream: Shell, message: bytes, payload: tuple[int, int], data: tuple[int, int], last: bool) -> None:
        """Sends one piece of the answer on. A piece stays unchanged unless the model was renamed. The last piece has plugins' metadata."""
        (start, end), (begin, stop) = payload, data
        metadata = _metadata(stream, self._response) if last else b""
        restorer = self._restorer
        if restorer is None and not metadata and stream.duplex and end - start <= PIECE_BYTES_MAX:
            stream.send(codec.response_body_answer(message, start, end))
            return
        piece: bytes | memoryview = memoryview(message)[begin:stop]
        if restorer is not None:
            piece = restorer.feed(memoryview(message)[begin:stop])
            if last:
                piece = bytes(piece) + restorer.rest()
        if not stream.duplex:
            stream.send(codec.response_body_passed(bytes(piece) if restorer is not None else None, metadata))
        elif restorer is None or last or piece:
            stream.transport.send_parts(codec.body_pieces(piece, last, request=False, metadata=metadata))

    def _chunk_seen(self, stream: Shell, *, empty: bool) -> None:
        """Calls the streaming plugins for a chunk. After the first chunk with content, calls only plugins that want every chunk."""
        pipeline, request, decision = self._pipeline, self._request, self._decision
        assert pipeline is not None
        assert request is not None
        assert decision is not None
        request.now = stream.app.clock.now
        for streaming in pipeline.every_chunk if empty else self._streaming:
            try:
                streaming(request, decision)
            except Exception as problem:  # the answer continues without this plugin
                self._fault(stream, streaming, problem)
        if not empty:
            self._streaming = pipeline.every_chunk
            stream.passing = stream.duplex and not (self._streaming or self._restorer)

    def on_trailers(self, stream: Shell) -> None:
        if self._restorer is not None and (rest := self._restorer.rest()) and stream.duplex:
            stream.transport.send_parts(codec.body_pieces(rest, False, request=False))
        self._complete(stream)
        stream.send(codec.response_trailers_answer(_metadata(stream, self._response)))

    # The scanner. A parser makes it, and the parser may be a foreign plugin.

    def _make_scanner(self, stream: Shell, request: Request) -> None:
        answer = request[ANSWER]
        if answer is None or answer.scanner is None:
            self.scanner = UsageScanner()
            return
        try:
            self.scanner = answer.scanner()
        except Exception as problem:
            self.leave_out_scanner(stream, problem)

    def leave_out_scanner(self, stream: Shell, problem: Exception) -> None:
        """Drops the scanner, which has raised `problem`: the answer continues, and its usage stays unknown."""
        self.scanner = None
        blame(problem, self._parser)
        stream.fault(problem)

    def _usage(self, stream: Shell, exchange: Exchange) -> Usage | None:
        """Returns the usage that the scanner has found, bounded by the possible use of the request, or None without usage."""
        request, decision = self._request, self._decision
        if self.scanner is None or request is None or decision is None:
            return None
        try:
            usage: object = self.scanner.usage
            if usage is None:
                return None
            if not isinstance(usage, Usage):
                raise TypeError(f"the scanner's usage is a {type(usage).__name__}, not a Usage")
        except Exception as problem:
            self.leave_out_scanner(stream, problem)
            return None
        within = bounded(usage, request, exchange.size, stream.app.clock.now - exchange.received_at)
        if within is not usage and implausible(usage, within):
            stream.app.telemetry.doubted(decision.targets[0], usage, within)
        return within

    # The end.

    def _complete(self, stream: Shell) -> None:
        """Finishes the response after its last piece or its trailers."""
        exchange = self.exchange
        if exchange is not None:
            exchange.whole = True
            exchange.usage = self._usage(stream, exchange)
            self._empty = not exchange.size and self.scanner is not None and self._status() == OK
            if self._empty and self._reservation is not None:
                self._reservation.fail(EMPTY)  # the answer should have had tokens
        self._whole = True
        stream.finish()

    def finish(self, stream: Shell) -> None:
        """Releases what the request holds, and calls the ResponseComplete plugins. A second call has no effect.

        A fault in one step is counted, and the other steps still run: nothing else would release what they hold.
        """
        exchange, self.exchange = self.exchange, None
        reservation, self._reservation = self._reservation, None
        usage: Usage | None = None
        try:
            if reservation is not None:
                reservation.release()
        except Exception as problem:
            stream.fault(problem)
        try:
            if exchange is not None:
                usage = exchange.usage if exchange.whole else self._usage(stream, exchange)
                self._close(stream, exchange)
        except Exception as problem:
            stream.fault(problem)
        if reservation is None:
            return
        try:
            if self._request is not None and self._decision is not None and self._pipeline is not None:
                self._answered(stream, self._request, self._decision, self._pipeline, usage)
        except Exception as problem:
            stream.fault(problem)
        try:
            if reservation.ticket is not None:
                reservation.ticket.done()
        except Exception as problem:
            stream.fault(problem)

    def _close(self, stream: Shell, exchange: Exchange) -> None:
        exchange.close()
        if self._request is not None and self._decision is not None:
            stream.app.telemetry.ended(exchange, self._request, self._decision, self._status())

    def _status(self) -> int:
        """Returns the status of the answer, or 0 without a status."""
        return self._response.status if self._response is not None else OK if self._begun_at else 0

    def _answered(self, stream: Shell, request: Request, decision: Decision, pipeline: Pipeline, usage: Usage | None) -> None:
        """Counts the end of a request that was sent to an endpoint, and calls the ResponseComplete plugins."""
        app = stream.app
        # A streamed answer counts the time that its chunks took in this process, without the time that the model server took.
        taken = self.taken if request.streaming else app.now() - self._begun_at
        if pipeline.response_complete:
            request.now = app.now()
            response = self._response = self._response or Response(OK if self._begun_at else 0)
            response.usage, response.whole, response.empty = usage, self._whole, self._empty
            for call in pipeline.response_complete:
                try:
                    call(request, decision, response)
                except Exception as problem:  # the other plugins must still release what they hold
                    self._fault(stream, call, problem)
        failed = self._empty or self._status() >= ERRORS_FROM
        if stream.charge is not None:
            stream.charge.answered(usage, failed=failed)
        app.telemetry.answered(request, decision, usage, taken if self._begun_at else None, failed=failed)

    def _fault(self, stream: Shell, call: object, problem: Exception) -> None:
        if self._pipeline is not None:
            blame(problem, self._pipeline.owner(call))
        stream.fault(problem)


def _served_by(gateway: Mapping[str, object] | None, decision: Decision, reservation: Reservation | None) -> Mapping[str, object] | None:
    """Moves the reservation if the gateway names another endpoint that serves the request. Returns `gateway`, the gateway's metadata."""
    address = gateway.get(SERVED) if gateway is not None else None
    if not isinstance(address, str) or address == decision.targets[0].address:
        return gateway
    run = decision.runs.get(decision.primary)
    endpoints = decision.targets if run is None else (*decision.targets, *run.candidates.snapshot.endpoints)
    served = next((endpoint for endpoint in endpoints if endpoint.address == address), None)
    if served is not None and reservation is not None:
        reservation.passed_over()
        reservation.move(served.slot)
        decision.targets = (served, *(target for target in decision.targets if target is not served))
    return gateway


def _metadata(stream: Shell, response: Response | None) -> bytes:
    """Returns the metadata that plugins have set, encoded; empty without metadata. Metadata that cannot be encoded are dropped."""
    if response is None or not response.metadata:
        return b""
    try:
        return codec.dynamic_metadata(response.metadata)
    except Exception as problem:
        stream.fault(problem)
        return b""


def _number(status: str) -> int:
    """Returns the status as a number, or 0 if it is no number."""
    return int(status) if len(status) == STATUS_DIGITS and status.isascii() and status.isdecimal() else 0


def _name(stream: Shell, exchange: Exchange) -> None:
    """Counts a request with new names, because a model server serves it. A fault here does not disturb the answer."""
    try:
        exchange.served()
    except Exception as problem:
        stream.fault(problem)


def _with_receipt(
    stream: Shell, pipeline: Pipeline | None, request: Request, decision: Decision, set_headers: Mapping[str, str] | None
) -> Mapping[str, str] | None:
    """Returns the headers for the client, with the receipt of the decision. A fault here does not disturb the answer."""
    receipts = stream.app.receipts
    if pipeline is None or receipts is None:
        return set_headers
    try:
        receipt = receipts(pipeline, request, decision)
    except Exception as problem:  # scorers are called again
        stream.fault(problem)
        return set_headers
    return {**(set_headers or {}), RECEIPT: receipt}
