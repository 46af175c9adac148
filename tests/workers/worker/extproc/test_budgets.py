"""Budgets on streams: what is refused, what a request uses, and what is given back."""

from collections.abc import Mapping
from typing import Any

import pytest

from epp.plugin import NoParams
from epp.request.budget import BEHIND, Bucket, Budget
from epp.request.tenants import FromHeader, Tenants
from shm.budgets import PLACES, WAYS, BudgetRow, BudgetsSchema
from shm.segment import Region
from tests.pair import Pair
from tests.workers.worker.extproc.streams import USAGE, Denies, Waits, pair, refusal
from tests.workers.worker.extproc.test_untrusted_headers import send_headers
from workers.worker.extproc.budgets import LOOK_S, Budgets, key_of

SEED = 5
PROMPT = b'{"model":"m", "prompt":"' + b"x" * 358 + b'", "max_tokens":9}'  # 400 bytes: 100 tokens
PLAIN = Budget(Bucket(10.0, 300.0), None)


class Desk:
    """Workers that share budgets. `streams`: one pair per worker."""

    def __init__(self, budget: Budget | None = PLAIN, *others: Any, workers: int = 1, budgets: Mapping[str, Budget | None] = {}) -> None:
        schema = BudgetsSchema(workers)
        region = Region(memoryview(bytearray(schema.bytes)))
        tenants = Tenants([FromHeader("x-tenant")], budget=budget, budgets=budgets)
        self.pairs: list[Pair] = []
        for index in range(workers):
            p = pair(*others)
            p.app.tenants = tenants
            p.app.guards.hidden_headers = tenants.hidden(())
            p.app.budgets = Budgets(BudgetRow(schema, region, index, [1] * workers), SEED)
            self.pairs.append(p)

    def send(self, tenant: str = "acme", worker: int = 0, body: bytes = PROMPT) -> tuple[Any, Any]:
        """Sends a request. Returns its stream, and what came back."""
        envoy = self.pairs[worker].open()
        return envoy, send_headers(envoy, [("x-tenant", tenant.encode())], "/v1/completions") + envoy.body(body)

    def wait(self, seconds: float) -> None:
        for p in self.pairs:
            p.clock.now += seconds

    def used(self, tenant: str = "acme", worker: int = 0) -> tuple[float, float, int]:
        budgets = self.pairs[worker].app.budgets
        assert budgets is not None
        place = budgets._row.place(key_of(tenant, SEED), 0.0)
        return round(place.tokens, 3), place.requests, place.in_flight


def refused(sent: Any) -> bool:
    return bool(sent and sent[-1].HasField("immediate_response"))


def answer(envoy: Any, data: bytes = USAGE, status: str = "200") -> None:
    envoy.response_headers(status)
    envoy.response_body(data)


def test_a_tenant_gets_429_once_its_tokens_are_used_up_and_others_do_not() -> None:
    desk = Desk()
    assert [refused(desk.send()[1]) for _ in range(5)] == [False, False, False, True, True]
    status, error, headers = refusal(desk.send()[1])
    assert (status, error["code"]) == (429, 429)
    assert "tokens per minute" in error["message"]
    assert (headers["retry-after"], headers["x-ratelimit-limit-tokens"], headers["x-ratelimit-remaining-tokens"]) == ("10", "600", "0")
    assert not refused(desk.send("other")[1])
    desk.wait(9.9)
    assert refused(desk.send()[1])
    desk.wait(0.2)
    assert not refused(desk.send()[1])


def test_the_prompt_counts_at_once_and_the_answer_as_the_server_reports_it() -> None:
    desk = Desk()
    envoy, _ = desk.send()
    assert desk.used() == (100.0, 1.0, 1)
    answer(envoy)  # 9 tokens of prompt, 4 of them not cached, and 4 of answer
    assert desk.used() == (13.0, 1.0, 0)


def test_cached_tokens_count_at_their_price_and_later_prompts_are_estimated_by_what_counted() -> None:
    desk = Desk(Budget(Bucket(10.0, 300.0), None, cached_price=0.0))
    envoy, _ = desk.send()
    answer(envoy)
    assert desk.used() == (8.0, 1.0, 0)
    desk.send()
    assert desk.used()[0] == pytest.approx(8.0 + 400 * (0.25 + 0.125 * (4 / 400 - 0.25)))


def test_a_streamed_answer_counts_as_it_comes_up_to_what_was_asked_for() -> None:
    desk = Desk()
    envoy, _ = desk.send()
    envoy.response_headers(kind="text/event-stream")
    budgets = desk.pairs[0].app.budgets
    assert budgets is not None
    for pieces in range(1, 12):
        desk.wait(0.1)
        envoy.response_body(b'data: {"choices":[]}\n\n', last=False)
        budgets.heartbeat(desk.pairs[0].clock.now)
        assert desk.used() == (100.0 + min(pieces, 9), 1.0, 1)
    envoy.response_body(b"data: [DONE]\n\n")
    assert desk.used() == (109.0, 1.0, 0)


def test_an_answer_without_usage_counts_by_its_bytes_up_to_what_was_asked_for() -> None:
    desk = Desk()
    for size, tokens in ((20, 5.0), (4000, 9.0)):
        before = desk.used()[0]
        envoy, _ = desk.send()
        answer(envoy, b"y" * size)
        assert desk.used()[0] == before + 100.0 + tokens


