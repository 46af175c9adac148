"""gRPC health (`grpc.health.v1.Health`) as unary methods on the native engine.

    service                                                    SERVING while
    "", readiness, envoy.service.ext_proc.v3.ExternalProcessor `ready()`: endpoints are known, a worker serves, nobody stops us,
                                                               and with leader election this picker leads
    liveness                                                   somebody answers; endpoints, leader and drain play no part
    any other name                                             as liveness; with leader election SERVICE_UNKNOWN

List tells of the ext_proc service, and with leader election of readiness and liveness too.

The supervisor serves it on a port of its own, in plaintext. With `--health-checking` each worker also serves it beside its
ext_proc streams, with their TLS; there a worker speaks for itself, and goes on while the supervisor is being replaced.

Check and List answer; Watch and everything else is UNIMPLEMENTED. The two messages are read and written without generated classes:
a request is one string, an answer one enum.
"""

from collections.abc import Callable, Sequence
from typing import Final

from epp.protocol import wire
from epp.protocol.codec import field
from workers.transport.interface import Application, Handler, Metadata, Stream

CHECK: Final = "/grpc.health.v1.Health/Check"
LIST: Final = "/grpc.health.v1.Health/List"
EXT_PROC: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
READINESS: Final = frozenset(("", "readiness", EXT_PROC))
LIVENESS: Final = "liveness"
SERVING: Final = b"\x08\x01"  # field 1, enum SERVING
NOT_SERVING: Final = b"\x08\x02"
SERVICE_UNKNOWN: Final = b"\x08\x03"
INVALID_ARGUMENT: Final = 3
SERVICE_BYTES_MAX: Final = 1024


class Health:
    """An application of the transport."""

    def __init__(self, ready: Callable[[], bool], *, elects: bool = False, missing: Callable[[], str] = str) -> None:
        """`elects`: there is leader election, so probes of several replicas are told apart by the names they ask for.

        `missing` is why the picker is not ready; it goes with NOT_SERVING as the call's gRPC message.
        """
        self._ready = ready
        self._missing = missing
        self._elects = elects

    def open(self, path: str, _metadata: Sequence[tuple[bytes, bytes]], stream: Stream) -> Handler | None:
        """A new stream; None: not a method of ours."""
        if path == CHECK:
            return _Unary(stream, self.check, self._why)
        if path == LIST:
            return _Unary(stream, self.list, self._why)
        return None

    def check(self, request: bytes) -> bytes:
        """HealthCheckRequest -> HealthCheckResponse. Raises ValueError on what is no request."""
        return self._status(read_service(request))

    def list(self, _request: bytes) -> bytes:
        """HealthListRequest -> HealthListResponse."""
        services = (EXT_PROC, LIVENESS, "readiness") if self._elects else (EXT_PROC,)
        return b"".join(field(1, field(1, name.encode()) + field(2, self._status(name))) for name in services)

    def _why(self, response: bytes) -> str:
        return self._missing() if response == NOT_SERVING else ""

    def _status(self, service: str) -> bytes:
        if service in READINESS:
            return SERVING if self._ready() else NOT_SERVING
        return SERVICE_UNKNOWN if self._elects and service != LIVENESS else SERVING


def beside(application: Application, ready: Callable[[], bool]) -> Application:
    """The application, and health for the paths that it does not know."""
    health = Health(ready)

    def open_either(path: str, metadata: Metadata, stream: Stream) -> Handler | None:
        handler = application(path, metadata, stream)
        return health.open(path, metadata, stream) if handler is None else handler

    return open_either


class _Unary:
    """One call: the first message is answered, then the stream is over."""

    __slots__ = ("_answer", "_ended", "_stream", "_why")

    def __init__(self, stream: Stream, answer: Callable[[bytes], bytes], why: Callable[[bytes], str]) -> None:
        self._stream = stream
        self._why = why
        self._answer = answer
        self._ended = False

    def message(self, message: bytes) -> None:
        if self._ended:
            return
        self._ended = True
        try:
            response = self._answer(message)
        except ValueError as wrong:
            self._stream.end(INVALID_ARGUMENT, str(wrong))
            return
        self._stream.send(response)
        self._stream.end(text=self._why(response))

    def half_closed(self) -> None:
        if not self._ended:
            self._ended = True
            self._stream.end(INVALID_ARGUMENT, "a call has one message, none came")

    def closed(self) -> None:
        self._ended = True


def read_service(request: bytes) -> str:
    """The string field 1 of a message; the last one counts, other fields are skipped. Raises ValueError on what is no request."""
    if len(request) > SERVICE_BYTES_MAX:
        raise ValueError(f"a health check has at most {SERVICE_BYTES_MAX} bytes")
    service = ""
    try:
        for number, value in wire.fields(request):
            if number == 1:
                service = wire.text(value)
    except ValueError as problem:
        raise ValueError(f"not a HealthCheckRequest: {problem}") from None
    return service
