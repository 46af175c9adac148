"""Printing a live segment."""

import os
from collections.abc import Iterator

import numpy as np
import pytest

from shm import inspect
from shm.documents import DocumentSchema, DocumentWriter
from shm.lanes import Lanes, LaneSchema
from shm.layout import Plan
from shm.prefix_index import IndexSchema, IndexWriter
from shm.segment import Segment
from shm.table import State, TableSchema, TableWriter

TABLE = TableSchema(("waiting", "kv_used"), 4)
DOCUMENTS = DocumentSchema((100, 100))
LANES = LaneSchema(4, ("streams",), ("requests",), (("wait_s", (1.0,)),), lanes=2)
INDEX = IndexSchema(300)
PLAN = Plan({"table": TABLE, "documents": DOCUMENTS, "lanes": LANES, "index": INDEX})


@pytest.fixture
def segment() -> Iterator[Segment]:
    segment = Segment.create_planned(f"/epp-test-inspect-{os.getpid()}", PLAN)
    yield segment
    segment.unlink()


def fill(segment: Segment) -> None:
    table = TableWriter(TABLE, segment.planned(PLAN, "table"))
    table.write(
        table.claim(7, lambda slot: True),
        state=State.FRESH,
        flags=0,
        updated_at=1.5,
        inflight_at_scrape=0.0,
        values=(3.0, 0.5),
        present=0b01,
    )
    DocumentWriter(DOCUMENTS, segment.planned(PLAN, "documents")).write(0, b"pool" * 20)
    lanes = Lanes(LANES, segment.planned(PLAN, "lanes"))
    lanes.set_serving(1, True)
    lanes.lane(1).inflight[2] = 5
    lanes.lane(1).observe(0, 0.5)
    index = IndexWriter(INDEX, segment.planned(PLAN, "index"))
    index.insert(np.array([2**40, 2**50], dtype=np.uint64), index.new_owner(), 1)


def test_a_filled_segment_is_printed_part_by_part(segment: Segment, capsys: pytest.CaptureFixture[str]) -> None:
    fill(segment)
    assert inspect.main([segment.name]) == 0
    text = capsys.readouterr().out
    assert "slot 0 generation 1 owner 7 FRESH flags 0 updated_at 1.500 waiting=3\n" in text
    assert "document 0: version 1, 80 of 100 bytes" in text
    assert "document 1: nothing readable" in text
    assert "lane 1: serving, taken over 0 times streams=0" in text
    assert "slot 2: 5 requests in flight" in text
    assert "wait_s [1, 0] sum 0.5" in text
    assert "2 of 304 entries used" in text
    assert "1 owners live, 0 retired" in text


def test_segments_are_listed_by_name(segment: Segment, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect.main(["--list"]) == 0
    assert segment.name in capsys.readouterr().out.split("\n")


def test_a_segment_without_a_description_shows_its_header(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain = Segment.create(f"/epp-test-plain-{os.getpid()}", 64, 0xABC)
    assert inspect.main([plain.name]) == 0
    plain.unlink()
    assert "64 bytes, layout 0000000000000abc, generation 1" in capsys.readouterr().out


def test_a_missing_segment_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect.main(["/epp-none"]) == 1
    assert "does not exist" in capsys.readouterr().err


def test_no_name_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        inspect.main([])
    assert "give a segment's name" in capsys.readouterr().err
