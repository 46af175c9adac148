"""The pools of one worker: creates the parts of a pool at its first request, and gives each stream the app of its pool.

    a stream needs a pool ─▶ a thread loads the configuration, one pool after the other ─▶ loop: parts of the pool ─▶ its streams go on
    a word of the parent has moved ─▶ the list of pools, and the configuration of each pool that is loaded (`adoption`)

A pool without requests costs nothing: it has no parts until its first request arrives, and a heartbeat costs time only for pools with new
streams since the last heartbeat. The first pool is loaded at the start, because streams need some app before their pools are known.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

import structlog

from epp.errors import Cause, Refused
from epp.protocol import codec
from epp.request.pool_choice import UNDECIDED
from shm.areas import Area
from shm.documents import DocumentReader
from workers.host.log import error_text
from workers.process.generations import GenerationLost
from workers.process.instance import Instance
from workers.process.loading import of_pool
from workers.process.pool_views import assigned, assigned_view, chosen, listed_now
from workers.shared.documents import ServedView
from workers.shared.pool_crashes import OutOfService
from workers.transport.interface import Handler, Metadata, Stream
from workers.worker.adoption import Adoption, Loading, Turn, show
from workers.worker.extproc.app import App
from workers.worker.extproc.pool_stream import open_pooled
from workers.worker.extproc.stream import ExtProcStream
from workers.worker.extproc.tried_stream import Tryout
from workers.worker.model_list import ModelList
from workers.worker.setup import WorkerParts

AGAIN_S: Final = 10.0  # the time until the next attempt to load a pool after a failure

log = structlog.get_logger()


class WorkerPools:
    """Keeps the parts of the pools that this worker has loaded. Implements `workers.worker.extproc.pool_stream.Pools`."""

    def __init__(
        self,
        instance: Instance,
        made: Callable[[Instance], WorkerParts],
        area: Area,
        ordinal: int,
        streams: Callable[[], Iterable[ExtProcStream]],
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        """`made`: creates the parts of a pool when its configuration is loaded. `area`: the area of this worker. `streams` returns all open
        streams.

        `moved`: called when the served pools change, perhaps with new ports.
        """
        assert instance.choice is not None
        self.choice = instance.choice
        self.tries = False  # whether any pool has a candidate
        self._instance = instance
        served = ServedView(DocumentReader(instance.layout.documents, instance.memory.documents), len(instance.pools))
        self._models = ModelList(served, instance.credentials.prefix_seed)
        self._made = made
        self._area = area
        self._ordinal = ordinal
        self._streams = streams
        self._moved = moved
        self._turn = Turn(area)
        self._out = OutOfService(instance.words.out_of_service)
        self._outs = 0  # the number of changes of `_out` seen so far
        # The number of the pool to which the lobby belongs
        self._lobby_of = next((pool for pool in range(len(instance.pools)) if self._out_of_service(pool) is None), 0)
        self._turn.take(self._lobby_of)
        self._first = made(self._of_first(instance.pools[self._lobby_of]))
        self._turn.give()
        self._lobby = self._first.lobby()
        self._loaded: list[Adoption | None] = [None] * len(instance.pools)
        self._loaded[self._lobby_of] = self._adoption(self._first)
        self._assigned = assigned_view(instance)
        self._left: list[WorkerParts] = []  # the parts of pools that are gone, which streams may still use
        self._retiring: set[asyncio.Task[None]] = set()
        self._used: set[int] = set()  # the pools that got a stream since the last heartbeat
        self._waiting: dict[int, list[Callable[[], None]]] = {}
        self._to_load: deque[int] = deque()
        self._loading: Loading | None = None
        self._failed: dict[int, float] = {}  # pool -> the time of the next attempt to load it, in the loop's time
        self._unsettled: set[int] = set()  # the pools with configurations that change
        self._changes = -1  # until the first `look`

    def open(self, path: str, metadata: Metadata, stream: Stream) -> Handler | None:
        """Returns the handler of a new stream; None if `path` is not the ext_proc method."""
        return open_pooled(self, path, metadata, stream)

    def app(self, pool: int) -> App | None:
        adoption = self._loaded[pool]
        if adoption is None:
            return None
        self._used.add(pool)
        return adoption.parts.app

    def tryout(self, pool: int) -> Tryout | None:
        adoption = self._loaded[pool]
        return None if adoption is None else adoption.tryout

    def name_at(self, port: int) -> str:
        """Returns the name of the pool that has this port, or ""."""
        return self.name(self.choice.of_stream(port, ""))

    def name(self, pool: int) -> str:
        return self._instance.pools[pool].options.pool_name if pool != UNDECIDED else ""

    def lobby(self) -> App:
        return self._lobby

    def models(self, headers: codec.Headers, message: bytes, then: Callable[[], None]) -> bytes | None:
        pools, unusable = list(self._instance.pools), dict[int, Refused]()
        for pool in self.choice.by_model:
            if (adoption := self._loaded[pool]) is not None:
                pools[pool] = adoption.parts.instance
            elif pools[pool].outdated or pools[pool].bundle is None:  # has the configuration of the start, or of an earlier pool here
                try:
                    self.wanted(pool, then)
                    return None
                except Refused as refused:
                    unusable[pool] = refused
        if unusable and len(unusable) == len(self.choice.by_model):
            raise next(iter(unusable.values()))
        return self._models.answer(self.choice, pools, headers, message, unusable)

    def wanted(self, pool: int, then: Callable[[], None]) -> None:
        if (refused := self._out_of_service(pool)) is not None:
            raise refused
        if asyncio.get_running_loop().time() < self._failed.get(pool, 0.0):
            raise Refused(Cause.INTERNAL, f"pool '{self.name(pool)}' cannot be loaded")
        if pool not in self._waiting:
            self._to_load.append(pool)
        self._waiting.setdefault(pool, []).append(then)
        self._load()

    def every(self) -> list[WorkerParts]:
        """Returns the parts of all pools that are loaded."""
        used = (parts for adoption in self._loaded if adoption is not None for parts in adoption.every())
        return list(dict.fromkeys([self._first, *used, *self._left]))

    def beat(self, now: float) -> None:
        """Does the work of a heartbeat: for the whole worker, for pools with new streams since the last heartbeat, and for pools that count
        the use of tenants. `now`: monotonic seconds.
        """
        self._first.kept.heartbeat(now)  # an answer may have ended although no stream has begun
        used, self._used = self._used, set()
        for pool, adoption in enumerate(self._loaded):
            if adoption is not None and (pool in used or adoption.parts.instance.config.tenants is not None):
                adoption.beat(now)

    def look(self) -> None:
        """Takes over changed places of pools, and later configurations."""
        if self._left:
            self._retire()
        if self._out.changes != self._outs:
            self._outs = self._out.changes
            self._leave_those_out()
        if (names := self._assigned.names()) is not None:
            self._use(assigned(self._instance, names))
        if (changes := self._instance.words.changes) != self._changes:
            self._changes = changes
            self._look_at_words()
        if self._unsettled:
            self._adopt()
        self._load()

    def _out_of_service(self, pool: int) -> Refused | None:
        """Returns the refusal of all requests of a pool that is out of service, or None if the pool is in service."""
        view = self._instance.pools[pool]
        name = view.options.pool_name
        return Refused(Cause.POOL_OUT, name) if self._out.of(pool, name, view.number_in_force) is not None else None

    def _leave_those_out(self) -> None:
        """Refuses the undecided requests of pools that are out of service."""
        for pool, adoption in enumerate(self._loaded):
            if adoption is not None and (refused := self._out_of_service(pool)) is not None:
                self._leave(pool, refused)

    def woken(self) -> None:
        """Begins or ends recording for all loaded pools."""
        for parts in self.every():
            parts.record()

    async def close(self) -> None:
        """Stores metrics and ends the plugins' work."""
        for parts in self.every():
            await parts.close()

    def _of_first(self, view: Instance) -> Instance:
        """Returns the first pool with its configuration, or with the configuration of the start if its own cannot be loaded. A first pool
        is needed for the lobby.
        """
        try:
            return of_pool(view)
        except Exception as problem:
            log.error("pool cannot be loaded", pool=view.options.pool_name, error=error_text(problem))
            if number := view.generations.number:
                view.reports.refused(self._ordinal, number, error_text(problem), view.generations.key)
            return view

    def _adoption(self, parts: WorkerParts) -> Adoption:
        return Adoption(parts, self._area, self._ordinal, lambda: (stream.app for stream in self._streams()), self._turn)

    def _use(self, instance: Instance) -> None:
        """Takes over which pools have which places. The old pool of a changed place loses its parts."""
        before, self._instance = self._instance, instance
        assert instance.choice is not None
        self.choice = instance.choice
        for pool, (old, new) in enumerate(zip(before.pools, instance.pools, strict=True)):
            if old is not new:
                self._failed.pop(pool, None)
                if _another(old, new):
                    self._leave(pool, _gone(old))
        self._moved()

    def _leave(self, pool: int, refused: Refused) -> None:
        """Ends the use of a pool's parts, if it has any, so that another pool may get its place. Refuses the pool's requests without an
        endpoint, also those that wait in the lobby.
        """
        for stream in self._streams():
            if stream.pool == pool:
                stream.leave(refused)
        adoption, self._loaded[pool] = self._loaded[pool], None
        if adoption is None:
            return
        self._unsettled.discard(pool)
        adoption.leave()
        every = adoption.every()
        for parts in every:
            parts.leave()
        self._left += [parts for parts in every if parts is not self._first]  # the lobby is a part of it

    def _look_at_words(self) -> None:
        """Follows the list of pools, and finds the pools with changed configurations."""
        with contextlib.suppress(GenerationLost):  # another list follows
            listed = listed_now(self._instance)
            if listed is not self._instance:
                self._use(listed)
        self._failed.clear()
        if self._instance.pool_list:
            self._use(chosen(self._instance))
        show(self._area, self._instance)
        for pool, view in enumerate(self._instance.pools):
            if self._loaded[pool] is not None and view.served:
                self._unsettled.add(pool)
            else:
                if self._loaded[pool] is not None:
                    self._leave(pool, _gone(view))
                # The next request of the pool loads the configuration in force.
                show(self._area, replace(view, number=view.number_in_force), view.generations.candidate_number)

    def _adopt(self) -> None:
        for pool in sorted(self._unsettled):
            adoption = self._loaded[pool]
            assert adoption is not None
            adoption.look()
            if adoption.settled:
                self._unsettled.discard(pool)
        self.tries = any(adoption is not None and adoption.tryout is not None for adoption in self._loaded)
        first = self._loaded[self._lobby_of]
        if first is not None and first.parts is not self._first:
            before, self._first = self._first, first.parts
            self._lobby = self._first.lobby()
            if before not in first.every():  # otherwise the adoption retires the parts
                self._left.append(before)

    def _retire(self) -> None:
        """Ends the work of parts that no open stream uses."""
        used = {id(stream.app) for stream in self._streams()}
        for parts in [each for each in self._left if id(each.app) not in used]:
            self._left.remove(parts)
            if parts.own in parts.kept.pools and all(parts.own is not each.own for each in self._left):
                parts.kept.pools.remove(parts.own)
            task = asyncio.get_running_loop().create_task(parts.retire())
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)

    def _load(self) -> None:
        """Loads the next wanted pool in a thread, one pool after the other, so that the loop continues to serve."""
        if self._loading is None and self._to_load and not self._turn.taken:
            pool = self._to_load.popleft()
            self._turn.take(pool)
            view = self._instance.pools[pool]
            number = view.generations.number
            self._loading = Loading(view, lambda _, found: self._finish(pool, number, found), load=of_pool)

    def _finish(self, pool: int, number: int, found: Instance | BaseException) -> None:
        self._loading = None
        view = self._instance.pools[pool]
        try:
            if isinstance(found, BaseException):
                raise found
            # Meanwhile, another pool may have got the place, or the pool may have lost its configuration, or be out of service.
            if found.options.pool_name == view.options.pool_name and view.served and self._out_of_service(pool) is None:
                self._loaded[pool] = self._adoption(self._made(found))
                self._unsettled.add(pool)
        except Exception as problem:
            self._failed[pool] = asyncio.get_running_loop().time() + AGAIN_S
            log.error("pool cannot be loaded", pool=view.options.pool_name, error=error_text(problem))
            if number > 1:
                view.reports.refused(self._ordinal, number, error_text(problem), pool)
        self._turn.give()
        for then in self._waiting.pop(pool):
            then()
        asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        """Begins the next load. Later configurations of loaded pools go first, because the parent waits for them only for SPREAD_S."""
        if self._unsettled:
            self._adopt()
        self._load()


def _another(old: Instance, new: Instance) -> bool:
    """Returns whether the place of a pool has got another pool."""
    return old.options.pool_name != new.options.pool_name or (old.bundle is not None and new.bundle is None)


def _gone(view: Instance) -> Refused:
    return Refused(Cause.NO_POOL, f"the pool '{view.options.pool_name}' is gone")
