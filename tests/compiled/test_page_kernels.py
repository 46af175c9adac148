"""The kernels for metrics pages in C against the Python code beside their calls."""

import contextlib
import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from compiled import kernels
from compiled.kernels import reference
from workers.supervisor.endpoints.http_answer import HEAD_BYTES_MAX, HttpError, ServerAnswer

native_only = pytest.mark.skipif(not kernels.NATIVE, reason="the kernels in C are not built")

NAMES = ("a", "ab", "vllm:x")
LINES = st.sampled_from(
    [b"a 1", b"ab 2", b"a_b 3", b"", b"\r", b" a 4", b"# EOF", b"# HELP a text", b"# TYPE a gauge", b"# TYPE ab gauge", b"# a"]
)
NUMBERS = st.floats().map(repr) | st.sampled_from(
    [
        "1",
        "-0",
        "+Inf",
        "nan",
        "1_0",
        "1e400",
        "-1e-400",
        "",
        " 7 ",
        "7\r",
        "\x0b8\t",
        "5 1700000000",
        "0x10",
        "1.",
        ".5",
        "1e",
        "1.0f",
        "\u0661",
    ]
)


def same_value(one: tuple[int, float] | None, other: tuple[int, float] | None) -> bool:
    if one is None or other is None:
        return one is other
    return one[0] == other[0] and (one[1] == other[1] or (math.isnan(one[1]) and math.isnan(other[1])))


def both(*arguments: Any) -> tuple[int, float] | None:
    """What the kernel and the Python code recall, which must be the same."""
    native, plain = kernels.recall(*arguments), reference.recall(*arguments)
    assert same_value(native, plain), (arguments, native, plain)
    return plain


