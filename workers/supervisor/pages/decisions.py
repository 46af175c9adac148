"""Serves the pages about single decisions, as JSON.

    /debug/decisions            the last decisions of the workers, newest first
        ?request_id=ID          only the decision about this request; an empty list if no worker remembers it
        ?pool=NAME              only decisions of this pool, of several
        ?n=N                    at most N decisions
    /debug/decisions/recorded   where the small recording is that has earlier ones (`Recorded`); ?flow=ID: the number by which it names a
                                tenant
    /debug/decisions/what-if    the candidates of a decision, ranked with other weights: ?request_id=ID&profile=NAME&SCORER=WEIGHT&...
    /debug/receipt?id=ID        what a receipt has (`epp.decision.receipt`), with names; with `explanation`, while a worker still remembers
                                the decision

A request costs the workers a millisecond or two, and the answer shows the traffic of each tenant (`access` says who gets it).
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Sequence
from http import HTTPStatus
from typing import Final
from urllib.parse import parse_qsl

import msgspec

from epp.candidates import Endpoint
from epp.decision.explain import Explanation, what_if
from epp.decision.pipeline import Pipeline
from epp.decision.receipt import UNKNOWN, BadReceipt, Place, Reason, Receipt, Seal, hash_of
from epp.plugin import Scorer
from epp.request import DEFAULT_FLOW
from epp.request.pool_choice import no_such_pool
from workers.shared.decisions import DecisionsAsking, by_request
from workers.supervisor.pages.page import JSON, PageAnswer, Pause, Piece, Request, refusal

ANSWER_S: Final = 0.25  # the answer lacks the decisions of a worker that needs longer
LOOK_AGAIN_S: Final = 0.002
KEPT: Final = 64
WEIGHT_MAX: Final = 1e6
NO_STORE: Final = (("Cache-Control", "no-store"),)
RECEIPT_VERSION: Final = 1
LEFT: Final = "(an endpoint that has left)"
REASONS: Final = {
    Reason.SCORER: "best total; {} contributes most to the lead",
    Reason.ONLY: "the only candidate that was left",
    Reason.TIED: "one of several with the best total",
    Reason.PICKER: "the picker chose it, although another total is better",
    Reason.UNSCORED: "no profile ran: the request has no body that is scored",
}

encode = msgspec.json.Encoder().encode


class Recorded(msgspec.Struct, frozen=True):
    """Says where earlier decisions are recorded. `folder`: "" without a recording; then `why` has the reason. `flow`: the number of the
    tenant.
    """

    folder: str
    why: str = ""
    flow: int = 0


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a receipt, with names. `at`: seconds since the epoch. A missing prediction is None.

    `explanation`: the whole decision, or None if no worker remembers it.
    """

    version: int = RECEIPT_VERSION
    at: int
    worker: int
    configuration: int
    reason: str
    target: str
    runner_up: str
    margin: float | None
    cached_tokens: int | None
    first_token_s: float | None
    explanation: Explanation | None = None


class RecordedPage:
    """Makes the page `/debug/decisions/recorded`."""

    def __init__(self, where: Callable[[], Recorded], keyed: Callable[[str], int]) -> None:
        """`where`: returns the present recording. `keyed`: returns the number of a tenant in it."""
        self._where = where
        self._keyed = keyed

    def __call__(self, request: Request) -> PageAnswer:
        (flow,) = request.values("flow")
        found = msgspec.structs.replace(self._where(), flow=0 if flow == DEFAULT_FLOW else self._keyed(flow))
        return PageAnswer(encode(found) + b"\n", JSON)


