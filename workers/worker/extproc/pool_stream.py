"""Streams of several pools: finds the pool of each request, and lets the app of that pool serve the stream.

    open_pooled ── port, :authority ─▶ pool, if it is loaded: an ordinary stream of this pool
         └ undecided ─▶ PooledRequestPhase ── headers: metadata of the gateway ─▶ pool
                                       └ undecided ── whole body: its model ─▶ pool, or Refused

Until the pool is known and loaded, a stream has the app of some pool, the *lobby*, only to collect the body. Then the app of the request's
own pool reads its headers again, because each pool hides other headers and knows other tenants.
"""

from collections.abc import Callable
from typing import Protocol

from epp.protocol import codec
from epp.protocol.inflate import Unpacking
from epp.protocol.models import asks_for_models
from epp.request.pool_choice import UNDECIDED, PoolChoice, model_of
from workers.transport.interface import Handler, Metadata, Stream
from workers.worker.extproc.app import App
from workers.worker.extproc.request_phase import ENCODED, LONG_BODY, RequestPhase, whole
from workers.worker.extproc.shell import Shell
from workers.worker.extproc.stream import PATH, ExtProcStream
from workers.worker.extproc.tried_stream import TriedStream, Tryout, open_tried


class Pools(Protocol):
    """The pools of one worker. The number of a pool in `choice` stands for the pool. `tries`: whether any pool has a candidate."""

    choice: PoolChoice
    tries: bool

    def app(self, pool: int) -> App | None:
        """Returns the app of this pool, or None if the pool is not loaded yet."""

    def tryout(self, pool: int) -> Tryout | None:
        """Returns the tryout of this pool's candidate, or None without a candidate."""

    def wanted(self, pool: int, then: Callable[[], None]) -> None:
        """Loads the pool, and calls `then` afterwards, in a later turn. Raises Refused if the last attempt to load the pool failed a short
        time ago.
        """

    def name(self, pool: int) -> str:
        """Returns the name of the pool; "" for UNDECIDED."""

    def lobby(self) -> App:
        """Returns an app for streams whose pool is not known or not loaded yet."""

    def models(self, headers: codec.Headers, message: bytes, then: Callable[[], None]) -> bytes | None:
        """Returns the framed answer that lists the models of all pools (`epp.protocol.models.listed`). `message`: the message with the
        headers.

        Returns None if the present configuration of a pool must be loaded first, and calls `then` afterwards, in a later turn. Raises
        Refused if no pool knows the client's tenant.
        """


def open_pooled(pools: Pools, path: str, metadata: Metadata, stream: Stream) -> Handler | None:
    """Returns the handler of a new stream, or None if `path` is not the ext_proc method."""
    if path != PATH:
        return None
    pool = pools.choice.of_stream(stream.port(), stream.authority)
    app = pools.app(pool) if pool != UNDECIDED else None
    if app is not None:
        if pools.tries and (tryout := pools.tryout(pool)) is not None:
            return open_tried(tryout, app, path, metadata, stream)
        app.telemetry.opened()
        return ExtProcStream(app, stream, metadata)
    app = pools.lobby()
    app.telemetry.opened()
    phase = PooledRequestPhase(pools, pool)
    if pools.tries:
        return TriedStream(app, stream, metadata, None, phase)
    return ExtProcStream(app, stream, metadata, phase)


class PooledRequestPhase(RequestPhase):
    """A request phase that finds the pool before it decides, and waits until the pool is loaded. `pool`: UNDECIDED until it is known."""

    __slots__ = ("_head", "_no_body", "_plain", "pool", "pools")

    def __init__(self, pools: Pools, pool: int) -> None:
        super().__init__()
        self.pools = pools
        self.pool = pool
        self._head: tuple[bytes, int, int] | None = None  # the message with the headers, while the stream is in the lobby
        self._no_body = False
        self._plain: bytes | None = None  # the body after it was decompressed to find its model, until the pool's parser reads it

    def pool_of(self, app: App) -> tuple[int, str]:
        return self.pool, self.pools.name(self.pool)

    def on_headers(self, stream: Shell, message: bytes, start: int, end: int) -> None:
        if self.pool == UNDECIDED:
            self.pool = self.pools.choice.of_metadata(message)
        app = self.pools.app(self.pool) if self.pool != UNDECIDED else None
        if app is None:
            self._head = message, start, end
        else:
            self._found(stream, app, message)
        super().on_headers(stream, message, start, end)

    def _found(self, stream: Shell, app: App, message: bytes) -> None:
        """Gives the stream to its pool. `message`: the message with the headers."""
        stream.app = app
        if isinstance(stream, TriedStream):
            stream.enter(self.pools.tryout(self.pool), message)

    def identify(self, stream: Shell, message: bytes, start: int, end: int) -> None:
        if self._head is None:
            super().identify(stream, message, start, end)
        else:
            self._headers = codec.Headers(message, start, end)

    def _body_complete(self, stream: Shell) -> None:
        if self._head is None or self.body_bytes > LONG_BODY:
            super()._body_complete(stream)
        else:  # the lobby has the turns of another pool
            self._start_deciding(stream)

    def _route_without_body(self, stream: Shell) -> None:
        if self._head is None:
            super()._route_without_body(stream)
        elif self.pool == UNDECIDED and self.pools.choice.by_model and asks_for_models(self._headers):
            self._list_models(stream)
        else:
            self._no_body = True
            self._enter(stream, b"")

    def _list_models(self, stream: Shell) -> None:
        assert self._head is not None
        answer = self.pools.models(self._headers, self._head[0], lambda: stream.resume(self._list_models, stream))
        if answer is not None:
            stream.send(answer)
            stream.end(0, "")

    def _start_deciding(self, stream: Shell) -> None:
        if self._head is None:
            super()._start_deciding(stream)
            return
        body = whole(self.pieces)
        if self.pool == UNDECIDED and self._headers.mentions(ENCODED) and (packed := self._packed(stream, body)) is not None:
            self._unpack(stream, packed, self._enter_plain)
        else:
            self._enter(stream, body)

    def _enter_plain(self, stream: Shell, body: bytes) -> None:
        self._plain = body
        self._enter(stream, body)

    def _packed(self, stream: Shell, body: bytes | memoryview) -> Unpacking | None:
        plain, self._plain = self._plain, None
        return super()._packed(stream, body) if plain is None else _unpacked(plain)

    def give_up(self) -> None:
        super().give_up()
        self._plain = None

    def _enter(self, stream: Shell, body: bytes | memoryview) -> None:
        """Finds the pool, by the model in `body` if the pool is still unknown. Decides as soon as the pool is loaded. Raises Refused."""
        if self.pool == UNDECIDED:
            self.pool = self.pools.choice.of_model(model_of(body))
        app = self.pools.app(self.pool)
        if app is None:
            self.pools.wanted(self.pool, lambda: stream.resume(self._enter, stream, b""))
            if not self.kept and self.body_bytes:
                self._keep(stream)
            return
        assert self._head is not None
        head, self._head = self._head, None
        self._found(stream, app, head[0])
        self.identify(stream, *head)
        if self._no_body:
            super()._route_without_body(stream)
        else:
            super()._body_complete(stream)


def _unpacked(body: bytes) -> Unpacking:
    """Returns a decompressed body in the form of a compressed body without further parts."""
    yield from ()
    return body
