"""The supervisor's part of objectives and rewrites: brings their sources together, gives bands their places, writes the documents.

    directory ─ Folder ─┐
                        ├─ together ─▶ Objects ─▶ documents OBJECTIVES and REWRITES
    API server ─ told ──┘

At first start a bad file ends the instance, as a bad endpoints file does. A successor goes on with what its predecessor had
published until every source has said something, and with the places that were given: what it hears first adds to the priorities
that were known, and rewrites stay as they are.
"""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Mapping
from typing import Final

import msgspec

from epp.model_rewrite import Rules, compiled
from shm.documents import DocumentReader, DocumentTooLarge, DocumentWriter
from shm.flow_lanes import FlowLanes
from workers import rewrites
from workers.discovery import LOOK_EVERY_S, watch
from workers.documents import OBJECTIVES, REWRITES
from workers.object_kinds import OBJECTIVE, REWRITE, Found, Once, PoolName, together
from workers.objectives import BandPlaces, ObjectivesRecord, decode, encode
from workers.objects import ANY_POOL, Folder

RETRY_S: Final = 1.0  # while a band waits for a place
TELL_EVERY_S: Final = 60.0
NAMED_MAX: Final = 8
NOTHING: Final = Found()


class ObjectsWatch:
    """`start`, then `run`. Without a source only the bands of the configuration are published."""

    def __init__(
        self,
        folder: str,
        reader: DocumentReader,
        writer: DocumentWriter,
        static: Collection[int],
        flow: FlowLanes | None,
        *,
        report: Callable[[str], None],
        now: Callable[[], float],
        pool: PoolName = ANY_POOL,
        api: bool = False,
    ) -> None:
        """`folder` is empty where there is none. `api`: an API server will be asked for objects too (`told`)."""
        self._path = folder
        self._folder = Folder(folder, report, pool=pool)
        self._reader = reader
        self._flow = flow
        self._report = report
        self._once = Once(report)
        self._now = now
        self._directory: Found | None = None if folder else NOTHING  # None: it said nothing yet
        self._api = NOTHING
        self._api_complete = not api
        self._left: Mapping[str, int] = {}  # priorities of a predecessor
        self._inherited = False  # whether rules of a predecessor may be there
        self._objectives = Published(writer, OBJECTIVES, "objectives", report)
        self._rewrites = Published(writer, REWRITES, "model rewrites", report)
        places = flow.schema.bands if flow is not None else 0
        self._bands = BandPlaces(static, places, empty=flow.empty if flow is not None else bool, now=now())
        self._told: frozenset[int] = frozenset()  # bands that wait, as it was said last
        self._tell_at = now()

    def start(self, *, successor: bool) -> None:
        """Publish the first state. Raises DiscoveryError, unless there was a predecessor."""
        self._inherited = successor
        if successor and (left := self._of_predecessor()) is not None:
            self._bands.adopt(left.places)
            self._left = left.priorities
        if self._path:
            self._directory = self._folder.reload() if successor else self._folder.load()
        self._publish()

    @property
    def expects(self) -> Collection[str]:
        """Kinds of which a predecessor had objects that the directory has not: they are the API server's."""
        if not self._inherited:
            return ()
        directory = self._directory or NOTHING
        found = self._reader.read(REWRITES)
        rules = rewrites.decode(found[1]) if found is not None else Rules()
        left = {
            OBJECTIVE: self._left.keys() - directory.objectives,
            REWRITE: {choice.rewrite for choice in rules.choices} - directory.rewrites.keys(),
        }
        return [kind for kind, names in left.items() if names]

    async def run(self) -> None:
        """Follow the directory; ends when cancelled."""
        moved = asyncio.Event()
        watching = asyncio.create_task(watch(self._path, moved)) if self._path else None
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RETRY_S if self._bands.waiting else LOOK_EVERY_S):
                        await moved.wait()
                moved.clear()
                self.look()
        finally:
            if watching is not None:
                watching.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await watching

    def look(self) -> None:
        """Take in what the directory says now."""
        found = self._folder.reload() if self._path else None
        if found is not None:
            self._directory = found
        self._publish()

    def told(self, found: Found, complete: bool) -> None:
        """What the API server says now, and whether that is all that it has to say."""
        self._api, self._api_complete = found, complete
        self._publish()

    def _of_predecessor(self) -> ObjectivesRecord | None:
        found = self._reader.read(OBJECTIVES)
        if found is None or not found[1]:
            return None
        try:
            return decode(found[1])
        except msgspec.MsgspecError:
            return None

    def _publish(self) -> None:
        objects = together(self._directory or NOTHING, self._api, self._once)
        complete = self._directory is not None and self._api_complete
        if complete:
            self._left, self._inherited = {}, False
        priorities = {**self._left, **objects.priorities}
        if self._flow is not None:
            self._provide_bands(priorities.values(), self._flow)
        self._objectives.write(encode(ObjectivesRecord(priorities, self._bands.places)))
        if not self._inherited:
            rules = compiled(objects.rewrites)
            if rules.choices or self._reader.version(REWRITES):
                self._rewrites.write(rewrites.encode(rules))

    def _provide_bands(self, priorities: Collection[int], flow: FlowLanes) -> None:
        now = self._now()
        self._bands.want(priorities, now)
        waiting = self._bands.waiting
        if not waiting:
            self._told = waiting
        elif waiting != self._told and now >= self._tell_at:
            self._told, self._tell_at = waiting, now + TELL_EVERY_S
            named = ", ".join(map(str, sorted(waiting, reverse=True)[:NAMED_MAX]))
            more = f" and {len(waiting) - NAMED_MAX} others" if len(waiting) > NAMED_MAX else ""
            self._report(
                f"all {flow.schema.bands} places of bands are taken: requests of priority {named}{more} wait in band 0 "
                "until one is free; use fewer different priorities"
            )


class Published:
    """One document as it was written last."""

    def __init__(self, writer: DocumentWriter, index: int, what: str, report: Callable[[str], None]) -> None:
        self._writer = writer
        self._index = index
        self._what = what
        self._report = report
        self._last = b""

    def write(self, blob: bytes) -> None:
        """If it is another one. Of one that has no room the one before stays; that is said once."""
        if blob == self._last:
            return
        self._last = blob
        try:
            self._writer.write(self._index, blob)
        except DocumentTooLarge as failure:
            self._report(f"workers keep the last {self._what}: {failure}")
