"""Gives endpoints their slots of the table and their owner ids of the prefix index.

After a restart, an endpoint keeps the slot and the owner id that it had in the predecessor, and an endpoint that is in the snapshot of the
prefix index keeps its owner id from there. Slots and ids of endpoints that discovery does not name again are released.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from shm.prefix_writer import IndexWriter, OwnersExhausted
from shm.table import DOWN, Handle, State, TableCopy, TableWriter
from workers.shared.documents import EndpointRecord, Identity, Known
from workers.supervisor.endpoints import records
from workers.supervisor.endpoints.discovery import EndpointSpec


class IndexOwners:
    """The owner ids of endpoints. `remembered`: the ids in the snapshot of the index that no endpoint has taken yet, by endpoint."""

    def __init__(
        self, writer: IndexWriter, remembered: Mapping[Known, int] | None = None, pool_name: Callable[[int], str] = lambda _number: ""
    ) -> None:
        """`pool_name` returns the present name of a pool by its number, or "" for the only pool."""
        self.writer = writer
        self.remembered = dict(remembered or {})
        self._pool_name = pool_name

    def known(self, spec: EndpointSpec) -> Known:
        """Returns the identity of an endpoint over restarts of the picker."""
        return self._pool_name(spec.pool), records.identity_of(spec)

    def retire_all_but(self, owners: Iterable[int]) -> None:
        """Retires the ids of a predecessor that neither these endpoints nor endpoints in the snapshot have."""
        for owner in set(self.writer.owners()) - {*owners, *self.remembered.values()}:
            self.writer.retire(owner)

    def retire_remembered(self, pool: int, pools: int, waiting: Iterable[EndpointSpec]) -> None:
        """Retires the ids that no endpoint will take, once discovery of `pool` is complete: of this pool, and of pools that are gone.

        `pools`: the number of pools. `waiting`: endpoints that wait for a slot.
        """
        if not self.remembered:
            return
        kept = {self.known(spec) for spec in waiting}
        others = {self._pool_name(number) for number in range(pools) if number != pool}
        for known in list(self.remembered):
            if known[0] not in others and known not in kept:
                self.writer.retire(self.remembered.pop(known))


class Slots:
    """The slots and owner ids of one table. `full`: why the last request for a slot was refused."""

    def __init__(self, table: TableWriter, index: IndexOwners, slot_inflight: Callable[[int], int]) -> None:
        self._table = table
        self._index = index
        self._slot_inflight = slot_inflight
        self._inherited: dict[tuple[int, Identity], tuple[EndpointRecord, State, bool]] = {}
        self.full = ""

    def take_over(self, predecessor: Sequence[EndpointRecord], copy: TableCopy | None) -> None:
        """Takes over the records of a predecessor and a copy of its table. Releases slots and ids that neither these records nor the
        snapshot name.
        """
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
        self._index.retire_all_but(record.owner for record in self.inherited())

    def inherited(self) -> list[EndpointRecord]:
        """Returns the predecessor's endpoints that no endpoint has inherited yet."""
        return [record for record, _, _ in self._inherited.values()]

    def inherit(self, spec: EndpointSpec) -> tuple[EndpointRecord, State, bool] | None:
        """Returns the predecessor's record of an endpoint, its state, and whether it was down. Returns None if the predecessor did not have
        the endpoint.
        """
        return self._inherited.pop((spec.pool, records.identity_of(spec)), None)

    def take(self, spec: EndpointSpec, members: int) -> tuple[Handle, int, bool] | None:
        """Takes a slot for an endpoint. Returns its handle, its owner id, and whether this id is new. Returns None without a free slot or
        id; `full` has the reason.

        `members`: how many endpoints have slots.
        """
        slots, remembered = self._table.schema.slots, self._index.remembered
        if members + len(self._inherited) >= slots:
            self.full = f"all {slots} slots of the table are taken; raise --max-endpoints"
            return None
        known = self._index.known(spec)
        is_new = known not in remembered
        try:
            owner = self._index.writer.new_owner() if is_new else remembered[known]
        except OwnersExhausted as failure:
            self.full = str(failure)
            return None
        handle = self._table.take(owner, lambda slot: self._slot_inflight(slot) == 0)
        if handle is None:
            if is_new:
                self._index.writer.retire(owner)
            self.full = "every free slot still has requests in flight; a slot can be used when they end"
            return None
        remembered.pop(known, None)
        return handle, owner, is_new

    def release(self, handle: Handle, owner: int) -> None:
        """Releases the slot and the owner id of an endpoint that has left."""
        self._table.release(handle)
        self._index.writer.retire(owner)

    def release_inherited(self, pool: int) -> list[EndpointRecord]:
        """Releases the slots of a pool that no endpoint has inherited. Returns their records."""
        left = [self._inherited.pop(key)[0] for key in list(self._inherited) if key[0] == pool]
        for record in left:
            self.release(Handle(record.slot, record.generation), record.owner)
        return left
