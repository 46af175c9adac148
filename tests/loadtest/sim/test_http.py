"""The HTTP/1.1 reader of the simulated servers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.sim import http as sim_http
from loadtest.sim.http import BadHttp, HttpRequest, RequestReader
from tests.cases import cases

GET = b"GET /metrics?x=1 HTTP/1.1\r\nHost: a\r\n\r\n"
POST = b"POST /v1 HTTP/1.1\r\nContent-Length: 5\r\nX-A:  b \r\n\r\nhello"
CHUNKED = b"POST /c HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5;note=1\r\nhello\r\nA\r\n0123456789\r\n0\r\nTrailer: t\r\n\r\n"


def read_all(reader: RequestReader, data: bytes) -> list[HttpRequest]:
    requests = []
    while (request := reader.receive(data)) is not None:
        requests.append(request)
        data = b""
    return requests


def test_a_request_is_split_into_its_parts() -> None:
    (get,) = read_all(RequestReader(), GET)
    assert (get.method, get.path, get.query, get.body) == (b"GET", b"/metrics", b"x=1", b"")
    (post,) = read_all(RequestReader(), POST)
    assert post.headers[b"x-a"] == b"b"
    assert post.body == b"hello"


def test_a_chunked_body_is_joined_and_its_trailers_dropped() -> None:
    first, second = read_all(RequestReader(), CHUNKED + GET)
    assert first.body == b"hello0123456789"
    assert second.path == b"/metrics"


@given(st.lists(st.integers(1, 40), max_size=40))
def test_the_requests_do_not_depend_on_how_the_bytes_are_cut(cuts: list[int]) -> None:
    stream = GET + POST + CHUNKED + GET + GET + POST
    reader, requests = RequestReader(), []
    for size in cuts:
        requests += read_all(reader, stream[:size])
        stream = stream[size:]
    requests += read_all(reader, stream)
    paths = [request.path for request in requests]
    assert paths == [b"/metrics", b"/v1", b"/c", b"/metrics", b"/metrics", b"/v1"]
    assert [request.body for request in requests if request.body] == [b"hello", b"hello0123456789", b"hello"]
    assert reader.buffered == 0


def test_the_same_bytes_again_are_the_same_request() -> None:
    reader = RequestReader()
    first = reader.receive(GET)
    assert reader.receive(GET) is first


def test_held_bytes_are_parsed_by_the_next_receive() -> None:
    reader = RequestReader()
    reader.hold(GET)
    assert reader.buffered == len(GET)
    (request,) = read_all(reader, b"")
    assert request.path == b"/metrics"


def test_only_a_head_with_expect_waits_for_100_continue() -> None:
    reader = RequestReader()
    head = b"POST / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n"
    assert reader.receive(head) is None
    assert reader.expects_continue
    assert reader.receive(b"h") is None
    assert not reader.expects_continue
    assert reader.receive(b"i") is not None


@pytest.mark.parametrize(
    ("version", "header", "stays"),
    [(b"1.1", b"A: b", True), (b"1.1", b"Connection: close", False), (b"1.0", b"A: b", False), (b"1.0", b"Connection: Keep-Alive", True)],
)
def test_version_and_header_decide_whether_the_connection_stays_open(version: bytes, header: bytes, *, stays: bool) -> None:
    (request,) = read_all(RequestReader(), b"GET / HTTP/" + version + b"\r\n" + header + b"\r\n\r\n")
    assert request.keep_alive is stays


@cases(
    ("data", "status"),
    [
        (b"GET /\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\n\r\n", 505),
        (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nspace : x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nContent-Length: x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n", 413),
        (b"GET / HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n", 501),
        (b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n", 400),
        (b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nfffffffff\r\n", 413),
        (b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 2000, 400),
        (b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"A: b\r\n" * sim_http.HEAD_MAX, 431),
        (b"x" * (sim_http.HEAD_MAX + 1), 431),
        (b"GET / HTTP/1.1\r\nA: " + b"x" * sim_http.HEAD_MAX + b"\r\n\r\n", 431),
    ],
)
def test_a_request_that_breaks_a_rule_or_a_limit_is_refused_with_its_status(data: bytes, status: int) -> None:
    with pytest.raises(BadHttp) as refusal:
        RequestReader().receive(data)
    assert refusal.value.status == status


def test_a_head_announces_how_its_body_ends() -> None:
    plain = sim_http.head(200, b"text/plain", b"A: b\r\n", length=3, close=False)
    assert plain == (b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 3\r\nA: b\r\n\r\n")
    stream = sim_http.head(404, b"t", b"", length=None, close=True)
    assert b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n" in stream
