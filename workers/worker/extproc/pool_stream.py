"""Streams at a port of several pools: finds the pool of each request, and lets the app of that pool serve the stream.

    open_pooled ── port, :authority ─▶ pool: an ordinary stream of this pool
         └ undecided ─▶ PooledStream ── headers: metadata of the gateway ─▶ pool
                                 └ undecided ── whole body: its model ─▶ pool, or Refused

Until the pool is known, a stream has the app of some pool, the *lobby*, only to collect the body. Then the app of the request's own pool
reads its headers again, because each pool hides other headers and knows other tenants.
"""

from typing import Protocol

from epp.protocol import codec
from epp.protocol.inflate import Unpacking, body_slices
from epp.protocol.models import asks_for_models
from epp.protocol.stream import DECIDING
from epp.request.pools import UNDECIDED, PoolChoice, model_of
from epp.request.renaming import CONTENT_ENCODING
from workers.transport.interface import Handler, Metadata, Stream
from workers.worker.extproc.app import App
from workers.worker.extproc.request_phase import ENCODED, RequestPhase
from workers.worker.extproc.shell import Shell
from workers.worker.extproc.stream import PATH, ExtProcStream


class Pools(Protocol):
    """The pools of one worker. A pool is its number in `choice`."""

    choice: PoolChoice

    def open(self, pool: int, path: str, metadata: Metadata, stream: Stream) -> Handler | None:
        """Returns the handler of a new stream of this pool."""

    def app(self, pool: int) -> App:
        """Returns the app of this pool, for a stream that is open already."""

    def lobby(self) -> App:
        """Returns an app for streams whose pool is not known yet."""

    def models(self) -> bytes:
        """Returns the framed answer that lists the models of all pools (`epp.protocol.models.listed`)."""


def open_pooled(pools: Pools, path: str, metadata: Metadata, stream: Stream) -> Handler | None:
    """Returns the handler of a new stream; None if `path` is not the ext_proc method."""
    pool = pools.choice.of_stream(stream.port(), stream.authority)
    if pool != UNDECIDED:
        return pools.open(pool, path, metadata, stream)
    if path != PATH:
        return None
    app = pools.lobby()
    app.telemetry.opened()
    return PooledStream(app, stream, metadata, pools)


class PooledRequestPhase(RequestPhase):
    """A request phase that finds the pool before it decides."""

    __slots__ = ("_head", "_pools")

    def __init__(self, pools: Pools) -> None:
        super().__init__()
        self._pools = pools
        self._head: tuple[bytes, int, int] | None = None  # the message with the headers, while the pool is not known

    def on_headers(self, stream: Shell, message: bytes, start: int, end: int) -> None:
        pool = self._pools.choice.of_metadata(message)
        if pool == UNDECIDED:
            self._head = message, start, end
        else:
            stream.app = self._pools.app(pool)
        super().on_headers(stream, message, start, end)

    def identify(self, stream: Shell, message: bytes, start: int, end: int) -> None:
        if self._head is None:
            super().identify(stream, message, start, end)
        else:
            self._headers = codec.Headers(message, start, end)

    def _route_without_body(self, stream: Shell) -> None:
        if self._head is not None:
            if asks_for_models(self._headers):
                stream.send(self._pools.models())
                stream.end(0, "")
                return
            self._enter(stream, "")
        super()._route_without_body(stream)

    def _start_deciding(self, stream: Shell) -> None:
        if self._head is not None:
            body = self._body()
            if self._headers.mentions(ENCODED):
                packed = body_slices(body, self._headers.get(CONTENT_ENCODING) or "", stream.app.guards.body_bytes_max)
                if packed is not None:
                    self._find_model(stream, packed)
                    return
            self._enter(stream, model_of(body))
        super()._start_deciding(stream)

    def _find_model(self, stream: Shell, packed: Unpacking) -> None:
        """Decompresses one part of the body, as `_unpack` does. The pool's parser decompresses the body again."""
        try:
            count = next(packed)
        except StopIteration as done:
            self._enter(stream, model_of(done.value))
            super()._start_deciding(stream)
            return
        self._keep(stream, count)
        if stream.state == DECIDING:
            stream.later(self._find_model, stream, packed)

    def _enter(self, stream: Shell, model: str) -> None:
        """Gives the stream to the pool of its model. Raises Refused."""
        pool = self._pools.choice.of_model(model)
        assert self._head is not None
        head, self._head = self._head, None
        stream.app = self._pools.app(pool)
        self.identify(stream, *head)


class PooledStream(ExtProcStream):
    """A stream whose pool follows from its request."""

    __slots__ = ()

    def __init__(self, app: App, transport: Stream, metadata: Metadata, pools: Pools) -> None:
        """`app`: that of the lobby."""
        super().__init__(app, transport, metadata)
        phase = PooledRequestPhase(pools)
        phase.gateway = self.request_phase.gateway
        self.request_phase = phase
