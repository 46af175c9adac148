"""Log lines about endpoints: few lines that lose only details, and snapshots in complete parts."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm.documents import DocumentReader, DocumentSchema, DocumentWriter
from shm.segment import Region
from shm.table import DOWN, State, TableReader, TableSchema, TableWriter
from tests.workers.recorder import Recorder
from workers.host.log import LINE_BYTES_MAX, LINES_PER_S
from workers.shared.documents import ENDPOINTS, NAMES, EndpointRecord, EndpointsView, NamesRecord, NamesView, encode
from workers.supervisor.endpoints.endpoint_log import (
    COUNTED_MAX,
    LINES_MAX,
    PART_EVERY_S,
    SNAPSHOT_EVERY_S,
    Change,
    Condition,
    EndpointLog,
    Kind,
    Snapshots,
    parts,
    shown,
)


def change(name: object, **more: Any) -> Change:
    return Change(f"default/{name}", "10.0.0.1:8000", **more)


def made() -> tuple[EndpointLog, Recorder]:
    recorder = Recorder()
    return EndpointLog(log=recorder), recorder


def test_up_to_five_changes_of_a_kind_get_a_line_each() -> None:
    log, recorder = made()
    for name in range(LINES_MAX):
        log.add(Kind.APPEARED, change(name))
    log.flush(100.0)
    assert [line["endpoint"] for line in recorder.of("endpoint appeared")] == [f"default/{n}" for n in range(5)]


def test_more_changes_share_one_line_with_counts_first_names_conditions_and_causes() -> None:
    log, recorder = made()
    for name in range(30):
        log.add(Kind.DOWN, change(name, previous=Condition(("fresh", "stale")[name % 3 == 0]), cause="refused"))
    log.flush(100.0)
    assert recorder.lines == [
        (
            "warning",
            "endpoints down",
            {
                "endpoints": 30,
                "first": [f"default/{name}" for name in range(8)],
                "previous": {"stale": 10, "fresh": 20},
                "causes": {"refused": 30},
            },
        )
    ]


def test_a_line_about_many_unreadable_endpoints_has_the_cause_of_one() -> None:
    log, recorder = made()
    for name in range(30):
        log.add(Kind.UNREADABLE, change(name, cause="status", why="the answer is not 200"))
    log.flush(100.0)
    (line,) = recorder.of("endpoints not readable")
    assert (line["endpoints"], line["why"]) == (30, "the answer is not 200")


def test_a_kind_without_budget_waits_a_second_and_delays_no_other_kind() -> None:
    log, recorder = made()
    for name in range(6):
        log.add(Kind.APPEARED, change(name))
    log.flush(100.0)
    log.add(Kind.APPEARED, change("late"))
    log.add(Kind.LEFT, change("gone"))
    log.flush(100.5)
    assert recorder.events() == ["endpoints appeared", "endpoint left"]
    log.flush(100.9)
    assert not recorder.lines
    log.flush(101.0)
    assert recorder.events() == ["endpoint appeared"]


def test_the_next_line_of_an_endpoint_counts_its_changes_since_the_last_one() -> None:
    log, recorder = made()
    for n in range(5):
        log.add(Kind.UP, change(n))
    log.flush(100.0)
    recorder.lines.clear()
    for cause in ("timeout", "closed", "refused"):
        log.add(Kind.UP, change("a", cause=cause))
    log.flush(101.0)
    (line,) = recorder.of("endpoint up")
    assert (line["cause"], line["suppressed"]) == ("refused", 2)


def test_a_summary_counts_changes_if_endpoints_changed_more_than_once() -> None:
    log, recorder = made()
    for n in range(40):
        log.add(Kind.UP, change(n % 10))
    log.flush(100.0)
    (line,) = recorder.of("endpoints up")
    assert (line["endpoints"], line["changes"]) == (10, 40)


def test_any_number_of_endpoints_is_counted_in_bounded_memory() -> None:
    log, recorder = made()
    for n in range(COUNTED_MAX + 1000):
        log.add(Kind.LEFT, change(n))
    collected = log._collected[Kind.LEFT]
    assert (len(collected.times), len(collected.changes)) == (COUNTED_MAX, 8)
    log.flush(100.0)
    (line,) = recorder.of("endpoints left")
    assert (line["endpoints"], line["changes"]) == (COUNTED_MAX, COUNTED_MAX + 1000)


@given(st.lists(st.tuples(st.integers(0, 12), st.sampled_from(list(Kind)[:3]), st.integers(0, 40)), max_size=120))
def test_every_change_is_logged_or_counted_and_a_kind_gets_few_lines_per_second(steps: list[tuple[int, Kind, int]]) -> None:
    log, recorder = made()
    now = 100.0
    for name, kind, wait in steps:
        log.add(kind, change(name))
        now += wait / 100
        log.flush(now)
    log.flush(now + 2.0)
    for kind in list(Kind)[:3]:
        single, many = recorder.of(f"endpoint {kind.value}"), recorder.of(f"endpoints {kind.value}")
        counted = len(single) + sum(line.get("suppressed", 0) for line in single)
        counted += sum(line.get("changes", line["endpoints"]) for line in many)
        assert counted == sum(step_kind is kind for _, step_kind, _ in steps)
        assert len(single) + len(many) <= LINES_MAX + (now + 2.0 - 100.0)


def test_an_ipv6_address_is_in_brackets() -> None:
    record = EndpointRecord("default", "a", "fd00::1", 8000, {}, 0, 1, 1)
    assert shown(record) == ("default/a", "[fd00::1]:8000")


# Snapshots


class FakeLoop:
    """A clock that moves to the next timer."""

    def __init__(self) -> None:
        self.time = 100.0
        self.timers: list[Any] = []

    def call_later(self, delay: float, callback: Callable[[], None]) -> Any:
        timer = FakeTimer(self, self.time + delay, callback)
        self.timers.append(timer)
        return timer

    def run(self) -> None:
        timer = self.timers.pop(0)
        self.time = timer.at
        timer.callback()


class FakeTimer:
    def __init__(self, loop: FakeLoop, at: float, callback: Callable[[], None]) -> None:
        self.loop, self.at, self.callback = loop, at, callback

    def cancel(self) -> None:
        self.loop.timers.remove(self)


class Pool:
    """A table and documents with endpoints, and the snapshots of them."""

    def __init__(self, endpoints: int, columns: tuple[str, ...] = ("waiting_requests", "kv_cache_usage")) -> None:
        schema = TableSchema(columns, max(endpoints, 1))
        region = Region(memoryview(bytearray(schema.bytes)))
        self.table = TableWriter(schema, region)
        document_schema = DocumentSchema((1 << 18, 1 << 14))
        memory = Region(memoryview(bytearray(document_schema.bytes)))
        self.documents = DocumentWriter(document_schema, memory)
        self.handles = [self.table.take(n + 1, lambda slot: True) for n in range(endpoints)]
        records = [
            EndpointRecord("default", f"vllm-llama-7d9f8b6c5-{n:05}-rank-0", f"10.0.{n >> 8}.{n & 255}", 8000, {}, *handle, n + 1)
            for n, handle in enumerate(self.handles)
            if handle is not None
        ]
        self.documents.write(ENDPOINTS, encode(records))
        self.loop, self.recorder = FakeLoop(), Recorder()
        reader = DocumentReader(document_schema, memory)
        self.snapshots = Snapshots(
            self.loop,  # type: ignore[arg-type]
            TableReader(schema, region),
            EndpointsView(reader),
            NamesView(reader),
            now=lambda: self.loop.time,
            log=self.recorder,
        )

    def write(self, n: int, state: State, *values: float, at: float = 99.0, present: int = 3, flags: int = 0) -> None:
        handle = self.handles[n]
        assert handle is not None
        self.table.write(handle, state=state, flags=flags, updated_at=at, inflight_at_scrape=0, values=values, present=present)

    def snapshot(self) -> list[dict[str, Any]]:
        """The parts of the next snapshot."""
        self.recorder.lines.clear()
        self.loop.run()
        while (last := self.recorder.lines[-1][2])["part"] < last["of"]:
            self.loop.run()
        return [fields for _, _, fields in self.recorder.lines]


def test_a_snapshot_has_all_endpoints_by_state_with_values_and_ages() -> None:
    pool = Pool(4)
    pool.write(0, State.FRESH, 3.0, 0.123456, at=104.99)
    pool.write(1, State.STALE, 4.0, 0.5, at=103.0, flags=DOWN)
    pool.write(2, State.FRESH, 7.0, 0.0, at=105.0, present=1)
    pool.documents.write(NAMES, encode([NamesRecord(0, 1, {"active_models": ["x", "y"]})]))
    pool.snapshots.start()
    (record,) = pool.snapshot()
    name = "default/vllm-llama-7d9f8b6c5-0000{}-rank-0".format
    assert record == {
        "part": 1,
        "of": 1,
        "fresh": {
            name(0): {"address": "10.0.0.0:8000", "age_s": 0.01, "waiting_requests": 3, "kv_cache_usage": 0.1235, "active_models": 2},
            name(2): {"address": "10.0.0.2:8000", "age_s": 0.0, "waiting_requests": 7},
        },
        "stale": {name(1): {"address": "10.0.0.1:8000", "age_s": 2.0, "down": True, "waiting_requests": 4, "kv_cache_usage": 0.5}},
        "unknown": {name(3): {"address": "10.0.0.3:8000"}},
    }
    assert pool.recorder.lines[0][:2] == ("debug", "endpoints")


def test_a_snapshot_is_logged_every_five_seconds_until_the_end_even_without_endpoints() -> None:
    pool = Pool(0, columns=())
    pool.snapshots.start()
    for n in range(1, 4):
        assert pool.snapshot() == [{"part": 1, "of": 1}]
        assert pool.loop.time == 100.0 + n * SNAPSHOT_EVERY_S
    pool.snapshots.close()
    assert not pool.loop.timers


def test_a_snapshot_of_a_thousand_endpoints_has_one_line_per_part_and_respects_the_pace_of_the_log() -> None:
    pool = Pool(1000)
    for n in range(1000):
        pool.write(n, (State.FRESH, State.STALE)[n % 2], 12345.0 + n, n / 1003)
    pool.snapshots.start()
    found = pool.snapshot()
    assert [(part["part"], part["of"]) for part in found] == [(n, len(found)) for n in range(1, len(found) + 1)]
    names = [name for part in found for state in ("fresh", "stale", "unknown") for name in part.get(state, ())]
    assert len(names) == len(set(names)) == 1000
    envelope = {"event": "endpoints", "level": "debug", "timestamp": "2000-01-01T00:00:00.000000Z", "pid": 4_000_000}
    sizes = [len(json.dumps(envelope | part)) for part in found]
    assert max(sizes) < LINE_BYTES_MAX
    assert min(sizes[:-1]) > LINE_BYTES_MAX * 3 / 4
    assert 1 / PART_EVERY_S < LINES_PER_S
    assert pool.loop.time == pytest.approx(100.0 + SNAPSHOT_EVERY_S + (len(found) - 1) * PART_EVERY_S)
    again = pool.snapshot()
    assert pool.loop.time == pytest.approx(100.0 + 2 * SNAPSHOT_EVERY_S + (len(again) - 1) * PART_EVERY_S)


@given(st.lists(st.tuples(st.sampled_from(("fresh", "stale")), st.integers(0, 6000)), max_size=60))
def test_parts_contain_each_endpoint_once_and_only_a_single_long_endpoint_makes_a_part_too_long(sizes: list[tuple[str, int]]) -> None:
    rows = [(state, f"e{n}", {"address": "x" * size}) for n, (state, size) in enumerate(sorted(sizes))]
    found = parts(rows)
    held = [(state, name) for part in found for state in ("fresh", "stale") for name in part.get(state, ())]
    assert held == [(state, name) for state, name, _ in rows]
    for part in found:
        alone = sum(len(part.get(state, ())) for state in ("fresh", "stale")) == 1
        assert alone or len(json.dumps(part)) < LINE_BYTES_MAX - 200


def test_a_row_is_left_out_if_its_new_endpoint_is_not_in_the_document_yet() -> None:
    pool = Pool(2)
    handle = pool.handles[0]
    assert handle is not None
    pool.table.release(handle)
    pool.table.take(9, lambda slot: True)
    pool.snapshots.start()
    (record,) = pool.snapshot()
    assert list(record["unknown"]) == ["default/vllm-llama-7d9f8b6c5-00001-rank-0"]


def test_the_last_endpoint_that_leaves_or_fails_has_a_line_and_the_first_that_returns_another() -> None:
    log, recorder = made()
    for endpoints, usable in ((0, 0), (2, 2), (2, 1), (2, 0), (2, 0), (0, 0), (1, 1)):
        log.left(endpoints, usable)
    told = [(level, event, fields["endpoints"]) for level, event, fields in recorder.lines]
    assert told == [("error", "no endpoint is healthy", 2), ("error", "no endpoint is left", 0), ("info", "there are endpoints again", 1)]
    assert "stale or down" in recorder.lines[0][2]["why"] and "discovery knows none" in recorder.lines[1][2]["why"]
