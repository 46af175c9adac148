"""The metrics port's HTTP, byte by byte and over a real connection."""

import asyncio
import contextlib

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from workers.admin import CONNECTIONS_MAX, HEAD_BYTES_MAX, AdminServer, Answer, BadRequest, Request, parse_head


def pages() -> AdminServer:
    return AdminServer(
        {"/healthz": lambda _: Answer(b"ok\n"), "/accept": lambda request: Answer(request.accept.encode())}
    )


def talk(sent: bytes, *, pieces: int = 1) -> bytes:
    """All that the server answers until it closes."""

    async def scenario() -> bytes:
        server = await asyncio.get_running_loop().create_server(pages().protocol, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        size = -(-len(sent) // pieces)
        for at in range(0, len(sent), size):
            writer.write(sent[at : at + size])
            await asyncio.sleep(0.001 if pieces > 1 else 0)
        async with asyncio.timeout(10):
            answer = await reader.read()
        writer.close()
        server.close()
        return answer

    return uvloop.run(scenario())


def test_a_page_is_answered_with_its_length() -> None:
    answer = talk(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"Content-Length: 3" in head
    assert body == b"ok\n"


def test_a_query_does_not_change_the_page() -> None:
    assert talk(b"GET /healthz?x=1 HTTP/1.1\r\nConnection: close\r\n\r\n").endswith(b"ok\n")


def test_head_has_no_body_but_the_length_of_one() -> None:
    answer = talk(b"HEAD /healthz HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert b"Content-Length: 3\r\n" in answer
    assert answer.endswith(b"\r\n\r\n")


def test_another_path_is_404_and_names_those_that_exist() -> None:
    answer = talk(b"GET /nothing HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 404 ")
    assert b"/healthz" in answer


def test_another_method_is_405_and_the_connection_ends_before_its_body() -> None:
    answer = talk(b"POST /healthz HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello")
    assert answer.startswith(b"HTTP/1.1 405 ")
    assert b"Allow: GET, HEAD\r\n" in answer


def test_requests_on_one_connection_are_answered_in_order_however_they_are_cut() -> None:
    sent = b"GET /healthz HTTP/1.1\r\n\r\nGET /accept HTTP/1.1\r\nAccept: a/b\r\n\r\nGET /healthz HTTP/1.0\r\n\r\n"
    for pieces in (1, 7, len(sent)):
        answer = talk(sent, pieces=pieces)
        assert answer.count(b"HTTP/1.1 200 OK") == 3
        assert answer.index(b"ok\n") < answer.index(b"a/b") < answer.rindex(b"ok\n")


def test_http_10_ends_the_connection_unless_asked_not_to() -> None:
    assert not parse_head(b"GET / HTTP/1.0").keep_alive
    assert parse_head(b"GET / HTTP/1.0\r\nConnection: keep-alive").keep_alive
    assert parse_head(b"GET / HTTP/1.1").keep_alive
    assert not parse_head(b"GET / HTTP/1.1\r\nConnection: Close").keep_alive


def test_a_head_without_end_is_refused_at_the_limit() -> None:
    assert talk(b"GET /healthz HTTP/1.1\r\nX: " + b"a" * (HEAD_BYTES_MAX + 1)).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("line", [b"", b"GET /", b"GET / HTTP/2.0", b"GET  / HTTP/1.1"])
def test_what_is_no_request_line_is_refused(line: bytes) -> None:
    with pytest.raises(BadRequest):
        parse_head(line)


@pytest.mark.parametrize("field", [b"no colon", b": x", b"a : x"])
def test_what_is_no_header_field_is_refused(field: bytes) -> None:
    with pytest.raises(BadRequest):
        parse_head(b"GET / HTTP/1.1\r\n" + field)


@given(st.binary(max_size=300))
def test_any_bytes_are_a_request_or_a_refusal(head: bytes) -> None:
    with contextlib.suppress(BadRequest):
        assert isinstance(parse_head(head), Request)


def test_connections_are_limited() -> None:
    async def scenario() -> None:
        admin = pages()
        server = await asyncio.get_running_loop().create_server(admin.protocol, "127.0.0.1", 0)
        address = server.sockets[0].getsockname()
        held = [await asyncio.open_connection(*address) for _ in range(CONNECTIONS_MAX)]
        async with asyncio.timeout(10):
            while len(admin.connections) < CONNECTIONS_MAX:
                await asyncio.sleep(0.001)
            reader, writer = await asyncio.open_connection(*address)
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
        writer.close()
        assert len(admin.connections) == CONNECTIONS_MAX
        for _, kept in held:
            kept.close()
        server.close()
        admin.close()

    uvloop.run(scenario())
