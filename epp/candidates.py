"""Candidates: an immutable, columnar view of the endpoints that one decision may choose from.

`Snapshot` is what all decisions share between two scrapes; `workers/pool.py` builds one from shared memory. `Candidates` is a
snapshot, narrowed to some rows, joined with the load that is in flight at this moment.

This file is the one place that decides what an endpoint without fresh values counts as:
- stale (last good scrape too old): the worst of the fresh candidates;
- unknown (never scraped, or its engine does not report the column): the mean of the fresh candidates, or the column's `absent`;
- none fresh: all alike, so that the load in flight decides.
Staleness alone never removes an endpoint. *Down* ones leave in `without_down`, unless all are down.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from epp.data import INFLIGHT_REQUESTS, INFLIGHT_TOKENS, WAITING, Column

Floats: TypeAlias = NDArray[np.float64]
Mask: TypeAlias = NDArray[np.bool_]
Scores: TypeAlias = NDArray[np.float64]


class Endpoint:
    """A server that may be picked. `slot` and `generation` name its row; `owner` is its id in the prefix index."""

    __slots__ = ("address", "generation", "host", "labels", "name", "namespace", "owner", "port", "slot")

    def __init__(
        self,
        *,
        name: str,
        namespace: str,
        host: str,
        port: int,
        labels: Mapping[str, str] | None = None,
        slot: int = 0,
        generation: int = 0,
        owner: int = 0,
    ) -> None:
        self.name = name
        self.namespace = namespace
        self.host = host
        self.port = port
        self.labels: Mapping[str, str] = labels or {}
        self.slot = slot
        self.generation = generation
        self.owner = owner
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def __repr__(self) -> str:
        return f"Endpoint({self.namespace}/{self.name} {self.address})"


class Roster:
    """Who the endpoints are, in order; the same object until discovery changes something."""

    __slots__ = ("endpoints", "row_of_owner", "slots")

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self.endpoints = tuple(endpoints)
        self.slots = np.array([e.slot for e in self.endpoints], dtype=np.intp)
        self.row_of_owner = {e.owner: row for row, e in enumerate(self.endpoints)}


class Snapshot:
    """A roster with its scraped values at one table epoch.

    `values[name]` is float64 of shape (endpoints,), NaN where the engine does not report it; `names[name]` a list of
    frozensets. `fresh`, `known` and `down` are masks; known = scraped at least once. `ages`: seconds from the last good scrape
    to the making of this snapshot, for who has a limit of its own; None: only `fresh` is known. `counted_at_scrape` is what was in
    flight at the last good scrape, however old that is.
    """

    __slots__ = (
        "_sent_before",
        "ages",
        "all_fresh",
        "any_down",
        "cache",
        "counted_at_scrape",
        "down",
        "endpoints",
        "fresh",
        "inflight_at_scrape",
        "known",
        "names",
        "roster",
        "totals",
        "values",
    )

    def __init__(
        self,
        roster: Roster,
        values: Mapping[str, Floats],
        *,
        fresh: Mask,
        known: Mask,
        down: Mask,
        inflight_at_scrape: Floats,
        names: Mapping[str, Sequence[frozenset[str]]] | None = None,
        ages: Floats | None = None,
    ) -> None:
        self.roster = roster
        self.endpoints = roster.endpoints
        self.values = values
        self.names = names or {}
        self.fresh = fresh
        self.known = known
        self.down = down
        self.all_fresh = bool(fresh.all())
        self.any_down = bool(down.any())
        self.ages = ages
        self.counted_at_scrape = inflight_at_scrape
        # With no fresh endpoint the last scrapes say nothing: the load in flight counts from zero.
        self.inflight_at_scrape = inflight_at_scrape if self.all_fresh or fresh.any() else np.zeros(len(self.endpoints))
        self.cache: dict[str, Floats] = {}
        self.totals: dict[str, Scores] = {}  # by profile: what its static scorers say of all endpoints
        self._sent_before: Floats | None = None

    def sent_before(self) -> Floats:
        """In flight at the scrape, less what then waited."""
        before = self._sent_before
        if before is None:
            before = self._sent_before = self.inflight_at_scrape - self.settled(WAITING, None)
        return before

    def settled(self, column: Column[Any], rows: NDArray[np.intp] | None) -> Floats:
        """The column with a number for every candidate; rows None means all."""
        if rows is None:
            cached = self.cache.get(column.name)
            if cached is not None:
                return cached
        values = self.values.get(column.name)
        if values is None:
            values = np.zeros(len(self.endpoints))
        fresh, known = self.fresh, self.known
        if rows is not None:
            values, fresh, known = values[rows], fresh[rows], known[rows]
        if column.absent is not None:
            values = np.where(np.isnan(values) & known, column.absent, values)
        settled = _settle(values, fresh, known, high=column.worst == "high")
        settled.flags.writeable = False
        if rows is None:
            self.cache[column.name] = settled
        return settled


def _settle(values: Floats, fresh: Mask, known: Mask, *, high: bool) -> Floats:
    reported = ~np.isnan(values)
    good = fresh & reported
    if good.all():
        return values.copy()
    if not good.any():
        return np.zeros(len(values))
    fresh_values = values[good]
    worst = fresh_values.max() if high else fresh_values.min()
    settled = np.where(good, values, fresh_values.mean())
    settled[known & ~fresh & reported] = worst
    return settled


class Candidates:
    """What one decision chooses from. Columns are read-only float64, one value per candidate, in order."""

    __slots__ = ("_inflight", "_made_waiting", "_size", "_tokens", "rows", "snapshot")

    def __init__(
        self, snapshot: Snapshot, inflight: Floats, tokens: Floats | None = None, rows: NDArray[np.intp] | None = None
    ) -> None:
        self.snapshot = snapshot
        self.rows = rows
        self._inflight = inflight
        self._tokens = tokens
        self._made_waiting: Floats | None = None
        self._size = len(snapshot.endpoints) if rows is None else len(rows)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, column: Column[Any]) -> Any:
        """Numbers: float64 of shape (candidates,). `frozenset` columns: a list, in order."""
        name = column.name
        if name == WAITING.name:
            return self._waiting()
        if name == INFLIGHT_REQUESTS.name:
            return self.narrow(self._inflight)
        if name == INFLIGHT_TOKENS.name:
            return self.narrow(self._tokens if self._tokens is not None else np.zeros(len(self._inflight)))
        if column.type is frozenset:
            names = self.snapshot.names.get(name) or [frozenset()] * len(self.snapshot.endpoints)
            return list(names) if self.rows is None else [names[row] for row in self.rows]
        return self.snapshot.settled(column, self.rows)

    def _waiting(self) -> Floats:
        """Scraped waiting requests + what was sent since that scrape: bursts between two scrapes are seen.

        s + max(0, now - then) is max(s, now - (then - s)), and what is in brackets stays until the next scrape.
        """
        waiting = self._made_waiting
        if waiting is None:
            snapshot = self.snapshot
            scraped = snapshot.settled(WAITING, self.rows)
            if self.rows is None:
                waiting = self._inflight - snapshot.sent_before()
            else:
                waiting = self._inflight[self.rows] - (snapshot.inflight_at_scrape[self.rows] - scraped)
            self._made_waiting = np.maximum(waiting, scraped, out=waiting)
        return waiting

    def endpoint(self, index: int) -> Endpoint:
        """The candidate at `index`."""
        return self.snapshot.endpoints[index if self.rows is None else self.rows[index]]

    @property
    def endpoints(self) -> Sequence[Endpoint]:
        """All candidates in order."""
        if self.rows is None:
            return self.snapshot.endpoints
        return [self.snapshot.endpoints[row] for row in self.rows]

    @property
    def fresh(self) -> Mask:
        """Whose last good scrape is recent."""
        return self.snapshot.fresh if self.rows is None else self.snapshot.fresh[self.rows]

    def narrow(self, values: Floats) -> Floats:
        """Values made for the whole snapshot, cut to these candidates."""
        return values if self.rows is None else values[self.rows]

    def keep(self, mask: Mask) -> "Candidates":
        """The candidates where `mask` (bool, shape (candidates,)) is true."""
        if mask.all():
            return self
        rows = np.flatnonzero(mask) if self.rows is None else self.rows[mask]
        return Candidates(self.snapshot, self._inflight, self._tokens, rows)

    def without_down(self) -> "Candidates":
        """Without endpoints that refuse connections, unless all of these do."""
        if not self.snapshot.any_down:
            return self
        up = ~(self.snapshot.down if self.rows is None else self.snapshot.down[self.rows])
        return self.keep(up) if up.any() else self

    def ones(self) -> Scores:
        """A score of 1 for everyone."""
        return np.ones(self._size)

    def zeros(self) -> Scores:
        """A score of 0 for everyone."""
        return np.zeros(self._size)
