"""Defines a page of the metrics port: a function from a Request to a PageAnswer. A Guard decides which requests may get the page.

Requests and answers are plain values. `http_messages` translates them from and to HTTP, and `connection` serves them on a socket.
"""

import asyncio
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import NamedTuple
from urllib.parse import parse_qs

PLAIN = "text/plain; charset=utf-8"
JSON = "application/json"

Fields = tuple[tuple[str, str], ...]  # header fields: names and values


class Pause(NamedTuple):
    """A page yields this instead of a piece if it has no piece to send for `seconds`. The page keeps its place among the pages under
    way.
    """

    seconds: float


Piece = bytes | Pause


class PageAnswer(NamedTuple):
    """The answer of a page. `body`: the whole body, or an iterator of its pieces.

    `endless`: whether the answer has no end. The page itself limits the number of such answers, and each of their pieces is sent at once.
    """

    body: bytes | Iterator[Piece]
    content_type: str = PLAIN
    status: HTTPStatus = HTTPStatus.OK
    fields: Fields = ()
    endless: bool = False


def refusal(status: HTTPStatus, text: str, fields: Fields = ()) -> PageAnswer:
    """Returns an answer with a line of text."""
    return PageAnswer(f"{text}\n".encode(), status=status, fields=fields)


class Token(str):
    """A bearer token. Its `repr` hides it, so that a printed request does not show it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<token>"


NO_TOKEN = Token()


class Request(NamedTuple):
    """The head of a request.

    `accept`: the Accept header. `token`: from `Authorization: Bearer`. `peer`: the client's address; an IPv4 client has an IPv4 address
    even on an IPv6 socket. `gzip`: whether the client accepts a body with this encoding. `host`: the Host header.
    """

    method: str
    path: str
    accept: str = ""
    query: str = ""
    peer: str = ""
    gzip: bool = False
    token: Token = NO_TOKEN
    host: str = ""

    def values(self, *names: str) -> list[str]:
        """Returns the first value of each of these parameters of the query, or "" for a missing parameter."""
        parameters = parse_qs(self.query)
        return [parameters.get(name, [""])[0] for name in names]


class Verdict(NamedTuple):
    """Says whether a request may get its page. Any status but OK refuses the request, with this text and these header fields."""

    status: HTTPStatus
    text: str = ""
    fields: Fields = ()


ALLOWED = Verdict(HTTPStatus.OK)

Page = Callable[[Request], PageAnswer]
Guard = Callable[[Request], "Verdict | asyncio.Future[Verdict]"]


def allow_all(_request: Request) -> Verdict:
    """Admits every request: the guard of a port that any client may use."""
    return ALLOWED
