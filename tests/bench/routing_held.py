"""Follows the KV events of the simulated servers in the routing benchmark: with the real index, and with delayed messages."""

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from epp.candidates import EndpointList
from epp.plugin import Hashes, HeldView, Measure
from loadtest.sim.engine import Job
from loadtest.sim.kv_dialects import Dialect, events_of, payload
from loadtest.sim.kv_pool import Change
from shm.held_blocks import HeldReader, HeldWriter, Owners, schemas
from shm.segment import Region
from tests.bench.routing_traffic import BLOCK_TOKENS
from workers.supervisor.kv_events.holdings import Holder, Holdings

EVENTS_S = 0.010  # from a step of an engine to the index
BLOCKS = 1 << 20
WEIGHT = 1000
AGE_S = 0.1
EXPECTED_S = 2.0  # how long a server is expected to hold what was sent there


class SharedHeld:
    """Implements `epp.plugin.HeldBlocks` for all workers, and takes the changes of the engines' pools."""

    def __init__(self, endpoints: Sequence[int], secret: int) -> None:
        """`endpoints`: the owner ids of the servers."""
        servers = len(endpoints)
        index, links = schemas(BLOCKS)
        memory, linked = (Region(memoryview(bytearray(schema.bytes))) for schema in (index, links))
        self._writer = writer = HeldWriter(index, memory, links, linked)
        self._reader = HeldReader(index, memory)
        self._holdings = Holdings(writer, (("gpu", WEIGHT),), secret)
        self._holders = [Holder(self._holdings) for _ in range(servers)]
        self._dialect = Dialect("vllm")
        self._due: deque[tuple[float, int, bytes]] = deque()
        self._owners = Owners(servers)
        for row, holder in enumerate(self._holders):
            self._owners.add(holder.tiers[0].owner, row, WEIGHT)
            self._owners.add(holder.speculative, row, WEIGHT)
        self._holder_of = dict(zip(endpoints, self._holders, strict=True))
        self._now = 0.0
        self._expected: deque[tuple[float, int, Hashes]] = deque()
        all_followed = np.ones(servers, dtype=bool)
        self._view = HeldView((BLOCK_TOKENS,), all_followed, all_followed, (BLOCK_TOKENS,) * servers, ("",) * servers, frozenset[int]())

    def changed(self, server: int, now: float) -> Callable[[Job, Sequence[Change]], None]:
        """Returns the function that an engine calls with the changes of its pool at time `now`."""
        return lambda job, changes: self._due.append(
            (now + EVENTS_S, server, payload(events_of(self._dialect, job, changes, BLOCK_TOKENS)))
        )

    def passed(self, now: float) -> None:
        """Applies the messages that have arrived."""
        self._now = now
        while self._expected and self._expected[0][0] + EXPECTED_S <= now:
            at, owner, hashes = self._expected.popleft()
            self._writer.forget(hashes, owner, before=int(at / AGE_S))
        if not self._due or self._due[0][0] > now:
            return
        while self._due and self._due[0][0] <= now:
            _, server, message = self._due.popleft()
            self._holders[server].apply(message)
        self._holdings.flush(int(now / AGE_S))

    def view(self, endpoint_list: EndpointList, now: float) -> HeldView:
        return self._view

    def match(self, view: HeldView, hashes: Hashes, block_tokens: int) -> tuple[list[int], list[int]]:
        return self._reader.held(hashes, self._owners)

    def measure(self, latency: Measure) -> None:
        """Does nothing, because the benchmark does not read the latency."""

    def expect(self, hashes: Hashes, owner: int, block_tokens: int) -> None:
        speculative = self._holder_of[owner].speculative
        self._writer.insert(hashes, speculative, int(self._now / AGE_S))
        self._expected.append((self._now, speculative, hashes))
