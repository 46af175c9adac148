"""Plugins that read metrics of endpoints by attribute name, and the code they share.

An attribute is one number per endpoint. Its name is one of NAMES (the reference picker's name or the name of our column), or the
`attributeKey` of a custom metric. `epp.config.contracts` checks that an extractor of the configuration produces the attribute. If no
extractor does, the check suggests the nearest name.

`epp.candidates` has a default value for two kinds of values, which these plugins tell apart:
- missing: the endpoint was never scraped, or its engine does not report the attribute; each plugin says what this means;
- stale: the endpoint reported the attribute, but not recently. A stale value alone never drops an endpoint, and gets the score of
  the worst fresh value.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from epp.candidates import Candidates, Mask, Snapshot
from epp.data import (
    ACTIVE_MODELS,
    CACHE_BLOCK_SIZE,
    CACHE_NUM_BLOCKS,
    CACHE_TOKENS,
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
    "KvCacheMaxTokenCapacity": CACHE_TOKENS,
}
NAMES: Mapping[str, Column[Any]] = {**_FIELD_NAMES, **{column.name: column for column in _FIELD_NAMES.values()}}
NO_NUMBERS = frozenset(("ActiveModels", "WaitingModels", ACTIVE_MODELS.name, WAITING_MODELS.name))


class Attribute:
    """Describes a configured attribute. `parameter`: the path of the parameter that names it, for error messages.

    `producer`: the name of the extractor that produces the attribute; None for the core metrics extractor, "" for any extractor. If
    `producer` names another extractor, `needs` has that extractor, and `column_of` finds its column.

    Raises ValueError if the attribute is no number, or if its name contains a '/' and `producer` is None.
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
        is_core = self._producer == CORE_EXTRACTOR
        self.needs = {} if is_core else {"producer": Need("producer", self._producer, Extractor)}

    def column_of(self, plugins: Mapping[str, Plugin]) -> Column[Any]:
        """Returns the column that the named producer declares for the attribute; if it declares none, a column that no plugin produces."""
        if "producer" not in plugins:
            return self.column
        produced = {key.name: key for key in plugins["producer"].produces if isinstance(key, Column)}
        column = produced.get(self._name) or produced.get(self.column.name)
        return column or Column(f"{self._name}/{self._producer}", float)


class Reports(NamedTuple):
    """Says which candidates have a fresh value, and which have no value (`missing`). A candidate in neither mask has a stale value."""

    fresh: Mask
    missing: Mask


class Reporters:
    """Finds the endpoints that report one column, once per snapshot."""

    __slots__ = ("_column", "_reports", "_snapshot")

    def __init__(self, column: Column[Any]) -> None:
        self._column = column
        self._snapshot: Snapshot | None = None
        self._reports: Reports | None = None

    def among(self, candidates: Candidates) -> Reports | None:
        """Returns the masks for these candidates; None if all candidates have a fresh value."""
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
        none: Mask = np.zeros(len(snapshot.endpoints), dtype=bool)
        return Reports(none, ~none)
    missing = np.isnan(values) | ~snapshot.known
    fresh = snapshot.fresh & ~missing
    return None if fresh.all() else Reports(fresh, missing)


class AttributeReader(Plugin):
    """Base class of the attribute filter and scorer: holds one attribute, its column, and which endpoints report it."""

    def look_at(self, attribute: Attribute) -> None:
        """Sets the attribute to read. Call this method in the constructor. The column may change when the attribute's producer is known."""
        self._attribute = attribute
        self.needs = attribute.needs
        self._read(attribute.column)

    def resolve(self, found: Mapping[str, Plugin]) -> None:
        self._read(self._attribute.column_of(found))

    def _read(self, column: Column[Any]) -> None:
        self._column = column
        self._reporters = Reporters(column)
        self.consumes = (column,)
