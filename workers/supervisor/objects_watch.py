"""Publishes objectives and model rewrites of one pool: merges their sources, assigns places to bands, and writes the documents.

    directory ─ use_directory ────────┐
                                      ├─ merge ─▶ Objects ─▶ documents OBJECTIVES and REWRITES
    API server ─ set_api_objects ─────┘

A successor keeps the places of its predecessor. Until every source has answered, it also keeps its predecessor's documents: it adds new
priorities, and leaves rewrites unchanged.
"""

import time
from collections.abc import Callable, Collection, Mapping
from typing import Final

import msgspec

from epp.request.model_rewrite import Rules, compiled
from shm.documents import DocumentReader, DocumentTooLarge, DocumentWriter
from shm.flow_areas import BANDS_MAX, FlowAreas
from workers.process.instance import Instance
from workers.shared.documents import document_name, objectives_of, rewrites_of
from workers.shared.objectives import BandPlaces, ObjectivesRecord, decode, encode, static_bands
from workers.supervisor.kube.object_kinds import OBJECTIVE, REWRITE, Found, Once, PoolName, merge
from workers.worker import rewrites

WARN_EVERY_S: Final = 60.0
NAMED_MAX: Final = 8
NOTHING: Final = Found()


class ObjectsWatch:
    """Merges and publishes objectives and rewrites. Call `start` first.

    If objects have no source, publishes only the bands of the configuration.
    """

    def __init__(
        self,
        reader: DocumentReader,
        writer: DocumentWriter,
        static: Collection[int],
        flow: FlowAreas | None,
        *,
        report: Callable[..., None],
        now: Callable[[], float],
        api: bool = False,
        number: int | None = None,
        places: int = BANDS_MAX,
    ) -> None:
        """`static`: the priorities of the bands in the configuration. `flow`: the areas of flow control, or None if it is off. `places`:
        for how many bands the areas have room if flow control is switched on later.

        `api`: whether an API server also gives objects (`set_api_objects`). `number`: the number of the pool; None if the picker has one
        pool.
        """
        self._reader = reader
        self._flow = flow
        self._report = report
        self._once = Once(report)
        self._now = now
        self._directory: Found | None = NOTHING  # None if the directory cannot be read
        self._api = NOTHING
        self._api_complete = not api
        self._left: Mapping[str, int] = {}  # priorities that a predecessor has published
        self._inherited = False  # whether the document REWRITES may have rules of a predecessor
        self._objectives = PublishedDocument(writer, objectives_of(number), report)
        self._rewrites = PublishedDocument(writer, rewrites_of(number), report)
        self._bands = BandPlaces(static, flow.schema.bands if flow is not None else places, empty=self._is_empty, now=now())
        self._warned: frozenset[int] = frozenset()  # the waiting bands of the last warning
        self._warn_at = now()

    def use(self, static: Collection[int], flow: FlowAreas | None) -> None:
        """Takes over the bands of a later configuration. Bands that exist keep their places."""
        self._flow = flow
        self._bands.fix(static, self._now())
        self._publish()

    def start(self, *, successor: bool, directory: Found | None = NOTHING) -> None:
        """Publishes the first state. `directory`: the objects of the directory, or None if it cannot be read."""
        self._inherited = successor
        if successor and (left := self._of_predecessor()) is not None:
            self._bands.adopt(left.places)
            self._left = left.priorities
        self._directory = directory
        self._publish()

    @property
    def expects(self) -> Collection[str]:
        """The kinds of objects that the API server must have given to a predecessor.

        These are the kinds of published objects that are not in the directory.
        """
        if not self._inherited:
            return ()
        directory = self._directory or NOTHING
        found = self._reader.read(self._rewrites.index)
        rules = rewrites.decode(found[1]) if found is not None else Rules()
        left = {
            OBJECTIVE: self._left.keys() - directory.objectives,
            REWRITE: {choice.rewrite for choice in rules.choices} - directory.rewrites.keys(),
        }
        return [kind for kind, names in left.items() if names]

    @property
    def waits(self) -> bool:
        """Returns whether a band waits for a place."""
        return bool(self._bands.waiting)

    def look_for_places(self) -> None:
        """Gives places to bands that wait for one."""
        if self.waits:
            self._publish()

    def use_directory(self, found: Found) -> None:
        """Publishes the changes. `found`: the present objects of the directory."""
        self._directory = found
        self._publish()

    def set_api_objects(self, found: Found, complete: bool) -> None:
        """Publishes the present objects of the API server. `complete` is False as long as some are not known yet."""
        self._api, self._api_complete = found, complete
        self._publish()

    def _of_predecessor(self) -> ObjectivesRecord | None:
        found = self._reader.read(self._objectives.index)
        if found is None or not found[1]:
            return None
        try:
            return decode(found[1])
        except msgspec.MsgspecError:
            return None

    def _is_empty(self, place: int) -> bool:
        return self._flow is None or self._flow.empty(place)

    def _publish(self) -> None:
        objects = merge(self._directory or NOTHING, self._api, self._once)
        complete = self._directory is not None and self._api_complete
        if complete:
            self._left, self._inherited = {}, False
        priorities = {**self._left, **objects.priorities}
        if self._flow is not None:
            self._provide_bands(priorities.values(), self._flow)
        self._objectives.write(encode(ObjectivesRecord(priorities, self._bands.places)))
        if not self._inherited:
            rules = compiled(objects.rewrites)
            if rules.choices or self._reader.version(self._rewrites.index):  # read() is None for a document that was overwritten
                self._rewrites.write(rewrites.encode(rules))

    def _provide_bands(self, priorities: Collection[int], flow: FlowAreas) -> None:
        now = self._now()
        self._bands.want(priorities, now)
        waiting = self._bands.waiting
        if not waiting:
            self._warned = waiting
        elif waiting != self._warned and now >= self._warn_at:
            self._warned, self._warn_at = waiting, now + WARN_EVERY_S
            self._report(
                "requests wait in band 0 until a place of a band is free",
                count=len(waiting),
                priorities=sorted(waiting, reverse=True)[:NAMED_MAX],
                reason=f"all {flow.schema.bands} places of bands are taken; use fewer different priorities",
            )


