"""Candidates: an immutable, columnar view of the endpoints that one decision may choose from.

`Snapshot` holds the scraped values of all endpoints. All decisions between two scrapes share one snapshot; `workers/worker/extproc/pool.py`
builds it from shared memory. `Candidates` is a snapshot, reduced to some rows, together with the load in flight at this moment.

This module alone decides which value a candidate without a fresh value gets (the value is then *settled*):
- A stale candidate, whose last good scrape is too old, keeps its own value at first. With age, the value fades into the worst value of the
  fresh candidates. But WAITING fades into what a candidate that was never scraped gets: the mean, plus all requests in flight.
- A candidate that was never scraped gets the mean of the fresh candidates.
- A candidate that was scraped, but whose engine does not report the column, gets the column's `absent`; if that is None, the mean of
  the fresh candidates.
- If no fresh candidate reports the column, all candidates get 0, plus the unfaded part of their own value. So in the end the load in
  flight decides.
Staleness alone never removes an endpoint. `without_down` removes endpoints that are down or ejected, unless all endpoints are.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from compiled import calls
from epp.data import INFLIGHT_REQUESTS, INFLIGHT_TOKENS, WAITING, Column

FADE_LIMITS: Final = 4.0  # a stale value fades during this many times the limit of freshness

Floats: TypeAlias = NDArray[np.float64]
Mask: TypeAlias = NDArray[np.bool_]
Scores: TypeAlias = NDArray[np.float64]


class Endpoint:
    """Identifies a model server that may be picked: one address and one port of a pod.

    `address` is `host:port`, with an IPv6 host in brackets. `labels` are the pod's labels. (`slot`, `generation`) identifies the
    endpoint for all time. `owner` is the endpoint's id in the prefix index.
    """

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

    def at_port(self, port: int) -> "Endpoint":
        """Returns the endpoint with another port. Slot and owner stay the same, so its load and cache still apply to the chosen rank."""
        return Endpoint(
            name=self.name,
            namespace=self.namespace,
            host=self.host,
            port=port,
            labels=self.labels,
            slot=self.slot,
            generation=self.generation,
            owner=self.owner,
        )

    def __repr__(self) -> str:
        return f"Endpoint({self.namespace}/{self.name} {self.address})"


class EndpointList:
    """Lists the endpoints of a snapshot, in order. An endpoint list stays the same object until discovery changes something.

    `slots` (int, shape (endpoints,)) are the slots of the endpoints. `row_of_owner` maps an owner id of the prefix index to the endpoint's
    row. `blocks`: what `epp.endpoints.server_blocks` keeps.
    """

    __slots__ = ("blocks", "endpoints", "row_of_owner", "slots")

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self.endpoints = tuple(endpoints)
        self.slots = np.array([e.slot for e in self.endpoints], dtype=np.intp)
        self.row_of_owner = {e.owner: row for row, e in enumerate(self.endpoints)}
        self.blocks: object = None


class Age(NamedTuple):
    """How old the values of a snapshot are (`Snapshot.ages`), and how much each value therefore counts (`Snapshot.weights`)."""

    seconds: Floats | None = None
    weights: Floats | None = None


NO_AGE: Final = Age()


class Snapshot:
    """Holds an endpoint list and the scraped values of its endpoints, as of one epoch of the endpoint table. Arrays: shape (endpoints,).

    `values[name]`: float64, NaN where the engine does not report the column. `names[name]`: a list of frozensets.
    `fresh`, `known`, `down`: bool. Fresh: the last good scrape is recent. Known: at least one scrape succeeded. Down: the server refused
    connections twice, or the endpoint is ejected.
    `ages`: float64, seconds from the last good scrape to the making of this snapshot, for plugins with their own limit of
    freshness; None if not available. Ages are 0 while a budget sets the pace of the scrapes (`metricsBudget`) and no scrape is missing.
    `counted_at_scrape`: float64, requests in flight that the values include: those at the last good scrape, however old, or at the time to
    which the values were carried on.
    `ejected`: bool, the endpoints that get no requests because earlier requests failed; None if no endpoint is ejected.
    `failing`: float64, which share of its requests each endpoint fails, beyond the share of the others; None if no endpoint does
    (`epp.endpoints.failing`).
    `weights`: float64, from 0 to 1, the weight that each stale value still has (`weights_by_age`); None if stale values have no weight.
    `blocks`: what `epp.endpoints.server_blocks` keeps.
    """

    __slots__ = (
        "_sent_before",
        "ages",
        "all_fresh",
        "any_down",
        "blocks",
        "cache",
        "counted_at_scrape",
        "down",
        "ejected",
        "endpoint_list",
        "endpoints",
        "failing",
        "fresh",
        "inflight_at_scrape",
        "known",
        "names",
        "totals",
        "values",
        "weights",
    )

    def __init__(
        self,
        endpoint_list: EndpointList,
        values: Mapping[str, Floats],
        *,
        fresh: Mask,
        known: Mask,
        down: Mask,
        inflight_at_scrape: Floats,
        names: Mapping[str, Sequence[frozenset[str]]] | None = None,
        age: Age = NO_AGE,
        ejected: Mask | None = None,
        failing: Floats | None = None,
    ) -> None:
        self.endpoint_list = endpoint_list
        self.blocks: object = None
        self.endpoints = endpoint_list.endpoints
        self.values = values
        self.names = names or {}
        self.fresh = fresh
        self.known = known
        self.down = down
        self.all_fresh = bool(fresh.all())
        self.any_down = bool(down.any())
        self.ages = age.seconds
        self.counted_at_scrape = inflight_at_scrape
        self.weights = age.weights
        self.ejected = ejected
        self.failing = failing
        # The older a scrape is, the more of the requests in flight are assumed to be sent since that scrape.
        self.inflight_at_scrape = inflight_at_scrape if self.all_fresh else inflight_at_scrape * np.where(fresh, 1.0, self._faded())
        self.cache: dict[str, Floats] = {}
        self.totals: dict[str, Scores] = {}  # profile name -> weighted sum of its static scorers, for all endpoints
        self._sent_before: Floats | None = None

    def _faded(self) -> Floats | float:
        return 0.0 if self.weights is None else self.weights

    def sent_before(self) -> Floats:
        """Returns the requests in flight at the scrape minus the requests that waited at the scrape: float64, shape (endpoints,)."""
        before = self._sent_before
        if before is None:
            before = self._sent_before = self.inflight_at_scrape - self.settled(WAITING, None)
        return before

    def settled(self, column: Column[Any], rows: NDArray[np.intp] | None) -> Floats:
        """Returns a column with a number for every row: read-only float64. `rows` selects candidates; None selects all endpoints."""
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
        weights = self.weights if rows is None or self.weights is None else self.weights[rows]
        into = "mean" if column.name == WAITING.name else column.worst
        settled = _settle(values, fresh, known, weights, into)
        settled.flags.writeable = False
        if rows is None:
            self.cache[column.name] = settled
        return settled


def weights_by_age(ages: Floats, limit_s: float) -> Floats:
    """Returns the weights of values of these ages: 1 up to `limit_s`, then falling to 0 over the next FADE_LIMITS * `limit_s` seconds."""
    faded: Floats = 1.0 - (ages - limit_s) / (FADE_LIMITS * limit_s)
    return np.clip(faded, 0.0, 1.0, out=faded)


def _settle(values: Floats, fresh: Mask, known: Mask, weights: Floats | None, into: str) -> Floats:
    """Fills the gaps of one column.

    `into`: the value into which stale values fade: the "mean", the highest ("high") or the lowest ("low") of the fresh values.
    `weights`: the weight that each stale value still has, from 0 to 1; None if stale values have no weight.
    """
    reported = ~np.isnan(values)
    good = fresh & reported
    if good.all():
        return values.copy()
    fresh_values = values[good] if good.any() else np.zeros(1)
    mean = fresh_values.mean()
    settled = np.where(good, values, mean)
    stale = known & ~fresh & reported
    if stale.any():
        end = mean if into == "mean" else fresh_values.max() if into == "high" else fresh_values.min()
        settled[stale] = end if weights is None else end + weights[stale] * (values[stale] - end)
    return settled


class Candidates:
    """Holds the endpoints from which one decision chooses, with their values, which `candidates[COLUMN]` returns.

    Arrays have one value per candidate, in the order of `endpoints`. `rows` are the candidates' rows in the snapshot; None for all rows.
    Decisions share these arrays, so never write into them.
    """

    __slots__ = ("_inflight", "_made_waiting", "_others", "_size", "_tokens", "rows", "snapshot")

    def __init__(
        self,
        snapshot: Snapshot,
        inflight: Floats,
        tokens: Floats | None = None,
        rows: NDArray[np.intp] | None = None,
        others: Floats | None = None,
    ) -> None:
        """`others`: the part of `inflight` that other replicas of the picker have; None without a replica store."""
        self.snapshot = snapshot
        self.rows = rows
        self._inflight = inflight
        self._tokens = tokens
        self._others = others
        self._made_waiting: Floats | None = None
        self._size = len(snapshot.endpoints) if rows is None else len(rows)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, column: Column[Any]) -> Any:
        """Returns the values of a column: float64 of shape (candidates,), or a list of frozensets for a `frozenset` column.

        Numbers are settled, so none is NaN. WAITING includes the requests sent since the last scrape. Read declared columns only: a column
        that no plugin declares in `consumes` is 0 (or empty) for every candidate, and `epp.points.guard` refuses it to foreign plugins.
        """
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
        """Returns the scraped waiting requests plus the requests sent since that scrape, to include a burst between two scrapes.

        With `s` scraped, `then` in flight at the scrape and `now` at this moment: s + max(0, now - then) = max(s, now - (then - s)).
        The term `then - s` does not change until the next scrape.
        """
        waiting = self._made_waiting
        if waiting is None:
            waiting = self._made_waiting = calls.waiting(*self.waiting_terms())
        return waiting

    def waiting_terms(self) -> tuple[Floats, Floats, Floats]:
        """Returns the terms of WAITING, for kernels: requests in flight, how many of these to subtract, and the scraped value."""
        snapshot, rows = self.snapshot, self.rows
        scraped = snapshot.settled(WAITING, rows)
        if rows is None:
            return self._inflight, snapshot.sent_before(), scraped
        return self._inflight[rows], snapshot.inflight_at_scrape[rows] - scraped, scraped

    def endpoint(self, index: int) -> Endpoint:
        """Returns the candidate at `index`, from 0. Raises IndexError."""
        return self.snapshot.endpoints[index if self.rows is None else self.rows[index]]

    @property
    def endpoints(self) -> Sequence[Endpoint]:
        """Returns all candidates, in order."""
        if self.rows is None:
            return self.snapshot.endpoints
        return [self.snapshot.endpoints[row] for row in self.rows]

    @property
    def fresh(self) -> Mask:
        """Returns bool, shape (candidates,): whether the candidate's last good scrape is recent."""
        return self.snapshot.fresh if self.rows is None else self.snapshot.fresh[self.rows]

    @property
    def of_others(self) -> Floats | None:
        """Returns the part of INFLIGHT_REQUESTS that other replicas have, shape (candidates,); None without a replica store."""
        return None if self._others is None else self.narrow(self._others)

    def index_of(self, row: int) -> int:
        """Returns the index of the candidate in this row of the snapshot; -1 if the endpoint of the row is no candidate."""
        rows = self.rows
        if rows is None:
            return row
        index = int(rows.searchsorted(row))
        return index if index < self._size and rows[index] == row else -1

    def narrow(self, values: Floats) -> Floats:
        """Selects the values of these candidates, shape (candidates,), from an array of the snapshot's shape (endpoints,)."""
        return values if self.rows is None else values[self.rows]

    def keep(self, mask: Mask) -> "Candidates":
        """Returns the candidates for which `mask` (bool, shape (candidates,)) is true; this object if the mask is true for all."""
        if mask.all():
            return self
        rows = np.flatnonzero(mask) if self.rows is None else self.rows[mask]
        return Candidates(self.snapshot, self._inflight, self._tokens, rows, self._others)

    def without_down(self) -> "Candidates":
        """Returns the candidates that are neither down nor ejected, or all candidates if no candidate would be left."""
        if not self.snapshot.any_down:
            return self
        up = ~(self.snapshot.down if self.rows is None else self.snapshot.down[self.rows])
        return self.keep(up) if up.any() else self

    def ones(self) -> Scores:
        """Returns a new array with a score of 1 for each candidate."""
        return np.ones(self._size)

    def zeros(self) -> Scores:
        """Returns a new array with a score of 0 for each candidate."""
        return np.zeros(self._size)
