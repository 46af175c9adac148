"""Turns the endpoint table in shared memory into `Candidates`.

A snapshot is rebuilt when the table's epoch has moved, at most once per millisecond. It is also rebuilt every 50 ms, so that values
become stale even while the supervisor writes nothing. The load in flight is read again for each decision. Loads of older pages are carried
on to the time of the snapshot (`account`).

If the picker has several pools, a worker reads only the rows from the first to the last endpoint of the pool, and keeps a snapshot until
these rows change. A snapshot also stays while the pool is idle: its pages are fresh, and as many requests are in flight as at the pages.
"""

import ipaddress
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from epp.candidates import Age, Candidates, Endpoint, EndpointList, Floats, Mask, Snapshot, weights_by_age
from epp.data import INFLIGHT_TOKENS, KV_USAGE, RUNNING, WAITING, Column
from epp.endpoints.failing import with_failed
from epp.errors import ProducerFailed
from epp.plugin import Plugin, Profile
from epp.request import Subset
from shm.areas import Areas
from shm.table import (
    AREA_MASK,
    DOWN,
    DRAINING,
    EJECTED,
    FAILING_AT,
    FAILING_MASK,
    TRIAL_AREA_AT,
    TRIAL_NUMBER_AT,
    State,
    TableCopy,
    TableReader,
)
from workers.shared.documents import EndpointsView, NamesView
from workers.shared.freshness import Fresh
from workers.worker.extproc.account import STEP_S, Account, Load

REBUILD_MIN_S: Final = 0.001
REBUILD_MAX_S: Final = 0.05
SUBSETS_MAX: Final = 256
SUBSET_ENTRIES_MAX: Final = 1 << 16  # limit for the number of endpoints in all remembered subsets together
PORT_DIGITS_MAX: Final = 5
LOAD: Final = (RUNNING.name, WAITING.name, KV_USAGE.name)
NO_ADDRESS: tuple[str, int | None] = ("", None)


def _ignore(*_: object) -> None:
    """Ignores a failure."""


class Failures(NamedTuple):
    """The functions to call when a plugin fails in a decision: a data producer, a scorer, or a shadow profile."""

    producer: Callable[[Plugin, ProducerFailed], None]
    scorer: Callable[[Exception], None]
    shadow: Callable[[Profile, Exception], None]


IGNORED: Final = Failures(_ignore, _ignore, _ignore)  # for a process that decides no requests


