"""Tests of printing a live segment."""

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shm import inspect
from shm.documents import DocumentSchema, DocumentWriter
from shm.flow_lanes import DISPATCHED, FlowLanes, FlowSchema
from shm.instance_lock import InstanceLock
from shm.lanes import Lanes, LaneSchema
from shm.layout import Plan
from shm.prefix_index import IndexSchema
from shm.prefix_writer import IndexWriter
from shm.remote_lane import REPLICAS, RemoteLane, RemoteSchema
from shm.segment import Segment
from shm.series import SeriesSchema, SeriesWriter
from shm.table import State, TableSchema, TableWriter

TABLE = TableSchema(("waiting", "kv_used"), 4)
DOCUMENTS = DocumentSchema((100, 100))
LANES = LaneSchema(4, ("streams",), ("requests",), (("wait_s", (1.0,)),), lanes=2)
INDEX = IndexSchema(300)
SERIES = SeriesSchema("errors", ("model",), ("running",), ("failed",), (("size", (1.0,)),), blocks=2, lanes=1)
PLAN = Plan({"table": TABLE, "documents": DOCUMENTS, "lanes": LANES, "errors": SERIES, "index": INDEX})


@pytest.fixture
def segment() -> Iterator[Segment]:
    segment = Segment.create_planned(f"/epp-test-inspect-{os.getpid()}", PLAN)
    yield segment
    segment.unlink()


def fill(segment: Segment) -> None:
    table = TableWriter(TABLE, segment.planned(PLAN, "table"))
    table.write(
        table.take(7, lambda slot: True),
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
    series = SeriesWriter(SERIES, SERIES.lane(segment.planned(PLAN, "errors"), 0))
    block = series.block(("llama",))
    series.words[block + SERIES.counter_at["failed"]] = 3
    series.words[block + SERIES.gauge_at["running"]] = 2
    series.observe(block, 0, 4.0)
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
    assert "1 label tuples, up to 2 per lane, 0 times labels were replaced" in text
    assert "model='llama': running=2, failed=3, size=[0, 1] sum 4\n" in text
    assert "2 of 304 entries used" in text
    assert "1 owners live, 0 retired" in text


def test_what_waits_and_what_other_replicas_route_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    flow_schema, remote_schema = FlowSchema(2, 1), RemoteSchema(4, 2)
    plan = Plan({"lanes": LANES, "flow": flow_schema, "remote": remote_schema})
    segment = Segment.create_planned(f"/epp-test-flow-{os.getpid()}", plan)
    lanes = Lanes(LANES, segment.planned(plan, "lanes"))
    lanes.set_serving(1, True)
    flow = FlowLanes(flow_schema, segment.planned(plan, "flow"), lanes)
    flow.lane(0).publish(1, 3, 600, 2.5)
    flow.words[flow.base(0) + DISPATCHED] = 7
    remote = RemoteLane(remote_schema, segment.planned(plan, "remote"))
    remote.words[REPLICAS] = 2
    remote.requests[1], remote.tokens[1] = 5, 900
    assert inspect.main([segment.name]) == 0
    segment.unlink()
    text = capsys.readouterr().out
    assert "worker 0: 7 dispatched, 0 of them without an endpoint yet" in text
    assert "worker 0 band 1: 3 requests, 600 bytes, oldest 2.500, to displace 0 requests, 0 bytes" in text
    assert "band 0" not in text
    assert "2 other replicas, heartbeat at 0.000" in text
    assert "slot 1: 5 requests and 900 tokens in flight" in text


def test_series_beyond_the_shown_ones_are_counted(
    segment: Segment, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspect, "SERIES_SHOWN", 1)
    series = SeriesWriter(SERIES, SERIES.lane(segment.planned(PLAN, "errors"), 0))
    series.block(("llama",))
    series.block(("mistral",))
    assert inspect.main([segment.name]) == 0
    assert "… and 1 more" in capsys.readouterr().out


def test_segments_are_listed_by_name(segment: Segment, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect.main(["--list"]) == 0
    assert segment.name in capsys.readouterr().out.split("\n")


def test_a_segment_without_a_description_shows_its_header(capsys: pytest.CaptureFixture[str]) -> None:
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
    assert "give the name of a segment" in capsys.readouterr().err


def test_lanes_that_no_process_has_used_are_omitted(segment: Segment, capsys: pytest.CaptureFixture[str]) -> None:
    Lanes(LANES, segment.planned(PLAN, "lanes")).lane(0).take_over()
    assert inspect.main([segment.name]) == 0
    text = capsys.readouterr().out
    assert "lane 0: not serving, taken over 1 times" in text
    assert "lane 1" not in text


def test_gauges_of_series_count_only_for_lanes_that_serve(segment: Segment, capsys: pytest.CaptureFixture[str]) -> None:
    fill(segment)
    Lanes(LANES, segment.planned(PLAN, "lanes")).set_serving(1, False)
    assert inspect.main([segment.name]) == 0
    assert "model='llama': running=0, failed=3" in capsys.readouterr().out


def test_a_part_of_an_unknown_kind_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    described = json.dumps({"ring": {"kind": "ring", "at": 0, "size": 64}}).encode()
    segment = Segment.create(f"/epp-test-ring-{os.getpid()}", 64, 0xABC, described)
    assert inspect.main([segment.name]) == 0
    segment.unlink()
    text = capsys.readouterr().out
    assert "ring: ring, 64 bytes at 0\n  this version does not know parts of kind ring\n" in text


@pytest.mark.parametrize("wanted", [["--metrics-port=9190"], ["--instance=some"]])
def test_all_segments_of_an_instance_are_printed(wanted: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = InstanceLock.acquire(str(tmp_path), "some")
    lock.record(pid=os.getpid(), ports={"metrics": 9190})
    names = [f"/epp-test-{uuid.uuid4().hex[:8]}-{part}" for part in ("state", "lanes")]
    lock.record(segments=names)
    plans = (Plan({"table": TABLE}), Plan({"lanes": LANES}))
    segments = [Segment.create_planned(name, plan) for name, plan in zip(names, plans, strict=True)]
    Lanes(LANES, segments[1].planned(plans[1], "lanes")).lane(0).heartbeat(time.monotonic())
    assert inspect.main([*wanted, f"--run-dir={tmp_path}"]) == 0
    for segment in segments:
        segment.unlink()
    lock.release()
    text = capsys.readouterr().out
    assert f"instance some (pid {os.getpid()}, metrics port 9190, running)\n{names[0]}: " in text
    assert f"\n{names[1]}: " in text


def test_a_reader_that_wants_no_more_gets_no_stack_trace(segment: Segment) -> None:
    ours, theirs = os.pipe()
    os.close(ours)  # what is written meets a closed pipe
    command = [sys.executable, "-m", "shm.inspect", segment.name]
    done = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_missing_instance_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect.main(["--metrics-port=9190", f"--run-dir={tmp_path}"]) == 1
    assert f"no instance in {tmp_path}" in capsys.readouterr().err
