"""Takes over later configurations in a running worker: loads them in a thread, then swaps between two turns of the loop.

    generation word has moved ─▶ thread: files ─▶ configuration ─▶ loop: start plugins, swap ─▶ report to the parent

- The loop serves on while the thread loads. Meanwhile, the interpreter switches between the two every SWITCH_S.
- A candidate is loaded in the same way, and used beside the configuration in force. When a candidate is promoted, the worker has it
  already.
- An open stream keeps the app of its configuration to its end. At each heartbeat, the worker looks through its open streams. After the last
  stream of an old configuration, the worker ends the work of the plugins of that configuration.
- If a step fails, the worker keeps its configuration and reports the reason. The parent then returns to the old configuration. If there is
  no old configuration, the worker tries again after AGAIN_S.
"""

import asyncio
import gc
import sys
import threading
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final

import structlog

from epp.metrics.request_series import TRYOUT, TRYOUT_SHADOWS
from shm.areas import Area
from workers.host.log import error_text
from workers.process.instance import Instance
from workers.process.layout import CANDIDATE, GENERATION, gauge_of_pool
from workers.process.loading import candidate as load_candidate
from workers.process.loading import in_force
from workers.shared.pool_crashes import LOADING
from workers.transport.interface import Metadata, Stream
from workers.worker.extproc.app import App
from workers.worker.extproc.stream import ExtProcStream, open_stream
from workers.worker.extproc.tried_stream import Tryout, open_tried
from workers.worker.setup import WorkerParts
from workers.worker.telemetry.alternatives import TryoutFigures

SWITCH_S: Final = 0.0005  # the interval while a thread loads; the interpreter's default is 5 ms
FREE_AFTER_S: Final = 1.0  # time from the last change until the memory of ended configurations is freed
FREE_AT: Final = 8  # this number of ended configurations is freed even while further changes follow
AGAIN_S: Final = 10.0
LOAD_S: Final = 5.0  # a load takes tens of milliseconds; after this time, a load whose plugin hangs is given up
STILL: Final = "the last attempt to load the configuration has not ended: a constructor of a plugin hangs"
_hanging: Final[set[tuple[int | None, str, int]]] = set()  # the configurations with loads that were given up and have not ended

log = structlog.get_logger()


class Loading:
    """Loads a configuration once, in a thread.

    Then calls `then` in the loop, with the exception or the instance under the loaded configuration.
    """

    def __init__(
        self,
        instance: Instance,
        then: Callable[["Loading", Instance | BaseException], None],
        *,
        number: int = 0,
        load: Callable[[Instance], Instance] = in_force,
    ) -> None:
        """`instance`: any instance of this picker. `then` is called once, after LOAD_S at the latest. `number`: the number of the
        configuration that `load` loads; 0 for the configuration in force.

        While an earlier attempt to load this configuration hangs, the attempt fails at once.
        """
        self.number = number or instance.generations.number
        self._instance = instance
        self._load = load
        self._then = then
        self._loop = asyncio.get_running_loop()
        self._switch_s = sys.getswitchinterval()
        self._key = instance.pool, str(instance.named), self.number
        if self._key in _hanging:  # otherwise each attempt would leave a thread
            self._timer: asyncio.Handle = self._loop.call_soon(self._done, TimeoutError(STILL))
            return
        self._timer = self._loop.call_later(LOAD_S, self._late)
        sys.setswitchinterval(SWITCH_S)
        threading.Thread(target=self._run, name="load", daemon=True).start()

    def _run(self) -> None:
        found: Instance | BaseException
        try:
            found = self._load(self._instance)
        except BaseException as problem:  # a plugin's constructor may raise any exception
            found = problem
        self._loop.call_soon_threadsafe(self._ended, found)

    def _ended(self, found: Instance | BaseException) -> None:
        _hanging.discard(self._key)
        self._done(found)

    def _late(self) -> None:
        _hanging.add(self._key)
        self._done(TimeoutError(f"the configuration is not loaded after {LOAD_S:g} s: a constructor of a plugin may hang"))

    def _done(self, found: Instance | BaseException) -> None:
        then, self._then = self._then, lambda _loading, _found: None
        self._timer.cancel()
        sys.setswitchinterval(self._switch_s)
        then(self, found)


