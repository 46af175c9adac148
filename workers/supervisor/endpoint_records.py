"""Describes the endpoints of the pool for a recording: which endpoints join and leave, scraped values, and loaded adapters."""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from epp.candidates import Endpoint
from epp.recording.records import INT64, Member, Named, Record, Scraped
from shm.documents import DocumentReader
from shm.table import DOWN, EJECTED, State, TableReader
from workers.process.instance import Instance
from workers.shared.documents import EndpointsView, NamesView

DOWN_BIT: Final = 4
EJECTED_BIT: Final = 8


class EndpointRecords:
    """Finds out what has changed since the last look. After `again`, the next look describes everything."""

    def __init__(self, instance: Instance) -> None:
        self._pools: dict[tuple[int, int], str] = {}  # the name of the pool of each described endpoint
        self.use(instance)
        layout, memory = instance.layout, instance.memory
        self._documents = documents = DocumentReader(layout.documents, memory.documents)
        self._endpoints = EndpointsView(documents)
        self._names = NamesView(documents)
        self.again()

    def use(self, instance: Instance) -> None:
        """Reads the columns of a later configuration. The next look describes the values of all endpoints."""
        self._names_of_pools = [pool.options.pool_name for pool in instance.pools]
        self._table = TableReader(instance.layout.table, instance.memory.table)
        self._forget_scrapes()

    def again(self, pool: int | None = None) -> None:
        """Forgets all descriptions. `pool`: the number of the only pool to describe from now on; None for all pools."""
        self._endpoints = EndpointsView(self._documents, pool)
        self._listed: Sequence[Endpoint] | None = None
        self._known: Mapping[tuple[int, int], Endpoint] = {}
        self._named: Mapping[tuple[int, int], Mapping[str, frozenset[str]]] = {}
        self._forget_scrapes()

    def _forget_scrapes(self) -> None:
        self._row_states = b""
        self._scraped_at = np.zeros(0)

    def look(self, now: float) -> list[Record]:
        """Returns the records of all changes. `now`: monotonic seconds."""
        return [*self.members(now), *self._scrapes(now), *self._adapters(now)]

    def members(self, now: float) -> list[Record]:
        """Returns the records of endpoints that have joined and left. This costs little if nothing has changed."""
        listed = self._endpoints.current()
        if listed is self._listed:
            return []
        self._listed = listed
        here = {(endpoint.slot, endpoint.generation): endpoint for endpoint in listed}
        before, self._known = self._known, here
        names = self._names_of_pools
        if names:
            self._pools |= {key: names[pool] for key, pool in zip(here, self._endpoints.pools(), strict=True)}
        found: list[Record] = [
            *(_member(before[key], now, self._pools.pop(key, ""), joined=False) for key in before if key not in here),
            *(_member(here[key], now, self._pools.get(key, ""), joined=True) for key in here if key not in before),
        ]
        return found

    def _scrapes(self, now: float) -> list[Record]:
        copy = self._table.copy()
        used, row_states, first = len(copy.rows), copy.row_states(), not self._row_states
        before = np.zeros(used)
        before[: len(self._scraped_at)] = self._scraped_at[:used]
        moved = (copy.updated_at != before) | (row_states != self._row_states)
        self._scraped_at, self._row_states = copy.updated_at.copy(), row_states
        slots = np.flatnonzero(moved & (copy.state != State.FREE))
        if not len(slots):
            return []
        columns = self._table.schema.columns
        present, flags = copy.present[slots], copy.flags[slots]
        values = np.full((len(slots), len(columns)), np.nan)
        for at in range(len(columns)):
            reported = (present >> np.uint64(at)) & np.uint64(1) != 0
            values[reported, at] = copy.column(at)[slots][reported]
        states = copy.state[slots] - np.uint64(State.UNKNOWN)
        states += np.where(flags & np.uint64(DOWN), np.uint64(DOWN_BIT), np.uint64(0))
        states += np.where(flags & np.uint64(EJECTED), np.uint64(EJECTED_BIT), np.uint64(0))
        return [
            Scraped(
                now,
                list(columns) if first else [],
                slots.astype(INT64).tobytes(),
                copy.updated_at[slots].tobytes(),
                values.tobytes(),
                states.astype(np.uint8).tobytes(),
            )
        ]

    def _adapters(self, now: float) -> list[Record]:
        names = self._names.current()
        before, self._named = self._named, names
        if names is before:
            return []
        return [
            Named(now, slot, {column: sorted(values) for column, values in columns.items()})
            for (slot, generation), columns in names.items()
            if before.get((slot, generation)) != columns
        ]


def _member(endpoint: Endpoint, now: float, pool: str, *, joined: bool) -> Member:
    slot, generation, labels = endpoint.slot, endpoint.generation, dict(endpoint.labels)
    return Member(now, joined, slot, generation, endpoint.namespace, endpoint.name, endpoint.address, labels, pool)
