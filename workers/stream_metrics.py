"""ext_proc streams by how long they were open and how they ended: `--enable-grpc-stream-metrics`.

An `Application` around another one. Without the flag it is not there, and streams pay nothing for it.
"""

from collections.abc import Callable

from epp.metrics import GRPC_CODES, STREAM_DURATION, STREAMS_INFLIGHT
from shm.lanes import Lane
from workers.transport.interface import Application, Handler, Metadata, Stream

OK, CANCELED, UNKNOWN = (GRPC_CODES.index(name) for name in ("OK", "Canceled", "Unknown"))


class StreamMetrics:
    """What all streams of one worker share."""

    def __init__(self, lane: Lane, now: Callable[[], float]) -> None:
        self._lane = lane
        self._now = now
        self._inflight = lane.schema.scalar[STREAMS_INFLIGHT.name]
        self._duration = lane.schema.histogram[STREAM_DURATION.name]
        self._codes = [lane.schema.counter[f"extproc_streams_{name}"] for name in GRPC_CODES]

    def around(self, application: Application) -> Application:
        """The same application, its streams counted."""

        def opened(path: str, metadata: Metadata, stream: Stream) -> Handler | None:
            measured = _Measured(self, stream, self._now())
            handler = application(path, metadata, measured)
            if handler is None:
                return None
            self._lane.scalars[self._inflight] += 1
            measured.handler = handler
            return measured

        return opened

    def ended(self, code: int, opened_at: float) -> None:
        """A stream is over."""
        lane = self._lane
        lane.scalars[self._inflight] -= 1
        lane.add(self._codes[code if 0 <= code < len(self._codes) else UNKNOWN])
        lane.observe(self._duration, self._now() - opened_at)


class _Measured:
    """Stands between transport and handler, to each as the other; sees the one ending that there is."""

    __slots__ = ("_metrics", "_opened_at", "_stream", "handler", "hold", "release", "send", "send_raw")

    def __init__(self, metrics: StreamMetrics, stream: Stream, opened_at: float) -> None:
        self._metrics = metrics
        self._stream = stream
        self._opened_at = opened_at
        self.send = stream.send
        self.send_raw = stream.send_raw
        self.hold = stream.hold
        self.release = stream.release
        self.handler: Handler

    def message(self, message: bytes) -> None:
        self.handler.message(message)

    def half_closed(self) -> None:
        self.handler.half_closed()

    def closed(self) -> None:
        done = getattr(self.handler, "done", False)  # gateways reset streams that have nothing more to say
        self._metrics.ended(OK if done else CANCELED, self._opened_at)
        self.handler.closed()

    def end(self, status: int = 0, text: str = "") -> None:
        self._metrics.ended(status, self._opened_at)
        self._stream.end(status, text)
