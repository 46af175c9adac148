"""Serves the page `/debug/decisions`: the last decisions of the workers as JSON, newest first.

    ?request_id=ID   only the decision about this request; an empty list if no worker remembers it
    ?n=N             at most N decisions

A request costs the workers a millisecond or two, and the answer shows the traffic of each tenant. So only clients on the loopback
interface get an answer, unless `--debug-remote` is set.
"""

import ipaddress
import re
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from urllib.parse import parse_qs

import msgspec

from epp.explain import Explanation
from workers.pages.page import PageAnswer, Pause, Piece, Request
from workers.shared.decisions import Asking, by_request

JSON = "application/json"
ANSWER_S = 0.25  # a worker that needs longer is left out
LOOK_AGAIN_S = 0.002
LOCAL_CLIENTS = "clients on the loopback interface that ask for localhost or an address"
_PORT = re.compile(r":\d+$")

_encoder = msgspec.json.Encoder()


class DecisionsPage:
    """Makes the page. It asks the workers for their decisions through shared memory."""

    def __init__(
        self,
        asking: Asking,
        now: Callable[[], float],
        *,
        remote: bool,
        answered: Callable[[Sequence[Explanation]], None] = lambda _: None,
    ) -> None:
        """`now`: a clock in seconds. `remote`: whether clients beyond the loopback interface get an answer, too.

        `answered`: called with the decisions of each answer.
        """
        self._asking = asking
        self._now = now
        self._remote = remote
        self._answered = answered

    def __call__(self, request: Request) -> PageAnswer:
        if not (self._remote or is_local(request)):
            text = f"only {LOCAL_CLIENTS} get decisions; start with --debug-remote to allow all clients\n".encode()
            return PageAnswer(text, status=HTTPStatus.FORBIDDEN)
        parameters = parse_qs(request.query)
        wanted, limit = parameters.get("request_id", [""])[0], parameters.get("n", [""])[0]
        if limit and not limit.isdecimal():
            return PageAnswer(b"n must be a number of decisions\n", status=HTTPStatus.BAD_REQUEST)
        return PageAnswer(self._body(wanted, int(limit) if limit else None), JSON)

    def _body(self, wanted: str, limit: int | None) -> Iterator[Piece]:
        number, until = self._asking.ask(), self._now() + ANSWER_S
        while not self._asking.answered(number) and self._now() < until:
            yield Pause(LOOK_AGAIN_S)
        found = self._asking.read()
        if wanted:
            one = by_request(found, wanted)
            found = [] if one is None else [one]
        self._answered(found[:limit])
        yield encoded(found[:limit])


def encoded(decisions: list[Explanation]) -> bytes:
    """Encodes the page with these decisions as JSON."""
    return _encoder.encode({"decisions": decisions}) + b"\n"


def decoded(data: bytes) -> list[Explanation]:
    """Decodes the decisions on a page. Raises msgspec.MsgspecError."""
    return msgspec.json.decode(data, type=dict[str, list[Explanation]])["decisions"]


def is_local(request: Request) -> bool:
    """Returns whether a request comes from the loopback interface, and its Host header is empty, localhost or an IP address.

    A web page can point its own DNS name to 127.0.0.1 and so make a browser send requests here (DNS rebinding). Their Host header has that
    name.
    """
    name = request.host.rpartition(":")[0] if _PORT.search(request.host) else request.host
    meant = name.lower() in ("", "localhost") or _address(name.strip("[]")) is not None
    peer = _address(request.peer)
    return meant and peer is not None and peer.is_loopback


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
