"""Tests of the seqlock at every interleaving with one intrusion. They must also catch planted bugs."""

from collections.abc import Callable

import numpy as np
import pytest

from shm import seqlock
from shm.seqlock import READ_TRIES_MAX, begin, end, read_rows, write_row
from tests.interleave import Grid, Killed, Words, every_point, kill

OLD, NEW = (1, 2, 3), (10, 20, 30)
SIZE = len(OLD)


def read_row(words: Words, at: int, size: int) -> tuple | None:
    """Read one row by the protocol. Return its body, or None if it was torn at every try."""
    for _ in range(READ_TRIES_MAX):
        version = words[at]
        body = tuple(words[at + 1 : at + 1 + size])
        if not version & 1 and words[at] == version:
            return body
    return None


def reads_during_a_write(write: Callable, read: Callable) -> set:
    seen = set()

    def scenario(n: int) -> bool:
        words = Words((0, *OLD))
        words.arm(n, lambda: seen.add(read(words, 0, SIZE)))
        write(words, 0, NEW)
        return words.fired

    every_point(scenario)
    return seen


def reads_with_a_write_inside(write: Callable, read: Callable) -> set:
    seen = set()

    def scenario(n: int) -> bool:
        words = Words((0, *OLD))
        words.arm(n, lambda: write(words, 0, NEW))
        seen.add(read(words, 0, SIZE))
        return words.fired

    every_point(scenario)
    return seen


def test_a_reader_at_any_point_of_a_write_sees_old_or_nothing() -> None:
    assert reads_during_a_write(write_row, read_row) == {OLD, None}


def test_a_write_at_any_point_of_a_read_gives_old_or_new() -> None:
    assert reads_with_a_write_inside(write_row, read_row) == {OLD, NEW}


def write_without_odd_mark(words: Words, at: int, body: tuple) -> None:
    words[at + 1 : at + 1 + len(body)] = body
    words[at] = words[at] + 2


def write_published_early(words: Words, at: int, body: tuple) -> None:
    end(words, at, begin(words, at))
    words[at + 1 : at + 1 + len(body)] = body


def write_published_within(words: Words, at: int, body: tuple) -> None:
    odd = begin(words, at)
    words[at + 1 : at + len(body)] = body[:-1]
    end(words, at, odd)
    words[at + len(body)] = body[-1]


def read_without_second_look(words: Words, at: int, size: int) -> tuple | None:
    version = words[at]
    body = tuple(words[at + 1 : at + 1 + size])
    return None if version & 1 else body


@pytest.mark.parametrize(
    ("write", "read"),
    [
        (write_without_odd_mark, read_row),
        (write_published_early, read_row),
        (write_published_within, read_row),
        (write_row, read_without_second_look),
    ],
)
def test_a_planted_bug_is_caught(write: Callable, read: Callable) -> None:
    seen = reads_during_a_write(write, read) | reads_with_a_write_inside(write, read)
    assert seen - {OLD, NEW, None}


def test_a_reader_gives_up_on_a_row_whose_writer_died() -> None:
    words = Words((0, *OLD))
    begin(words, 0)
    assert read_row(words, 0, SIZE) is None


def test_the_successor_of_a_killed_writer_makes_the_row_readable() -> None:
    def scenario(n: int) -> bool:
        words = Words((0, *OLD))
        words.arm(n, kill)
        try:
            write_row(words, 0, NEW)
        except Killed:
            assert read_row(words, 0, SIZE) in (OLD, None)
        words.disarm()
        write_row(words, 0, NEW)
        assert read_row(words, 0, SIZE) == NEW
        assert words[0] % 2 == 0
        return words.fired

    every_point(scenario)


@pytest.mark.parametrize("version", [2**64 - 1, 2**64 - 2])
def test_versions_wrap(version: int) -> None:
    words = Words((version, *OLD))
    write_row(words, 0, NEW)
    assert words[0] in (0, 2)
    assert read_row(words, 0, SIZE) == NEW


def checked(*values: int) -> tuple[int, ...]:
    check = 0
    for value in values:
        check ^= value
    return (*values, check)


OLD_ROW, NEW_ROW = checked(*OLD), checked(*NEW)
WIDTH = 1 + len(OLD_ROW)


@pytest.mark.parametrize("slot", [0, 1, 2])
def test_copies_of_all_rows_are_whole_or_marked_torn(slot: int) -> None:
    def check(rows: np.ndarray, torn: np.ndarray) -> None:
        for row, mark in zip(rows.tolist(), torn.tolist(), strict=True):
            assert mark or tuple(row[1:]) in (OLD_ROW, NEW_ROW)

    def during_write(n: int) -> bool:
        words = Words((0, *OLD_ROW) * 3)
        words.arm(n, lambda: check(*read_rows(Grid(words, 0, 3, WIDTH))))
        write_row(words, slot * WIDTH, NEW_ROW)
        return words.fired

    def during_read(n: int) -> bool:
        words = Words((0, *OLD_ROW) * 3)
        words.arm(n, lambda: write_row(words, slot * WIDTH, NEW_ROW))
        check(*read_rows(Grid(words, 0, 3, WIDTH)))
        return words.fired

    assert every_point(during_write) > 5
    assert every_point(during_read) > 15


def test_the_check_word_catches_a_torn_row_whose_version_did_not_move() -> None:
    rows = np.array([(4, *OLD_ROW), (4, NEW_ROW[0], *OLD_ROW[1:])], dtype=np.uint64)
    _, torn = seqlock.read_rows(rows)
    assert torn[0] == 0
    assert torn[1] != 0
