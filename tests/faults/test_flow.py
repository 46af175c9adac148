"""A worker dies with a full queue: its part of the limits is free at once, and other requests are not affected."""

import asyncio
import os
import signal
import time

from tests.bench.overload_stack import config
from tests.bench.waiting import flow, until
from tests.e2e.cluster import Cluster, Picker
from tests.faults.waiting import LOST, SERVED, Waiting, identified, request
from tests.faults.watch import Watched

LIMIT = 120
WORKERS = 4
FULL = "rejected-saturated"
PATIENCE_S = 20.0  # for a busy machine; the test prints the actual time, which should be below 1 s


def test_after_a_worker_with_a_full_queue_was_killed_the_limit_is_exact_and_other_requests_are_served() -> None:
    with Cluster() as cluster:
        fleet = cluster.fleet(1)
        picker = cluster.picker(fleet.file, workers=WORKERS, config_text=config(fleet.file, flow(1, maxRequests=LIMIT)))
        asyncio.run(killed(picker))


async def killed(picker: Picker) -> None:
    waiting, watched = Waiting(picker.grpc), Watched(picker.child.pid, picker.instance, picker.grpc)
    waiting.ask(request("held", {}), hold=True)
    await until(lambda: waiting.served == 1)
    for number in range(LIMIT):
        waiting.ask(request(f"{number} waits", identified(tenant=f"tenant-{number % 7}")))
    await full(waiting)
    assert waiting.open == 1 + LIMIT

    spared = [pid for pid in watched.children().values() if watched.client_ports(pid) & waiting.held_on]
    victims = [(ordinal, pid) for ordinal, pid in watched.children().items() if ordinal and pid not in spared]
    _, pid = max(victims, key=lambda pair: len(watched.client_ports(pair[1])))
    os.kill(pid, signal.SIGKILL)
    died = time.monotonic()
    await until(lambda: waiting.endings[LOST] > 0)
    while await queued(waiting) is False:
        assert time.monotonic() - died < PATIENCE_S
    print(f"exact again after {time.monotonic() - died:.2f} s")
    free = waiting.endings[LOST]
    assert free > 1
    for number in range(free - 1):
        waiting.ask(request(f"{number} instead", {}))
    await full(waiting)
    assert waiting.open == 1 + LIMIT
    assert waiting.endings[LOST] == free

    waiting.released.set()
    await until(lambda: not waiting.open)
    assert waiting.endings[SERVED] == 1 + LIMIT
    assert set(waiting.endings) == {SERVED, LOST, FULL}
    await until(lambda: watched.in_flight() == 0)
    await waiting.close()


async def queued(waiting: Waiting) -> bool:
    """Sends one more request. Returns whether it was queued."""
    task = waiting.ask(request("one more", {}))
    done, _ = await asyncio.wait([task], timeout=0.2)
    if done:
        assert task.result() == FULL
    return not done


async def full(waiting: Waiting) -> None:
    """Waits until all requests are queued and the queue is full."""
    before = -1
    while before != waiting.open:
        before = waiting.open
        await asyncio.sleep(0.2)
    assert await waiting.ask(request("too much", {})) == FULL
