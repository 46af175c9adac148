"""Tests of the endpoint table: handles, repair after a kill, and concurrent readers."""

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from shm.table import COLUMNS_MAX, DOWN, DRAINING, Handle, State, TableCopy, TableReader, TableSchema, TableWriter
from tests.examples import examples
from tests.interleave import Killed, Memory, every_point, kill
from tests.modes import interpreted_only
from tests.shm.memory import region_for

SCHEMA = TableSchema(("waiting", "kv_used"), slots=4)


def always(slot: int) -> bool:
    return True


def never(slot: int) -> bool:
    return False


def pair(schema: TableSchema = SCHEMA) -> tuple[TableWriter, TableReader]:
    region = region_for(schema)
    return TableWriter(schema, region), TableReader(schema, region)


def put(writer: TableWriter, handle: Handle, value: float, state: State = State.FRESH) -> bool:
    return writer.write(
        handle,
        state=state,
        flags=DRAINING,
        updated_at=value,
        inflight_at_scrape=value,
        values=(value,) * len(writer.schema.columns),
        present=0b01,
    )


def rows(copy: TableCopy) -> list[tuple]:
    return [(State(int(copy.state[i])), int(copy.generation[i]), int(copy.owner[i]), copy.column(1)[i]) for i in range(len(copy.rows))]


def test_what_is_written_is_read() -> None:
    writer, reader = pair()
    handle = writer.take(77, never)
    assert handle == Handle(0, 1)
    assert rows(reader.copy()) == [(State.UNKNOWN, 1, 77, 0.0)]
    assert put(writer, handle, 2.5)
    copy = reader.copy()
    assert rows(copy) == [(State.FRESH, 1, 77, 2.5)]
    assert copy.flags.tolist() == [DRAINING]
    assert copy.present.tolist() == [0b01]
    assert copy.updated_at.tolist() == copy.inflight_at_scrape.tolist() == [2.5]


def test_a_copy_does_not_change_with_the_table() -> None:
    writer, reader = pair()
    handle = writer.take(7, never)
    copy = reader.copy()
    put(writer, handle, 9.0)
    assert rows(copy) == [(State.UNKNOWN, 1, 7, 0.0)]


def test_mark_changes_state_and_flags_and_keeps_values() -> None:
    writer, reader = pair()
    handle = writer.take(7, never)
    put(writer, handle, 3.0)
    assert writer.mark(handle, state=State.STALE)
    assert writer.mark(handle, flags=DOWN)
    copy = reader.copy()
    assert rows(copy) == [(State.STALE, 1, 7, 3.0)]
    assert copy.flags.tolist() == [DOWN]


def test_the_epoch_moves_only_when_published() -> None:
    writer, reader = pair()
    before = reader.epoch()
    put(writer, writer.take(7, never), 1.0)
    assert reader.epoch() == before
    writer.publish()
    assert reader.epoch() == before + 1 == reader.copy().epoch


def test_a_stale_handle_touches_nothing() -> None:
    writer, reader = pair()
    old = writer.take(7, never)
    assert writer.owner(old) == 7
    assert writer.release(old)
    new = writer.take(8, always)
    assert new == Handle(old.slot, old.generation + 1)
    put(writer, new, 1.0)
    before = reader.copy().rows.tolist()
    assert not put(writer, old, 2.0)
    assert not writer.mark(old, state=State.STALE)
    assert not writer.release(old)
    assert writer.owner(old) is None
    assert reader.copy().rows.tolist() == before


def test_a_slot_in_use_is_not_reused_and_the_lowest_free_one_is() -> None:
    writer, _ = pair()
    handles = [writer.take(owner, never) for owner in (1, 2, 3)]
    writer.release(handles[0])
    writer.release(handles[1])
    assert writer.take(4, lambda slot: slot != 0).slot == 1
    assert writer.take(5, always).slot == 0


@interpreted_only("counts the calls of a method")
def test_taking_all_slots_checks_each_once_and_finds_slots_that_were_freed_or_became_reusable() -> None:
    looked: list[int] = []

    class Counting(TableWriter):
        def _row(self, slot: int) -> int:
            looked.append(slot)
            return super()._row(slot)

    schema = TableSchema(("waiting",), slots=500)
    writer = Counting(schema, region_for(schema))
    looked.clear()
    handles = [writer.take(1, always) for _ in range(500)]
    assert len(looked) == 500
    for slot in (7, 3, 400):
        handle = handles[slot]
        assert handle is not None
        writer.release(handle)
    assert [writer.take(1, lambda slot: slot != 3) for _ in range(3)] == [Handle(7, 2), Handle(400, 2), None]
    assert writer.take(1, always) == Handle(3, 2)


def test_a_full_table_refuses_a_request_for_a_slot() -> None:
    writer, _ = pair()
    assert all(writer.take(owner, never) for owner in (1, 2, 3, 4))
    assert writer.take(5, always) is None


def test_the_used_part_shrinks_with_the_highest_slot() -> None:
    writer, reader = pair()
    handles = [writer.take(owner, never) for owner in (1, 2, 3)]
    writer.release(handles[1])
    assert len(reader.copy().rows) == 3
    writer.release(handles[2])
    assert len(reader.copy().rows) == 1
    writer.release(handles[0])
    assert len(reader.copy().rows) == 0