class SharedPool:
    """Reads the pool's endpoints and their load from the table, the documents and the areas. Implements
    `epp.decision.decide.EndpointPool`.
    """

    def __init__(
        self,
        table: TableReader,
        endpoints: EndpointsView,
        names: NamesView,
        areas: Areas,
        *,
        columns: Sequence[Column[Any]],
        fresh: Fresh,
        now: Callable[[], float],
        failures: Failures,
        honour_subsets: bool = True,
        area: int = 0,
    ) -> None:
        """`area`: the number of this worker's area. With 0, this pool takes part in no trial of an ejected endpoint."""
        self._area = area
        # The trials that wait for a request of this worker: slot of the ejected endpoint -> number of the trial.
        self.trials: dict[int, int] = {}
        self._tried: dict[int, int] = {}  # slot -> number of the last trial for which this worker has sent the request
        self._ejected: Mask | None = None
        self._failing: Floats | None = None
        self._table = table
        self._endpoints = endpoints
        self._names = names
        self._areas = areas
        self.now = now
        self._fresh = fresh
        self._honour_subsets = honour_subsets
        wanted = {c.name for c in columns}
        read = wanted.union(LOAD)
        self._indices = [(name, index) for index, name in enumerate(table.schema.columns) if name in read]
        self._unwanted = [name for name in LOAD if name not in wanted]
        self._account = Account(table.schema.slots)
        self._name_columns = tuple(c.name for c in columns if c.type is frozenset)
        self._reads_tokens = INFLIGHT_TOKENS.name in wanted
        self.producer_failed, self.scorer_failed, self.shadow_failed = failures
        self._copy: TableCopy | None = None
        self._endpoint_list = EndpointList(())
        self._key: tuple[int, bytes] = (-1, b"")
        none: Mask = np.zeros(0, dtype=bool)
        self._marked_fresh = self._known = self._down = none
        self._reported: list[tuple[str, int, Mask | None]] = []
        self._subsets: dict[tuple[str, ...], Mask] = {}
        self._subset_entries = 0
        self._first = self._used = 0  # the slot with which the copy of the table begins, and its length
        self._slots: Any = slice(0)  # the slots of the endpoints, counted from the first slot
        self._scattered: Any = None  # the same, or None if the endpoints are all slots of the copy, in order
        # With several pools: the time until which the snapshot may stay, and the requests in flight that its values include.
        self._until = 0.0
        self._counted: Floats = np.zeros(0)
        self._snapshot = self._build(now())
        self._built_at = now()

    def candidates(self, subset: Subset | None) -> Candidates:
        """Returns the endpoints that the gateway allows, with the current load. `subset`: the gateway's choice; None allows all."""
        now = self.now()
        age = now - self._built_at
        if age > REBUILD_MAX_S or (age > REBUILD_MIN_S and self._copy is not None and self._moved(self._copy)):
            if not self._stands(now):
                self._snapshot = self._build(now)
            self._built_at = now
        candidates = self._loaded(self._snapshot, self._first, self._used, self._scattered)
        if subset is None or not self._honour_subsets:
            return candidates
        return candidates.keep(self._allowed(subset))

    def take_over(self, predecessor: "SharedPool") -> None:
        """Learns from another pool of this worker for which trials of ejected endpoints the worker has sent the request already."""
        self._tried.update(predecessor._tried)
        self._key = (-1, b"")
        self._snapshot = self._build(self.now())

    def tried(self, slot: int) -> None:
        """Notes that a request is on its way to an endpoint on trial, so that no other request goes there."""
        self._tried[slot] = self.trials.pop(slot)
        self._key = (-1, b"")
        self._snapshot = self._build(self.now())

    def reloaded(self, candidates: Candidates) -> Candidates:
        """Returns the same candidates with the current load, because a request that has waited must see the requests that were routed
        meanwhile.
        """
        slots = candidates.snapshot.endpoint_list.slots
        return self._loaded(candidates.snapshot, 0, int(slots.max()) + 1, slots, candidates.rows)

    def _loaded(self, snapshot: Snapshot, first: int, used: int, slots: Any, rows: Any = None) -> Candidates:
        areas = self._areas
        inflight: Any
        tokens: Any = None
        if self._reads_tokens:
            inflight, tokens = areas.loads(used, first)
        else:
            inflight = areas.inflight(used, first)
        added = areas.added
        others: Any = None if added is None else added.requests[first : first + used].copy()
        if slots is not None:
            inflight = inflight[slots]
            others = others if others is None else others[slots]
            tokens = tokens if tokens is None else tokens[slots]
        if snapshot.failing is not None:
            inflight, tokens = with_failed(inflight, tokens, snapshot.failing)
        return Candidates(snapshot, inflight, tokens, rows, others)

    def _stands(self, now: float) -> bool:
        """Returns whether a snapshot made at `now` would equal the present snapshot."""
        if now > self._until or self._copy is None or self._moved(self._copy):
            return False
        return bool((self._areas.inflight(self._used, self._first)[self._slots] == self._counted).all())

    def _moved(self, copy: TableCopy) -> bool:
        """Returns whether the endpoints or their rows have changed since `copy`."""
        if self._endpoints.pool is None:
            return self._table.epoch() != copy.epoch
        return self._endpoints.outdated or self._table.moved(self._first, copy)

    def _copied(self) -> TableCopy:
        """Copies the table, or the rows from the first to the last endpoint of this pool."""
        view, before = self._endpoints, self._copy
        if view.pool is None:  # read the document after the table: if the document changes meanwhile, the epoch moves, too
            return self._table.copy(before)
        view.current()
        first, end = view.span()
        same = before is not None and first == self._first and end - first == len(before.rows)
        self._first = first
        return self._table.copy_part(first, end, before if same else None)

    def _build(self, now: float) -> Snapshot:
        copy = self._copy = self._copied()
        endpoints = self._endpoints.current()
        # The endpoint list and masks change rarely. One comparison of bytes detects a change of endpoints, states or reported columns.
        key = (self._endpoints.version, copy.row_states())
        if key != self._key:
            self._key = key
            self._rebuild_endpoint_list(copy, endpoints)
        slots = self._slots
        ages = now - copy.updated_at[slots]
        fresh = self._marked_fresh & (ages <= self._fresh.for_s)
        values: dict[str, Floats] = {}
        for name, index, reported in self._reported:
            column = copy.column(index)[slots]
            values[name] = column if reported is None else np.where(reported, column, np.nan)
        counted = page = np.ascontiguousarray(copy.inflight_at_scrape[slots])  # kernels read this array for each request
        if ages.max(initial=0.0) > STEP_S:
            counted = self._carried(values, counted, now)
        for name in self._unwanted:
            values.pop(name, None)
        weights = None if fresh.all() else weights_by_age(ages, self._fresh.for_s)
        steady = self._endpoints.pool is not None and self._fresh.paced and not self._name_columns and weights is None and counted is page
        self._until = now + self._fresh.for_s - float(ages.max(initial=0.0)) if steady else 0.0
        self._counted = counted
        return Snapshot(
            self._endpoint_list,
            values,
            fresh=fresh,
            known=self._known,
            down=self._down,
            inflight_at_scrape=counted,
            names=self._current_names(self._endpoint_list) if self._name_columns else None,
            age=Age(np.where(fresh, 0.0, ages) if self._fresh.paced else ages, weights),
            ejected=self._ejected,
            failing=self._failing,
        )

    def _carried(self, values: dict[str, Floats], counted: Floats, now: float) -> Floats:
        """Carries the loads in `values` on to `now`. Returns the requests in flight that they include."""
        copy, slots = self._copy, self._slots
        assert copy is not None
        missing = np.full(len(counted), np.nan)
        running, waiting, kv = (values.get(name, missing) for name in LOAD)
        inflight = self._areas.inflight(self._used, self._first)[slots]
        load = self._account.carry(
            self._endpoint_list.slots, copy.generation[slots], copy.updated_at[slots], Load(running, waiting, kv, counted), inflight, now
        )
        for name, carried in zip(LOAD, load[:3], strict=True):
            if name in values:
                values[name] = carried
        return load.counted

    def _rebuild_endpoint_list(self, copy: TableCopy, endpoints: Sequence[Endpoint]) -> None:
        """Selects the endpoints of the document that still own their rows and are not draining. Computes the masks over them."""
        used = len(copy.rows)
        slots = self._endpoints.slots - self._first
        inside = slots < used
        valid = np.zeros(len(slots), dtype=bool)
        at = slots[inside]
        valid[inside] = (
            (copy.generation[at] == self._endpoints.generations[inside])
            & (copy.state[at] != State.FREE)
            & ((copy.flags[at] & np.uint64(DRAINING)) == 0)
        )
        self._endpoint_list = EndpointList([e for e, keep in zip(endpoints, valid.tolist(), strict=True) if keep])
        self._used = used
        self._subsets.clear()
        self._subset_entries = 0
        count, rows = len(self._endpoint_list.slots), self._endpoint_list.slots - self._first
        in_order = count == used and bool((rows == np.arange(count)).all())
        self._slots = slice(count) if in_order else rows
        self._scattered = None if in_order else rows
        state = copy.state[self._slots]
        self._marked_fresh = state == State.FRESH
        self._known = state != State.UNKNOWN
        flags = copy.flags[self._slots]
        self._down = (flags & np.uint64(DOWN)) != 0
        steps = flags >> np.uint64(FAILING_AT) & np.uint64(FAILING_MASK)
        self._failing = steps.astype(np.float64) / FAILING_MASK if steps.any() else None
        self._reject(flags)
        present = copy.present[self._slots]
        masks = ((name, index, (present >> np.uint64(index)) & np.uint64(1) != 0) for name, index in self._indices)
        self._reported = [(name, index, None if mask.all() else mask) for name, index, mask in masks]

    def _reject(self, flags: Any) -> None:
        """Treats ejected endpoints as down, except those on trial to which this worker may send a request."""
        ejected: Mask = (flags & np.uint64(EJECTED)) != 0
        self.trials.clear()
        if not ejected.any():
            self._ejected = None
            self._tried.clear()
            return
        for row in np.flatnonzero(ejected).tolist():
            slot, word = int(self._endpoint_list.slots[row]), int(flags[row])
            number = word >> TRIAL_NUMBER_AT
            mine = self._area and word >> TRIAL_AREA_AT & AREA_MASK == self._area
            if mine and self._tried.get(slot) != number and not self._down[row]:
                self.trials[slot] = number
                ejected[row] = False
        self._ejected = ejected
        self._down |= ejected

    def _current_names(self, endpoint_list: EndpointList) -> Mapping[str, Sequence[frozenset[str]]]:
        names = self._names.current()
        nothing: Mapping[str, frozenset[str]] = {}
        none: frozenset[str] = frozenset()
        rows = [names.get((e.slot, e.generation), nothing) for e in endpoint_list.endpoints]
        return {column: [row.get(column, none) for row in rows] for column in self._name_columns}

    def _allowed(self, subset: Subset) -> Mask:
        mask = self._subsets.get(subset.entries)
        if mask is None:
            self._subset_entries += len(subset.entries)
            if len(self._subsets) >= SUBSETS_MAX or self._subset_entries > SUBSET_ENTRIES_MAX:
                self._subsets.clear()
                self._subset_entries = len(subset.entries)
            mask = self._subsets[subset.entries] = subset_mask(subset, self._endpoint_list.endpoints)
        return mask


