"""Serves the page `/debug/receipt`: opens a receipt (`epp.decision.receipt`), and says what it has, with names.

    ?id=ID    the receipt as JSON; with `explanation`, while a worker still remembers the decision

An endpoint that has left has no name any more. Positions of profile and scorer have names if the configuration is still in force.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from typing import Final
from urllib.parse import parse_qs

import msgspec

from epp.candidates import Endpoint
from epp.decision.explain import Explanation
from epp.decision.pipeline import Pipeline
from epp.decision.receipt import UNKNOWN, BadReceipt, Place, Reason, Receipt, Seal, hash_of
from epp.plugin import Scorer
from workers.shared.decisions import Asking
from workers.supervisor.pages.decisions import ANSWER_S, JSON, LOOK_AGAIN_S
from workers.supervisor.pages.page import PageAnswer, Pause, Piece, Request

VERSION: Final = 1
LEFT: Final = "(an endpoint that has left)"
REASONS: Final = {
    Reason.SCORER: "best total; {} contributes most to the lead",
    Reason.ONLY: "the only candidate that was left",
    Reason.TIED: "one of several with the best total",
    Reason.PICKER: "the picker chose it, although another total is better",
    Reason.UNSCORED: "no profile ran: the request has no body that is scored",
}

encode = msgspec.json.Encoder().encode


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    """What a receipt says, with names. `at`: seconds since the epoch. A prediction that was not made is None.

    `explanation`: the whole decision; None if no worker remembers it.
    """

    version: int = VERSION
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


class ReceiptPage:
    """Makes the page. It asks the workers for the decision through shared memory."""

    def __init__(
        self,
        seal: Seal,
        asking: Asking,
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
        try:
            receipt = self._seal.open(parse_qs(request.query).get("id", [""])[0].strip())
        except BadReceipt as wrong:
            return PageAnswer(f"{wrong}\n".encode(), status=HTTPStatus.BAD_REQUEST)
        return PageAnswer(self._body(receipt), JSON, fields=(("Cache-Control", "no-store"),))

    def _body(self, receipt: Receipt) -> Iterator[Piece]:
        number, until = self._asking.ask(), self._now() + ANSWER_S
        while not self._asking.answered(number) and self._now() < until:
            yield Pause(LOOK_AGAIN_S)
        found = [each for each in self._asking.read() if each.request_id and hash_of(each.request_id) == receipt.request]
        self._answered(found[:1])
        yield encode(self.opened(receipt, found[0] if found else None)) + b"\n"

    def opened(self, receipt: Receipt, explanation: Explanation | None) -> Opened:
        """Returns a receipt with names. `explanation`: of its decision, if it is known."""
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