def show(area: Area, instance: Instance, tried: int = 0) -> None:
    """Shows which configuration and which candidate a process uses for the pool of `instance`. `area`: the area of the process."""
    scalars, at, pool = area.scalars, area.schema.scalar, instance.pool
    scalars[at[gauge_of_pool(GENERATION, pool)]] = instance.number
    scalars[at[gauge_of_pool(CANDIDATE, pool)]] = tried


class Turn:
    """Makes several pools load their configurations one after the other, because all use one registry of plugins. `taken`: whether a pool
    loads.

    Publishes which pool loads, in case its plugins end the worker.
    """

    def __init__(self, area: Area | None = None) -> None:
        """`area`: the area of this worker; None if the picker has one pool."""
        self.taken = False
        self._word: memoryview | None = None
        if area is not None:
            at = area.schema.scalar[LOADING]
            self._word = area.scalars[at : at + 1]

    def take(self, pool: int | None) -> None:
        """Begins to load a configuration of this pool."""
        self.taken = True
        self._publish((pool or 0) + 1)

    def give(self) -> None:
        """Ends the turn, after the plugins were started."""
        self.taken = False
        self._publish(0)

    def _publish(self, word: int) -> None:
        if self._word is not None:
            self._word[0] = word


class Unusable:
    """Remembers the last configuration that this process could not take over, so that it is not tried again for AGAIN_S."""

    def __init__(self) -> None:
        self._number = 0
        self._until = 0.0

    def add(self, number: int, now: float) -> None:
        self._number, self._until = number, now + AGAIN_S

    def has(self, number: int, now: float) -> bool:
        return number == self._number and now < self._until


