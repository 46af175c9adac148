"""The heads of HTTP requests on the metrics port."""

import contextlib

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.supervisor.pages.http_messages import BadRequest, new_connection, next_head, request_of
from workers.supervisor.pages.page import Request

GET = b"GET / HTTP/1.1\r\nHost: x\r\n"


def parsed(data: bytes) -> Request | None:
    """The request in these bytes; None: it is incomplete."""
    state = new_connection()
    state.receive_data(data)
    head = next_head(state)
    return None if head is None else request_of(head, "peer")


@pytest.mark.parametrize("line", [b"GET /", b"GET / HTTP/2.0", b"GET  / HTTP/1.1", b"\x16\x03\x01", b"\r\n"])
def test_a_bad_request_line_is_refused(line: bytes) -> None:
    with pytest.raises(BadRequest):
        parsed(line + b"\r\nHost: x\r\n\r\n")


@pytest.mark.parametrize("field", [b"no colon", b": x", b"a : x", b"a: x\0", b"Content-Length: x", b"Host: y"])
def test_a_bad_header_field_is_refused(field: bytes) -> None:
    with pytest.raises(BadRequest):
        parsed(GET + field + b"\r\n\r\n")


@given(st.binary(max_size=300), st.booleans())
def test_any_bytes_are_a_request_or_incomplete_or_refused(data: bytes, begun: bool) -> None:
    with contextlib.suppress(BadRequest):
        assert isinstance(parsed(GET + data if begun else data), Request | None)


def test_a_request_that_announces_a_body_is_known_before_the_body() -> None:
    state = new_connection()
    state.receive_data(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n")
    assert next_head(state) is not None
    assert state.their_state is h11.SEND_BODY


@pytest.mark.parametrize(
    ("accepted", "compressed"),
    [
        ("gzip", True),
        ("deflate, gzip;q=1.0", True),
        ("gzip;q=0.001", True),
        ("gzip; q=0", False),
        ("gzip;q=0.000", False),
        ("identity", False),
        ("x-gzip-like", False),
        ("", False),
    ],
)
def test_gzip_is_used_if_the_request_names_it_with_a_weight_above_zero(accepted: str, compressed: bool) -> None:
    request = parsed(GET + f"Accept-Encoding: {accepted}\r\n\r\n".encode())
    assert request is not None
    assert request.gzip is compressed


@pytest.mark.parametrize(
    ("field", "token"),
    [
        ("Authorization: Bearer abc", "abc"),
        ("authorization:  bearer   abc ", "abc"),
        ("Authorization: Basic abc", ""),
        ("Authorization: Bearer", ""),
        ("X-Authorization: Bearer abc", ""),
        ("Authorization: Bearer a b", "a b"),
    ],
)
def test_the_token_is_read_from_the_scheme_bearer(field: str, token: str) -> None:
    request = parsed(GET + f"{field}\r\n\r\n".encode())
    assert request is not None
    assert request.token == token
