"""The page that opens receipts: names for numbers, and the whole decision while a worker remembers it."""

import json
import math
from http import HTTPStatus
from typing import Any
from urllib.parse import urlencode

from epp.candidates import Endpoint
from epp.decision.receipt import SALT_BYTES, Place, Reason, Receipt, Seal, hash_of
from tests.fakes import candidates
from tests.workers.shared.test_decisions import Site
from workers.supervisor.pages.decisions import LEFT, ReceiptPage
from workers.supervisor.pages.page import PageAnswer, Pause, Request

SEAL = Seal(99)
ENDPOINTS: list[Endpoint] = list(candidates(count=3).endpoints)


def receipt(**changes: Any) -> Receipt:
    places = [Place(each.slot, each.generation) for each in ENDPOINTS]
    values = Receipt(1000, 1, 7, hash_of("a"), Reason.SCORER, 0, 0, places[0], places[1], 0.5, 64, math.nan)
    return values._replace(**changes)


def sealed(of: Receipt) -> str:
    return SEAL.seal(of, bytes(SALT_BYTES))


def open_(site: Site, text: str) -> PageAnswer:
    """Opens a receipt. The workers answer meanwhile. The configuration in force has the number 7."""
    pipeline = site.pairs[0].app.pipelines.whole
    page = ReceiptPage(SEAL, site.asking, lambda: ENDPOINTS, lambda _: (7, pipeline), lambda: site.time)
    answer = page(Request("GET", "/debug/receipt", query=urlencode({"id": text})))
    if isinstance(answer.body, bytes):
        return answer
    body = b""
    for turn, piece in enumerate(answer.body):
        body += b"" if isinstance(piece, Pause) else piece
        if turn == 2:
            site.answer(0, 1)
        site.time += 0.01
    return answer._replace(body=body)


def opened(site: Site, of: Receipt) -> dict[str, Any]:
    body = open_(site, sealed(of)).body
    assert isinstance(body, bytes)
    document: dict[str, Any] = json.loads(body)
    return document


def test_a_receipt_has_names_and_the_decision_while_a_worker_remembers_it() -> None:
    site = Site()
    site.decide(1, "a")
    found = opened(site, receipt())
    assert found["target"] == f"{ENDPOINTS[0].name} ({ENDPOINTS[0].address})"
    assert found["runner_up"].startswith(ENDPOINTS[1].name)
    assert found["reason"] == "best total; q contributes most to the lead"
    assert (found["margin"], found["cached_tokens"], found["first_token_s"]) == (0.5, 64, None)
    assert found["explanation"]["request_id"] == "a"


def test_a_receipt_outlives_the_decision_the_endpoint_and_the_configuration() -> None:
    found = opened(Site(), receipt(target=Place(0, 12345), configuration=3, cached_tokens=-1))
    assert found["target"] == LEFT
    assert found["reason"] == "best total; scorer 1 of configuration 3 contributes most to the lead"
    assert found["cached_tokens"] is None
    assert found["explanation"] is None


def test_the_only_candidate_has_no_runner_up() -> None:
    found = opened(Site(), receipt(reason=Reason.ONLY, runner_up=Place()))
    assert (found["runner_up"], found["margin"]) == ("", None)
    assert found["reason"] == "the only candidate that was left"


def test_other_texts_are_refused() -> None:
    site = Site()
    for text in ("", "x", Seal(1).seal(receipt(), bytes(SALT_BYTES))):
        answer = open_(site, text)
        assert answer.status is HTTPStatus.BAD_REQUEST
        assert isinstance(answer.body, bytes) and b"receipt" in answer.body
