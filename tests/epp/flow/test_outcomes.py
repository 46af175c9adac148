"""The label of each outcome, and what the client sees of it."""

import json

from epp.flow import outcomes as module
from epp.flow.outcomes import (
    EVICTED_CONTEXT_CANCELLED,
    EVICTED_DISPLACED,
    EVICTED_FAULT,
    EVICTED_NO_ENDPOINTS,
    EVICTED_SHUT_DOWN,
    EVICTED_TTL,
    REJECTED_CAPACITY,
    REJECTED_FAULT,
    REJECTED_NO_ENDPOINTS,
    REJECTED_SHUT_DOWN,
    Ending,
    Outcome,
    Undispatched,
)
from epp.protocol.refusals import DROP_REASON, RETRY_AFTER, answer
from tests.cases import cases

TABLE = [
    (REJECTED_CAPACITY, "RejectedCapacity", 429, "rejected-saturated",
     "ResourceExhausted - request rejected pre-queue: queue at capacity"),
    (REJECTED_NO_ENDPOINTS, "RejectedNoEndpoints", 503, "rejected-no-endpoints",
     "ServiceUnavailable - no endpoints available: request rejected pre-queue: no endpoints available"),
    (REJECTED_SHUT_DOWN, "RejectedOther", 503, "rejected-shutting-down",
     "ServiceUnavailable - flow controller shutting down: request rejected pre-queue: flow controller is not running"),
    (REJECTED_FAULT, "RejectedOther", 500, None,
     "Internal - internal flow control error: request rejected pre-queue"),
    (EVICTED_TTL, "EvictedTTL", 429, "rejected-ttl-expired",
     "ResourceExhausted - request timed out in queue: request evicted from queue: request TTL expired"),
    (EVICTED_NO_ENDPOINTS, "EvictedNoEndpoints", 503, "rejected-no-endpoints",
     "ServiceUnavailable - request timed out in queue and no endpoints are available: "
     "request evicted from queue: request TTL expired: no endpoints available"),
    (EVICTED_CONTEXT_CANCELLED, "EvictedContextCancelled", 503, "rejected-context-cancelled",
     "ServiceUnavailable - client disconnected: request evicted from queue: request context cancelled"),
    (EVICTED_DISPLACED, "EvictedDisplaced", 429, "evicted-priority",
     "ResourceExhausted - request evicted from queue: request displaced"),
    (EVICTED_SHUT_DOWN, "EvictedOther", 503, "rejected-shutting-down",
     "ServiceUnavailable - flow controller shutting down: request evicted from queue: flow controller is not running"),
    (EVICTED_FAULT, "EvictedOther", 500, None,
     "Internal - internal flow control error: request evicted from queue"),
]  # fmt: skip


@cases(("ending", "label", "status", "reason", "message"), TABLE)
def test_an_outcome_has_its_label_and_its_answer(ending: Ending, label: str, status: int, reason: str | None, message: str) -> None:
    raised = Undispatched(ending, retry_after_s=7)
    assert raised.ending.outcome is Outcome(label)
    error_answer = answer(raised)
    assert error_answer.status == status
    assert error_answer.headers.get(DROP_REASON) == reason
    assert error_answer.headers[RETRY_AFTER] == "7"
    assert json.loads(error_answer.body)["error"]["message"] == f"inference error: {message}"


def test_the_table_is_complete() -> None:
    endings = {each for each in vars(module).values() if isinstance(each, Ending)}
    assert endings == {row[0] for row in TABLE}
    assert {each.outcome for each in endings} == set(Outcome) - {Outcome.DISPATCHED}


def test_an_unknown_time_gives_no_retry_after() -> None:
    assert RETRY_AFTER not in answer(Undispatched(REJECTED_CAPACITY)).headers


def test_a_fault_adds_its_detail() -> None:
    assert b"request rejected pre-queue: an item of -1 bytes" in answer(Undispatched(REJECTED_FAULT, detail="an item of -1 bytes")).body