class DecisionsPage:
    """Makes the page of the last decisions. It asks the workers for their decisions through shared memory."""

    def __init__(
        self,
        asking: DecisionsAsking,
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
        wanted, limit, pool = request.values("request_id", "n", "pool")
        if why := no_such_pool(pool, self._pools()):
            return refusal(HTTPStatus.NOT_FOUND, why)
        if limit and not limit.isdecimal():
            return refusal(HTTPStatus.BAD_REQUEST, "n must be a number of decisions")
        return PageAnswer(self._body(wanted, pool, int(limit) if limit else None), JSON)

    def _body(self, wanted: str, pool: str, limit: int | None) -> Iterator[Piece]:
        remembered = yield from _remembered(self._asking, self._now)
        found = [each for each in remembered if not pool or each.pool == pool]
        if wanted:
            one = by_request(found, wanted)
            found = [] if one is None else [one]
        self._answered(found[:limit])
        yield encoded(found[:limit])


def encoded(decisions: list[Explanation]) -> bytes:
    """Encodes the page with these decisions as JSON."""
    return encode({"decisions": decisions}) + b"\n"


def decoded(data: bytes) -> list[Explanation]:
    """Decodes the decisions on a page. Raises msgspec.MsgspecError."""
    return msgspec.json.decode(data, type=dict[str, list[Explanation]])["decisions"]


def _remembered(asking: DecisionsAsking, now: Callable[[], float]) -> Generator[Piece, None, list[Explanation]]:
    """Asks the workers for the decisions that they remember. Returns these decisions, without the decisions of workers that need more than
    ANSWER_S.
    """
    number, until = asking.ask(), now() + ANSWER_S
    while not asking.answered(number) and now() < until:
        yield Pause(LOOK_AGAIN_S)
    return asking.read()


class WhatIfPage:
    """Makes the page with other weights, and remembers decisions for it.

    A worker remembers 32 decisions, which a busy pool makes in seconds. So this page also knows the last KEPT decisions in answers of the
    other pages, because a user may look at these.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Explanation] = OrderedDict()

    def remember(self, decisions: Sequence[Explanation]) -> None:
        """Remembers decisions that a client has seen, up to KEPT of them. A decision without a request id cannot be remembered."""
        for each in reversed(decisions):
            if each.request_id:
                self._kept[each.request_id] = each
                self._kept.move_to_end(each.request_id)
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)

    def __call__(self, request: Request) -> PageAnswer:
        parameters = dict(parse_qsl(request.query))
        request_id, name = parameters.pop("request_id", ""), parameters.pop("profile", "")
        decision = self._kept.get(request_id)
        if decision is None:
            return refusal(HTTPStatus.NOT_FOUND, "this decision is not remembered any more; choose a newer one")
        profile = next((each for each in decision.profiles if each.profile == name), None)
        try:
            weights = {scorer: _weight(text) for scorer, text in parameters.items()}
        except ValueError:
            return refusal(HTTPStatus.BAD_REQUEST, f"a weight is a number from 0 to {WEIGHT_MAX:g}")
        ranked = None if profile is None else what_if(profile, weights)
        if ranked is None:
            return refusal(HTTPStatus.NOT_FOUND, "the decision has no such profile, or it had no candidate")
        return PageAnswer(encode(ranked), JSON, fields=NO_STORE)


def _weight(text: str) -> float:
    weight = float(text)
    if not (math.isfinite(weight) and 0 <= weight <= WEIGHT_MAX):
        raise ValueError(text)
    return weight


class ReceiptPage:
    """Makes the page of a receipt. It asks the workers for the decision through shared memory.

    An endpoint that has left has no name any more. Positions of profile and scorer have names if the configuration is still in force.
    """

    def __init__(
        self,
        seal: Seal,
        asking: DecisionsAsking,
        endpoints: Callable[[], Sequence[Endpoint]],
        pipeline: Callable[[int], tuple[int, Pipeline]],
        now: Callable[[], float],
        *,
        answered: Callable[[Sequence[Explanation]], None] = lambda _: None,
    ) -> None:
        """`pipeline(slot)`: returns the number of the configuration in force, and its pipeline for the endpoint in a slot.

        `now`: a clock in seconds. `answered`: called with the decision of each answer.
        """
        self._seal = seal
        self._asking = asking
        self._endpoints = endpoints
        self._pipeline = pipeline
        self._now = now
        self._answered = answered

    def __call__(self, request: Request) -> PageAnswer:
        (sealed,) = request.values("id")
        try:
            receipt = self._seal.open(sealed.strip())
        except BadReceipt as wrong:
            return refusal(HTTPStatus.BAD_REQUEST, str(wrong))
        return PageAnswer(self._body(receipt), JSON, fields=NO_STORE)

    def _body(self, receipt: Receipt) -> Iterator[Piece]:
        remembered = yield from _remembered(self._asking, self._now)
        found = [each for each in remembered if each.request_id and hash_of(each.request_id) == receipt.request]
        self._answered(found[:1])
        yield encode(self.opened(receipt, found[0] if found else None)) + b"\n"

    def opened(self, receipt: Receipt, explanation: Explanation | None) -> Opened:
        """Returns a receipt with names. `explanation`: the explanation of its decision, if it is known."""
        has_rival = receipt.reason in (Reason.SCORER, Reason.TIED, Reason.PICKER)
        return Opened(
            at=receipt.at,
            worker=receipt.worker,
            configuration=receipt.configuration,
            reason=REASONS[receipt.reason].format(self._scorer(receipt)),
            target=self._name(receipt.target),
            runner_up=self._name(receipt.runner_up) if has_rival else "",
            margin=round(receipt.margin, 4) if has_rival else None,
            cached_tokens=None if receipt.cached_tokens == UNKNOWN else receipt.cached_tokens,
            first_token_s=None if math.isnan(receipt.first_token_s) else round(receipt.first_token_s, 6),
            explanation=explanation,
        )

    def _name(self, place: Place) -> str:
        """Returns name and address of an endpoint."""
        found = (each for each in self._endpoints() if (each.slot, each.generation) == place)
        return next((f"{each.name} ({each.address})" for each in found), LEFT)

    def _scorer(self, receipt: Receipt) -> str:
        number, pipeline = self._pipeline(receipt.target.slot)
        profiles = pipeline.wiring.profiles
        if number == receipt.configuration and receipt.profile < len(profiles):
            names = [member.name for member, _ in profiles[receipt.profile].members if isinstance(member, Scorer)]
            if receipt.scorer < len(names):
                return names[receipt.scorer]
        return f"scorer {receipt.scorer + 1} of configuration {receipt.configuration}"
