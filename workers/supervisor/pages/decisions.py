"""Serves the page `/debug/decisions`: the last decisions of the workers as JSON, newest first.

    ?request_id=ID   only the decision about this request; an empty list if no worker remembers it
    ?pool=NAME       only decisions of this pool, of several
    ?n=N             at most N decisions
    /recorded        where the small recording is that has earlier ones (`Recorded`); ?flow=ID: the number by which it names a tenant

A request costs the workers a millisecond or two, and the answer shows the traffic of each tenant (`access` says who gets it).
"""

from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from urllib.parse import parse_qs

import msgspec

from epp.decision.explain import Explanation
from epp.request import DEFAULT_FLOW
from epp.request.pools import no_such_pool
from workers.shared.decisions import Asking, by_request
from workers.supervisor.pages.page import PageAnswer, Pause, Piece, Request

JSON = "application/json"
ANSWER_S = 0.25  # a worker that needs longer is left out
LOOK_AGAIN_S = 0.002

_encoder = msgspec.json.Encoder()


class Recorded(msgspec.Struct, frozen=True):
    """Says where earlier decisions are recorded. `folder`: "" if nowhere; then `why` says why. `flow`: the number of the tenant."""

    folder: str
    why: str = ""
    flow: int = 0


class RecordedPage:
    """Makes the page `/debug/decisions/recorded`."""

    def __init__(self, where: Callable[[], Recorded], keyed: Callable[[str], int]) -> None:
        """`where`: the recording of this moment. `keyed`: the number of a tenant in it."""
        self._where = where
        self._keyed = keyed

    def __call__(self, request: Request) -> PageAnswer:
        flow = parse_qs(request.query).get("flow", [""])[0]
        found = msgspec.structs.replace(self._where(), flow=0 if flow == DEFAULT_FLOW else self._keyed(flow))
        return PageAnswer(_encoder.encode(found) + b"\n", JSON)


class DecisionsPage:
    """Makes the page. It asks the workers for their decisions through shared memory."""

    def __init__(
        self,
        asking: Asking,
        now: Callable[[], float],
        *,
        answered: Callable[[Sequence[Explanation]], None] = lambda _: None,
        pools: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """`now`: a clock in seconds. `answered`: called with the decisions of each answer. `pools`: the names of several pools."""
        self._asking = asking
        self._now = now
        self._answered = answered
        self._pools = pools

    def __call__(self, request: Request) -> PageAnswer:
        parameters = parse_qs(request.query)
        wanted, limit, pool = (parameters.get(name, [""])[0] for name in ("request_id", "n", "pool"))
        if why := no_such_pool(pool, self._pools()):
            return PageAnswer(f"{why}\n".encode(), status=HTTPStatus.NOT_FOUND)
        if limit and not limit.isdecimal():
            return PageAnswer(b"n must be a number of decisions\n", status=HTTPStatus.BAD_REQUEST)
        return PageAnswer(self._body(wanted, pool, int(limit) if limit else None), JSON)

    def _body(self, wanted: str, pool: str, limit: int | None) -> Iterator[Piece]:
        number, until = self._asking.ask(), self._now() + ANSWER_S
        while not self._asking.answered(number) and self._now() < until:
            yield Pause(LOOK_AGAIN_S)
        found = [each for each in self._asking.read() if not pool or each.pool == pool]
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
