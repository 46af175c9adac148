"""Events on the pool: what is sent, and what a refusal or an outage causes."""

import asyncio
import json
from typing import Any

from tests.waiting import turns
from workers.supervisor.kube.errors import ApiError, Unreachable
from workers.supervisor.kube.events import MESSAGE_CHARS_MAX, WAITING_MAX, PoolEvents
from workers.supervisor.kube.object_kinds import PoolName

AT = 1_800_000_000.25


class Server:
    """Stores events. `failures` are raised first, one per request."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.asked = 0
        self.stored: list[dict[str, Any]] = []

    async def request(self, verb: str, path: str, *, body: bytes | None = None, timeout_s: float = 0.0) -> bytes:
        assert (verb, path) == ("POST", "/api/v1/namespaces/space/events")
        assert body is not None
        self.asked += 1
        if self.failures:
            raise self.failures.pop(0)
        self.stored.append(json.loads(body))
        return b"{}"


def sent(server: Server, *messages: str, together: bool = True) -> list[str]:
    """Tells these messages, one by one unless `together`. Returns what was reported."""
    reported: list[str] = []

    async def main() -> None:
        events = PoolEvents(
            "space",
            PoolName("pool"),
            reporter="epp-1",
            uid=lambda: "u-1",
            report=lambda _event, reason: reported.append(reason),
            wall=lambda: AT,
        )
        running = asyncio.create_task(events.run(server))
        for message in messages:
            events.tell("ConfigurationRefused", message, warning=True)
            await turns(0 if together else 10)
        await turns(100)
        running.cancel()

    asyncio.run(main())
    return reported


def test_an_event_names_the_pool_the_reason_and_this_replica() -> None:
    server = Server()
    assert sent(server, "c.yaml:3:1: error[unknown-field]") == []
    (event,) = server.stored
    assert event["involvedObject"] == {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "namespace": "space",
        "name": "pool",
        "uid": "u-1",
    }
    assert event["metadata"] == {"name": f"pool.{int(AT * 1e6):x}", "namespace": "space"}
    assert (event["type"], event["reason"]) == ("Warning", "ConfigurationRefused")
    assert event["message"] == "c.yaml:3:1: error[unknown-field]"
    assert event["firstTimestamp"] == event["lastTimestamp"] == "2027-01-15T08:00:00Z"
    assert event["reportingInstance"] == event["source"]["host"] == "epp-1"


def test_a_long_message_is_cut_as_the_api_server_takes_no_longer_one() -> None:
    server = Server()
    sent(server, "x" * 5000)
    assert len(server.stored[0]["message"]) == MESSAGE_CHARS_MAX


def test_without_the_right_to_create_events_the_picker_asks_once() -> None:
    server = Server(ApiError(403, "Forbidden", "no", "create", "/api/v1/namespaces/space/events"))
    (why,) = sent(server, "one", "two", "three", together=False)
    assert "not allowed to create events in namespace space; add to a Role" in why
    assert (server.asked, server.stored) == (1, [])


def test_an_event_that_an_outage_prevents_is_dropped_and_later_ones_are_sent() -> None:
    server = Server(Unreachable("away"), ApiError(500, "InternalError", "oh", "create", "/api/v1/namespaces/space/events"))
    assert len(sent(server, "one", "two", "three", together=False)) == 2
    assert [event["message"] for event in server.stored] == ["three"]


def test_of_too_many_events_at_once_the_last_ones_are_sent() -> None:
    server = Server()
    sent(server, *(str(number) for number in range(WAITING_MAX + 3)))
    assert [event["message"] for event in server.stored] == [str(n) for n in range(3, WAITING_MAX + 3)]
