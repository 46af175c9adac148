"""`/debug/decisions`: the workers' last decisions as JSON, newest first.

    ?request_id=ID   that one alone; none, if no worker remembers it
    ?n=N             at most N

Asking costs the workers a millisecond or two, and what they say tells who sent how much where: so only peers on the loopback
interface are answered, unless `--debug-remote` says otherwise.
"""

import ipaddress
from collections.abc import Callable, Iterator
from http import HTTPStatus
from urllib.parse import parse_qs

import msgspec

from epp.explain import Explanation
from workers.admin import Answer, Request
from workers.decisions import Asking, by_request

JSON = "application/json"
ANSWER_S = 0.25  # a worker that says nothing for so long is left out

_encoder = msgspec.json.Encoder()


class DecisionsPage:
    """The page; `remote`: peers other than loopback are answered too."""

    def __init__(self, asking: Asking, now: Callable[[], float], *, remote: bool) -> None:
        self._asking = asking
        self._now = now
        self._remote = remote

    def __call__(self, request: Request) -> Answer:
        if not (self._remote or is_loopback(request.peer)):
            text = (
                b"decisions are told to the loopback interface only; start with --debug-remote to tell them to anyone\n"
            )
            return Answer(text, status=HTTPStatus.FORBIDDEN)
        asked = parse_qs(request.query)
        wanted, limit = asked.get("request_id", [""])[0], asked.get("n", [""])[0]
        if limit and not limit.isdecimal():
            return Answer(b"n is a number of decisions\n", status=HTTPStatus.BAD_REQUEST)
        return Answer(self._body(wanted, int(limit) if limit else None), JSON)

    def _body(self, wanted: str, limit: int | None) -> Iterator[bytes]:
        number, until = self._asking.ask(), self._now() + ANSWER_S
        while not self._asking.answered(number) and self._now() < until:
            yield b""  # the loop turns
        found = self._asking.read()
        if wanted:
            one = by_request(found, wanted)
            found = [] if one is None else [one]
        yield encoded(found[:limit])


def encoded(found: list[Explanation]) -> bytes:
    """As the page has it."""
    return _encoder.encode({"decisions": found}) + b"\n"


def decoded(data: bytes) -> list[Explanation]:
    """What a page says. Raises msgspec.MsgspecError."""
    return msgspec.json.decode(data, type=dict[str, list[Explanation]])["decisions"]


def is_loopback(peer: str) -> bool:
    try:
        return ipaddress.ip_address(peer).is_loopback
    except ValueError:
        return False
