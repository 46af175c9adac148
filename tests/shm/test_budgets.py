"""Budgets in shared memory: what each worker writes, what all read, and what is left after a worker has died."""

import math
import struct

import pytest

from shm.budgets import LINE, NOWHERE, PLACES, WAYS, BudgetRow, BudgetsSchema, BudgetSums, Elsewhere, Sum, rates_of
from shm.segment import Region

SETS = PLACES // WAYS


class Rows:
    def __init__(self, workers: int = 2) -> None:
        self.schema = BudgetsSchema(workers)
        self.region = Region(memoryview(bytearray(self.schema.bytes)))
        self.serving = [1] * workers
        self.rows = [BudgetRow(self.schema, self.region, row, self.serving) for row in range(workers + 1)]
        self.sums = BudgetSums(self.schema, self.region, self.serving)

    def use(self, row: int, key: int, tokens: float, in_flight: int = 1, *, plan: int = 0, lapsed: float = 0.0, now: float = 1.0) -> int:
        writer = self.rows[row]
        place = writer.place(key, now)
        place.tokens += tokens
        place.requests += 1
        place.in_flight += in_flight
        place.plan, place.lapsed_tokens = plan, lapsed
        writer.store(place, now)
        writer.lapse(place)
        return place.at


def test_each_row_is_read_by_the_others() -> None:
    rows = Rows()
    rows.use(0, 7, 100.0, plan=3, lapsed=-5.0)
    rows.use(1, 7, 10.0, plan=3, lapsed=8.0)
    rows.use(2, 7, 1.0, plan=4, lapsed=99.0)
    assert rows.rows[0].elsewhere(7, 3) == Elsewhere(11.0, 2.0, 2, 8.0, 0.0, 99.0, 0.0)
    assert rows.rows[1].elsewhere(7, 3) == Elsewhere(101.0, 2.0, 2, -5.0, 0.0, 99.0, 0.0)
    assert rows.rows[0].elsewhere(8, 3) == Elsewhere(0.0, 0.0, 0, *[-math.inf] * 4)


def test_what_a_dead_worker_had_in_flight_does_not_count_but_what_it_used_does() -> None:
    rows = Rows()
    at = rows.use(0, 7, 100.0)
    rows.serving[0] = 0
    assert rows.rows[1].elsewhere(7, 1)[:3] == (100.0, 1.0, 0)
    assert rows.sums.sums(0.0) == {7: Sum(100.0, 1.0, 0)}
    rows.serving[0] = 1
    successor = BudgetRow(rows.schema, rows.region, 0, rows.serving)
    successor.take_over()
    assert rows.rows[1].elsewhere(7, 1)[:3] == (100.0, 1.0, 0)
    place = successor.place(7, 2.0)
    assert (place.at, place.tokens, place.requests, place.in_flight) == (at, 100.0, 1.0, 0)


def test_the_supervisor_sums_workers_without_other_replicas() -> None:
    rows = Rows()
    rows.use(0, 7, 100.0)
    rows.use(1, 7, 10.0)
    rows.use(1, 8, 1.0)
    rows.use(2, 9, 1.0)
    before = rows.sums.changes()
    assert rows.sums.sums(0.0) == {7: Sum(110.0, 2.0, 2), 8: Sum(1.0, 1.0, 1)}
    rows.use(0, 7, 1.0, now=1.5)
    assert rows.sums.changes() != before


def test_the_supervisor_knows_when_a_bucket_is_full() -> None:
    rows, plan = Rows(), int.from_bytes(struct.pack("<ff", 10.0, 0.0), "little")
    assert rates_of(plan) == (10.0, 0.0)
    rows.use(0, 7, 100.0, plan=plan, lapsed=850.0)
    rows.use(1, 7, 10.0, plan=plan, lapsed=870.0, now=2.0)
    rows.use(2, 7, 40.0)  # other replicas
    assert rows.sums.sums(100.0) == {7: Sum(110.0, 2.0, 2, fills_tokens=2.0)}
    assert rows.sums.sums(200.0)[7].fills_tokens == 0.0


def test_a_tenant_without_a_place_takes_the_one_that_was_not_touched_for_longest() -> None:
    rows = Rows()
    keys = [1 + n * SETS for n in range(WAYS)]  # all of one set
    for n, key in enumerate(keys):
        rows.use(0, key, 5.0, in_flight=int(n in (0, 2)), now=float(n))
    writer = rows.rows[0]
    places = [writer.place(key, 9.0) for key in keys]
    assert len({place.at for place in places}) == WAYS
    new = writer.place(1 + WAYS * SETS, 10.0)
    assert (new.tokens, places[1].at) == (0.0, NOWHERE)
    assert rows.rows[1].elsewhere(keys[1], 0).tokens == 0.0  # the oldest without a request in flight
    assert [rows.rows[1].elsewhere(key, 0).tokens for key in keys] == [5.0, 0.0, *[5.0] * (WAYS - 2)]


def test_rows_lie_on_cache_lines_and_need_a_worker() -> None:
    schema = BudgetsSchema(3)
    assert schema.row_bytes % 64 == 0 and schema.bytes == 4 * schema.row_bytes and LINE == 8
    assert schema.description == {"kind": "budgets", "workers": 3}
    with pytest.raises(ValueError, match="at least one worker"):
        BudgetsSchema(0)
