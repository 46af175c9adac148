"""Simulates pools that publish KV events, and the index that follows them. Tests and the benchmark of KV events use it.

    prompts ──▶ KvPool, one per engine ──▶ events in a dialect ──▶ Holder ──▶ index of held blocks, links

`differences` compares the index with the pools, block by block.
"""

import random
from collections import deque

import numpy as np

from epp.prefix.held import held_links, held_root, index_keys
from loadtest.sim.engine import Job
from loadtest.sim.kv_dialects import DIALECTS, Dialect, events_of, payload
from loadtest.sim.kv_pool import CPU, GPU, KvPool, block_hashes, token_count
from shm.held_blocks import HeldReader, HeldWriter, Owners, schemas
from shm.segment import Region
from workers.supervisor.kv_events.holdings import Holder, Holdings

BLOCK = 16
BYTES = 4 * BLOCK
SECRET = 7
RUNNING = 6
ADAPTERS = ("", "", "tuned")
SALTS = ("", "", "", "tenant")
TIERS = (("gpu", 1000), ("cpu", 800))


class Engine:
    """One pool, its requests, and the blocks that it has published. `keys`: engine's hash of a block -> key in the index."""

    def __init__(self, dialect: str, blocks: int, cpu_blocks: int) -> None:
        self.dialect = Dialect(dialect)
        self.pool = KvPool(blocks, cpu_blocks, logs=True)
        self.running: deque[tuple[list[int], int]] = deque()
        self.keys: dict[int, int] = {}
        self.events = 0


class KvFleet:
    """Engines of all dialects with random prompts. `step` lets one engine take a request and returns what it publishes."""

    def __init__(self, seed: int, *, engines: int = 4, blocks: int = 1_500, cpu_blocks: int = 400) -> None:
        self._rng = random.Random(seed)
        self._documents = [self._rng.randbytes(BYTES * self._rng.randint(20, 300)) for _ in range(3 * engines)]
        self.engines = [Engine(DIALECTS[n % len(DIALECTS)], blocks, cpu_blocks) for n in range(engines)]
        index, links = schemas(2 * engines * (blocks + cpu_blocks))  # at its limit, the index evicts a few
        memory, linked = (Region(memoryview(bytearray(schema.bytes))) for schema in (index, links))
        self.writer = HeldWriter(index, memory, links, linked)
        self.reader = HeldReader(index, memory)
        self.holdings = Holdings(self.writer, TIERS, SECRET)
        self.holders = [Holder(self.holdings) for _ in self.engines]
        self.events = 0

    def step(self) -> tuple[int, bytes]:
        """Lets one engine take a request. Returns the number of the engine and its message; b"" if its pool has not changed."""
        place = self._rng.randrange(len(self.engines))
        engine, rng = self.engines[place], self._rng
        document = rng.choice(self._documents)
        prompt = document[: BYTES * rng.randint(1, len(document) // BYTES)] + rng.randbytes(rng.randrange(10 * BYTES))
        # SGLang's events name no adapter.
        adapter = "" if engine.dialect.name.startswith("sglang") else rng.choice(ADAPTERS)
        salt = rng.choice(SALTS)
        hashes = block_hashes(prompt, BLOCK, f"{adapter}\0{salt}".encode())
        needed = len(hashes) + rng.randrange(20)
        while engine.pool.allocate(hashes, needed, len(hashes)) is None:
            engine.pool.release(*engine.running.popleft())
        engine.running.append((hashes, needed))
        if len(engine.running) > RUNNING:
            engine.pool.release(*engine.running.popleft())
        self._learn(engine, hashes, prompt, adapter, salt)
        job = Job(hashes, token_count(prompt), 1, lora=adapter or None, prompt=prompt, salt=salt)
        assert engine.pool.log is not None
        events = events_of(engine.dialect, job, engine.pool.log, BLOCK)
        engine.pool.log.clear()
        engine.events += len(events)
        self.events += len(events)
        return place, payload(events) if events else b""

    def apply(self, place: int, message: bytes, tick: int) -> None:
        """Applies a message of an engine to the index. `place`: the number of the engine. `tick`: the age to record."""
        self.holders[place].apply(message)
        self.holdings.flush(tick)

    def differences(self) -> int:
        """Counts the blocks that the index has and a pool does not, or the other way round, over all engines and tiers."""
        found = 0
        for engine, holder in zip(self.engines, self.holders, strict=True):
            for tier, media in zip(holder.tiers, (GPU, CPU, ""), strict=True):
                expected = {engine.keys[block] for block in engine.pool.blocks(media)} if media else set()
                owners = Owners(1)
                owners.add(tier.owner, 0, tier.weight)
                held = sum(self.reader.held(np.array([key], np.uint64), owners)[0][0] for key in expected)
                found += len(expected) - held + self.writer.held(tier.owner) - held
        return found

    def _learn(self, engine: Engine, hashes: list[int], prompt: bytes, adapter: str, salt: str) -> None:
        tokens = np.frombuffer(prompt[: len(hashes) * BYTES], "<u4")
        chain = held_links(tokens, BLOCK, held_root(adapter, BLOCK, SECRET), SECRET, {0: [salt]} if salt else {})
        engine.keys |= zip(hashes, index_keys(chain).tolist(), strict=True)
