"""Gives endpoints their slots of the table and their owner ids of the prefix index.

After a restart, an endpoint keeps the slot and the owner id that it had in the predecessor, and an endpoint that is in the snapshot of the
prefix index keeps its owner id from there. What discovery does not name again is released.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from shm.prefix_writer import IndexWriter, OwnersExhausted
from shm.table import DOWN, Handle, State, TableCopy, TableWriter
from workers.shared.documents import EndpointRecord, Identity
from workers.supervisor.endpoints import records
from workers.supervisor.endpoints.discovery import EndpointSpec
from workers.supervisor.endpoints.remembered import Remembered


class Indexed(NamedTuple):
    """What the prefix index knows of endpoints. `remembered`: the owner ids of the index snapshot."""

    owners: IndexWriter
    remembered: Remembered


class Slots:
    """The slots and owner ids of one table. `full`: why the last endpoint that asked got no slot. `remembered`: as in `Indexed`."""

    def __init__(self, table: TableWriter, index: Indexed, slot_inflight: Callable[[int], int]) -> None:
        self._table = table
        self._owners = index.owners
        self._slot_inflight = slot_inflight
        self.remembered = index.remembered
        self._inherited: dict[tuple[int, Identity], tuple[EndpointRecord, State, bool]] = {}
        self.full = ""

    def take_over(self, predecessor: Sequence[EndpointRecord], copy: TableCopy | None) -> None:
        """Takes over the records of a predecessor and a copy of its table. Releases what neither they nor the snapshot name."""
        taken = set(self._table.taken())
        for record in predecessor:
            handle = Handle(record.slot, record.generation)
            if copy is not None and handle in taken and record.slot < len(copy.rows):
                state = State(int(copy.state[record.slot]))
                down = bool(int(copy.flags[record.slot]) & DOWN)
                self._inherited[record.pool, records.identity_of(record)] = record, state, down
                taken.discard(handle)
        for handle in taken:  # the predecessor took these slots, but died before it wrote their records
            self._table.release(handle)
        known = {*(record.owner for record in self.inherited()), *self.remembered.owners.values()}
        for owner in set(self._owners.owners()) - known:
            self._owners.retire(owner)

    def inherited(self) -> list[EndpointRecord]:
        """Returns the predecessor's endpoints that no endpoint has inherited yet."""
        return [record for record, _, _ in self._inherited.values()]

    def inherit(self, spec: EndpointSpec) -> tuple[EndpointRecord, State, bool] | None:
        """Returns the predecessor's record of an endpoint, its state, and whether it was down. None: the predecessor did not have it."""
        return self._inherited.pop((spec.pool, records.identity_of(spec)), None)

    def take(self, spec: EndpointSpec, members: int) -> tuple[Handle, int, bool] | None:
        """Takes a slot for an endpoint. Returns its handle, its owner id, and whether this id is new. None: `full` says why.

        `members`: how many endpoints have slots.
        """
        slots = self._table.schema.slots
        if members + len(self._inherited) >= slots:
            self.full = f"all {slots} slots of the table are taken; raise --max-endpoints"
            return None
        remembered = self.remembered.of(spec)
        try:
            owner = self._owners.new_owner() if remembered is None else remembered
        except OwnersExhausted as failure:
            self.full = str(failure)
            return None
        handle = self._table.take(owner, lambda slot: self._slot_inflight(slot) == 0)
        if handle is None:
            if remembered is None:
                self._owners.retire(owner)
            self.full = "every free slot still has requests in flight; a slot can be used when they end"
            return None
        if remembered is not None:
            self.remembered.taken(spec)
        return handle, owner, remembered is None

    def release(self, handle: Handle, owner: int) -> None:
        """Releases the slot and the owner id of an endpoint that has left."""
        self._table.release(handle)
        self._owners.retire(owner)

    def release_inherited(self, pool: int) -> list[EndpointRecord]:
        """Releases the slots of a pool that no endpoint has inherited. Returns their records."""
        left = [self._inherited.pop(key)[0] for key in list(self._inherited) if key[0] == pool]
        for record in left:
            self.release(Handle(record.slot, record.generation), record.owner)
        return left

    def retire_remembered(self, pool: int, pools: int, waiting: Iterable[EndpointSpec]) -> None:
        """Retires the owner ids of the snapshot that no endpoint will take (`Remembered.left`)."""
        for owner in self.remembered.left(pool, pools, waiting):
            self._owners.retire(owner)