@pytest.mark.parametrize("most", [b"1e308", b"1" + b"0" * 400])
def test_a_request_may_ask_for_more_tokens_than_a_number_can_count(most: bytes) -> None:
    desk = Desk()
    envoy, sent = desk.send(body=PROMPT.replace(b'"max_tokens":9', b'"n":9,"max_tokens":' + most))
    assert not refused(sent)
    answer(envoy)
    assert desk.used()[2] == 0


@pytest.mark.parametrize("status", ["500", "429"])
def test_a_request_that_its_server_fails_uses_no_tokens(status: str) -> None:
    desk = Desk()
    envoy, _ = desk.send()
    answer(envoy, b"busy", status)
    assert desk.used() == (0.0, 1.0, 0)


def test_a_request_without_an_endpoint_uses_nothing() -> None:
    desk = Desk(PLAIN, Denies("denies", NoParams()))
    assert refused(desk.send()[1])
    assert desk.used() == (0.0, 0.0, 0)


def test_a_client_that_leaves_while_its_request_waits_has_used_nothing() -> None:
    desk = Desk(PLAIN, Waits())
    envoy, sent = desk.send()
    assert (sent, desk.used()) == ([], (100.0, 1.0, 1))
    envoy.handler.closed()
    assert desk.used() == (0.0, 0.0, 0)


def test_a_client_that_leaves_within_an_answer_has_used_what_came() -> None:
    desk = Desk()
    envoy, _ = desk.send()
    envoy.response_headers(kind="text/event-stream")
    envoy.response_body(b"data: {}\n\n", last=False)
    envoy.handler.closed()
    assert desk.used() == (101.0, 1.0, 0)


def test_requests_in_flight_are_limited() -> None:
    desk = Desk(Budget(None, None, 2))
    first, _ = desk.send()
    assert [refused(desk.send()[1]) for _ in range(2)] == [False, True]
    answer(first)
    assert not refused(desk.send()[1])
    status, error, headers = refusal(desk.send()[1])
    assert (status, headers["retry-after"], "concurrent requests" in error["message"]) == (429, "1", True)


def test_requests_per_minute_are_limited() -> None:
    desk = Desk(Budget(None, Bucket(0.5, 3.0)))
    assert [refused(desk.send()[1]) for _ in range(4)] == [False, False, False, True]
    desk.wait(2.0)
    assert [refused(desk.send()[1]) for _ in range(2)] == [False, True]


def test_workers_count_together() -> None:
    desk = Desk(workers=3)
    admitted = 0
    for turn in range(30):
        admitted += not refused(desk.send(worker=turn % 3)[1])
        desk.wait(2 * LOOK_S)
    assert admitted == 3
    desk.wait(10.0)
    assert [refused(desk.send(worker=worker)[1]) for worker in (2, 1)] == [False, True]


def test_a_budget_that_queues_lets_requests_wait_behind_all_others_and_counts_nothing_for_them() -> None:
    desk = Desk(Budget(Bucket(10.0, 100.0), None, queues=True))
    for priority in (0, BEHIND, BEHIND):
        envoy, sent = desk.send()
        assert (refused(sent), envoy.handler.request.priority) == (False, priority)
    assert desk.used() == (100.0, 1.0, 3)
    desk.wait(10.0)
    assert desk.send()[0].handler.request.priority == 0


def test_a_tenant_without_a_budget_costs_nothing_and_has_no_limit() -> None:
    desk = Desk(PLAIN, budgets={"free": None})
    assert not any(refused(desk.send("free")[1]) for _ in range(10))
    assert desk.pairs[0].app.budgets is not None and not desk.pairs[0].app.budgets._accounts


def test_a_request_beyond_the_bucket_passes_when_the_tenant_was_idle_and_leaves_a_debt() -> None:
    desk = Desk(Budget(Bucket(10.0, 50.0), None))
    assert [refused(desk.send()[1]) for _ in range(2)] == [False, True]
    desk.wait(9.9)
    assert refused(desk.send()[1])
    desk.wait(0.2)
    assert not refused(desk.send()[1])


def test_a_tenant_whose_place_went_to_another_one_goes_on_counting() -> None:
    desk = Desk()
    envoy, _ = desk.send()
    budgets = desk.pairs[0].app.budgets
    assert budgets is not None
    sets = PLACES // WAYS
    for number in range(1, WAYS + 1):
        other = budgets._row.place(key_of("acme", SEED) % sets + number * sets, 1e6)
        other.in_flight = 1
        budgets._row.store(other, 1e6)
    answer(envoy)
    assert desk.used()[1:] == (0.0, 0)
    assert not refused(desk.send()[1])


def test_with_another_budget_a_tenant_begins_with_a_full_bucket() -> None:
    desk = Desk()
    for _ in range(4):
        _, sent = desk.send()
    assert refused(sent)
    app = desk.pairs[0].app
    app.tenants = Tenants([FromHeader("x-tenant")], budget=Budget(Bucket(1.0, 100.0), None))
    assert [refused(desk.send()[1]) for _ in range(2)] == [False, True]
    app.tenants = Tenants([FromHeader("x-tenant")], budget=Budget(Bucket(1.0, 100.0), None))
    assert refused(desk.send()[1])  # the same limits, written again


def test_keys_do_not_tell_names() -> None:
    assert key_of("acme", 1) != key_of("acme", 2) != key_of("other", 2)
    assert key_of("acme", 1) != key_of("acme", 1, "llama") != key_of("acme", 1, "qwen")
    assert 0 < key_of("acme", 1) < 1 << 63
