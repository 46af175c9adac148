"""The supervisor's part of objectives: follows the directory, gives bands their places, writes the document.

At first start a bad file ends the instance, as a bad endpoints file does; a successor goes on with what its predecessor had
published until the directory says something else, and with the places that were given.
"""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Mapping
from typing import Final

import msgspec

from shm.documents import DocumentReader, DocumentTooLarge, DocumentWriter
from shm.flow_lanes import FlowLanes
from workers.discovery import LOOK_EVERY_S, watch
from workers.documents import OBJECTIVES
from workers.objectives import BandPlaces, ObjectivesRecord, decode, encode
from workers.objects import Folder

DEFAULT_POOL: Final = "epp"  # the pool's name where none is given
RETRY_S: Final = 1.0  # while a band waits for a place


class ObjectivesWatch:
    """`start`, then `run`. Without a folder only the bands of the configuration are published."""

    def __init__(
        self,
        folder: str,
        reader: DocumentReader,
        writer: DocumentWriter,
        static: Collection[int],
        flow: FlowLanes | None,
        *,
        pool: str,
        report: Callable[[str], None],
        now: Callable[[], float],
    ) -> None:
        self._path = folder
        self._folder = Folder(folder, report, pool=pool)
        self._reader = reader
        self._writer = writer
        self._flow = flow
        self._report = report
        self._now = now
        self._priorities: Mapping[str, int] = {}
        self._published: bytes = b""
        places = flow.schema.bands if flow is not None else 0
        self._bands = BandPlaces(static, places, empty=flow.empty if flow is not None else bool, now=now())
        self._told: frozenset[int] = frozenset()

    def start(self, *, successor: bool) -> None:
        """Publish the first state. Raises DiscoveryError, unless there was a predecessor."""
        if successor and (left := self._left()) is not None:
            self._bands.adopt(left.places)
            self._priorities = left.priorities
        if self._path:
            found = self._folder.reload() if successor else self._folder.load()
            self._priorities = self._priorities if found is None else found
        self._publish()

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
            self._priorities = found
        self._publish()

    def _left(self) -> ObjectivesRecord | None:
        found = self._reader.read(OBJECTIVES)
        if found is None or not found[1]:
            return None
        try:
            return decode(found[1])
        except msgspec.MsgspecError:
            return None

    def _publish(self) -> None:
        if self._flow is not None:
            self._bands.want(self._priorities.values(), self._now())
            if self._bands.waiting and self._bands.waiting != self._told:
                named = ", ".join(map(str, sorted(self._bands.waiting, reverse=True)))
                self._report(
                    f"all {self._flow.schema.bands} places of bands are taken: requests of priority {named} wait in band 0 "
                    "until one is free; use fewer different priorities"
                )
            self._told = self._bands.waiting
        blob = encode(ObjectivesRecord(dict(self._priorities), self._bands.places))
        if blob == self._published:
            return
        try:
            self._writer.write(OBJECTIVES, blob)
            self._published = blob
        except DocumentTooLarge as failure:
            self._report(f"workers keep the last objectives: {failure}")
