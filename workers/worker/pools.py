"""The pools of one worker: creates the parts of a pool at its first request, and gives each stream the app of its pool.

    a stream needs a pool ─▶ a thread loads the configuration, one pool after the other ─▶ loop: parts of the pool ─▶ its streams go on

A pool without requests costs nothing: it has no parts until its first request comes, and a heartbeat costs only the pools that got streams
since the one before. The first pool is loaded at the start, because streams need some app before their pools are known.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

import structlog

from epp.errors import Cause, Refused
from epp.protocol import codec
from epp.request.pools import UNDECIDED
from shm.documents import DocumentReader
from shm.lanes import Lane
from workers.host.log import error_text
from workers.process.instance import Instance
from workers.process.loading import of_pool
from workers.process.pools import assigned, assigned_view
from workers.shared.model_lists import ServedView
from workers.shared.pool_crashes import LOADING, OutOfService
from workers.transport.interface import Handler, Metadata, Stream
from workers.worker.adoption import Loading
from workers.worker.extproc.app import App
from workers.worker.extproc.pool_stream import open_pooled
from workers.worker.extproc.stream import ExtProcStream
from workers.worker.model_list import ModelList
from workers.worker.setup import Parts

AGAIN_S: Final = 10.0  # until a pool that could not be loaded is tried again

log = structlog.get_logger()


class Pools:
    """Keeps the parts of the pools that this worker has loaded. Implements `workers.worker.extproc.pool_stream.Pools`."""

    def __init__(
        self,
        instance: Instance,
        made: Callable[[Instance], Parts],
        lane: Lane,
        streams: Callable[[], Iterable[ExtProcStream]],
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        """`made`: creates the parts of a pool whose configuration is loaded. `lane`: this worker's. `streams` returns all open streams.

        `moved`: called when other pools are served, perhaps at ports that were not open before.
        """
        assert instance.choice is not None
        self.choice = instance.choice
        self._instance = instance
        served = ServedView(DocumentReader(instance.layout.documents, instance.memory.documents), len(instance.pools))
        self._models = ModelList(served, instance.models, instance.credentials.prefix_seed)
        self._views = instance.pools
        self._made = made
        self._streams = streams
        self._moved = moved
        at = lane.schema.scalar[LOADING]
        self._loads = lane.scalars[at : at + 1]
        self._out = OutOfService(instance.words.out_of_service)
        self._outs = 0  # changes of it that were seen
        first = next((pool for pool in range(len(self._views)) if self._out_of_service(pool) is None), 0)
        self._loads[0] = first + 1
        self._first = made(of_pool(instance.pools[first]))
        self._loads[0] = 0
        self._lobby = self._first.lobby()
        self._parts: list[Parts | None] = [self._first if pool == first else None for pool in range(len(instance.pools))]
        self._assigned = assigned_view(instance) if instance.places is not None else None
        self._left: list[Parts] = []  # those of pools that are gone; streams may still use them
        self._retiring: set[asyncio.Task[None]] = set()
        self._used: set[int] = set()  # the pools that got a stream since the last heartbeat
        self._waiting: dict[int, list[Callable[[], None]]] = {}
        self._to_load: deque[int] = deque()
        self._loading: Loading | None = None
        self._failed: dict[int, float] = {}  # pool -> when it may be tried again, in the loop's time

    def open(self, path: str, metadata: Metadata, stream: Stream) -> Handler | None:
        """Returns the handler of a new stream; None if `path` is not the ext_proc method."""
        return open_pooled(self, path, metadata, stream)

    def app(self, pool: int) -> App | None:
        parts = self._parts[pool]
        if parts is None:
            return None
        self._used.add(pool)
        return parts.app

    def name_at(self, port: int) -> str:
        """Returns the name of the pool that has this port; "" without one."""
        return self.name(self.choice.of_stream(port, ""))

    def name(self, pool: int) -> str:
        return self._views[pool].options.pool_name if pool != UNDECIDED else ""

    def lobby(self) -> App:
        return self._lobby

    def models(self, headers: codec.Headers, message: bytes) -> bytes:
        return self._models.answer(self.choice, self._views, headers, message)

    def wanted(self, pool: int, then: Callable[[], None]) -> None:
        if (refused := self._out_of_service(pool)) is not None:
            raise refused
        if asyncio.get_running_loop().time() < self._failed.get(pool, 0.0):
            raise Refused(Cause.INTERNAL, f"pool '{self._views[pool].options.pool_name}' cannot be loaded")
        if pool not in self._waiting:
            self._to_load.append(pool)
        self._waiting.setdefault(pool, []).append(then)
        self._load()

    def every(self) -> list[Parts]:
        """Returns the parts of all pools that are loaded."""
        return list(dict.fromkeys([self._first, *(parts for parts in self._parts if parts is not None), *self._left]))

    def beat(self, now: float) -> None:
        """Does what is due at a heartbeat, for the pools that got streams since the last one, and those that count what tenants use.

        `now`: monotonic seconds.
        """
        used, self._used = self._used, set()
        for pool, parts in enumerate(self._parts):
            if parts is not None and (pool in used or parts.instance.config.tenants is not None):
                parts.heartbeat(now)

    def look(self) -> None:
        """Takes over which InferencePools have which places, if that has changed."""
        if self._left:
            self._retire()
        if self._out.changes != self._outs:
            self._outs = self._out.changes
            self._leave_those_out()
        if self._assigned is None or (names := self._assigned.names()) is None:
            return
        before, self._instance = self._views, assigned(self._instance, names)
        assert self._instance.choice is not None
        self._views, self.choice = self._instance.pools, self._instance.choice
        for pool, (old, new) in enumerate(zip(before, self._views, strict=True)):
            if old is new:
                continue
            self._failed.pop(pool, None)
            self._leave(pool, Refused(Cause.NO_POOL, f"the pool '{old.options.pool_name}' is gone"))
        self._moved()

    def _leave(self, pool: int, refused: Refused) -> None:
        """Ends the use of a pool's parts, so that another pool may get its place: its requests without an endpoint are refused."""
        parts, self._parts[pool] = self._parts[pool], None
        if parts is None:
            return
        for stream in self._streams():
            if stream.app is parts.app:
                stream.leave(refused)
        parts.leave()
        if parts is not self._first:  # the lobby is a part of it
            self._left.append(parts)

    def _out_of_service(self, pool: int) -> Refused | None:
        """Returns the refusal of all requests of a pool that is out of service; None if it is in service."""
        view = self._views[pool]
        return Refused(Cause.POOL_OUT, view.options.pool_name) if self._out.of(pool, view.generations.number) is not None else None

    def _leave_those_out(self) -> None:
        """Refuses the requests without a decision of pools that are out of service now."""
        for pool, parts in enumerate(self._parts):
            if parts is not None and (refused := self._out_of_service(pool)) is not None:
                self._leave(pool, refused)

    def _retire(self) -> None:
        """Ends the work of parts that no open stream uses."""
        used = {id(stream.app) for stream in self._streams()}
        for parts in [each for each in self._left if id(each.app) not in used]:
            self._left.remove(parts)
            parts.kept.pools.remove(parts.own)
            task = asyncio.get_running_loop().create_task(parts.retire())
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)

    def woken(self) -> None:
        """Begins to record, or ends it, for all pools that are loaded."""
        for parts in self.every():
            parts.record()

    async def close(self) -> None:
        """Stores metrics and ends the plugins' work."""
        for parts in self.every():
            await parts.close()

    def _load(self) -> None:
        """Loads the next pool that is wanted, in a thread: one after the other, so that the loop serves on meanwhile."""
        if self._loading is None and self._to_load:
            pool = self._to_load.popleft()
            self._loads[0] = pool + 1
            self._loading = Loading(self._views[pool], lambda _, found: self._loaded(pool, found), load=of_pool)

    def _loaded(self, pool: int, found: Instance | BaseException) -> None:
        self._loading = None
        try:
            if isinstance(found, BaseException):
                raise found
            if found.options.pool_name == self._views[pool].options.pool_name:  # else another pool has the place meanwhile
                self._parts[pool] = self._made(found)
        except Exception as problem:
            self._failed[pool] = asyncio.get_running_loop().time() + AGAIN_S
            log.error("pool cannot be loaded", pool=self._views[pool].options.pool_name, error=error_text(problem))
        self._loads[0] = 0
        for then in self._waiting.pop(pool):
            then()
        asyncio.get_running_loop().call_soon(self._load)
