"""The HTTP server of the metrics port over real connections: requests, answers, and pages in chunks."""

import asyncio
import gzip
import http.client

import pytest

from tests.workers.supervisor.pages.servers import CLOSE, PIECES, Endless, served, split, talk
from tests.workers.supervisor.pages.test_page_streaming import unchunked
from workers.supervisor.pages.admin import AdminServer
from workers.supervisor.pages.http_messages import HEAD_BYTES_MAX, QUERY_BYTES_MAX


def test_a_page_is_answered_with_its_length() -> None:
    answer = talk(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"Content-Length: 3" in head
    assert body == b"ok\n"


def test_a_query_does_not_change_the_page() -> None:
    assert talk(b"GET /healthz?x=1 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").endswith(b"ok\n")


def test_the_answer_to_head_has_the_length_of_the_body_but_no_body() -> None:
    answer = talk(b"HEAD /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert b"Content-Length: 3\r\n" in answer
    assert answer.endswith(b"\r\n\r\n")


def test_an_unknown_path_is_404_and_the_answer_lists_the_pages() -> None:
    answer = talk(b"GET /nothing HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 404 ")
    assert b"/healthz" in answer


def test_another_method_is_405_and_the_connection_ends_without_reading_the_body() -> None:
    answer = talk(b"POST /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello")
    assert answer.startswith(b"HTTP/1.1 405 ")
    assert b"Allow: GET, HEAD\r\n" in answer


def test_requests_on_one_connection_are_answered_in_order_for_any_split_of_their_bytes() -> None:
    sent = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\nGET /accept HTTP/1.1\r\nHost: x\r\nAccept: a/b\r\n\r\nGET /healthz HTTP/1.0\r\n\r\n"
    for pieces in (1, 7, len(sent)):
        answer = talk(sent, pieces=pieces)
        assert answer.count(b"HTTP/1.1 200 OK") == 3
        assert answer.index(b"ok\n") < answer.index(b"a/b") < answer.rindex(b"ok\n")


def test_an_endless_head_is_refused_at_the_limit() -> None:
    assert talk(b"GET /healthz HTTP/1.1\r\nHost: x\r\nX: " + b"a" * (HEAD_BYTES_MAX + 1)).startswith(b"HTTP/1.1 431 ")


def test_a_long_page_is_sent_in_chunks() -> None:
    head, body = split(talk(b"GET /long HTTP/1.1\r\nHost: x\r\n" + CLOSE + b"\r\n"))
    assert head[0] == b"HTTP/1.1 200 OK"
    assert {b"Transfer-Encoding: chunked", b"Content-Type: text/x-pieces", b"Vary: Accept-Encoding"} <= set(head)
    assert not any(line.startswith((b"Content-Length", b"Content-Encoding")) for line in head)
    assert unchunked(body) == b"".join(PIECES)


def test_with_http_10_a_long_page_ends_with_the_connection() -> None:
    head, body = split(talk(b"GET /long HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"))
    assert b"Connection: close" in head
    assert not any(line.startswith((b"Content-Length", b"Transfer-Encoding")) for line in head)
    assert body == b"".join(PIECES)


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_a_long_page_is_compressed_if_the_client_accepts_gzip(version: bytes) -> None:
    sent = b"GET /long HTTP/" + version + b"\r\nHost: x\r\nAccept-Encoding: br, GZIP;q=0.5\r\n" + CLOSE + b"\r\n"
    head, body = split(talk(sent))
    assert b"Content-Encoding: gzip" in head
    assert gzip.decompress(body if version == b"1.0" else unchunked(body)) == b"".join(PIECES)


def test_a_short_page_is_never_compressed() -> None:
    assert talk(b"GET /healthz HTTP/1.1\r\nHost: x\r\nAccept-Encoding: gzip\r\n" + CLOSE + b"\r\n").endswith(b"ok\n")


def test_head_of_a_long_page_generates_no_piece() -> None:
    endless = Endless()

    async def scenario(_admin: AdminServer, address: tuple[str, int]) -> None:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"HEAD /endless HTTP/1.1\r\nHost: x\r\n" + CLOSE + b"\r\n")
        head, body = split(await reader.read())
        assert b"Transfer-Encoding: chunked" in head
        assert body == b""
        assert endless.made == 0
        writer.close()

    served(scenario, endless=endless)


def test_a_request_waits_for_the_long_page_before_it() -> None:
    sent = (
        b"GET /long HTTP/1.1\r\nHost: x\r\n\r\nGET /healthz HTTP/1.1\r\nHost: x\r\n\r\nGET /long HTTP/1.1\r\nHost: x\r\n" + CLOSE + b"\r\n"
    )
    for pieces in (1, 5):
        first, second, third = talk(sent, pieces=pieces).split(b"HTTP/1.1 200 OK\r\n")[1:]
        assert unchunked(split(first)[1]) == unchunked(split(third)[1]) == b"".join(PIECES)
        assert second.endswith(b"\r\n\r\nok\n")


def test_a_client_that_closed_its_sending_side_still_gets_all_pages() -> None:
    answer = talk(b"GET /long HTTP/1.1\r\nHost: x\r\n\r\nGET /long HTTP/1.1\r\nHost: x\r\n\r\n", half=True)
    assert answer.count(b"HTTP/1.1 200 OK") == answer.count(b"third\r\n0\r\n\r\n") == 2


def test_pythons_client_reads_a_long_page_and_the_next_one() -> None:
    def read(port: int) -> list[bytes]:
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        bodies = []
        for path in ("/long", "/healthz", "/long"):
            client.request("GET", path)
            bodies.append(client.getresponse().read())
        client.close()
        return bodies

    async def scenario(_admin: AdminServer, address: tuple[str, int]) -> None:
        bodies = await asyncio.get_running_loop().run_in_executor(None, read, address[1])
        assert bodies == [b"".join(PIECES), b"ok\n", b"".join(PIECES)]

    served(scenario)


@pytest.mark.parametrize("query", [b"at-once", b"before"])
def test_a_page_that_fails_before_its_first_piece_is_500_and_the_connection_stays(query: bytes) -> None:
    reports: list[str] = []
    sent = b"GET /broken?" + query + b" HTTP/1.1\r\nHost: x\r\n\r\nGET /healthz HTTP/1.1\r\nHost: x\r\n" + CLOSE + b"\r\n"
    answer = talk(sent, reports=reports)
    assert answer.startswith(b"HTTP/1.1 500 ")
    assert answer.endswith(b"ok\n")
    (report,) = reports
    assert "/broken" in report
    assert "ValueError" in report


def test_a_page_that_fails_half_way_ends_the_connection_and_is_reported_rarely() -> None:
    reports: list[str] = []

    async def scenario(_admin: AdminServer, address: tuple[str, int]) -> None:
        for _ in range(5):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b"GET /broken?half-way HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = await reader.read()
            assert not answer.endswith(b"0\r\n\r\n")
            writer.close()

    served(scenario, reports=reports)
    (report,) = reports
    assert report == "pages on the metrics port that failed: 1; the last: /broken for 127.0.0.1: ValueError('half-way')"


def test_a_page_gets_the_query_and_the_address_of_the_client() -> None:
    sent = b"GET /echo?a=1&b=2 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    assert talk(sent).endswith(b"\r\n\r\na=1&b=2 127.0.0.1")
    assert talk(sent, host="::").endswith(b"a=1&b=2 127.0.0.1")


def test_a_query_that_is_too_long_is_refused() -> None:
    assert talk(b"GET /echo?" + b"q" * QUERY_BYTES_MAX + b" HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200 ")
    sent = b"GET /echo?" + b"q" * (QUERY_BYTES_MAX + 1) + b" HTTP/1.1\r\nHost: x\r\n\r\n"
    assert talk(sent).startswith(b"HTTP/1.1 414 ")


def test_a_request_without_a_host_gets_the_reason() -> None:
    head, body = split(talk(b"GET /healthz HTTP/1.1\r\n\r\n"))
    assert head[0].startswith(b"HTTP/1.1 400 ")
    assert b"Host" in body


def test_an_empty_line_before_a_request_is_skipped() -> None:
    assert talk(b"\r\nGET /healthz HTTP/1.0\r\n\r\n").endswith(b"ok\n")
