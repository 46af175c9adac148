"""The common part of the two phases of an ext_proc stream: the state of the stream, the request, and the ways in which a stream ends.

`workers.worker.extproc.stream` has the subclass. Every exception during the work for a stream goes to `stopped`.

Two rules always hold. Every stream answers its request exactly once: with a target, with an error, or by ending. Every stream releases the
reservation of its decision exactly once, in each kind of end.
"""

from collections.abc import Callable
from typing import Any, Final

from epp.decision.decision import Decision
from epp.errors import Cause, ProtocolViolation, Refused
from epp.protocol import codec, refusals
from epp.protocol.message_order import AWAIT_HEADERS, DECIDING, ENDED, ROUTED
from epp.request import Request
from workers.transport.interface import Stream
from workers.worker.extproc.app import App
from workers.worker.extproc.budgets import Charge
from workers.worker.extproc.pipelines import Lease
from workers.worker.telemetry.tracing import Trace

UNKNOWN_ERROR: Final = "Unknown"
INTERNAL_ERROR: Final = "Internal"
INVALID_ARGUMENT: Final = 3
INTERNAL: Final = 13
BODIES_RETRY_S: Final = 1
# The tag and the length before the payload of a message take 2 to 6 bytes. If more bytes precede it, the message has other fields.
SHORTEST_ENVELOPE: Final = 6


class Shell:
    """The parts of a stream that its phases use. The phases set `state`, `passing`, `error`, `request`, `lease`, and the data for times
    and traces.
    """

    __slots__ = (
        "app", "charge", "duplex", "error", "fingerprint", "half", "lease", "passing", "received_at", "request", "send", "state", "trace",
        "transport",
    )  # fmt: skip

    def __init__(self, app: App, transport: Stream) -> None:
        self.app = app
        self.transport = transport
        self.send = transport.send_raw
        self.state: int = AWAIT_HEADERS
        self.passing = False  # chunks of the answer pass unchanged, and no plugin sees them
        # Whether response bodies pass through the picker; if False, the picker only says how they change.
        self.duplex = True
        # Whether the gateway has half-closed the stream; if so, the stream ends with the answer to the request.
        self.half = False
        self.error = ""  # the code under which the error metric counts the stream; "" without an error
        self.trace: Trace | None = None
        # The time at which the stream was opened; later, the time at which the headers came.
        self.received_at = app.clock.now
        self.request: Request | None = None  # set when the body is complete
        self.lease: Lease | None = None  # set when the body is complete
        self.charge: Charge | None = None  # the use of its tenant's budget, or None without a budget
        self.fingerprint = 0  # the body's fingerprint, see `workers.shared.query_of_death`

    # Work.

    def stopped(self, problem: Exception) -> None:
        """Turns an exception into the answer to the request or the end of the stream. No other code does this."""
        if isinstance(problem, Refused):
            self.refuse(problem)
        elif isinstance(problem, ProtocolViolation):
            self._violated(problem)
        else:  # a bug of ours or of a plugin: only this stream fails
            self._fail(problem)

    def later(self, act: Callable[..., object], *arguments: Any) -> None:
        """Continues the undecided request with `act` in a later turn of the loop: long work takes turns."""
        self.app.soon(self.resume, act, *arguments)

    def resume(self, act: Callable[..., object], *arguments: Any) -> None:
        """Continues the undecided request with `act` now, unless it was given up meanwhile."""
        if self.state != DECIDING:
            return
        deciding = self.app.guards.deciding
        deciding.again(self.fingerprint)
        try:
            act(*arguments)
        except Exception as problem:
            self.stopped(problem)
        finally:
            deciding.word[0] = 0

    @property
    def pool_name(self) -> str:
        """The name of the pool; "" if the pool is not known yet, or if the picker has one pool."""
        raise NotImplementedError

    def too_much_held(self) -> Refused:
        """Returns the refusal of this request because of the held bytes of bodies. The text names the pool if there are several pools."""
        name = self.pool_name
        return Refused(Cause.BODIES_HELD, f" by pool '{name}'" if name else "", retry_after_s=BODIES_RETRY_S)

    def request_id(self) -> str:
        """Returns the id that the gateway gives the request; "" without one."""
        raise NotImplementedError

    def decided(self, decision: Decision) -> None:
        """Answers the request with the targets of its decision."""
        raise NotImplementedError

    # Endings.

    def refuse(self, refused: Refused) -> None:
        """Answers the request with an error."""
        answer = refusals.answer(refused)
        self.error = answer.code
        if self.trace is not None:
            self.trace.failed(self.request, refused)
        used = self.lease.used if self.lease is not None else None
        self.app.telemetry.refused(self.request, refused, used, self.received_at, self.request_id())
        self.send(codec.immediate_answer(answer.status, answer.headers, answer.body))
        self.end(0, "")

    def end(self, status: int, text: str) -> None:
        """Ends the stream from our side. `status`: a gRPC status."""
        self.state = ENDED
        self.finish()
        self.transport.end(status, text)

    def fault(self, problem: Exception) -> None:
        """Counts and reports a bug of ours or of a plugin."""
        self.app.telemetry.fault()
        self.app.guards.on_fault(problem)

    def finish(self) -> None:
        """Releases what the stream holds. A second call has no effect."""
        raise NotImplementedError

    def _violated(self, problem: ProtocolViolation) -> None:
        self.app.telemetry.violated()
        self.error = UNKNOWN_ERROR
        self.end(INVALID_ARGUMENT, str(problem))

    def _fail(self, problem: Exception) -> None:
        """Answers 500 if the request has no answer yet. Otherwise ends the stream with an error."""
        self.fault(problem)
        self.error = INTERNAL_ERROR
        if self.trace is not None:
            self.trace.failed(self.request, problem)
        if self.state < ROUTED:
            if self.request is not None and self.lease is not None:
                self.app.telemetry.faulted(self.request, problem, self.lease.used)
            answer = refusals.answer(Refused(Cause.INTERNAL, f"{type(problem).__name__} in the endpoint picker"))
            self.send(codec.immediate_answer(answer.status, answer.headers, answer.body))
            self.end(0, "")
        elif self.state != ENDED:
            self.end(INTERNAL, f"{type(problem).__name__} in the endpoint picker")
