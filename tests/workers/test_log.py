"""Logging never waits, and says what it lost."""

import contextlib
import json
import os
import re

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from workers.log import (
    EVENTS_MAX,
    LINE_BYTES_MAX,
    LINES_PER_S,
    TOLD_CHARS_MAX,
    Limit,
    LineWriter,
    configure,
    json_line,
    stack,
    told,
)


def filled() -> tuple[int, int, int]:
    """Both ends of a pipe that is full, and how many bytes it holds."""
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


def test_not_waiting_is_not_forced_on_others_who_hold_the_same_pipe() -> None:
    reader, writer = os.pipe()
    LineWriter(writer).msg("x")
    assert os.get_blocking(writer)
    os.close(reader)
    os.close(writer)


def test_a_reader_that_is_gone_costs_lines_and_nothing_else() -> None:
    reader, descriptor = os.pipe()
    writer = LineWriter(descriptor)
    os.close(reader)
    writer.msg("x")
    assert writer.dropped == 1
    os.close(descriptor)


def test_a_line_is_cut_to_what_a_pipe_takes_in_one_piece() -> None:
    reader, descriptor = os.pipe()
    LineWriter(descriptor).msg("x" * 10_000)
    data = os.read(reader, 20_000)
    assert len(data) <= LINE_BYTES_MAX
    assert data.endswith(b"...\n")
    os.close(reader)
    os.close(descriptor)


def test_a_socket_is_written_without_waiting_too() -> None:
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


def test_one_event_is_limited_and_the_rest_is_told_in_a_later_second() -> None:
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


def test_what_was_suppressed_is_told_however_long_the_event_is_quiet() -> None:
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


def test_a_line_s_own_count_of_what_it_suppressed_is_added_to() -> None:
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
    found = json.loads(line)
    assert found == {"event": "x"} | fields or found["cut"]


def test_of_a_value_that_is_too_long_both_ends_stay() -> None:
    found = json.loads(json_line({"event": "fault", "exception": "Traceback" + "x" * 9000 + "ValueError: no", "n": 1}))
    assert found["exception"].startswith("Traceback")
    assert found["exception"].endswith("ValueError: no")
    assert (found["event"], found["n"], found["cut"]) == ("fault", 1, True)


def test_an_event_of_too_many_fields_keeps_its_name() -> None:
    found = json.loads(json_line({"event": "x"} | {f"field-{n}": n for n in range(1000)}))
    assert found == {"event": "x", "cut": True}


def choked(problem: BaseException) -> BaseException:
    """As if raised by what reads a prompt, and because of something else."""
    try:
        try:
            raise TypeError("the cause")
        except TypeError as cause:
            raise problem from cause
    except BaseException as raised:
        return raised


def test_on_a_terminal_nothing_that_is_logged_steers_it() -> None:
    before, (reader, writer) = structlog.get_config(), os.pipe()
    try:
        configure(console=True, descriptor=writer)
        structlog.get_logger().error(
            "a\x1b]0;title\x07", model="\x1b[2Jm", list=["\x9b2J"], exception="at\n  line\x1b[2J"
        )
        line = os.read(reader, 4096).decode()
    finally:
        structlog.configure(**before)
        os.close(reader)
        os.close(writer)
    plain = re.sub("\x1b\\[[0-9;]*m", "", line)  # but for colours
    assert "?[2Jm" in plain and "at\n  line?[2J" in plain
    assert plain.replace("\n", "").isprintable()


@pytest.mark.parametrize(
    "problem",
    [
        KeyError("my prompt"),
        ValueError("could not convert string to float: 'my prompt'"),
        UnicodeDecodeError("utf-8", b"my prompt\xff", 9, 10, "invalid start byte"),
    ],
    ids=lambda problem: type(problem).__name__,
)
def test_what_an_exception_choked_on_is_not_told_but_where(problem: BaseException) -> None:
    raised = choked(problem)
    assert told(raised) == type(problem).__name__
    assert stack(raised).endswith(type(problem).__name__) and "my prompt" not in stack(raised)
    assert "TypeError: the cause\n\n" in stack(raised) and stack(raised).count("in choked") == 2


def test_other_exceptions_are_told_in_their_words_up_to_a_length() -> None:
    assert told(ZeroDivisionError("division by zero")) == "ZeroDivisionError: division by zero"
    assert told(AssertionError()) == "AssertionError"
    assert len(told(RuntimeError("x" * 10_000))) == TOLD_CHARS_MAX + len("RuntimeError: ")
