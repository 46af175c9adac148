"""gRPC health (`grpc.health.v1.Health`) as unary methods on the native engine.

    service                                                    SERVING while
    "", readiness, envoy.service.ext_proc.v3.ExternalProcessor `ready()`: endpoints are known, a worker serves, nobody stops us
    liveness, any other name                                   somebody answers; endpoints play no part

The supervisor serves it on a port of its own, in plaintext. With `--health-checking` each worker also serves it beside its
ext_proc streams, with their TLS; there a worker speaks for itself, and goes on while the supervisor is being replaced.

Check and List answer; Watch and everything else is UNIMPLEMENTED. The two messages are small enough to be read and written by
hand: a request is one string, an answer one enum.
"""

from collections.abc import Callable, Sequence
from typing import Final

from epp.protocol.codec import field
from workers.transport.interface import Application, Handler, Metadata, Stream

CHECK: Final = "/grpc.health.v1.Health/Check"
LIST: Final = "/grpc.health.v1.Health/List"
EXT_PROC: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
READINESS: Final = frozenset(("", "readiness", EXT_PROC))
SERVING: Final = b"\x08\x01"  # field 1, enum SERVING
NOT_SERVING: Final = b"\x08\x02"
INVALID_ARGUMENT: Final = 3
SERVICE_BYTES_MAX: Final = 1024


class Health:
    """An application of the transport."""

    def __init__(self, ready: Callable[[], bool]) -> None:
        self._ready = ready

    def open(self, path: str, _metadata: Sequence[tuple[bytes, bytes]], stream: Stream) -> Handler | None:
        """A new stream; None: not a method of ours."""
        if path == CHECK:
            return _Unary(stream, self.check)
        if path == LIST:
            return _Unary(stream, self.list)
        return None

    def check(self, request: bytes) -> bytes:
        """HealthCheckRequest -> HealthCheckResponse. Raises ValueError on what is no request."""
        return self._status(read_service(request))

    def list(self, _request: bytes) -> bytes:
        """HealthListRequest -> HealthListResponse."""
        return field(1, field(1, EXT_PROC.encode()) + field(2, self._status(EXT_PROC)))

    def _status(self, service: str) -> bytes:
        return NOT_SERVING if service in READINESS and not self._ready() else SERVING


def beside(application: Application, ready: Callable[[], bool]) -> Application:
    """The application, and health for the paths that it does not know."""
    health = Health(ready)

    def open_either(path: str, metadata: Metadata, stream: Stream) -> Handler | None:
        handler = application(path, metadata, stream)
        return health.open(path, metadata, stream) if handler is None else handler

    return open_either


class _Unary:
    """One call: the first message is answered, then the stream is over."""

    __slots__ = ("_answer", "_ended", "_stream")

    def __init__(self, stream: Stream, answer: Callable[[bytes], bytes]) -> None:
        self._stream = stream
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
        self._stream.end()

    def half_closed(self) -> None:
        if not self._ended:
            self._ended = True
            self._stream.end(INVALID_ARGUMENT, "a call has one message, none came")

    def closed(self) -> None:
        self._ended = True


def read_service(request: bytes) -> str:
    """The string field 1 of a message; the last one counts, other fields are skipped."""
    service, at = "", 0
    if len(request) > SERVICE_BYTES_MAX:
        raise ValueError(f"a health check has at most {SERVICE_BYTES_MAX} bytes")
    while at < len(request):
        key, at = _varint(request, at)
        wire = key & 7
        if wire == 0:
            _, at = _varint(request, at)
            continue
        size, at = _varint(request, at) if wire == 2 else ({1: 8, 5: 4}.get(wire, len(request) + 1), at)
        if at + size > len(request):
            raise ValueError("not a HealthCheckRequest")
        if key == 0x0A:
            service = request[at : at + size].decode()
        at += size
    return service


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte, at = data[at], at + 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("not a HealthCheckRequest")
