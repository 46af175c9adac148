"""Writes the prefix index. The supervisor is its only writer.

    workers ─ bus ─▶ BusReader ─▶ IndexWriter ─▶ shared memory, which workers read
                                       ▲ ▼
                                  IndexState       a snapshot on disk, only with --state-dir

A killed supervisor leaves the index in shared memory, and its successor continues to write it. The snapshot is for a restart of the
whole picker.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping

from shm.prefix_writer import IndexWriter, TieredWriter
from workers.process.instance import Instance
from workers.shared.bus import AGE_TICKS, RHYTHM, BusReader, IndexWriting
from workers.shared.documents import Known
from workers.supervisor.background import Background
from workers.supervisor.endpoints.index_state import IndexState

SWEEP_S = 0.1
SWEEP_BUCKETS = 16384

Owners = Callable[[], Mapping[Known, int]]


class IndexKeeper:
    """Writes the prefix index and saves it. Call `load` first, then `start`, and `save` at the end."""

    def __init__(self, present: Callable[[], Instance]) -> None:
        """`present`: returns the instance under the present configuration."""
        instance = self._instance = present()
        self.writer = TieredWriter(instance.layout.index, instance.memory.index)
        self.snapshot = _snapshot(present, self.writer)  # None without --state-dir
        self.taught: IndexWriting = self.writer  # the object that gets the updates of the bus; may also copy them to other replicas
        self.rhythm = RHYTHM  # the rhythm of reading the bus; an exchange with other replicas uses another one
        self.bus: BusReader

    @property
    def lost(self) -> int:
        """The number of entries that were freed because their bucket, or their endpoint's share of the index, was full."""
        return self.writer.evictions + self.writer.over_capacity

    def load(self) -> Mapping[Known, int] | None:
        """Fills the index from the snapshot.

        Returns endpoint -> owner id for the endpoints with entries in the snapshot, or None without --state-dir.
        """
        return self.snapshot.load() if self.snapshot is not None else None

    def start(
        self,
        background: Background,
        cleanup: contextlib.ExitStack,
        on_samples: Callable[[bytes], object],
        on_records: Callable[[bytes], object],
        on_cached: Callable[[int, int], object],
    ) -> None:
        """Starts to read the bus, and to free the entries of gone endpoints step by step. `on_…`: see `BusReader`."""
        self.bus = BusReader(
            asyncio.get_running_loop(),
            self._instance.pipes.bus_readers,
            self.taught,
            now=time.monotonic,
            on_samples=on_samples,
            on_records=on_records,
            on_cached=on_cached,
            rhythm=self.rhythm,
        )
        cleanup.callback(self.bus.close)
        self.bus.start()
        background.every(SWEEP_S, self._sweep)

    def save_regularly(self, background: Background, owners: Owners) -> None:
        """Starts to save snapshots, including one when the picker begins to stop. `owners` returns the owner id of each endpoint."""
        if self.snapshot is not None:
            background.keep(self.snapshot.run(owners, lambda: self._instance.words.stopping))

    async def save(self, owners: Owners) -> None:
        """Saves the last snapshot, including all updates that workers have sent."""
        if self.snapshot is not None:
            self.bus.drain()
            await self.snapshot.close(owners)

    def _sweep(self) -> None:
        self.writer.sweep_step(SWEEP_BUCKETS)


def _snapshot(present: Callable[[], Instance], writer: IndexWriter) -> IndexState | None:
    instance = present()
    if not instance.options.state_dir:
        return None

    def block_tokens() -> Mapping[str, int]:
        now = present()
        uses = ((pool.options.pool_name if now.pools else "", pool.sources.prefix_use) for pool in now.every)
        return {name: use.block_tokens if use is not None else 0 for name, use in uses}

    return IndexState(
        instance.options.state_dir,
        writer,
        seed=instance.credentials.prefix_seed,
        block_tokens=block_tokens,
        several=bool(instance.pools),
        ticks=lambda: int(time.monotonic() * AGE_TICKS),
    )
