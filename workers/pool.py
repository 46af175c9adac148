"""The endpoints of this moment: shared memory -> `Candidates`.

A snapshot is rebuilt when the table's epoch moved, at most once per millisecond, and every 50 ms even if it did not, so that
values grow stale although the supervisor is silent. The load in flight is read anew for each decision.
"""

import ipaddress
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from epp.candidates import Candidates, Endpoint, Floats, Mask, Roster, Snapshot
from epp.data import INFLIGHT_TOKENS, Column
from epp.errors import ProducerFailed
from epp.plugin import DataProducer, Profile
from epp.request import Subset
from shm.lanes import Lanes
from shm.table import DOWN, DRAINING, State, TableCopy, TableReader
from workers.documents import EndpointsView, NamesView

REBUILD_MIN_S = 0.001
REBUILD_MAX_S = 0.05
SUBSETS_MAX = 256
SUBSET_ENTRIES_MAX = 1 << 16  # of all that are remembered
PORT_DIGITS_MAX = 5
NOBODY: tuple[str, int | None] = ("", None)


class SharedPool:
    """Implements `epp.decide.Pool` over the table, the documents and the lanes."""

    def __init__(
        self,
        table: TableReader,
        endpoints: EndpointsView,
        names: NamesView,
        lanes: Lanes,
        *,
        columns: Sequence[Column[Any]],
        fresh_for_s: float,
        now: Callable[[], float],
        producer_failed: Callable[[DataProducer, ProducerFailed], None],
        shadow_failed: Callable[[Profile, Exception], None],
        honour_subsets: bool = True,
    ) -> None:
        self._table = table
        self._endpoints = endpoints
        self._names = names
        self._lanes = lanes
        self._now = now
        self._fresh_for_s = fresh_for_s
        self._honour_subsets = honour_subsets
        wanted = {c.name for c in columns}
        self._indices = [(name, index) for index, name in enumerate(table.schema.columns) if name in wanted]
        self._name_columns = tuple(c.name for c in columns if c.type is frozenset)
        self._reads_tokens = INFLIGHT_TOKENS.name in wanted
        self.producer_failed = producer_failed
        self.shadow_failed = shadow_failed
        self._copy: TableCopy | None = None
        self._roster = Roster(())
        self._key: tuple[int, bytes] = (-1, b"")
        nobody: Mask = np.zeros(0, dtype=bool)
        self._marked_fresh = self._known = self._down = nobody
        self._reported: list[tuple[str, int, Mask | None]] = []
        self._subsets: dict[tuple[str, ...], Mask] = {}
        self._subset_entries = 0
        self._used = 0
        self._slots: Any = slice(0)
        self._snapshot = self._build(now())
        self._built_at = now()

    def candidates(self, subset: Subset | None) -> Candidates:
        """Everyone the gateway allows, with the load of this moment."""
        now = self._now()
        age = now - self._built_at
        if age > REBUILD_MAX_S or (
            age > REBUILD_MIN_S and self._copy is not None and self._table.epoch() != self._copy.epoch
        ):
            self._snapshot = self._build(now)
            self._built_at = now
        candidates = self._loaded(self._snapshot, self._used, self._slots)
        if subset is None or not self._honour_subsets:
            return candidates
        return candidates.keep(self._allowed(subset))

    def reloaded(self, candidates: Candidates) -> Candidates:
        """The same candidates with the load of this moment: a request that has waited sees what the others did meanwhile."""
        slots = candidates.snapshot.roster.slots
        return self._loaded(candidates.snapshot, int(slots.max()) + 1, slots, candidates.rows)

    def _loaded(self, snapshot: Snapshot, used: int, slots: Any, rows: Any = None) -> Candidates:
        inflight: Any = self._lanes.inflight(used)[slots]
        tokens: Any = self._lanes.tokens(used)[slots].astype(np.float64) if self._reads_tokens else None
        return Candidates(snapshot, inflight, tokens, rows)

    def _build(self, now: float) -> Snapshot:
        copy = self._copy = self._table.copy(self._copy)
        endpoints = self._endpoints.current()
        # Who is there, in which state and what they report changes rarely: one comparison of bytes tells.
        key = (self._endpoints.version, copy.standing())
        if key != self._key:
            self._key = key
            self._stand(copy, endpoints)
        slots = self._slots
        ages = now - copy.updated_at[slots]
        fresh = self._marked_fresh & (ages <= self._fresh_for_s)
        values: dict[str, Floats] = {}
        for name, index, reported in self._reported:
            column = copy.column(index)[slots]
            values[name] = column if reported is None else np.where(reported, column, np.nan)
        return Snapshot(
            self._roster,
            values,
            fresh=fresh,
            known=self._known,
            down=self._down,
            inflight_at_scrape=copy.inflight_at_scrape[slots],
            names=self._current_names(self._roster) if self._name_columns else None,
            ages=ages,
        )

    def _stand(self, copy: TableCopy, endpoints: Sequence[Endpoint]) -> None:
        """Who is a candidate: endpoints of the document whose row is still theirs and not draining; and their masks."""
        used = len(copy.rows)
        slots = self._endpoints.slots
        inside = slots < used
        valid = np.zeros(len(slots), dtype=bool)
        at = slots[inside]
        valid[inside] = (
            (copy.generation[at] == self._endpoints.generations[inside])
            & (copy.state[at] != State.FREE)
            & ((copy.flags[at] & np.uint64(DRAINING)) == 0)
        )
        self._roster = Roster([e for e, keep in zip(endpoints, valid.tolist(), strict=True) if keep])
        self._used = used
        self._subsets.clear()
        self._subset_entries = 0
        count = len(self._roster.slots)
        in_order = count == used and bool((self._roster.slots == np.arange(count)).all())
        self._slots = slice(count) if in_order else self._roster.slots
        state = copy.state[self._slots]
        self._marked_fresh = state == State.FRESH
        self._known = state != State.UNKNOWN
        self._down = (copy.flags[self._slots] & np.uint64(DOWN)) != 0
        present = copy.present[self._slots]
        masks = ((name, index, (present >> np.uint64(index)) & np.uint64(1) != 0) for name, index in self._indices)
        self._reported = [(name, index, None if mask.all() else mask) for name, index, mask in masks]

    def _current_names(self, roster: Roster) -> Mapping[str, Sequence[frozenset[str]]]:
        names = self._names.current()
        nothing: Mapping[str, frozenset[str]] = {}
        none: frozenset[str] = frozenset()
        rows = [names.get((e.slot, e.generation), nothing) for e in roster.endpoints]
        return {column: [row.get(column, none) for row in rows] for column in self._name_columns}

    def _allowed(self, subset: Subset) -> Mask:
        mask = self._subsets.get(subset.entries)
        if mask is None:
            self._subset_entries += len(subset.entries)
            if len(self._subsets) >= SUBSETS_MAX or self._subset_entries > SUBSET_ENTRIES_MAX:
                self._subsets.clear()
                self._subset_entries = len(subset.entries)
            mask = self._subsets[subset.entries] = subset_mask(subset, self._roster.endpoints)
        return mask


def subset_mask(subset: Subset, endpoints: Sequence[Endpoint]) -> Mask:
    """Endpoints named by `ip:port`, `[ip]:port` or `ip` alone; a port that is given counts."""
    addresses = {_canonical(entry) for entry in subset.entries} - {NOBODY}
    hosts = [(_host(e.host), e.port) for e in endpoints]
    return np.array([at in addresses or (at[0], None) in addresses for at in hosts], dtype=bool)


def _canonical(entry: str) -> tuple[str, int | None]:
    """(host, port or None); a bare IPv6 address has colons but no port. What is malformed names nobody."""
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
        return NOBODY
    return _host(host), int(port)


def _host(text: str) -> str:
    """An address as all write it: IPv6 has many forms."""
    if ":" not in text:
        return text.lower()
    try:
        return ipaddress.IPv6Address(text).compressed
    except ValueError:
        return ""
