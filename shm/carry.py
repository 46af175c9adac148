"""Copies the contents of one part of shared memory into a new part that another version of the program has laid out differently.

    table       rows keep their slots; columns are found by name
    documents   keep their numbers; a document for which the new part has no room is left out
    lanes       counters, histograms and the supervisor's gauges are found by name. Other gauges, and what is in flight, stay behind:
                their processes go on in the old part
    series      only if the layout is the same

Another process may still write the old part during the copy. No process may use the new part yet.
"""

import contextlib

import numpy as np

from shm.documents import DocumentReader, DocumentSchema, DocumentTooLarge, DocumentWriter
from shm.lanes import SUCCESSIONS, SUPERVISOR_LANE, Lane, Lanes, LaneSchema
from shm.layout import CACHE_LINE, Schema
from shm.segment import Region
from shm.series import SeriesSchema
from shm.table import COLUMNS, EPOCH, GENERATION, PRESENT, USED, TableReader, TableSchema


def carry(old: Schema, source: Region, new: Schema, target: Region) -> bool:
    """Copies the contents of `source` into `target`. `old`: the schema of `source`; `new`: that of `target`.

    Returns False, without any change, if parts of this kind cannot be carried.
    """
    if isinstance(old, TableSchema) and isinstance(new, TableSchema):
        _table(old, source, new, target)
    elif isinstance(old, DocumentSchema) and isinstance(new, DocumentSchema):
        _documents(old, source, new, target)
    elif isinstance(old, LaneSchema) and isinstance(new, LaneSchema):
        before, after = Lanes(old, source), Lanes(new, target)
        for index in range(min(old.lanes, new.lanes)):
            _lane(before.lane(index), after.lane(index), gauges=index == SUPERVISOR_LANE)
    elif isinstance(old, SeriesSchema) and old.layout_hash == new.layout_hash:
        target.bytes[:] = source.bytes
    else:
        return False
    return True


def _table(old: TableSchema, source: Region, new: TableSchema, target: Region) -> None:
    copy = TableReader(old, source).copy()
    used = min(len(copy.rows), new.slots)
    before = copy.rows[:used]
    after = target.array(np.uint64, CACHE_LINE, (new.slots, new.row_words))[:used]
    after[:, GENERATION:PRESENT] = before[:, GENERATION:PRESENT]
    for index, name in enumerate(new.columns):
        if name not in old.offsets:
            continue
        has = before[:, PRESENT] >> np.uint64(old.columns.index(name)) & np.uint64(1)
        after[:, PRESENT] |= has << np.uint64(index)
        after[:, COLUMNS + index] = before[:, old.offsets[name]]
    after[:, -1] = np.bitwise_xor.reduce(after[:, GENERATION:-1], axis=1)
    target.words[USED], target.words[EPOCH] = used, copy.epoch


def _documents(old: DocumentSchema, source: Region, new: DocumentSchema, target: Region) -> None:
    reader, writer = DocumentReader(old, source), DocumentWriter(new, target)
    for index in range(min(len(old.capacities), len(new.capacities))):
        found = reader.read(index)
        if found is not None:
            with contextlib.suppress(DocumentTooLarge):
                writer.write(index, found[1])


def _lane(before: Lane, after: Lane, *, gauges: bool) -> None:
    old, new = before.schema, after.schema
    after.words[SUCCESSIONS] = before.words[SUCCESSIONS]
    for name, at in new.counter.items():
        if name in old.counter:
            after.counters[at] = before.counters[old.counter[name]]
    for (name, bounds), at in zip(new.histograms, new.histograms_at, strict=True):
        index = old.histogram.get(name)
        if index is not None and old.histograms[index][1] == bounds:
            cells = 2 + len(bounds)
            after.words[at : at + cells] = before.words[old.histograms_at[index] :][:cells]
    slots = min(old.slots, new.slots)
    after.served[:slots], after.failed[:slots] = before.served[:slots], before.failed[:slots]
    if gauges:
        for name, at in new.scalar.items():
            if name in old.scalar:
                after.scalars[at] = before.scalars[old.scalar[name]]
