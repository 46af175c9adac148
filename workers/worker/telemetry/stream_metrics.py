"""Measures ext_proc streams: how long they were open and how they ended (`--enable-grpc-stream-metrics`).

`StreamMetrics.around` wraps the worker's `Application`. Without the flag, nothing is wrapped, so this module costs nothing.
"""

from collections.abc import Callable
from typing import Final

from epp.metrics.areas import GRPC_CODES, STREAM_DURATION, STREAMS_INFLIGHT
from shm.areas import Area
from workers.transport.interface import Application, Handler, Metadata, Stream

OK: Final = 0
CANCELED: Final = 1
UNKNOWN: Final = 2


class StreamMetrics:
    """Counts the streams of one worker."""

    def __init__(self, area: Area, now: Callable[[], float]) -> None:
        self._area = area
        self._now = now
        self._inflight = area.schema.scalar[STREAMS_INFLIGHT.name]
        self._duration = area.schema.histogram[STREAM_DURATION.name]
        self._codes = [area.schema.counter[f"extproc_streams_{name}"] for name in GRPC_CODES]

    def around(self, application: Application) -> Application:
        """Returns an application that counts the streams of `application`."""

        def opened(path: str, metadata: Metadata, stream: Stream) -> Handler | None:
            measured = _Measured(self, stream, self._now())
            handler = application(path, metadata, measured)
            if handler is None:
                return None
            self._area.scalars[self._inflight] += 1
            measured.handler = handler
            return measured

        return opened

    def ended(self, code: int, opened_at: float) -> None:
        """Counts the end of a stream. `code`: its gRPC status."""
        area = self._area
        area.scalars[self._inflight] -= 1
        area.add(self._codes[code if 0 <= code < len(self._codes) else UNKNOWN])
        area.observe(self._duration, self._now() - opened_at)


class _Measured:
    """A layer between transport and handler: a handler to the transport, a stream to the handler. So it sees how the stream ends."""

    __slots__ = (
        "_metrics", "_opened_at", "_stream", "authority", "gathered", "handler", "hold", "release", "send", "send_parts", "send_raw",
    )  # fmt: skip

    def __init__(self, metrics: StreamMetrics, stream: Stream, opened_at: float) -> None:
        self._metrics = metrics
        self._stream = stream
        self._opened_at = opened_at
        self.send = stream.send
        self.send_raw = stream.send_raw
        self.send_parts = stream.send_parts
        self.hold = stream.hold
        self.gathered = stream.gathered
        self.release = stream.release
        self.authority = stream.authority
        self.handler: Handler

    def message(self, message: bytes) -> None:
        self.handler.message(message)

    def half_closed(self) -> None:
        self.handler.half_closed()

    def closed(self) -> None:
        done = getattr(self.handler, "done", False)  # gateways also reset streams that are done
        self._metrics.ended(OK if done else CANCELED, self._opened_at)
        self.handler.closed()

    def peer(self) -> str:
        return self._stream.peer()

    def port(self) -> int:
        return self._stream.port()

    def end(self, status: int = 0, text: str = "") -> None:
        self._metrics.ended(status, self._opened_at)
        self._stream.end(status, text)
