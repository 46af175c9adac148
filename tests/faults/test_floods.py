"""Attackers on a real picker's port: each is closed with ENHANCE_YOUR_CALM and counted by its cause, and good streams go on."""

import asyncio
import threading

import pytest

from tests.bench.floods import abuse, pss_mib
from tests.e2e.cluster import Cluster
from tests.faults.attacks import ATTACKS, CALM, PROVOCATIONS, Closed, exhaust, pour, provoking
from tests.faults.client import Ending, Gateway

PATIENCE_S = 20.0  # nobody waits so long unless something is wrong
GOOD = 30
MEMORY_MARGIN_MIB = 150  # what an allocator may keep

CAUSES = {
    "rapid reset": "resets",
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
    found = [(await gateway.exchange(number))[0] for number in range(GOOD)]
    await gateway.close()
    return found


def beside(attack, port: int) -> tuple[Closed, list[Ending]]:
    """What came of an attack, and of good streams during it."""
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
    assert more in ({cause}, {"window_updates"})  # of errors by WINDOW_UPDATE, either bucket may be empty first
    assert pss_mib(picker.child.pid) < memory + MEMORY_MARGIN_MIB


def test_who_takes_all_connections_keeps_nobody_out(picker):
    closed, endings = beside(lambda: exhaust(picker.grpc, 1.5, count=700), picker.grpc)
    assert closed.after is not None
    assert endings == [Ending.OK] * GOOD
    assert abuse(picker)["connections"] > 0
