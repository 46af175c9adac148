"""Many open streams at once: over Envoy, which opens connections as it needs them, and over grpcio, which does not."""

import asyncio
import json

from loadtest.demo.children import python
from tests.e2e.cluster import COMPLETIONS, ask_all, completion, eventually, run
from tests.e2e.conftest import Gateway

STREAMS = 200


def test_all_streams_held_open_through_envoy_are_answered(gateway: Gateway) -> None:
    bodies = [completion(f"{n} held", max_tokens=120, stream=True) for n in range(STREAMS)]

    async def both() -> float:
        asking = asyncio.create_task(ask_all(gateway.port, COMPLETIONS, bodies))
        most = 0.0
        while not asking.done():
            await asyncio.sleep(0.2)
            most = max(most, sum(await asyncio.to_thread(gateway.picker.gauge, "streams_open")))
        assert {answer.status for answer in await asking} == {200}
        return most

    most = asyncio.run(both())
    print(f"{most:.0f} streams seen open at once over connections {gateway.picker.gauge('connections_open')}")
    assert most >= STREAMS * 0.9
    assert eventually(lambda: sum(gateway.picker.gauge("streams_open")) == 0)


def test_all_streams_of_a_client_with_two_connections_are_answered(gateway: Gateway) -> None:
    done = run(python("tests.e2e.raw_streams", str(gateway.picker.grpc), str(STREAMS), "2"))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    addresses = {f"{host}:{port}" for host, port in gateway.fleet.addresses}
    print(f"{report['answered_while_held']} of {STREAMS} answered while held, after {report['seconds'] * 1e3:.0f} ms")
    assert report["answered_while_held"] == STREAMS
    assert set(report["results"]) <= addresses
    assert eventually(lambda: sum(gateway.picker.gauge("streams_open")) == 0)
    assert eventually(lambda: gateway.picker.in_flight() == [])
