"""Learns latencies. The supervisor is the only writer of the latency model.

    workers ─ bus: samples ─▶ LatencyKeeper of a pool ─▶ document in shared memory, which workers read
    endpoint table: batches and queues ─▶ ▲ ▼
                                      LatencyState       a file, only with --state-dir

The model is published every PUBLISH_S if it has changed. A killed supervisor leaves the model in shared memory, and its successor continues
to learn. Meanwhile, samples wait in the bus.

If the picker has several pools, each pool has a keeper from its first samples on, or from the start if it has a file. Keepers without
samples for RECENT_S take turns in `look`, and all keepers take turns to be saved.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import structlog

from epp.data import KV_USAGE, RUNNING, WAITING
from epp.learning import samples, state
from epp.learning.doubt import Doubt
from epp.learning.endpoint import EndpointModel
from epp.learning.model import FirstToken, LatencyModel
from epp.learning.prompt_time import PromptTime
from shm.documents import DocumentReader, DocumentTooLarge, DocumentWriter
from shm.table import TableReader
from workers.process.instance import Instance
from workers.shared.documents import EndpointsView, Identity
from workers.supervisor.background import Background
from workers.supervisor.endpoints.latency_state import LatencyState, has_file, remove_oldest, state_folder

PUBLISH_S = 0.1
RECENT_S = 2.0
SAVE_S = 60.0
SAVE_TURN_S = 1.0
SAVE_ALL_S = 2.0  # a part of the time that the parent gives the supervisor to end
SURPRISE = 3.0  # a first token that takes this many times the predicted time is a surprise
SURPRISE_S = 0.2

log = structlog.get_logger()


class LatencyKeeper:
    """The keeper of the latency model of one pool. `take` learns a frame, `look` publishes the model, and `save` writes the file."""

    def __init__(
        self,
        instance: Instance,
        now: Callable[[], float] = time.monotonic,
        surprised: Callable[[int], None] = lambda slot: None,
        *,
        new: bool = False,
    ) -> None:
        """`surprised(slot)`: is called when the endpoint of a slot was far slower than predicted.

        `new`: whether the published model is not of this pool, but of an earlier pool in its place.
        """
        layout, memory = instance.layout, instance.memory
        self._document = instance.pool or 0
        self._now = now
        self._surprised = surprised
        self._writer = DocumentWriter(layout.latency, memory.latency)
        self._table = TableReader(layout.table, memory.table)
        self._columns = [layout.table.columns.index(column.name) for column in (RUNNING, WAITING, KV_USAGE)]
        self._endpoints = EndpointsView(DocumentReader(layout.documents, memory.documents), instance.pool or 0)
        self._seen = self._endpoints.version
        self._epoch = -1
        folder = state_folder(instance)
        self._file = LatencyState(folder) if folder else None
        self._remembered: Mapping[Identity, EndpointModel] = {}
        self._scraped_at = np.zeros(layout.table.slots)
        self._running = 0.0  # requests that all servers run
        self._areas = memory.areas
        self._doubt = Doubt()
        self._prompts = PromptTime()
        self._used = False  # whether the keeper has ever learned. Before that, it reads, publishes and saves no model
        reader = DocumentReader(layout.latency, memory.latency)
        self.model = self._kept() if new else self._predecessor(reader)
        self._published = self.model.changes
        if new and reader.version(self._document):
            self._publish()

    def take(self, data: bytes) -> None:
        """Learns the samples of one frame. Raises CorruptSamples."""
        self._used = True
        samples.learn(self.model, data, self._begun)

    def _begun(self, first: FirstToken) -> None:
        self._prompts.add(first.tokens)
        if first.observed > SURPRISE * first.predicted + SURPRISE_S:
            self._surprised(first.slot)

    def prompt_s(self) -> float:
        """Returns the mean seconds that a server works on one prompt, or 0 if not known."""
        return self._prompts.seconds(self.model)

    def look(self) -> None:
        """Follows the endpoints and their batches, and publishes the model if it has changed."""
        if not self._used:
            return
        self._follow_endpoints()
        self._follow_batches()
        sent = float(self._areas.inflight(len(self._scraped_at))[self._endpoints.slots].sum())
        if why := self._doubt.look(self.model, self._now(), self._running, sent):
            log.warning(
                "predictions of the time to the first token have been poor for five minutes",
                error=round(self.model.error, 2),
                used=self.model.trusted,
                likely_cause=why,
            )
        if self.model.changes == self._published:
            return
        self._publish()

    def _publish(self) -> None:
        self._published = self.model.changes
        try:
            self._writer.write(self._document, state.encode(self.model))
        except DocumentTooLarge as problem:  # the layout has room for all slots
            log.error("the latency model is not published", why=str(problem))

    def save(self) -> None:
        """Writes the model to the state folder."""
        if self._file is not None and self._used:
            current = self._endpoints.current()
            identities = zip(self._endpoints.identities(), current, strict=True)
            self._file.save(self.model, {endpoint.slot: identity for identity, endpoint in identities})

    def learned(self) -> bytes:
        """Returns the model as bytes, for a replica that joins, or b"" if it has learned nothing."""
        return state.encode(self.model) if self._used else b""

    def adopt(self, data: bytes, slots: Mapping[int, int]) -> bool:
        """Takes over another replica's model if this model has learned less. `slots`: the sender's slot -> this replica's slot. Returns
        whether it was taken over.

        Raises UnusableModel.
        """
        model = state.decode(data)
        if model.first.count <= self.model.first.count:
            return False
        generations = {endpoint.slot: endpoint.generation for endpoint in self._endpoints.current()}
        known = {slots[slot]: endpoint for slot, endpoint in model.endpoints.items() if slot in slots}
        for slot in list(model.endpoints):
            model.forget(slot)
        for slot, endpoint in known.items():
            if slot in generations:
                model.adopt(endpoint, slot, generations[slot], self._now())
        model.changes += self._published + 1
        self.model = model
        self._used = True
        return True

    def _predecessor(self, reader: DocumentReader) -> LatencyModel:
        """Returns the model that a predecessor has published, or else the model of the state folder, or else a new model."""
        found = reader.read(self._document)
        if found is not None:
            try:
                model = state.decode(found[1])
            except state.UnusableModel as problem:
                log.warning("the latency model begins anew", why=str(problem))
            else:
                self._used = True
                return model
        return self._kept()

    def _kept(self) -> LatencyModel:
        """Returns the model of the state folder, or else a new model."""
        if self._file is None:
            return LatencyModel()
        model, self._remembered = self._file.load()
        self._used = bool(self._remembered)
        return model

    def _follow_endpoints(self) -> None:
        """Forgets endpoints that have left, and restores endpoints of the state folder that have come back."""
        view = self._endpoints
        current = view.current()
        if view.version == self._seen:
            return
        self._seen = view.version
        here = {endpoint.slot: endpoint.generation for endpoint in current}
        for slot, known in list(self.model.endpoints.items()):
            if here.get(slot) != known.generation:
                self.model.forget(slot)
        for identity, endpoint in zip(view.identities(), current, strict=True):
            remembered = self._remembered.get(identity)
            if remembered is not None and endpoint.slot not in self.model.endpoints:
                self.model.adopt(remembered, endpoint.slot, endpoint.generation, self._now())

    def _follow_batches(self) -> None:
        """Reads the batch and the queue of each endpoint that was scraped since the last look."""
        if self._table.epoch() == self._epoch:
            return
        first, end = self._endpoints.span()
        copy, rows = self._table.copy_part(first, end), self._endpoints.slots - first
        self._epoch = copy.epoch
        running, waiting, usage = (copy.column(index) for index in self._columns)
        self._running = float(np.nansum(running[rows]))
        before = self._scraped_at[first : first + len(copy.rows)]
        moved = (copy.updated_at != before) & (running > 0.0)
        before[:] = copy.updated_at
        for row in np.arange(len(moved))[rows][moved[rows]].tolist():
            found = float(running[row]), float(waiting[row]), float(usage[row])
            self.model.scraped(first + row, int(copy.generation[row]), *found)


class LatencyKeepers:
    """The keepers of all pools. `start` begins to publish. Call `save` at the end."""

    def __init__(
        self,
        instance: Instance,
        pool_of: Callable[[int], int | None],
        now: Callable[[], float] = time.monotonic,
        surprised: Callable[[int], None] = lambda slot: None,
    ) -> None:
        """`pool_of(slot)`: the pool of the endpoint in a slot, or None without an endpoint. `surprised`: as for `LatencyKeeper`."""
        self._pools = instance.every
        self._several = bool(instance.pools)
        self._pool_of = pool_of
        self._now = now
        self._surprised = surprised
        self._keepers: dict[int, LatencyKeeper] = {}
        self._taken_at: dict[int, float] = {}
        self._turn = 0
        self._saves: Iterator[LatencyKeeper] = iter(())  # the keepers still to be saved in this round
        self._round_at = now()  # the time at which the round began
        self._folder = instance.options.state_dir
        left = DocumentReader(instance.layout.latency, instance.memory.latency)
        for number, pool in enumerate(instance.every):
            if not self._several or left.version(number) or has_file(state_folder(pool)):
                self.keeper(number)

    def use(self, instance: Instance) -> None:
        """Takes over that other pools have some of the numbers. The models of these pools begin anew, or from their files."""
        before, self._pools = self._pools, instance.every
        for number, (old, new) in enumerate(zip(before, instance.every, strict=True)):
            if old.options.pool_name == new.options.pool_name:
                continue
            self._taken_at.pop(number, None)
            if (left := self._keepers.pop(number, None)) is not None:
                left.save()
            if left is not None or has_file(state_folder(new)):
                self._keepers[number] = LatencyKeeper(new, self._now, self._surprised, new=True)

    def start(self, background: Background) -> None:
        """Starts to publish the models, and to save them with --state-dir."""
        background.every(PUBLISH_S, self.look)
        if self._folder:
            if self._several:
                remove_oldest(self._folder, {pool.options.pool_name for pool in self._pools} - {""}, len(self._pools))
            background.every(SAVE_TURN_S, self.save_some)

    def save_some(self) -> None:
        """Saves a part of the models, so that each is saved every SAVE_S, and the event loop does not wait for all disks at once."""
        for _ in range(math.ceil(len(self._keepers) * SAVE_TURN_S / SAVE_S)):
            keeper = next(self._saves, None)
            if keeper is None:
                if self._now() - self._round_at >= SAVE_S:
                    self._saves, self._round_at = iter(list(self._keepers.values())), self._now()
                return
            if any(keeper is each for each in self._keepers.values()):
                keeper.save()

    def save(self) -> None:
        """Saves all models at the end, those with the latest samples first. Gives up after SAVE_ALL_S."""
        began = self._now()
        for number in sorted(self._keepers, key=lambda pool: -self._taken_at.get(pool, 0.0)):
            if self._now() - began > SAVE_ALL_S:
                log.warning("not all latency models are saved", folder=self._folder)
                return
            self._keepers[number].save()

    def take(self, data: bytes) -> None:
        """Learns the samples of one frame, all of one pool. Raises CorruptSamples."""
        pool = self._pool_of(samples.slot_of(data))
        if pool is not None:
            self._taken_at[pool] = self._now()
            self.keeper(pool).take(data)

    def keepers(self) -> Mapping[int, LatencyKeeper]:
        """Returns the keepers of all pools with answers."""
        return self._keepers

    def model_of(self, pool: int) -> LatencyModel | None:
        """Returns the model of a pool, or None if the pool has learned nothing."""
        keeper = self._keepers.get(pool)
        return None if keeper is None else keeper.model

    def look(self) -> None:
        """Calls `LatencyKeeper.look` for the pools with recent samples and for one other pool."""
        recent = [pool for pool, at in self._taken_at.items() if self._now() - at < RECENT_S]
        others = [pool for pool in self._keepers if pool not in recent]
        if others:
            self._turn += 1
            recent.append(others[self._turn % len(others)])
        for pool in recent:
            self._keepers[pool].look()

    def keeper(self, pool: int) -> LatencyKeeper:
        """Returns the keeper of a pool."""
        keeper = self._keepers.get(pool)
        if keeper is None:
            keeper = self._keepers[pool] = LatencyKeeper(self._pools[pool], self._now, self._surprised)
        return keeper