def subset_mask(subset: Subset, endpoints: Sequence[Endpoint]) -> Mask:
    """Returns a mask of the endpoints that a subset names as `ip:port`, `[ip]:port` or `ip`. An entry without a port allows all ports."""
    addresses = {_canonical(entry) for entry in subset.entries} - {NO_ADDRESS}
    hosts = [(_host(e.host), e.port) for e in endpoints]
    return np.array([at in addresses or (at[0], None) in addresses for at in hosts], dtype=bool)


def _canonical(entry: str) -> tuple[str, int | None]:
    """Returns (host, port) of a subset's entry; the port is None if the entry names no port. Returns NO_ADDRESS if the entry is malformed.

    The colons of an IPv6 address without brackets are no sign of a port.
    """
    entry = entry.strip()
    if entry.startswith("["):
        host, closed, rest = entry[1:].partition("]")
        colon, port = rest[:1], rest[1:]
    elif entry.count(":") == 1:
        host, closed, port = entry.partition(":")
        colon = closed
    else:
        return _host(entry), None
    if not colon and closed:
        return _host(host), None
    if colon != ":" or not port.isdecimal() or len(port) > PORT_DIGITS_MAX:
        return NO_ADDRESS
    return _host(host), int(port)


def _host(text: str) -> str:
    """Returns the canonical form of a host, because an IPv6 address has several spellings. Returns "" if the host is malformed."""
    if ":" not in text:
        return text.lower()
    try:
        return ipaddress.IPv6Address(text).compressed
    except ValueError:
        return ""
