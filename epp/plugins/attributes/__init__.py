"""Plugins that look at what endpoints report about themselves, and what these share: attributes by name, and who reports them.

An attribute is a number per endpoint, named as the field names it (NAMES) or as our column, or by the `attributeKey` of a custom
metric. That some extractor of the configuration produces it is held by `epp.contracts`, with the nearest name.

Two rules beside those of `epp.candidates`, since these plugins say what a missing value means:
- missing: never scraped, or the engine does not report it;
- stale: reported once, but not lately. Staleness alone never drops an endpoint, and scores as the worst of the fresh ones.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from epp.candidates import Candidates, Mask, Snapshot
from epp.data import (
    ACTIVE_MODELS,
    CACHE_BLOCK_SIZE,
    CACHE_NUM_BLOCKS,
    KV_USAGE,
    MAX_LORA,
    RUNNING,
    WAITING,
    WAITING_MODELS,
    Column,
)
from epp.plugin import Extractor, Need, Plugin

CORE_EXTRACTOR = "core-metrics-extractor"
_FIELD_NAMES: Mapping[str, Column[Any]] = {
    "WaitingQueueSize": WAITING,
    "RunningRequestsSize": RUNNING,
    "KVCacheUsagePercent": KV_USAGE,
    "MaxActiveModels": MAX_LORA,
    "CacheBlockSize": CACHE_BLOCK_SIZE,
    "CacheNumBlocks": CACHE_NUM_BLOCKS,
}
NAMES: Mapping[str, Column[Any]] = {**_FIELD_NAMES, **{column.name: column for column in _FIELD_NAMES.values()}}
NO_NUMBERS = frozenset(("ActiveModels", "WaitingModels", ACTIVE_MODELS.name, WAITING_MODELS.name))


class Attribute:
    """A configured attribute. `parameter` is where its name stands; no producer stands for the core metrics extractor.

    A producer of another name is looked up among the plugins (`needs`), and `found` says its column; the empty name stands for
    whoever produces the attribute.
    """

    def __init__(self, parameter: str, name: str, producer: str | None) -> None:
        if name in NO_NUMBERS:
            numbers = ", ".join(sorted(_FIELD_NAMES))
            raise ValueError(f"{parameter}: '{name}' is a set of names, not a number; numbers are {numbers}")
        if producer is None and "/" in name:
            left, _, right = name.rpartition("/")
            raise ValueError(
                f"{parameter}: '{name}' has a '/': attribute and producer are two parameters; write "
                f"'{parameter}: {left}' with 'producer: {right}', or name the producer if the '/' is part of the attribute's name"
            )
        self._name = name
        self._producer = producer or CORE_EXTRACTOR
        self.column = NAMES.get(name) or Column(name, float)
        own = self._producer == CORE_EXTRACTOR
        self.needs = {} if own else {"producer": Need("producer", self._producer, Extractor)}

    def found(self, plugins: Mapping[str, Plugin]) -> Column[Any]:
        """The column as its producer declares it. One that it does not produce gets a name that nobody produces."""
        if "producer" not in plugins:
            return self.column
        produced = {key.name: key for key in plugins["producer"].produces if isinstance(key, Column)}
        column = produced.get(self._name) or produced.get(self.column.name)
        return column or Column(f"{self._name}/{self._producer}", float)


class Reports(NamedTuple):
    """Of candidates not all of whom report freshly. Who is in neither mask is stale."""

    fresh: Mask
    missing: Mask


class Reporters:
    """Who reports one column; worked out once per snapshot."""

    __slots__ = ("_column", "_reports", "_snapshot")

    def __init__(self, column: Column[Any]) -> None:
        self._column = column
        self._snapshot: Snapshot | None = None
        self._reports: Reports | None = None

    def among(self, candidates: Candidates) -> Reports | None:
        """None when everyone does, freshly."""
        snapshot = candidates.snapshot
        if snapshot is not self._snapshot:
            self._reports = _reports(snapshot, self._column)
            self._snapshot = snapshot
        reports, rows = self._reports, candidates.rows
        if reports is None or rows is None:
            return reports
        return Reports(reports.fresh[rows], reports.missing[rows])


def _reports(snapshot: Snapshot, column: Column[Any]) -> Reports | None:
    values = snapshot.values.get(column.name)
    if values is None:
        nobody: Mask = np.zeros(len(snapshot.endpoints), dtype=bool)
        return Reports(nobody, ~nobody)
    missing = np.isnan(values) | ~snapshot.known
    fresh = snapshot.fresh & ~missing
    return None if fresh.all() else Reports(fresh, missing)


class AttributeReader(Plugin):
    """What filter and scorer share: one attribute, its column and who reports it."""

    def look_at(self, attribute: Attribute) -> None:
        """In the constructor. The column may be another once the attribute's producer is known."""
        self._attribute = attribute
        self.needs = attribute.needs
        self._read(attribute.column)

    def resolve(self, found: Mapping[str, Plugin]) -> None:
        self._read(self._attribute.found(found))

    def _read(self, column: Column[Any]) -> None:
        self._column = column
        self._reporters = Reporters(column)
        self.consumes = (column,)