def test_only_release_frees_a_row() -> None:
    writer, _ = pair()
    handle = writer.take(1, never)
    with pytest.raises(ValueError, match="use release"):
        put(writer, handle, 1.0, State.FREE)
    with pytest.raises(ValueError, match="use release"):
        writer.mark(handle, state=State.FREE)


@pytest.mark.parametrize(("columns", "slots"), [(("a", "a"), 1), ((), 0), (tuple(map(str, range(COLUMNS_MAX + 1))), 1)])
def test_an_impossible_schema_is_refused(columns: tuple, slots: int) -> None:
    with pytest.raises(ValueError, match="table"):
        TableSchema(columns, slots)


def test_the_layout_hash_depends_on_columns_their_order_and_slots() -> None:
    schemas = [TableSchema(columns, slots) for columns in (("a", "b"), ("b", "a"), ("ab",)) for slots in (4, 5)]
    assert len({schema.layout_hash for schema in schemas}) == len(schemas)


def test_a_reader_cannot_write() -> None:
    _, reader = pair()
    with pytest.raises(ValueError, match="read-only"):
        reader._rows[0, 0] = 1
    with pytest.raises(TypeError, match="read-only"):
        reader._words[0] = 1


def torn_pair() -> tuple[TableWriter, TableReader, Handle]:
    writer, reader = pair()
    handle = writer.take(7, never)
    put(writer, handle, 5.0)
    return writer, reader, handle


def tear(writer: TableWriter, handle: Handle) -> None:
    writer._words[writer._row(handle.slot)] += 1


def test_a_torn_row_is_taken_from_the_previous_copy() -> None:
    writer, reader, handle = torn_pair()
    previous = reader.copy()
    tear(writer, handle)
    assert rows(reader.copy(previous)) == rows(previous)


def test_a_torn_row_without_a_previous_copy_reads_as_free() -> None:
    writer, reader, handle = torn_pair()
    other = writer.take(8, never)
    put(writer, other, 6.0)
    tear(writer, handle)
    assert rows(reader.copy()) == [(State.FREE, 0, 0, 0.0), (State.FRESH, 1, 8, 6.0)]


def test_a_row_newer_than_the_previous_copy_reads_as_free_while_torn() -> None:
    writer, reader, _ = torn_pair()
    previous = reader.copy()
    tear(writer, writer.take(8, never))
    assert [row[0] for row in rows(reader.copy(previous))] == [State.FRESH, State.FREE]


def live_table(actions: int) -> tuple[Memory, TableWriter, list[Handle]]:
    memory = Memory(SCHEMA.bytes)
    writer = TableWriter(SCHEMA, memory)
    handles = [writer.take(owner, never) for owner in (11, 12)][:actions]
    for handle in handles:
        put(writer, handle, 5.0)
    return memory, writer, handles


ACTIONS = {
    "take": lambda writer, handles: writer.take(13, always),
    "reuse": lambda writer, handles: (writer.release(handles[0]), writer.take(13, always)),
    "write": lambda writer, handles: put(writer, handles[1], 8.0),
    "mark": lambda writer, handles: writer.mark(handles[1], state=State.STALE, flags=0),
    "release": lambda writer, handles: writer.release(handles[1]),
    "publish": lambda writer, handles: writer.publish(),
}
OWNER_OF = {(0, 1): 11, (1, 1): 12, (0, 2): 13, (2, 1): 13}


def check_rows(copy: TableCopy) -> None:
    for slot, (state, generation, owner, value) in enumerate(rows(copy)):
        if state != State.FREE:
            assert owner == OWNER_OF[slot, generation]
            assert value in (0.0, 5.0, 8.0)
            assert copy.column(0)[slot] == value == copy.updated_at[slot]


@pytest.mark.parametrize("action", ACTIONS)
def test_a_successor_repairs_what_a_writer_killed_at_any_access_left(action: str) -> None:
    def scenario(n: int) -> bool:
        memory, writer, handles = live_table(2)
        memory.words.arm(n, kill)
        with contextlib.suppress(Killed):
            ACTIONS[action](writer, handles)
        memory.words.disarm()
        reader = TableReader(SCHEMA, memory)
        check_rows(reader.copy())
        successor = TableWriter(SCHEMA, memory)
        copy = reader.copy()
        check_rows(copy)
        assert not any(version & 1 for version in copy.rows[:, 0].tolist())
        live = [slot for slot, row in enumerate(rows(copy)) if row[0] != State.FREE]
        assert [handle.slot for handle in successor.taken()] == live
        if action in ("write", "mark", "publish"):
            assert successor.taken() == handles
        for handle in successor.taken():
            assert put(successor, handle, 8.0)
        check_rows(reader.copy())
        return memory.words.fired

    assert every_point(scenario) > 1


