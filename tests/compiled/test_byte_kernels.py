"""The kernels in C that read bytes, words or coroutines, against their references in Python."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from compiled import kernels
from compiled.kernels import reference

native_only = pytest.mark.skipif(not kernels.NATIVE, reason="the kernels in C are not built")


def same(one: Callable[..., Any], other: Callable[..., Any], *arguments: Any) -> None:
    assert one(*arguments) == other(*arguments)


@native_only
@given(st.binary(max_size=40), st.binary(max_size=3), st.integers(-50, 50), st.integers(-50, 50))
@example(b"", b"", 0, 0)
@example(b"abc", b"", 4, 9)
@example(b"abc", b"", 3, 3)
@example(b"a\0b\0", b"\0", -1, 4)
def test_find_is_equal(data: bytes, needle: bytes, start: int, end: int) -> None:
    same(kernels.find, reference.find, data, needle)
    same(kernels.find, reference.find, data, needle, start)
    same(kernels.find, reference.find, data, needle, start, end)
    inside = data[start:end][:2]
    same(kernels.find, reference.find, data, inside, start, end)


@native_only
@given(st.binary(max_size=200) | st.text("aAxX-", max_size=200).map(str.encode), st.data())
def test_mentions_is_equal(data: bytes, draw: st.DataObject) -> None:
    start, end = draw.draw(st.integers(0, len(data) + 1)), draw.draw(st.integers(0, len(data) + 1))
    at = draw.draw(st.integers(start, max(start, end)))
    for text in (data[at : at + 9].lower(), draw.draw(st.binary(max_size=3)).lower()):
        same(kernels.mentions, reference.mentions, data, text, start, end)


@native_only
@given(st.uuids().map(str) | st.text(max_size=40), st.integers(0, 35), st.sampled_from(["", "-", "G", "f", "F", "é", "0\n"]))
def test_is_uuid_is_equal(text: str, at: int, instead: str) -> None:
    for each in (text, text.upper(), text[:at] + instead + text[at + 1 :], text[:at] + instead + text[at:]):
        same(kernels.is_uuid, reference.is_uuid, each)


@native_only
@given(st.text('{}":a\\', max_size=90).map(str.encode), st.integers(0, 80), st.integers(0, 100))
def test_flat_end_is_equal(data: bytes, at: int, most: int) -> None:
    same(kernels.flat_end, reference.flat_end, data[:at] + b"{" + data[at:], min(at, len(data)), most)


@native_only
@given(st.binary(min_size=14, max_size=60), st.data())
def test_framed_message_is_equal(data: bytes, draw: st.DataObject) -> None:
    same(kernels.framed_message, reference.framed_message, data, draw.draw(st.integers(0, len(data) - 14)))


@native_only
@given(st.integers(0, (1 << 24) - 1), st.integers(0, (1 << 31) - 1), st.binary(min_size=9, max_size=40))
def test_frame_headers_are_equal(size: int, number: int, frame: bytes) -> None:
    same(kernels.data_header, reference.data_header, size, number)
    same(kernels.numbered, reference.numbered, frame, number)


@native_only
def test_a_frame_that_cannot_be_is_refused() -> None:
    for size, number in ((1 << 24, 1), (1, 1 << 32), (-1, 1)):
        with pytest.raises(OverflowError):
            kernels.data_header(size, number)
    with pytest.raises(TypeError, match="bytes of a frame"):
        kernels.numbered(bytes(8), 1)


HEADER = st.tuples(st.sampled_from([b":path", b"a"]), st.binary(max_size=130), st.sampled_from([0, 0, 0, 1, -1]))


@native_only
@given(st.lists(HEADER, max_size=4), st.integers(0, 5), st.integers(0, 300))
def test_a_header_is_found_alike(headers: list[tuple[bytes, bytes, int]], start: int, end: int) -> None:
    """Some lengths are wrong, as in text that only looks like a header."""
    message = b""
    for name, value, wrong in headers:
        entry = b"\x0a" + bytes((len(name),)) + name + b"\x1a" + bytes((min(len(value), 255),)) + value
        message += b"\x0a" + bytes(((len(entry) + wrong) & 0xFF,)) + entry
    for needle in (b"\x0a\x05:path\x1a", b"\x0a\x01a\x1a"):
        same(kernels.header, reference.header, message, needle, min(start, len(message)), min(end, len(message)))
        same(kernels.header, reference.header, message, needle, 0, len(message))


@native_only
@pytest.mark.parametrize("at", [-1, 1, 1 << 40])
def test_a_frame_outside_the_bytes_is_refused(at: int) -> None:
    with pytest.raises(ValueError, match="no 14 bytes"):
        kernels.framed_message(bytes(14), at)


@pytest.mark.parametrize("step", [kernels.step, reference.step])
def test_a_coroutine_is_stepped_from_wait_to_wait_to_its_result(step: Any) -> None:
    class Wait:
        def __await__(self) -> Any:
            return (yield self)

    async def waits(*for_: Wait) -> str:
        for each in for_:
            await each
        return "done"

    first, second = Wait(), Wait()
    coroutine = waits(first, second)
    assert [step(coroutine) for _ in range(3)] == [(False, first), (False, second), (True, "done")]


@pytest.mark.parametrize("step", [kernels.step, reference.step])
@pytest.mark.parametrize("error", [KeyError("a"), asyncio.CancelledError()])
def test_the_exception_of_a_coroutine_leaves_the_step(step: Any, error: BaseException) -> None:
    async def fails() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        step(fails())
    assert caught.value is error


@native_only
@given(st.integers(0, 3), st.integers(-(1 << 40), 1 << 40), st.sampled_from("ql"))
def test_increase_is_equal(at: int, by: int, code: str) -> None:
    first, second = (memoryview(bytearray(32)).cast(code) for _ in range(2))
    for _ in range(2):
        kernels.increase(first, at, by)
        reference.increase(second, at, by)
    kernels.increase(first, at)
    reference.increase(second, at)
    assert first.tolist() == second.tolist()


@native_only
@pytest.mark.parametrize("at", [-1, 4, 1 << 62])
def test_increase_writes_only_inside_its_words(at: int) -> None:
    words = memoryview(bytearray(32)).cast("q")
    with pytest.raises(IndexError):
        kernels.increase(words, at, 1)
    assert not any(words)


@native_only
@pytest.mark.parametrize(
    "words",
    [memoryview(bytes(32)).cast("q"), memoryview(bytearray(32)).cast("i"), memoryview(bytearray(32)), bytearray(32),
     memoryview(bytearray(32)).cast("q")[::2], memoryview(bytearray(32)).cast("d")],
    ids=["read-only", "short words", "bytes", "no view", "gaps", "floats"],
)  # fmt: skip
def test_increase_refuses_what_is_not_words(words: Any) -> None:
    with pytest.raises(TypeError):
        kernels.increase(words, 0, 1)


@native_only
@given(st.lists(st.floats(allow_nan=False), min_size=1, max_size=5), st.integers(-2, 6), st.floats(allow_nan=False))
def test_raise_to_is_equal(values: list[float], at: int, value: float) -> None:
    first, second = np.array(values), np.array(values)
    for raise_to, cells in ((kernels.raise_to, first), (reference.raise_to, second)):
        if 0 <= at < len(values):
            raise_to(cells, at, value)
        else:
            with pytest.raises(IndexError):
                raise_to(cells, at, value)
    assert first.tolist() == second.tolist()
