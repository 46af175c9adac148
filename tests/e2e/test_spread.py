"""The spread of requests: back to the server with their prefix, otherwise evenly over servers and workers."""

import asyncio
import random
import time
from statistics import mean

from tests.e2e.cluster import COMPLETIONS, Cluster, Picker, ask, ask_all, completion, eventually
from tests.e2e.conftest import SERVERS, WORKERS, Gateway

LEARN_S = 0.2  # an index update takes a few milliseconds from the worker to the index
HELD = 64
HELD_TOKENS = 150  # at least 1.5 s
ARRIVE_S = 0.3
LOOKS = 4


def prompt(rng: random.Random, size: int = 4_000) -> str:
    return rng.randbytes(size // 2).hex()


def unmoved(picker: Picker) -> bool:
    """Returns whether no scrape happens for half a second."""
    scrapes = picker.counter("scrapes_total")
    time.sleep(0.5)
    return picker.counter("scrapes_total") == scrapes


def test_prompts_with_the_same_beginning_go_to_the_same_server(gateway: Gateway) -> None:
    rng = random.Random("affinity")
    for _ in range(4):
        start = prompt(rng)
        first = ask(gateway.port, COMPLETIONS, completion(start, max_tokens=1)).server
        time.sleep(LEARN_S)
        servers = {ask(gateway.port, COMPLETIONS, completion(start + prompt(rng, 200), max_tokens=1)).server for _ in range(6)}
        assert servers == {first}


def test_different_prompts_go_to_all_servers(gateway: Gateway) -> None:
    rng = random.Random("spread")
    servers = {ask(gateway.port, COMPLETIONS, completion(prompt(rng), max_tokens=1)).server for _ in range(48)}
    assert len(servers) == SERVERS


def test_a_burst_between_two_scrapes_spreads_over_equally_loaded_servers(gateway: Gateway, cluster: Cluster) -> None:
    picker = cluster.picker(gateway.fleet.file, "--refresh-metrics-interval=600s", workers=WORKERS)
    port = cluster.envoy(picker)
    rng = random.Random("burst")
    assert eventually(lambda: unmoved(picker)), "the first scrapes do not end"
    scrapes = picker.counter("scrapes_total")
    before = gateway.fleet.requests()
    answers = asyncio.run(ask_all(port, COMPLETIONS, [completion(prompt(rng, 1_000), max_tokens=40) for _ in range(200)]))
    counts = [now - then for now, then in zip(gateway.fleet.requests(), before, strict=True)]
    assert picker.counter("scrapes_total") == scrapes, "a scrape happened during the burst"
    assert {answer.status for answer in answers} == {200}
    print(f"200 requests between two scrapes over {SERVERS} servers: {counts}, max/mean {max(counts) / mean(counts):.2f}")
    assert max(counts) / mean(counts) <= 1.3


def test_concurrent_streams_spread_over_workers(gateway: Gateway, cluster: Cluster) -> None:
    """Uses a new gateway without connections. An older Envoy would keep the connections of an earlier peak and fill some of them first."""
    picker = cluster.picker(gateway.fleet.file, workers=WORKERS)
    port = cluster.envoy(picker)
    bodies = [completion(f"{n} spread over workers", max_tokens=HELD_TOKENS, stream=True) for n in range(HELD)]

    async def look() -> list[list[float]]:
        asking = asyncio.create_task(ask_all(port, COMPLETIONS, bodies, ARRIVE_S))
        seen = []
        for _ in range(LOOKS):
            await asyncio.sleep(0.35)
            seen.append(await asyncio.to_thread(picker.gauge, "streams_open"))
        assert {answer.status for answer in await asking} == {200}
        return seen

    held = max(asyncio.run(look()), key=sum)
    connections = picker.gauge("connections_open")
    print(f"streams per worker {held} over connections {connections}; busiest/mean {max(held) / mean(held):.2f}")
    assert sum(held) == HELD
    assert max(held) / mean(held) <= 1.5
