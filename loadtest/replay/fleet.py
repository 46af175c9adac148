"""The servers of a replay, and what workers know of them: the listed endpoints, the values of the last scrape, the load, and the prefix
index.

Every SCRAPE_S, a scrape sees all servers that answer. The index learns the blocks of a request INDEX_S after the decision. Servers join and
leave at the times of the recording. A server that was down fails its requests, and comes back with an empty cache.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from epp.candidates import Candidates, Endpoint, EndpointList, Snapshot
from epp.data import CACHE_BLOCK_SIZE, CACHE_NUM_BLOCKS, CACHE_TOKENS, KV_USAGE, RUNNING, WAITING
from epp.errors import ProducerFailed
from epp.plugin import Hashes, Plugin, Profile
from epp.request import Subset
from loadtest.replay.reading import Lifetime
from loadtest.replay.runs import Run
from loadtest.replay.servers import UNBOUNDED, Speed, server
from shm.prefix_index import IndexReader, IndexSchema
from shm.prefix_writer import TieredWriter, in_tier
from shm.segment import Region
from workers.cli.offline import OfflineError
from workers.shared.bus import AGE_TICKS
from workers.shared.index_limits import PrefixUse

SCRAPE_S: Final = 0.05
INDEX_S: Final = 0.009  # the time from a decision until all workers see its blocks in the index
INDEX_ENTRIES: Final = 1 << 19
SERVER_BLOCK_TOKENS: Final = 16
Batch = tuple[int, float, float]  # slot of an endpoint; requests that it runs; requests that wait there


class Fleet:
    """Implements `epp.decision.decide.EndpointPool`, the prefix index, and the counts of load. The slot of each endpoint is its index."""

    def __init__(self, endpoints: Sequence[Lifetime], speeds: Sequence[Speed], use: PrefixUse | None = None) -> None:
        """`use`: what the configuration requires of the prefix index; None if it does not use the index."""
        self.servers = [server(speed) for speed in speeds]
        self._speeds = speeds
        schema = IndexSchema(INDEX_ENTRIES)
        region = Region(memoryview(bytearray(schema.bytes)))
        self._writer = TieredWriter(schema, region)
        self.match: Callable[[Hashes], Mapping[int, int]] = IndexReader(schema, region).match
        self._endpoints = [self._endpoint(slot, each, speeds[slot], use) for slot, each in enumerate(endpoints)]
        size = len(endpoints)
        self.inflight, self._tokens = np.zeros(size), np.zeros(size)
        self.up = [True] * size
        self._counts = [np.zeros(size) for _ in range(3)]  # waiting, running, usage: as of the last scrape
        self._inflight_at_scrape = np.zeros(size)
        self._known = np.zeros(size, dtype=bool)
        self._sizes = self._cache_sizes()
        self._now, self._scraped_at = 0.0, -math.inf
        self._told: deque[tuple[float, Hashes, int, bool]] = deque()  # when, blocks, owner, and whether it holds them
        self._snapshot: Snapshot | None = None
        self._rows: np.ndarray | None = None
        self.list(range(size))

    def _endpoint(self, slot: int, lifetime: Lifetime, speed: Speed, use: PrefixUse | None) -> Endpoint:
        member = lifetime.member
        owner = self._writer.new_owner()
        if use is not None:
            cached = speed.cache_tokens // use.block_tokens if speed.cache_tokens < UNBOUNDED else 0
            for tier, (auto_tune, lru_capacity) in enumerate(use.tiers):
                self._writer.limit(in_tier(owner, tier), cached if auto_tune and cached else lru_capacity)
        host, _, port = member.address.rpartition(":")
        return Endpoint(
            name=member.name,
            namespace=member.namespace,
            host=host.strip("[]"),
            port=int(port),
            labels=member.labels,
            slot=slot,
            owner=owner,
        )

    def _cache_sizes(self) -> Mapping[str, np.ndarray]:
        if not all(speed.cache_tokens < UNBOUNDED for speed in self._speeds):
            return {}
        tokens = np.array([speed.cache_tokens for speed in self._speeds])
        return {
            CACHE_BLOCK_SIZE.name: np.full(len(tokens), float(SERVER_BLOCK_TOKENS)),
            CACHE_NUM_BLOCKS.name: tokens / SERVER_BLOCK_TOKENS,
            CACHE_TOKENS.name: tokens,
        }

    def list(self, slots: Sequence[int]) -> None:
        """Sets the endpoints that discovery lists from now on."""
        self._listed = np.array(slots, dtype=np.int64)
        self._rows = None if len(slots) == len(self._endpoints) else self._listed
        self._endpoint_list = EndpointList([self._endpoints[slot] for slot in slots])
        self._snapshot = None

    def die(self, slot: int) -> None:
        """Takes a server away: it loses its requests and its cache."""
        self.up[slot] = False
        self.servers[slot].clear()
        self._snapshot = None

    def revive(self, slot: int) -> None:
        """Brings a server back."""
        self.up[slot] = True
        self._snapshot = None

    def passed(self, now: float) -> None:
        """Scrapes if a scrape is due before `now`, the time of the next event."""
        if now - self._scraped_at >= SCRAPE_S:
            self._scraped_at = now - now % SCRAPE_S
            waiting, running, usage = self._counts
            for slot, each in enumerate(self.servers):
                if self.up[slot]:
                    waiting[slot] = each.queued(self._scraped_at) if each.waiting else 0
                    running[slot] = each.running
                    usage[slot] = min(each.active_tokens / self._speeds[slot].cache_tokens, 1.0)
                    self._inflight_at_scrape[slot] = self.inflight[slot]
                    self._known[slot] = True
            self._snapshot = None
        if self._told:
            self._index(now)
        self._now = now

    def batches(self) -> Iterator[Batch]:
        """Yields what the last scrape said of each listed endpoint that answered it."""
        waiting, running, _ = self._counts
        for slot in self._listed.tolist():
            if self.up[slot]:
                yield slot, running.item(slot), waiting.item(slot)

    def _made(self) -> Snapshot:
        rows = self._listed
        waiting, running, usage = (counts[rows] for counts in self._counts)
        values = {WAITING.name: waiting, RUNNING.name: running, KV_USAGE.name: usage}
        values |= {name: sizes[rows] for name, sizes in self._sizes.items()}
        known = self._known[rows]
        down = ~np.array(self.up, dtype=bool)[rows]
        at_scrape = self._inflight_at_scrape[rows]
        return Snapshot(self._endpoint_list, values, fresh=known & ~down, known=known, down=down, inflight_at_scrape=at_scrape)

    def candidates(self, subset: Subset | None) -> Candidates:
        snapshot, rows = self._snapshot, self._rows
        if snapshot is None:
            snapshot = self._snapshot = self._made()
        if rows is None:
            return Candidates(snapshot, self.inflight.copy(), self._tokens.copy())
        return Candidates(snapshot, self.inflight[rows], self._tokens[rows])

    def reloaded(self, candidates: Candidates) -> Candidates:
        rows = self._rows if candidates.snapshot.endpoint_list is self._endpoint_list else None
        if rows is None and len(candidates.snapshot.endpoints) != len(self._endpoints):
            return candidates  # the listed endpoints have changed while the request waited
        inflight, tokens = self.inflight, self._tokens
        if rows is None:
            return Candidates(candidates.snapshot, inflight.copy(), tokens.copy(), candidates.rows)
        return Candidates(candidates.snapshot, inflight[rows], tokens[rows], candidates.rows)

    def now(self) -> float:
        return self._now

    def add_tokens(self, endpoint: Endpoint, tokens: int) -> None:
        self._tokens[endpoint.slot] += tokens

    def learn(self, hashes: Hashes, owner: int) -> None:
        self._told.append((self._now + INDEX_S, hashes, owner, True))

    def forget(self, hashes: Hashes, owner: int) -> None:
        self._told.append((self._now + INDEX_S, hashes, owner, False))

    def warm(self, slot: int, runs: Sequence[Run], block_tokens: float, hashes: Hashes) -> None:
        """Puts the first blocks of a prompt into a server's cache, before the first request. `hashes`: the hashes of these blocks that the
        index has.
        """
        self.servers[slot].warm(runs, block_tokens)
        self._writer.insert(hashes, self._endpoints[slot].owner, 0)

    def _index(self, now: float) -> None:
        """Adds to the index the blocks that were reported INDEX_S ago."""
        told = self._told
        while told and told[0][0] <= now:
            _, hashes, owner, learned = told.popleft()
            if learned:
                self._writer.insert(hashes, owner, int(now * AGE_TICKS))
            else:
                self._writer.forget(hashes, owner)

    def producer_failed(self, producer: Plugin, failure: ProducerFailed) -> None:
        raise OfflineError(f"a data producer failed: {failure}")

    def scorer_failed(self, problem: Exception) -> None:
        raise problem

    def shadow_failed(self, profile: Profile, problem: Exception) -> None:
        raise OfflineError(f"shadow profile '{profile.name}' failed: {problem!r}") from problem
