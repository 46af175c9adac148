"""What the stream of an evicted request sends to the gateway, and what it releases."""

from collections.abc import Callable
from typing import Any

import pytest

from epp.flow.eviction import Victim
from epp.request import Request
from epp.request.flows import FlowKey
from tests.pair import Envoy, Pair
from tests.workers.worker.extproc.streams import BODY, USAGE, pair


class Tracked:
    """Stands for `workers.worker.flow.eviction.Evictions`: records its calls."""

    def __init__(self) -> None:
        self.victims: list[Victim] = []
        self.ends: list[Victim] = []

    def track(self, request: Request, now: float, revoke: Callable[[], bool]) -> Victim | None:
        self.victims.append(Victim(FlowKey(request.fairness_id, request.priority), now, revoke))
        return self.victims[-1]

    def ended(self, victim: Victim) -> None:
        self.ends.append(victim)


def routed(p: Pair) -> tuple[Envoy, Tracked]:
    tracked = Tracked()
    p.app.evictions = tracked  # type: ignore[assignment]
    envoy = p.open()
    envoy.headers()
    envoy.body(BODY)
    return envoy, tracked


def evicted(envoy: Envoy) -> Any:
    (answer,) = envoy.answers()
    return answer.immediate_response


def test_an_evicted_request_gets_429_with_the_exact_text_and_reason() -> None:
    p = pair()
    envoy, tracked = routed(p)
    assert tracked.victims[0].revoke()
    answer = evicted(envoy)
    assert answer.status.code == 429
    assert answer.body == b"request evicted by flow control"
    assert [(o.header.key, o.header.raw_value) for o in answer.headers.set_headers] == [("x-llm-d-request-dropped-reason", b"evicted")]
    assert envoy.stream.ended == (0, "")
    assert sum(p.inflight) == 0
    assert tracked.ends == tracked.victims


def test_a_request_is_evicted_even_after_its_answer_has_begun() -> None:
    p = pair()
    envoy, tracked = routed(p)
    envoy.response_headers(kind="text/event-stream")
    envoy.response_body(b"data: {}\n\n", last=False)
    assert tracked.victims[0].revoke()
    assert evicted(envoy).status.code == 429
    assert sum(p.inflight) == 0


def test_an_eviction_after_the_end_of_the_answer_is_ignored() -> None:
    p = pair()
    envoy, tracked = routed(p)
    envoy.response_headers()
    envoy.response_body(USAGE)
    assert tracked.ends == tracked.victims
    assert not tracked.victims[0].revoke()
    assert envoy.answers() == []
    assert envoy.stream.ended is None


@pytest.mark.parametrize("how", ["half_closed", "closed"])
def test_an_eviction_after_the_end_of_the_stream_is_ignored(how: str) -> None:
    p = pair()
    envoy, tracked = routed(p)
    getattr(envoy.handler, how)()
    assert not tracked.victims[0].revoke()
    assert envoy.answers() == []
    assert tracked.ends == tracked.victims


def test_an_eviction_happens_once_and_later_messages_of_the_gateway_are_ignored() -> None:
    p = pair()
    envoy, tracked = routed(p)
    assert tracked.victims[0].revoke()
    assert not tracked.victims[0].revoke()
    envoy.answers()
    assert envoy.response_headers() == []
    assert envoy.response_body(USAGE) == []
    assert sum(p.inflight) == 0
    assert tracked.ends == tracked.victims
