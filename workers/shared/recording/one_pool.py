"""Chooses one pool of a recording of several.

A recording names the pools when it begins a file (`Opened.pools`), and the pool of each endpoint, configuration and request. What belongs
to another pool is left out, so a reader sees what a picker of the chosen pool alone had recorded.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from epp.recording.records import Configured, Decided, Ended, Member, Named, Opened, Record, Scraped, floats, ints
from epp.request.pools import listed
from workers.shared.recording import Unreadable


def of_pool(batches: Iterable[list[Record]], pool: str, path: str) -> Iterator[list[Record]]:
    """Yields the records of one pool, "" for the only one, of the recording in `path`. Raises Unreadable, with their names."""
    chosen = _Chosen(pool, path)
    for batch in batches:
        yield [kept for record in batch if (kept := chosen.kept(record)) is not None]


@dataclass(slots=True)
class _Chosen:
    """What a reader knows while it reads. `slots`: those of the pool's endpoints."""

    pool: str
    path: str
    slots: set[int] = field(default_factory=set)

    def kept(self, record: Record) -> Record | None:
        """Returns the record as a picker of this pool alone had written it; None if it belongs to another pool."""
        if isinstance(record, Opened):
            self._check(record.pools)
            return record
        if not self.pool:
            return record  # of the only pool, whether it has a name or not
        if isinstance(record, (Configured, Decided)):
            return record if record.pool == self.pool else None
        if isinstance(record, Member):
            return self._member(record)
        if isinstance(record, Scraped):
            return self._scraped(record)
        if isinstance(record, (Named, Ended)):
            return record if record.slot in self.slots else None
        return record

    def _check(self, pools: Sequence[str]) -> None:
        if self.pool and not pools:
            raise Unreadable(f"{self.path}: the recording is of a picker of one pool: leave --pool out")
        if self.pool not in pools and len(pools) > 1:
            why = f"the recording has no pool '{self.pool}'" if self.pool else "the recording has several pools: give one with --pool"
            raise Unreadable(f"{self.path}: {why}; pools: {listed(pools)}")

    def _member(self, record: Member) -> Member | None:
        if record.pool != self.pool:
            self.slots.discard(record.slot)
            return None
        self.slots.add(record.slot)
        return record

    def _scraped(self, record: Scraped) -> Scraped | None:
        slots = ints(record.slots).tolist()
        own = np.fromiter((slot in self.slots for slot in slots), bool, len(slots))
        if own.all():
            return record
        return self._only(record, own) if own.any() or record.columns else None  # the names of columns are said once

    def _only(self, record: Scraped, own: NDArray[np.bool_]) -> Scraped:
        values = floats(record.values).reshape(len(own), -1)[own]
        states = bytes(state for state, mine in zip(record.states, own.tolist(), strict=True) if mine)
        slots, scraped_at = ints(record.slots)[own], floats(record.scraped_at)[own]
        return Scraped(record.at, record.columns, slots.tobytes(), scraped_at.tobytes(), values.tobytes(), states)
