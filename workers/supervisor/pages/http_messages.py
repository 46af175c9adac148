"""Translates between HTTP/1 messages of the metrics port and the values of pages. The library h11 parses and encodes the messages.

h11 keeps the state of one connection and does no I/O. It reads one request at a time, even if the client has sent several. It also
chooses what ends a body: a length, chunks, or the end of the connection. RFC 9112 describes the format.
"""

from http import HTTPStatus
from typing import Final

import h11

from workers.supervisor.pages.page import NO_TOKEN, Fields, PageAnswer, Request, Token

HEAD_BYTES_MAX: Final = 16 << 10
QUERY_BYTES_MAX: Final = 2 << 10
CLOSE: Final[Fields] = (("Connection", "close"),)


class BadRequest(Exception):
    """Raised for bytes that are not a valid request. `status`: the HTTP status of the answer. The text names the error."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


def new_connection() -> h11.Connection:
    """Returns the h11 state of a connection that has just been accepted."""
    return h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES_MAX)


def next_head(state: h11.Connection) -> h11.Request | None:
    """Returns the head of the next request, or None if it has not arrived completely. Raises BadRequest."""
    try:
        event = state.next_event()
        if not isinstance(event, h11.Request):
            return None
        if event.http_version not in (b"1.0", b"1.1"):
            raise BadRequest(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "HTTP/1.0 and HTTP/1.1 only")
        while state.their_state is h11.SEND_BODY and isinstance(state.next_event(), h11.EndOfMessage):
            pass  # a request without a body ends at once; a body is not read
    except h11.RemoteProtocolError as problem:
        raise BadRequest(HTTPStatus(problem.error_status_hint), str(problem)) from problem
    return event


def request_of(head: h11.Request, peer: str) -> Request:
    """Returns the request for a page from its head. `peer`: the client's address. Raises BadRequest if the query is too long."""
    path, _, query = head.target.decode("latin-1").partition("?")
    if len(query) > QUERY_BYTES_MAX:
        raise BadRequest(HTTPStatus.REQUEST_URI_TOO_LONG, f"the query has more than {QUERY_BYTES_MAX} bytes")
    found = {name: value.decode("latin-1") for name, value in head.headers}
    gzip = _takes_gzip(found.get(b"accept-encoding", ""))
    token = _token(found.get(b"authorization", ""))
    method, host = head.method.decode("latin-1"), found.get(b"host", "")
    return Request(method, path, found.get(b"accept", ""), query, peer, gzip, token, host)


def response(answer: PageAnswer, *, more: Fields = (), close: bool = False) -> h11.Response:
    """Returns the head of an answer. `more`: header fields besides those of `answer`. `close`: whether the connection ends after it."""
    fields = [("Content-Type", answer.content_type), *more, *answer.fields, *(CLOSE if close else ())]
    return h11.Response(status_code=answer.status.value, reason=answer.status.phrase.encode(), headers=fields)


def coding_fields(request: Request) -> Fields:
    """Returns the header fields about compression for an answer that is sent in pieces: gzip if the client accepts it."""
    vary = ("Vary", "Accept-Encoding")
    return (vary, ("Content-Encoding", "gzip")) if request.gzip else (vary,)


def _token(authorization: str) -> Token:
    scheme, _, token = authorization.partition(" ")
    return Token(token.strip()) if scheme.lower() == "bearer" else NO_TOKEN


def _takes_gzip(accept_encoding: str) -> bool:
    """Returns whether an Accept-Encoding field names gzip without a weight of zero. The wildcard `*` is ignored."""
    for coding in accept_encoding.lower().split(","):
        name, _, weight = coding.partition(";")
        if name.strip() == "gzip":
            return weight.replace(" ", "").removeprefix("q=").strip("0.") != "" or not weight
    return False
