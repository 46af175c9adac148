"""Attackers on a real picker's port: each is closed with ENHANCE_YOUR_CALM and counted by its cause, and good streams are still served."""

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

import pytest

from tests.bench.floods import LITTLE_MEMORY, PROBE_EVERY_S, abuse, probe, pss_mib
from tests.e2e.cluster import Cluster, eventually
from tests.faults.attacks import ATTACKS, CALM, ELSEWHERE, PROVOCATIONS, Closed, exhaust, pour, provoking, shake_hands
from tests.faults.client import Ending, Gateway, event_stream, long_request
from tests.faults.page_attacks import PAGE_ATTACKS
from tests.faults.tls_attacks import garble
from tests.tls_client import client_context
from workers.host.memory import BURST_EVERY_S
from workers.transport.limits import RESETS_OF_ALL_PER_SECOND

Ended = TypeVar("Ended")
PATIENCE_S = 20.0  # only a failure takes that long
GOOD = 30
ATTACKS_MAX = 10
MEMORY_MARGIN_MIB = 150  # MiB that an allocator may keep
RETURN_S = 4 * BURST_EVERY_S  # a worker returns the memory of a burst once it is over

CAUSES = {
    "CONTINUATION": "header_block",
    "HPACK bomb": "header_list",
    "PING": "pings",
    "SETTINGS": "settings",
    "empty DATA": "empty_frames",
    "WINDOW_UPDATE": "window_updates",
    "PRIORITY": "priorities",
    "MadeYouReset": "provoked_resets",
    "zero window": "output_limit",
}
SCRIPTS = {name: ATTACKS[name] for name in CAUSES} | {f"MadeYouReset: {k}": provoking(k) for k in PROVOCATIONS}


@pytest.fixture(scope="module")
def picker():
    with Cluster() as cluster:
        yield cluster.picker(cluster.fleet(2).file, workers=1)


async def good(port: int) -> list[Ending]:
    gateway = Gateway(port)
    endings = [(await gateway.exchange(number))[0] for number in range(GOOD)]
    await gateway.close()
    return endings


def beside(attack, port: int) -> tuple[Closed, list[Ending]]:
    """Runs good streams during an attack. Returns the end of the attack and the endings of the streams."""
    ends: list[Closed] = []
    attacker = threading.Thread(target=lambda: ends.append(attack()))
    attacker.start()
    endings = asyncio.run(good(port))
    attacker.join()
    return ends[0], endings


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_attacker_is_closed_and_counted_and_good_streams_are_answered(picker, name):
    counted, memory = abuse(picker), pss_mib(picker.child.pid)
    closed, endings = beside(lambda: pour(picker.grpc, SCRIPTS[name](), PATIENCE_S), picker.grpc)
    assert closed.after is not None
    assert closed.code == CALM
    assert endings == [Ending.OK] * GOOD
    cause = CAUSES[name.partition(":")[0]]
    more = {cause for cause, count in abuse(picker).items() if count > counted.get(cause, 0)}
    assert more in ({cause}, {"window_updates"})  # WINDOW_UPDATE errors drain two buckets, and either may be empty first
    assert any(f"{cause}: from 127.0.0.1" in picker.child.text() for cause in more)
    assert eventually(lambda: pss_mib(picker.child.pid) < memory + MEMORY_MARGIN_MIB, RETURN_S)


def test_a_gateway_that_relays_rapid_resets_is_slowed_down_and_keeps_its_streams(picker):
    counted = abuse(picker).get("resets", 0)
    closed, endings = beside(lambda: pour(picker.grpc, ATTACKS["rapid reset"](), 4.0), picker.grpc)
    assert closed.after is None
    assert endings == [Ending.OK] * GOOD
    taken = abuse(picker)["resets"] - counted
    assert 0 < taken < 4.0 * RESETS_OF_ALL_PER_SECOND


