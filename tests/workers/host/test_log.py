"""Tests of logging: it never waits, and reports lost lines."""

import contextlib
import json
import os
import re
from pathlib import Path

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from workers.host.log import (
    ERROR_CHARS_MAX,
    EVENTS_MAX,
    LINE_BYTES_MAX,
    LINES_PER_S,
    Limit,
    LineWriter,
    configure,
    error_text,
    json_line,
    name_process,
    stack,
)


def filled() -> tuple[int, int, int]:
    """Both ends of a full pipe, and the number of bytes in it."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    size = 0
    try:
        while True:
            size += os.write(writer, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(writer, True)
    return reader, writer, size


def test_a_line_is_written_whole() -> None:
    reader, writer = os.pipe()
    lines = LineWriter(writer)
    lines.msg("hello")
    lines.close()
    assert os.read(reader, 100) == b"hello\n"
    os.close(reader)
    os.close(writer)


def test_a_full_pipe_drops_lines_without_waiting_and_the_next_one_counts_them() -> None:
    reader, descriptor, size = filled()
    writer = LineWriter(descriptor)
    writer.msg("one")
    writer.msg("two")
    assert writer.dropped == 2
    while size:
        size -= len(os.read(reader, size))
    writer.msg("three")
    first, second = os.read(reader, 4096).splitlines()
    assert json.loads(first) == {"event": "log lines dropped", "lines": 2}
    assert second == b"three"
    assert writer.dropped == 0
    os.close(reader)
    os.close(descriptor)


def test_other_holders_of_the_same_pipe_can_still_wait() -> None:
    reader, writer = os.pipe()
    LineWriter(writer).msg("x")
    assert os.get_blocking(writer)
    os.close(reader)
    os.close(writer)


def test_without_a_reader_lines_are_lost_and_nothing_else_happens() -> None:
    reader, descriptor = os.pipe()
    writer = LineWriter(descriptor)
    os.close(reader)
    writer.msg("x")
    assert writer.dropped == 1
    os.close(descriptor)


def test_a_line_is_cut_to_the_largest_atomic_write_to_a_pipe() -> None:
    reader, descriptor = os.pipe()
    LineWriter(descriptor).msg("x" * 10_000)
    data = os.read(reader, 20_000)
    assert len(data) <= LINE_BYTES_MAX
    assert data.endswith(b"...\n")
    os.close(reader)
    os.close(descriptor)


def test_a_write_to_a_socket_does_not_wait() -> None:
    import socket

    ours, theirs = socket.socketpair()
    writer = LineWriter(ours.fileno())
    writer.msg("hello")
    assert theirs.recv(100) == b"hello\n"
    for _ in range(2000):
        writer.msg("x" * 1000)
    assert writer.dropped
    ours.close()
    theirs.close()
    writer.close()


def test_an_event_is_limited_and_a_later_second_reports_the_number_of_suppressed_lines() -> None:
    now = [10.0]
    limit = Limit(lambda: now[0])
    for _ in range(LINES_PER_S):
        assert limit(None, "info", {"event": "storm"}) == {"event": "storm"}
    for _ in range(7):
        with pytest.raises(structlog.DropEvent):
            limit(None, "info", {"event": "storm"})
    assert limit(None, "info", {"event": "other"}) == {"event": "other"}
    now[0] = 11.0
    assert limit(None, "info", {"event": "storm"}) == {"event": "storm", "suppressed": 7}
    assert limit(None, "info", {"event": "storm"}) == {"event": "storm"}


def test_suppressed_lines_are_reported_even_after_a_long_pause_of_the_event() -> None:
    now = [10.0]
    limit = Limit(lambda: now[0])
    for burst in (3, 4):
        for n in range(LINES_PER_S + burst):
            if n < LINES_PER_S:
                limit(None, "info", {"event": "storm"})
            else:
                with pytest.raises(structlog.DropEvent):
                    limit(None, "info", {"event": "storm"})
        now[0] += 1.0
        limit(None, "info", {"event": "other"})
        now[0] += 1.0
        assert limit(None, "info", {"event": "storm"}) == {"event": "storm", "suppressed": burst}
        now[0] += 1.0


def test_the_number_of_suppressed_lines_is_added_to_that_of_the_line() -> None:
    now = [10.0]
    limit = Limit(lambda: now[0])
    for _ in range(LINES_PER_S):
        limit(None, "info", {"event": "storm"})
    with pytest.raises(structlog.DropEvent):
        limit(None, "info", {"event": "storm"})
    now[0] = 11.0
    assert limit(None, "info", {"event": "storm", "suppressed": 4})["suppressed"] == 5


def test_names_of_suppressed_events_are_bounded() -> None:
    now = [0.0]
    limit = Limit(lambda: now[0])
    for name in range(3 * EVENTS_MAX):
        for n in range(LINES_PER_S + 1):
            with pytest.raises(structlog.DropEvent) if n == LINES_PER_S else contextlib.nullcontext():
                limit(None, "info", {"event": f"e{name}"})
        now[0] += 1.0
    assert len(limit._lost) <= EVENTS_MAX + 1


def test_a_short_line_is_the_event_as_json() -> None:
    assert json.loads(json_line({"event": "x", "n": 1})) == {"event": "x", "n": 1}


@given(
    st.dictionaries(
        st.text("abc", min_size=1, max_size=8),
        st.one_of(
            st.integers(0, 10_000).map(lambda n: "\N{SNOWMAN}" * n),
            st.integers(0, 10_000).map(lambda n: "x" * n),
            st.lists(st.integers(), max_size=2000),
            st.none(),
        ),
        max_size=40,
    )
)
def test_a_line_of_any_event_fits_and_is_whole_json(fields: dict[str, object]) -> None:
    line = json_line({"event": "x"} | fields)
    assert len(line.encode()) < LINE_BYTES_MAX
    parsed = json.loads(line)
    assert parsed == {"event": "x"} | fields or parsed["cut"]


def test_a_value_that_is_too_long_keeps_both_ends() -> None:
    parsed = json.loads(json_line({"event": "fault", "exception": "Traceback" + "x" * 9000 + "ValueError: no", "n": 1}))
    assert parsed["exception"].startswith("Traceback")
    assert parsed["exception"].endswith("ValueError: no")
    assert (parsed["event"], parsed["n"], parsed["cut"]) == ("fault", 1, True)


def test_an_event_with_too_many_fields_keeps_its_name() -> None:
    parsed = json.loads(json_line({"event": "x"} | {f"field-{n}": n for n in range(1000)}))
    assert parsed == {"event": "x", "cut": True}


def raised_by_a_parser(problem: BaseException) -> BaseException:
    """Raise the exception with a cause, like code that reads a prompt."""
    try:
        try:
            raise TypeError("the cause")
        except TypeError as cause:
            raise problem from cause
    except BaseException as raised:
        return raised


HOSTILE = "m\x1b[2J\x9b2J\n2026-01-01 [info] forged\r\u202e\u2028\u200b"
SAFE = r"m\u001b[2J\u009b2J\n2026-01-01 [info] forged\r\u202e\u2028\u200b"


def logged(*, console: bool, **fields: object) -> str:
    """Logs an event of hostile names, and its fields. Returns what is written, without the colours."""
    before, (reader, writer) = structlog.get_config(), os.pipe()
    try:
        configure(console=console, descriptor=writer)
        try:
            raise RuntimeError(HOSTILE)
        except RuntimeError:
            structlog.get_logger().error(HOSTILE, model=HOSTILE, list=[HOSTILE], **fields)
        line = os.read(reader, 1 << 16).decode()
    finally:
        structlog.configure(**before)
        os.close(reader)
        os.close(writer)
    return re.sub("\x1b\\[[0-9;]*m", "", line)


@pytest.mark.parametrize("fields", [{}, {"exc_info": True}, {"exception": f"at\n  line {HOSTILE}"}])
def test_on_a_terminal_names_are_escaped_and_forge_no_line(fields: dict[str, object]) -> None:
    text = logged(console=True, **fields)
    assert text.replace("\n", "").isprintable()
    first, *stack_lines = text.splitlines()
    assert SAFE in first
    assert bool(fields) == bool(stack_lines) and all(line.startswith("  ") or not line for line in stack_lines)


@pytest.mark.parametrize("fields", [{}, {"exc_info": True}])
def test_elsewhere_names_are_json_with_their_value(fields: dict[str, object]) -> None:
    (line,) = logged(console=False, **fields).splitlines()
    event = json.loads(line)
    assert line.isascii() and event["event"] == event["model"] == HOSTILE and event["list"] == [HOSTILE]
    assert ("exception" in event) == bool(fields)


@pytest.mark.parametrize(
    "problem",
    [
        KeyError("my prompt"),
        ValueError("could not convert string to float: 'my prompt'"),
        UnicodeDecodeError("utf-8", b"my prompt\xff", 9, 10, "invalid start byte"),
    ],
    ids=lambda problem: type(problem).__name__,
)
def test_the_input_that_caused_an_exception_is_not_logged_but_the_place_is(problem: BaseException) -> None:
    raised = raised_by_a_parser(problem)
    assert error_text(raised) == type(problem).__name__
    assert stack(raised).endswith(type(problem).__name__) and "my prompt" not in stack(raised)
    assert "TypeError: the cause\n\n" in stack(raised) and stack(raised).count("in raised_by_a_parser") == 2


def test_the_text_of_other_exceptions_is_logged_up_to_a_length() -> None:
    assert error_text(ZeroDivisionError("division by zero")) == "ZeroDivisionError: division by zero"
    assert error_text(AssertionError()) == "AssertionError"
    assert len(error_text(RuntimeError("x" * 10_000))) == ERROR_CHARS_MAX + len("RuntimeError: ")


def test_a_line_begins_with_time_and_level_and_names_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.host.log._own", {"process": "parent"})
    before = structlog.get_config()
    with (tmp_path / "log").open("wb") as file:
        configure(console=False, descriptor=file.fileno())
        try:
            structlog.get_logger().info("first", n=1)
            name_process("worker 0")
            structlog.get_logger().warning("second", level_of="x")
        finally:
            structlog.configure(**before)
    first, second = (json.loads(line) for line in (tmp_path / "log").read_text().splitlines())
    assert list(first) == ["timestamp", "level", "process", "pid", "event", "n"]
    assert (first["process"], second["process"], second["event"]) == ("parent", "worker 0", "second")


def test_lines_of_the_access_log_are_as_many_as_the_operator_chose() -> None:
    limit = Limit(lambda: 1.0)
    assert all(limit(None, "info", {"event": "request"}) for _ in range(5 * LINES_PER_S))
