"""Serves gRPC health (`grpc.health.v1.Health`) as unary methods on the native engine.

    service                                                    SERVING while
    "", readiness, envoy.service.ext_proc.v3.ExternalProcessor `ready()`: endpoints are known, a worker serves, the picker is not
                                                               stopping, and with leader election this picker leads
    liveness                                                   always: the process answers
    any other name                                             as liveness; with leader election SERVICE_UNKNOWN

List has the ext_proc service, readiness and liveness, because the endpoint picker protocol demands these three.

The supervisor serves health on a separate port, in plaintext. With `--health-checking`, each worker also serves health on the ext_proc
port, with the same TLS. On that port a worker answers itself, even while the supervisor is being replaced.

Check and List are implemented, Watch and all other methods are UNIMPLEMENTED. The messages are read and written without generated
classes: a request is one string, an answer one enum.
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
LISTED: Final = (EXT_PROC, LIVENESS, "readiness")
SERVING: Final = b"\x08\x01"  # field 1, enum SERVING
NOT_SERVING: Final = b"\x08\x02"
SERVICE_UNKNOWN: Final = b"\x08\x03"
INVALID_ARGUMENT: Final = 3
SERVICE_BYTES_MAX: Final = 1024


class Health:
    """Serves gRPC health. It is an application of the transport."""

    def __init__(self, ready: Callable[[], bool], *, elects: bool = False, missing: Callable[[], str] = str) -> None:
        """`elects`: whether leader election is on. If so, the answer to an unknown service name is SERVICE_UNKNOWN.

        `missing` returns why the picker is not ready. This text becomes the gRPC message of NOT_SERVING.
        """
        self._ready = ready
        self._missing = missing
        self._elects = elects

    def open(self, path: str, _metadata: Sequence[tuple[bytes, bytes]], stream: Stream) -> Handler | None:
        """Returns the handler of a new stream, or None if `path` is not a method of health."""
        if path == CHECK:
            return _Unary(stream, self.check, self._why)
        if path == LIST:
            return _Unary(stream, self.list, self._why)
        return None

    def check(self, request: bytes) -> bytes:
        """Answers a HealthCheckRequest with a HealthCheckResponse, both encoded. Raises ValueError if the request is malformed."""
        return self._status(read_service(request))

    def list(self, _request: bytes) -> bytes:
        """Answers a HealthListRequest with a HealthListResponse, both encoded."""
        return b"".join(field(1, field(1, name.encode()) + field(2, self._status(name))) for name in LISTED)

    def _why(self, response: bytes) -> str:
        return self._missing() if response == NOT_SERVING else ""

    def _status(self, service: str) -> bytes:
        if service in READINESS:
            return SERVING if self._ready() else NOT_SERVING
        return SERVICE_UNKNOWN if self._elects and service != LIVENESS else SERVING


def beside(application: Application, ready: Callable[[], bool]) -> Application:
    """Returns an application that tries `application` first, and serves health on the paths that it does not serve."""
    health = Health(ready)

    def open_either(path: str, metadata: Metadata, stream: Stream) -> Handler | None:
        handler = application(path, metadata, stream)
        return health.open(path, metadata, stream) if handler is None else handler

    return open_either


class _Unary:
    """Serves one unary call: answers the first message and ends the stream."""

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
            self._stream.end(INVALID_ARGUMENT, "the call ended without its message")

    def closed(self) -> None:
        self._ended = True


def read_service(request: bytes) -> str:
    """Returns the service that a HealthCheckRequest names: its string field 1, or "" without this field.

    If the field occurs several times, the last one is used. Other fields are skipped. Raises ValueError if the message is malformed.
    """
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
