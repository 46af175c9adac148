"""Decoding one HTTP answer: for any division into pieces, and with every kind of fault."""

import gzip

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import cases
from workers.supervisor.endpoints.http_answer import CHUNKS_MAX, HEAD_BYTES_MAX, INTERIM_MAX, PAGE_BYTES_MAX, HttpError, ServerAnswer
from workers.supervisor.endpoints.http_client import get_request

PAGE = b"a 1\nb 2\n" * 5
OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"
CHUNKED = b"8\r\na 1\nb 2\n\r\n20;x=y\r\n" + PAGE[8:] + b"\r\n0\r\nTrailer: x\r\n\r\n"
PACKED = gzip.compress(PAGE)


def sized(page: bytes, more: bytes = b"") -> bytes:
    return OK + more + b"Content-Length: %d\r\n\r\n" % len(page) + page


HINTS = b"HTTP/1.1 103 Early Hints\r\nLink: </style.css>\r\n\r\n"
ANSWERS = {
    "sized": sized(PAGE),
    "lower case": sized(PAGE).replace(b"Content-Length: ", b"content-length:"),
    "chunked": OK + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKED,
    "gzip": sized(PACKED, b"Content-Encoding: gzip\r\n"),
    "gzip of two members": sized(gzip.compress(PAGE[:16]) + gzip.compress(PAGE[16:]), b"Content-Encoding: gzip\r\n"),
    "after interim answers": b"HTTP/1.1 100 Continue\r\n\r\n" + HINTS * (INTERIM_MAX - 1) + sized(PAGE),
    "until close": b"HTTP/1.0 200 OK\r\n\r\n" + PAGE,
    "chunked gzip": OK + b"Transfer-Encoding: chunked\r\nContent-Encoding: gzip\r\n\r\n%x\r\n" % len(PACKED) + PACKED + b"\r\n0\r\n\r\n",
}


def read(answer: ServerAnswer, pieces: list[bytes], *, end: bool = False) -> bytes | None:
    page = None
    for piece in pieces:
        assert page is None
        page = answer.receive(piece)
    return answer.end() if page is None and end else page


@pytest.mark.parametrize("kind", ANSWERS)
@given(data=st.data())
def test_a_page_is_the_same_for_any_division_into_pieces(kind: str, data: st.DataObject) -> None:
    raw = ANSWERS[kind]
    cuts = sorted(data.draw(st.sets(st.integers(1, len(raw) - 1), max_size=6)))
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    assert read(ServerAnswer(), pieces, end=kind == "until close") == PAGE


@pytest.mark.parametrize("kind", [kind for kind in ANSWERS if kind != "until close"])
def test_an_answer_that_is_truncated_at_any_byte_is_never_a_page(kind: str) -> None:
    raw = ANSWERS[kind]
    for cut in range(1, len(raw)):
        answer = ServerAnswer()
        assert answer.receive(raw[:cut]) is None
        with pytest.raises(HttpError, match="ended inside"):
            answer.end()


@given(st.binary(max_size=300), st.sampled_from(sorted(ANSWERS)), st.integers(0, 120))
def test_any_bytes_are_a_page_an_error_or_incomplete(noise: bytes, kind: str, at: int) -> None:
    answer = ServerAnswer()
    raw = ANSWERS[kind]
    try:
        for piece in (raw[:at], noise, raw[at:]):
            if piece and answer.receive(piece) is not None:
                break
    except HttpError as failure:
        assert failure.cause


@cases(
    ("raw", "cause"),
    [
        (b"HTTP/1.1 404 Not Found\r\n\r\n", "status"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://169.254.169.254/\r\n\r\n", "status"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", "status"),
        (b"\x16\x03\x01 not http\r\n\r\n", "status"),
        (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n", "status"),
        (b"x" * HEAD_BYTES_MAX, "head"),
        (HINTS * (INTERIM_MAX + 1), "head"),
        (OK + b"Content-Length: many\r\n\r\n", "length"),
        (OK + b"Content-Length: -1\r\n\r\n", "length"),
        (OK + b"Content-Length: " + b"9" * 30 + b"\r\n\r\n", "length"),
        (OK + b"Content-Length: %d\r\n\r\n" % (PAGE_BYTES_MAX + 1), "too-large"),
        (sized(PAGE) + b"HTTP/1.1", "length"),
        (OK + b"Transfer-Encoding: gzip\r\n\r\n", "coding"),
        (OK + b"Content-Encoding: br\r\nContent-Length: 1\r\n\r\nx", "coding"),
        (OK + b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\nxxxx", "gzip"),
        (sized(PACKED[:-9], b"Content-Encoding: gzip\r\n"), "gzip"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n", "chunks"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n-5\r\n", "chunks"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nabc\r\n", "chunks"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n" + b"0" * 2000, "chunks"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * 3000, "chunks"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\nffffffff\r\n", "too-large"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nmore", "length"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * CHUNKS_MAX + b"1\r\n", "too-large"),
    ],
)
def test_an_invalid_answer_is_an_error_with_its_cause(raw: bytes, cause: str) -> None:
    with pytest.raises(HttpError) as failure:
        ServerAnswer().receive(raw)
    assert failure.value.cause == cause


@pytest.mark.parametrize(("status", "serves"), [(404, True), (401, True), (501, True), (500, False), (503, False), (302, False)])
def test_an_error_says_whether_the_server_works_without_the_page(status: int, serves: bool) -> None:
    with pytest.raises(HttpError) as failure:
        ServerAnswer().receive(b"HTTP/1.1 %d x\r\n\r\n" % status)
    assert failure.value.serves is serves


def test_a_gzip_bomb_and_an_endless_body_end_at_the_page_limit() -> None:
    bomb = gzip.compress(b"\0" * (PAGE_BYTES_MAX + 1))
    endless = ServerAnswer()
    assert endless.receive(b"HTTP/1.1 200 OK\r\n\r\n") is None
    for answer, raw in (
        (ServerAnswer(), sized(bomb, b"Content-Encoding: gzip\r\n")),
        (ServerAnswer(), OK + b"Transfer-Encoding: chunked\r\n\r\n1f4\r\n" + b"x" * 500 + b"\r\n%x\r\n" % (PAGE_BYTES_MAX - 499)),
        (endless, b"x" * PAGE_BYTES_MAX),
    ):
        with pytest.raises(HttpError) as failure:
            answer.receive(raw)
        assert failure.value.cause == "too-large"


@pytest.mark.parametrize(
    ("raw", "kept"),
    [
        (sized(PAGE), True),
        (sized(PAGE, b"Connection: close\r\n"), False),
        (sized(PAGE, b"Connection: Keep-Alive\r\n"), True),
        (sized(PAGE).replace(b"HTTP/1.1", b"HTTP/1.0"), False),
        (sized(PAGE, b"Connection: keep-alive\r\n").replace(b"HTTP/1.1", b"HTTP/1.0"), True),
    ],
)
def test_the_connection_header_decides_whether_the_connection_is_kept(raw: bytes, kept: bool) -> None:
    answer = ServerAnswer()
    assert answer.receive(raw) == PAGE
    assert answer.keep_alive is kept


def test_a_request_has_its_host_and_no_accept_encoding() -> None:
    request = get_request("::1", 8000, "/metrics")
    assert request.startswith(b"GET /metrics HTTP/1.1\r\nHost: [::1]:8000\r\n")
    assert b"accept-encoding" not in request.lower()
    assert request.endswith(b"\r\n\r\n")