class Adoption:
    """Keeps the configurations of one pool in one worker: the current parts, and the parts that open streams still use."""

    def __init__(
        self, parts: WorkerParts, area: Area, ordinal: int, streams: Callable[[], Iterable[App]], turn: Turn | None = None
    ) -> None:
        """`area`: this worker's area. `streams` returns the apps of all open streams. `turn`: the turn to load; None if the picker has one
        pool.
        """
        self.parts = parts
        self._turn = turn or Turn()
        self._gone = False
        self._area = area
        self._ordinal = ordinal
        self._streams = streams
        self._loading: Loading | None = None
        self._unusable = Unusable()
        self._candidate: WorkerParts | None = None
        self.tryout: Tryout | None = None
        self._retired: list[WorkerParts] = []
        self._ending: set[asyncio.Task[None]] = set()
        self._ended = 0  # configurations that have ended and are not freed yet
        self._changed_at = 0.0  # in the time of the event loop
        self._show()

    def look(self) -> None:
        """Starts to load if the parent has named another configuration. Ends configurations without streams. Called at each heartbeat and
        wake-up.
        """
        if self._loading is None and not self._turn.taken:
            self._follow()
        if self._retired:
            self._retire(frozenset(map(id, self._streams())))
        if self._ended:
            self._free()

    @property
    def settled(self) -> bool:
        """Whether `look` has nothing to do until the parent's words change again."""
        instance, tried = self.parts.instance, self._candidate.instance.number if self._candidate is not None else 0
        waits = self._retired or self._ended or self._ending or self._loading is not None
        return not waits and not instance.outdated and instance.generations.candidate_number == tried

    def open(self, path: str, metadata: Metadata, stream: Stream) -> ExtProcStream | None:
        """Returns the handler of a new stream, under the present configuration. Returns None if `path` is not the ext_proc method."""
        if self.tryout is not None:
            return open_tried(self.tryout, self.parts.app, path, metadata, stream)
        return open_stream(self.parts.app, path, metadata, stream)

    def name_at(self, port: int) -> str:
        """Returns "", because the picker has one pool."""
        return ""

    def beat(self, now: float) -> None:
        """Does the work of a heartbeat. `now`: monotonic seconds."""
        for parts in self.every():
            parts.instance.memory.areas.add_remote(now)
            parts.heartbeat(now)

    def woken(self) -> None:
        """Checks whether a recording has begun. Called at a wake-up."""
        if not self.parts.kept.records.file:
            self.parts.record()

    async def close(self) -> None:
        """Stores metrics and ends the plugins' work. Called at the worker's end."""
        current, *before = self.every()
        for used in before:
            await used.retire()
        await current.close()

    def leave(self) -> None:
        """Ends taking over configurations, because the pool is gone."""
        self._gone = True

    def every(self) -> list[WorkerParts]:
        """Returns the current parts, then the parts of the candidate, then the parts that open streams still use."""
        return [self.parts, *([self._candidate] if self._candidate is not None else []), *self._retired]

    def _follow(self) -> None:
        """Uses the configuration and the candidate that the parent's two words name. Loads them first if necessary."""
        instance = self.parts.instance
        number, tried = instance.generations.number, instance.generations.candidate_number
        if tried == number:
            tried = 0  # the candidate was promoted and is about to be withdrawn
        candidate, now = self._candidate, asyncio.get_running_loop().time()
        if instance.outdated and not self._unusable.has(number, now):
            if candidate is not None and candidate.instance.number == number:
                self._promote(candidate)
            else:
                self._load(instance)
        elif candidate is not None and candidate.instance.number != tried:
            self._end_tryout()
            self._retired.append(candidate)
        if self._loading is None and self._candidate is None and tried and not self._unusable.has(tried, now):
            self._load(instance, number=tried, load=load_candidate)

    def _load(self, instance: Instance, **what: Any) -> None:
        self._turn.take(instance.pool)
        self._loading = Loading(instance, self._finish, **what)

    def _finish(self, loading: Loading, found: Instance | BaseException) -> None:
        self._loading = None
        if isinstance(found, Instance) and not self._gone:
            try:
                if found.generations.candidate_number == found.number:
                    self._begin_tryout(found)
                elif found.generations.number == found.number:
                    # Otherwise, yet another configuration is in force already.
                    self._put_in_force(self.parts.under(found, found.memory.areas.area(self._ordinal)))
            except Exception as problem:
                found = problem
        self._turn.give()
        if self._gone:
            return
        if isinstance(found, BaseException):
            self._unusable.add(loading.number, asyncio.get_running_loop().time())
            instance = self.parts.instance
            log.error("configuration cannot be taken over", generation=loading.number, error=error_text(found), **instance.named)
            instance.reports.refused(self._ordinal, loading.number, error_text(found), instance.generations.key)
        self.look()  # another configuration may be in force already

    def _begin_tryout(self, instance: Instance) -> None:
        bundle = instance.generations.candidate()
        parts = self._candidate = self.parts.under(instance, instance.memory.areas.area(self._ordinal), beside=True)
        self.tryout = Tryout(
            parts.app,
            bundle.share,
            seed=int(bundle.hash, 16),
            figures=TryoutFigures(parts.series(TRYOUT), parts.series(TRYOUT_SHADOWS)),
            later=asyncio.get_running_loop().create_task,
        )
        self._show()
        log.info("candidate is tried", generation=instance.number, share=str(bundle.share), **instance.named)

    def _promote(self, candidate: WorkerParts) -> None:
        candidate.promote()
        self._end_tryout()
        self._put_in_force(candidate)

    def _put_in_force(self, parts: WorkerParts) -> None:
        self._retired.append(self.parts)
        self.parts = parts
        self._show()
        instance = parts.instance
        instance.reports.adopted(self._ordinal, instance.number, instance.generations.key)
        log.info("configuration in force", generation=instance.number, **instance.named)

    def _end_tryout(self) -> None:
        self._candidate = self.tryout = None
        self._show()

    def _show(self) -> None:
        self._changed_at = asyncio.get_running_loop().time()
        tried = self._candidate.instance.number if self._candidate is not None else 0
        show(self._area, self.parts.instance, tried)

    def _retire(self, used: Collection[int]) -> None:
        ended = [parts for parts in self._retired if id(parts.app) not in used]
        if not ended:
            return
        self._retired = [parts for parts in self._retired if id(parts.app) in used]
        for parts in ended:
            task = asyncio.get_running_loop().create_task(parts.retire())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
            self._ended += 1

    def _free(self) -> None:
        """Frees the memory of ended configurations. Waits for a pause between changes, because freeing stops the loop for milliseconds."""
        quiet = asyncio.get_running_loop().time() - self._changed_at > FREE_AFTER_S
        if self._ended >= FREE_AT or (quiet and not self._ending):
            self._ended = 0
            gc.collect()  # needed because plugins, pipelines and apps refer to each other
