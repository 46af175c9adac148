"""Computes the figures of a pool and of its endpoints on the metrics page, from the endpoint table."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from epp.candidates import Endpoint
from epp.data import CACHE_RANKS, KV_USAGE, RUNNING, WAITING
from epp.metrics.computed import POOL_FIGURES
from shm.table import EJECTED, State, TableCopy, TableReader
from workers.shared.documents import EndpointsView

Floats = NDArray[np.float64]

POOL_COLUMNS = dict(zip(POOL_FIGURES, (KV_USAGE.name, WAITING.name, RUNNING.name), strict=True))


class PoolGauges:
    """Computes the figures of a pool and of its endpoints. `number`: the number of the pool."""

    def __init__(self, table: TableReader, endpoints: EndpointsView, *, name: str, fresh_for_s: float) -> None:
        self.number = endpoints.pool or 0
        self._first = 0  # the slot with which the last copy of the table began
        self._table = table
        self._endpoints = endpoints
        self._columns = {column: index for index, column in enumerate(table.schema.columns)}
        self._fresh_for_s = fresh_for_s
        self.name = name
        self.ready = self.ejected = 0
        self.figures: dict[str, tuple[float, float]] = {}

    def refresh(self, now: float) -> None:
        """Computes mean and sample deviation over the endpoints with fresh values. Without fresh values, the last figures stay."""
        copy, endpoints = self._current()
        slots = self._rows(endpoints)
        fresh = (copy.state[slots] == State.FRESH) & (now - copy.updated_at[slots] <= self._fresh_for_s)
        self.ready = int(fresh.sum())
        self.ejected = int(((copy.flags[slots] & np.uint64(EJECTED)) != 0).sum())
        for figure, column in POOL_COLUMNS.items():
            values = self._values(copy, slots, column)[fresh]
            values = values[~np.isnan(values)]
            if len(values):
                deviation = values.std(ddof=1) if len(values) > 1 else 0.0
                self.figures[figure] = round(float(values.mean()), 2), round(float(deviation), 2)

    def endpoints(self) -> list[Endpoint]:
        """Returns the endpoints that are in the table."""
        return self._current()[1]

    def queues(self) -> list[tuple[str, float]]:
        """Returns (endpoint name, waiting requests), without endpoints that were never scraped."""
        copy, endpoints = self._current()
        values = self._values(copy, self._rows(endpoints), WAITING.name).tolist()
        return [(endpoint.name, value) for endpoint, value in zip(endpoints, values, strict=True) if value == value]

    def ranks(self) -> list[tuple[Endpoint, float]]:
        """Returns each endpoint with the number of its data-parallel ranks, or NaN if not known."""
        copy, endpoints = self._current()
        values = self._values(copy, self._rows(endpoints), CACHE_RANKS.name).tolist()
        return list(zip(endpoints, values, strict=True))

    def ages(self, now: float) -> list[tuple[str, float]]:
        """Returns (endpoint name, seconds since its last good scrape), without endpoints that were never scraped."""
        copy, endpoints = self._current()
        updated_at = copy.updated_at[self._rows(endpoints)].tolist()
        return [(endpoint.name, now - at) for endpoint, at in zip(endpoints, updated_at, strict=True) if at]

    def _current(self) -> tuple[TableCopy, list[Endpoint]]:
        if self._endpoints.pool is None:
            copy, known = self._table.copy(), self._endpoints.current()
        else:
            known = self._endpoints.current()
            self._first, end = self._endpoints.span()
            copy = self._table.copy_part(self._first, end)
        first, rows, generations = self._first, len(copy.rows), copy.generation
        return copy, [e for e in known if e.slot < first + rows and int(generations[e.slot - first]) == e.generation]

    def _rows(self, endpoints: Sequence[Endpoint]) -> list[int]:
        """Returns the rows of the endpoints in the last copy of the table."""
        return [endpoint.slot - self._first for endpoint in endpoints]

    def _values(self, copy: TableCopy, slots: Sequence[int], column: str) -> Floats:
        """Returns the values of a column in these slots, with NaN for missing values."""
        index = self._columns.get(column)
        if index is None:
            return np.full(len(slots), np.nan)
        present = (copy.present[slots] >> np.uint64(index)) & np.uint64(1)
        return np.where(present, copy.column(index)[slots], np.nan)
