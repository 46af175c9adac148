"""Logging never waits, and says what it lost."""

import json
import os

import pytest
import structlog

from workers.log import LINE_BYTES_MAX, LINES_PER_S, Limit, LineWriter


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
