"""The label of each outcome, its phase, and what the client sees of it."""

import json

import pytest

from epp.flow import outcomes as module
from epp.flow.outcomes import (
    Evicted,
    EvictedContextCancelled,
    EvictedDisplaced,
    EvictedFault,
    EvictedNoEndpoints,
    EvictedShutDown,
    EvictedTTL,
    Outcome,
    Rejected,
    RejectedCapacity,
    RejectedFault,
    RejectedNoEndpoints,
    RejectedShutDown,
    Undispatched,
)
from epp.protocol.refusals import DROP_REASON, RETRY_AFTER, answer

TABLE = [
    (RejectedCapacity, "RejectedCapacity", Rejected, 429, "rejected-saturated",
     "ResourceExhausted - request rejected pre-queue: queue at capacity"),
    (RejectedNoEndpoints, "RejectedNoEndpoints", Rejected, 503, "rejected-no-endpoints",
     "ServiceUnavailable - no endpoints available: request rejected pre-queue: no endpoints available"),
    (RejectedShutDown, "RejectedOther", Rejected, 503, "rejected-shutting-down",
     "ServiceUnavailable - flow controller shutting down: request rejected pre-queue: flow controller is not running"),
    (RejectedFault, "RejectedOther", Rejected, 500, None,
     "Internal - internal flow control error: request rejected pre-queue"),
    (EvictedTTL, "EvictedTTL", Evicted, 429, "rejected-ttl-expired",
     "ResourceExhausted - request timed out in queue: request evicted from queue: request TTL expired"),
    (EvictedNoEndpoints, "EvictedNoEndpoints", Evicted, 503, "rejected-no-endpoints",
     "ServiceUnavailable - request timed out in queue and no endpoints are available: "
     "request evicted from queue: request TTL expired: no endpoints available"),
    (EvictedContextCancelled, "EvictedContextCancelled", Evicted, 503, "rejected-context-cancelled",
     "ServiceUnavailable - client disconnected: request evicted from queue: request context cancelled"),
    (EvictedDisplaced, "EvictedDisplaced", Evicted, 429, "evicted-priority",
     "ResourceExhausted - request evicted from queue: request displaced"),
    (EvictedShutDown, "EvictedOther", Evicted, 503, "rejected-shutting-down",
     "ServiceUnavailable - flow controller shutting down: request evicted from queue: flow controller is not running"),
    (EvictedFault, "EvictedOther", Evicted, 500, None,
     "Internal - internal flow control error: request evicted from queue"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "label", "phase", "status", "reason", "message"), TABLE)
def test_an_outcome_has_its_label_its_phase_and_its_answer(
    kind: type[Undispatched], label: str, phase: type[Undispatched], status: int, reason: str | None, message: str
) -> None:
    raised = kind(retry_after_s=7)
    assert raised.outcome is Outcome(label)
    assert isinstance(raised, phase)
    error_answer = answer(raised)
    assert error_answer.status == status
    assert error_answer.headers.get(DROP_REASON) == reason
    assert error_answer.headers[RETRY_AFTER] == "7"
    assert json.loads(error_answer.body)["error"]["message"] == f"inference error: {message}"


def test_the_table_is_complete() -> None:
    concrete = {
        each for each in vars(module).values() if isinstance(each, type) and issubclass(each, Undispatched) and "outcome" in vars(each)
    }
    assert concrete == {row[0] for row in TABLE}
    assert {each.outcome for each in concrete} == set(Outcome) - {Outcome.DISPATCHED}


def test_an_unknown_time_gives_no_retry_after() -> None:
    assert RETRY_AFTER not in answer(RejectedCapacity()).headers


def test_a_fault_adds_its_detail() -> None:
    assert b"request rejected pre-queue: an item of -1 bytes" in answer(RejectedFault(detail="an item of -1 bytes")).body