@given(st.binary(min_size=SCHEMA.bytes, max_size=SCHEMA.bytes) | st.sampled_from((0, 255)).map(lambda b: bytes([b]) * SCHEMA.bytes))
@examples(100)
def test_a_writer_that_finds_garbage_frees_it_and_can_take_every_slot(garbage: bytes) -> None:
    region = region_for(SCHEMA)
    region.bytes[:] = garbage
    reader = TableReader(SCHEMA, region)
    assert len(reader.copy().rows) <= SCHEMA.slots  # ends, and reads what is there
    writer = TableWriter(SCHEMA, region)
    for handle in writer.taken():  # torn rows with a state that exists: nobody knows them
        writer.release(handle)
    assert writer.taken() == [] and writer.used == 0
    handles = [writer.take(owner, always) for owner in range(SCHEMA.slots)]
    assert [handle.slot for handle in handles] == list(range(SCHEMA.slots))
    assert all(put(writer, handle, 4.0) for handle in handles)
    assert [row[3] for row in rows(reader.copy())] == [4.0] * SCHEMA.slots
    assert writer.intact(handles)


def test_a_writer_counts_the_rows_that_another_program_has_overwritten_and_keeps_the_others() -> None:
    region = region_for(SCHEMA)
    writer = TableWriter(SCHEMA, region)
    handles = [writer.take(owner, never) for owner in (1, 2, 3)]
    writer._words[writer._row(1) + 6] ^= 1  # a bit of a row that nobody writes
    successor = TableWriter(SCHEMA, region)
    assert successor.overwritten == 1
    assert successor.taken() == [handles[0], handles[2]]


def test_a_table_is_not_intact_once_a_row_or_the_number_of_rows_was_overwritten() -> None:
    for word, value in ((0, 0), (1, 0), (1, SCHEMA.slots + 1)):
        writer, _ = pair()
        handles = [writer.take(owner, never) for owner in (1, 2)]
        assert writer.intact(handles)
        writer._words[writer._row(1) + 1 if word == 0 else 1] = value
        assert not writer.intact(handles)


@pytest.mark.parametrize("action", ACTIONS)
def test_a_reader_at_any_point_of_a_change_sees_whole_rows(action: str) -> None:
    def scenario(n: int) -> bool:
        memory, writer, handles = live_table(2)
        reader = TableReader(SCHEMA, memory)
        previous = reader.copy()
        memory.words.arm(n, lambda: check_rows(reader.copy(previous)))
        ACTIONS[action](writer, handles)
        return memory.words.fired

    every_point(scenario)


@pytest.mark.parametrize("action", ACTIONS)
def test_a_change_at_any_point_of_a_copy_leaves_whole_rows(action: str) -> None:
    def scenario(n: int) -> bool:
        memory, writer, handles = live_table(2)
        memory.words.arm(n, lambda: ACTIONS[action](writer, handles))
        check_rows(TableReader(SCHEMA, memory).copy())
        return memory.words.fired

    every_point(scenario)


class TableModel(RuleBasedStateMachine):
    """Compares the table with a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.region = region_for(SCHEMA)
        self.writer = TableWriter(SCHEMA, self.region)
        self.reader = TableReader(SCHEMA, self.region)
        self.live: dict[Handle, tuple] = {}
        self.gone: list[Handle] = []
        self.owners = 0

    @rule()
    def take(self) -> None:
        self.owners += 1
        handle = self.writer.take(self.owners, always)
        if len(self.live) == SCHEMA.slots:
            assert handle is None
        else:
            assert handle not in self.live
            assert handle not in self.gone
            self.live[handle] = (State.UNKNOWN, handle.generation, self.owners, 0.0)

    @rule(data=st.data(), value=st.floats(allow_nan=False))
    def write(self, data: st.DataObject, value: float) -> None:
        if self.live:
            handle = data.draw(st.sampled_from(sorted(self.live)))
            assert put(self.writer, handle, value)
            self.live[handle] = (State.FRESH, *self.live[handle][1:3], value)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.live:
            handle = data.draw(st.sampled_from(sorted(self.live)))
            assert self.writer.release(handle)
            del self.live[handle]
            self.gone.append(handle)

    @rule()
    def restart(self) -> None:
        self.writer = TableWriter(SCHEMA, self.region)

    @invariant()
    def the_table_is_the_model(self) -> None:
        found = {Handle(slot, row[1]): row for slot, row in enumerate(rows(self.reader.copy())) if row[0] != State.FREE}
        assert found == self.live
        assert self.writer.taken() == sorted(self.live)
        assert not any(put(self.writer, handle, 1.0) for handle in self.gone)


TestTableModel = TableModel.TestCase
TestTableModel.settings = examples(30, stateful_step_count=25)


@given(st.lists(st.floats(width=64), min_size=2, max_size=2), st.integers(0, 2**53))
def test_any_values_survive_bit_for_bit(values: list[float], present: int) -> None:
    writer, reader = pair()
    handle = writer.take(1, never)
    writer.write(handle, state=State.FRESH, flags=0, updated_at=values[0], inflight_at_scrape=values[1], values=values, present=present)
    copy = reader.copy()
    got = np.array([copy.column(0)[0], copy.column(1)[0]])
    assert got.tobytes() == np.array(values).tobytes()
    assert copy.present.tolist() == [present]