def test_large_unfinished_bodies_give_way_to_those_of_others():
    async def long_requests(port: int) -> list[Ending]:
        gateway = Gateway(port)
        endings = [await gateway.whole(long_request(400_000), event_stream(1)) for _ in range(GOOD)]
        await gateway.close()
        return endings

    with Cluster() as cluster:
        picker = cluster.picker(cluster.fleet(2).file, LITTLE_MEMORY, workers=1)
        attackers = [threading.Thread(target=lambda: pour(picker.grpc, ATTACKS["large bodies"](), 4.0)) for _ in range(2)]
        for attacker in attackers:
            attacker.start()
        assert asyncio.run(long_requests(picker.grpc)) == [Ending.OK] * GOOD
        for attacker in attackers:
            attacker.join()
        assert abuse(picker)["body_given_up"] > 0
        assert asyncio.run(long_requests(picker.grpc)) == [Ending.OK] * GOOD


async def secure(port: int) -> list[Ending]:
    endings = []
    for number in range(GOOD):
        gateway = Gateway(port, context=client_context())  # a handshake of its own
        endings.append((await gateway.exchange(number))[0])
        await gateway.close()
    return endings


def shaken(attack: Callable[[int, float], Ended], port: int) -> tuple[list[Ended], list[Ending]]:
    """Attacks a second at a time until the good streams have ended. Returns the ends of the attacks and of the streams."""
    ends: list[Ended] = []
    over = threading.Event()

    def repeat() -> None:
        while not ends or not over.is_set():
            ends.append(attack(port, 1.0))

    attacker = threading.Thread(target=repeat)
    attacker.start()
    try:
        return ends, asyncio.run(secure(port))
    finally:
        over.set()
        attacker.join()


def test_handshakes_without_end_from_one_address_delay_no_stream_of_another():
    with Cluster() as cluster:
        picker = cluster.picker(cluster.fleet(2).file, "--secure-serving", workers=1)
        _, endings = shaken(shake_hands, picker.grpc)
        assert endings == [Ending.OK] * GOOD
        assert abuse(picker)["handshakes"] > 0
        assert f"{ELSEWHERE} begins too many TLS connections" in picker.child.text()
        assert '"child ended"' not in picker.child.text()


def test_garbled_handshakes_from_many_addresses_keep_no_stream_out():
    with Cluster() as cluster:
        picker = cluster.picker(cluster.fleet(2).file, "--secure-serving", workers=1)
        closed, endings = shaken(garble, picker.grpc)
        assert endings == [Ending.OK] * GOOD
        assert sum(closed) > 0
        assert "handshake failed" in picker.child.text()
        assert '"child ended"' not in picker.child.text()


def test_compressed_bombs_are_never_unpacked_whole(picker):
    memory = pss_mib(picker.child.pid)
    _, endings = beside(lambda: pour(picker.grpc, ATTACKS["bombs"](), 2.0), picker.grpc)
    assert endings == [Ending.OK] * GOOD
    assert eventually(lambda: pss_mib(picker.child.pid) < memory + MEMORY_MARGIN_MIB, RETURN_S)


@pytest.mark.parametrize("name", PAGE_ATTACKS)
def test_an_attack_on_the_metrics_port_keeps_no_probe_out_and_restarts_no_process(picker, name):
    counted = abuse(picker)["metrics_port_abuse"]
    for _ in range(ATTACKS_MAX):  # on a busy machine, the first may be too slow to be abuse
        attacker = threading.Thread(target=lambda: PAGE_ATTACKS[name](picker.metrics, 1.0))
        attacker.start()
        while attacker.is_alive():
            assert probe(picker.metrics)
            attacker.join(PROBE_EVERY_S)  # probes without a pause would be abuse, too
        if name == "pages: scrapes" or abuse(picker)["metrics_port_abuse"] > counted:
            break  # one client may read pages as fast as they are made
    else:
        pytest.fail(f"{ATTACKS_MAX} attacks were not counted")
    assert '"child ended"' not in picker.child.text()


def test_an_attacker_that_takes_all_connections_keeps_no_client_out(picker):
    closed, endings = beside(lambda: exhaust(picker.grpc, 1.5, count=700), picker.grpc)
    assert closed.after is not None
    assert endings == [Ending.OK] * GOOD
    assert abuse(picker)["connections"] > 0