@native_only
@given(
    above=st.lists(LINES, max_size=4),
    below=st.lists(LINES, max_size=3),
    name=st.sampled_from(NAMES),
    labels=st.sampled_from([b"", b'{l="x"}', b'{l="a\\"b",m="\xc3\xa9"}']),
    value=NUMBERS,
    typed=st.booleans(),
    ended=st.booleans(),
    off=st.integers(0, 600),
)
@example([], [], "a", b"", "1", False, True, 0)
@example([b"# TYPE a gauge"], [], "a", b"", "nan", False, True, 0)
@example([b"a 1"] * 4, [], "vllm:x", b"", "1", True, False, 300)
def test_a_value_is_recalled_from_the_same_place(
    above: list[bytes], below: list[bytes], name: str, labels: bytes, value: str, typed: bool, ended: bool, off: int
) -> None:
    series = name.encode() + labels + b" "
    text = b"\n" + (b"# TYPE %s gauge\n" % name.encode() if typed else b"") + series
    page = b"\n".join(above) + text + value.encode() + b"\n" + b"\n".join(below) + (b"\n" if ended else b"")
    lines = b"\n" + name.encode(), b"# TYPE %s " % name.encode()
    found = both(page, text, off, *lines)
    at = page.find(text)
    assert found is None or page.startswith(text, found[0])
    for place in {at, max(at - 256, 0), max(at - 257, 0), at + 256, at + 257, len(page), len(page) + 1000}:
        both(page, text, place, *lines)
    for cut in range(0, len(page), max(len(page) // 9, 1)):
        both(page[:cut], text, at, *lines)


@native_only
@given(page=st.binary(max_size=80), text=st.binary(min_size=1, max_size=4), at=st.integers(0, 90), name=st.binary(max_size=2))
def test_any_bytes_are_read_in_the_same_way(page: bytes, text: bytes, at: int, name: bytes) -> None:
    both(page.replace(b"\x07", b"\n"), text, at, b"\n" + name, b"# TYPE " + name)


@native_only
def test_a_value_far_into_a_huge_page_is_recalled_there_and_after_a_shift_only() -> None:
    filler = b"other 1\n" * (1 << 18)
    text, lines = b'\na{l="x"} ', (b"\na", b"# TYPE a ")
    page = filler + text[1:] + b"4.5\n" + filler
    at = len(filler) - 1
    assert both(page, text, at, *lines) == (at, 4.5)
    assert both(page, text, at + 256, *lines) == (at, 4.5)
    assert both(page, text, at + 257, *lines) is None
    assert both(b"x\n" * 120 + page, text, at, *lines) == (at + 240, 4.5)


@native_only
@pytest.mark.parametrize(
    "arguments",
    [(b"p", b"", 0, b"\na", b"#"), (b"p", b"t", -1, b"\na", b"#"), (b"p", b"t", 0, b"", b"#"), ("p", b"t", 0, b"\na", b"#"), (b"p", b"t")],
)
def test_recall_refuses_what_is_no_place_on_a_page(arguments: tuple[Any, ...]) -> None:
    with pytest.raises((TypeError, ValueError)):
        kernels.recall(*arguments)


HEADERS = st.sampled_from(
    [
        b"Content-Length: 12",
        b"content-length:0",
        b"CONTENT-LENGTH: \t 7 \x0b",
        b"Content-Length: 1234567890123456789",
        b"Content-Length: 123456789012345678",
        b"Content-Length: -1",
        b"Content-Length:",
        b"Content-Length : 4",
        b"X-Content-Length: 4",
        b"Connection: close",
        b"connection : x",
        b"Content-Encoding: gzip",
        b"TRANSFER-ENCODING: chunked",
        b"date: Thu, 26 Nov 2026 18:19:04 GMT",
        b"a\rb",
        b"c\nd",
        b"",
    ]
)
STATUS = st.sampled_from([b"HTTP/1.1 200 OK", b"http/1.1 200", b"HTTP/1.0 200 OK", b"HTTP/1.1 404 Not Found", b"HTTP/1.1 20", b""])


@native_only
@given(
    status=STATUS, headers=st.lists(HEADERS, max_size=4), body=st.binary(max_size=8), most=st.integers(-1, 120) | st.just(HEAD_BYTES_MAX)
)
def test_what_a_plain_head_says_is_what_the_general_decoder_finds(status: bytes, headers: list[bytes], body: bytes, most: int) -> None:
    answer = b"".join(line + b"\r\n" for line in (status, *headers)) + b"\r\n" + body
    for cut in range(len(answer) + 1):
        received = memoryview(bytearray(answer[:cut]))
        found = kernels.plain_head(received, most)
        if found is not None and sum(found) == cut:
            assert found[0] <= most
            assert decoded(answer[:cut]) == answer[found[0] : cut]


def decoded(answer: bytes) -> bytes | None:
    """What the general decoder finds in an answer: one in pieces is not looked at by the kernel."""
    decoder = ServerAnswer()
    with contextlib.suppress(HttpError):
        return decoder.receive(answer[:1]) or decoder.receive(answer[1:])
    return None


@native_only
def test_a_usual_head_is_plain() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 12\r\n\r\n"
    assert kernels.plain_head(head + bytes(12), HEAD_BYTES_MAX) == (len(head), 12)


@native_only
def test_plain_head_refuses_what_has_no_bytes() -> None:
    with pytest.raises(TypeError):
        kernels.plain_head("HTTP/1.1 200", 9)  # type: ignore[arg-type]


@native_only
@given(st.lists(st.integers(0, (1 << 64) - 1), min_size=1, max_size=40))
def test_seal_is_equal_and_makes_the_words_cancel_out(words: list[int]) -> None:
    native, plain = (memoryview(bytearray(8 * len(words))).cast("Q") for _ in range(2))
    for view in native, plain:
        for at, word in enumerate(words):
            view[at] = word
    kernels.seal(native)
    reference.seal(plain)
    assert native == plain
    total = 0
    for word in native:
        total ^= word
    assert total == 0


@native_only
@pytest.mark.parametrize(
    "words",
    [
        b"12345678",
        memoryview(bytes(16)).cast("Q"),
        memoryview(bytearray(16)),
        memoryview(bytearray(16)).cast("q"),
        memoryview(bytearray(0)).cast("Q"),
    ],
)
def test_seal_refuses_what_is_not_words(words: Any) -> None:
    with pytest.raises(TypeError):
        kernels.seal(words)
