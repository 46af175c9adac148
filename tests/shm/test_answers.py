"""The counts of requests and failed answers: who writes what, and what the reader sees."""

import pytest

from shm.answers import FAILED, SENT, AnswersReader, AnswersSchema, AnswersWriter
from shm.segment import Region

SCHEMA = AnswersSchema(5, 3, 4, 6)


def ends() -> tuple[list[AnswersWriter], AnswersReader]:
    region = Region(memoryview(bytearray(SCHEMA.bytes)))
    return [AnswersWriter(SCHEMA, region, index) for index in range(3)], AnswersReader(SCHEMA, region)


def test_each_worker_counts_in_its_own_row_and_the_reader_sees_all() -> None:
    (first, second, _), reader = ends()
    first.give(0, 77)
    first.count(0, 4, SENT)
    first.count(0, 4, FAILED)
    first.count_outcome(5, 4)
    second.give(3, 88)
    second.count(3, 0, SENT)
    second.count_outcome(0, 0)
    second.count_outcome(5, 4)
    counts = reader.counts()
    assert counts.kinds.tolist() == [[77, 0, 0, 0], [0, 0, 0, 88], [0, 0, 0, 0]]
    assert counts.answers[0, :, 0, 4].tolist() == [1, 1]
    assert counts.answers[1, :, 3, 0].tolist() == [1, 0]
    assert counts.answers.sum() == 3
    assert counts.outcomes[5].tolist() == [0, 0, 0, 0, 2]
    assert counts.outcomes[0].tolist() == [1, 0, 0, 0, 0]
    assert counts.outcomes.sum() == 3


def test_the_reader_sees_that_nothing_was_counted_without_reading_the_counts() -> None:
    (first, second, _), reader = ends()
    before = reader.changes()
    assert reader.changes() == before
    first.count_outcome(0, 1)
    assert reader.changes() != before
    second.count_outcome(0, 1)
    assert reader.changes() == [1, 1, 0]


def test_a_place_that_another_kind_gets_begins_at_0_and_a_successor_frees_all_places() -> None:
    (first, second, _), reader = ends()
    for writer in (first, second):
        writer.give(1, 77)
        writer.count(1, 2, SENT)
        writer.count(1, 2, FAILED)
    first.give(1, 78)
    assert reader.counts().answers[0].sum() == 0
    assert reader.counts().kinds[0].tolist() == [0, 78, 0, 0]
    assert reader.counts().answers[1].sum() == 2
    second.take_over()
    assert not reader.counts().kinds[1].any()
    assert not reader.counts().answers[1].any()


def test_workers_see_whether_the_supervisor_watches_and_cannot_change_it() -> None:
    (first, *_), reader = ends()
    assert not first.watched[0]
    reader.watch(True)
    assert first.watched[0]
    reader.watch(False)
    assert not first.watched[0]
    with pytest.raises(TypeError):
        first.watched[0] = 1


def test_an_empty_layout_is_refused_and_each_layout_has_its_own_hash() -> None:
    with pytest.raises(ValueError, match="at least a slot"):
        AnswersSchema(0, 1, 1, 1)
    shapes = {AnswersSchema(*shape).layout_hash for shape in ((5, 3, 4, 6), (5, 3, 4, 7), (5, 3, 5, 6), (6, 3, 4, 6))}
    assert len(shapes) == 4
