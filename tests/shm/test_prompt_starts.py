"""Tests of prompt starts."""

import pytest

from compiled.outlook import CELLS, PROMPTS, START
from shm.prefills import PromptStarts, StartsSchema
from shm.segment import Region

SCHEMA = StartsSchema(5, 3)


def test_the_newest_start_of_a_slot_counts_whichever_worker_saw_it() -> None:
    region = Region(memoryview(bytearray(SCHEMA.bytes)))
    workers = [PromptStarts(SCHEMA, region, index) for index in range(3)]
    workers[0].own[1] = 7.0
    workers[2].own[1] = 9.0
    workers[1].own[4] = 3.0
    for worker in workers:
        assert worker.rows.max(axis=0)[START, :5].tolist() == [0.0, 9.0, 0.0, 0.0, 3.0]


def test_a_worker_that_begins_again_clears_its_own_numbers_of_prompts_only() -> None:
    region = Region(memoryview(bytearray(SCHEMA.bytes)))
    workers = [PromptStarts(SCHEMA, region, index) for index in range(2)]
    for worker in workers:
        worker.own[3], worker.prompts[3] = 7.0, 2.0
    PromptStarts(SCHEMA, region, 1)
    assert workers[0].rows[:, PROMPTS, 3].tolist() == [2.0, 0.0, 0.0]
    assert workers[1].own[3] == 7.0


def test_rows_do_not_share_cache_lines() -> None:
    assert SCHEMA.cells_bytes % 128 == 0
    assert SCHEMA.bytes == 3 * CELLS * SCHEMA.cells_bytes


@pytest.mark.parametrize(("slots", "workers"), [(0, 1), (1, 0)])
def test_a_schema_without_cells_is_refused(slots: int, workers: int) -> None:
    with pytest.raises(ValueError, match="at least one slot and one worker"):
        StartsSchema(slots, workers)