def flow_areas(instance: Instance) -> FlowAreas | None:
    """Returns the areas of flow control. Returns None if flow control is off."""
    return instance.memory.flow if instance.config.flow is not None else None


def objects_watch(instance: Instance, report: Callable[..., None]) -> ObjectsWatch | None:
    """Returns the watch of this instance. Returns None if the instance has neither flow control nor a source of objects."""
    flow = flow_areas(instance)
    if flow is None and not instance.sources.has_objects:
        return None
    return ObjectsWatch(
        DocumentReader(instance.layout.documents, instance.memory.documents),
        DocumentWriter(instance.layout.documents, instance.memory.documents),
        static_bands(instance.config.flow),
        flow,
        report=report,
        now=time.monotonic,
        api=instance.sources.asks_objects,
        number=instance.pool,
        places=instance.memory.flow.schema.bands,
    )


def pool_name(instance: Instance) -> PoolName:
    """Returns the pool's name in objectives and rewrites of this instance: the name of its InferencePool, if it has one."""
    kube, options = instance.kube, instance.options
    return PoolName(kube.name if kube is not None and kube.name else options.pool_name, options.pool_group)


class PublishedDocument:
    """Writes one document if it has changed."""

    def __init__(self, writer: DocumentWriter, index: int, report: Callable[..., None]) -> None:
        self._writer = writer
        self.index = index
        self._report = report
        self._last = b""

    def write(self, blob: bytes) -> None:
        """Writes `blob` unless it equals the blob of the last call. If `blob` is too large, reports this and keeps the written document."""
        if blob == self._last:
            return
        self._last = blob
        try:
            self._writer.write(self.index, blob)
        except DocumentTooLarge as failure:
            self._report("workers keep the last document", document=document_name(self.index, 0), reason=str(failure))
