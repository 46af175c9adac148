"""Computes the scaling signal once per second. The supervisor is the only writer of its two words in shared memory.

areas: requests routed, refused for load, failed, ended ────────────┐
flow control: requests that wait ───────────────────────────────────┤
endpoint table: batches, KV usage ──────────────────────────────────┼▶ ReplicasNeeded ─▶ gauges of the supervisor's area
latency model: limits, speeds, prompt times ────────────────────────┘

If the picker has several pools, each pool has a signal from its first answers on (`PoolSignals`), which only the metrics page shows. The
requests of a pool are counted at its endpoints, so requests that are refused for load are not counted.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from epp.data import KV_USAGE, RUNNING, WAITING
from epp.learning.replicas_needed import Reading, ReplicasNeeded, batch_share
from shm.areas import Area
from shm.documents import DocumentReader
from shm.flow_areas import WAITING as WAITING_REQUESTS
from shm.flow_areas import FlowAreas
from shm.table import State, TableReader
from workers.process.instance import Instance
from workers.process.layout import HEADROOM, REPLICAS_NEEDED, UNKNOWN_HEADROOM
from workers.shared.documents import EndpointsView
from workers.supervisor.latency_keeper import LatencyKeeper
from workers.supervisor.objects_watch import flow_areas

READ_S = 1.0
THOUSANDTHS = 1000
HEADROOM_LEAST = -9.999


class ScalingSignal:
    """Reads the pool and shows the signal. Call `look` every READ_S. `latency`: the keeper of the pool's latency model."""

    def __init__(
        self,
        instance: Instance,
        area: Area | None,
        latency: LatencyKeeper,
        waiting: Callable[[], int],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`area`: the area of the supervisor; None if the signal is not shown in an area. `waiting`: returns the requests that wait in the
        picker.
        """
        layout, memory = instance.layout, instance.memory
        self._table = TableReader(layout.table, memory.table)
        self._columns = [layout.table.columns.index(column.name) for column in (RUNNING, WAITING, KV_USAGE)]
        self._endpoints = EndpointsView(DocumentReader(layout.documents, memory.documents), instance.pool or 0)
        self._areas = memory.areas
        self._area = area
        self.latency = latency
        self._waiting = waiting
        self._now = now
        self._signal = ReplicasNeeded()
        self._show()

    @property
    def needed(self) -> int:
        """The replicas that the pool needs, or 0 if not known."""
        return self._signal.needed or 0

    @property
    def headroom(self) -> float | None:
        """The headroom of the pool, or None if not known."""
        return self._signal.headroom

    def look(self) -> None:
        """Takes a reading and shows the signal."""
        view, model = self._endpoints, self.latency.model
        view.current()
        first, end = view.span()
        copy, rows = self._table.copy_part(first, end), view.slots - first
        running, waiting, usage = (np.nan_to_num(copy.column(index)[rows]) for index in self._columns)
        arrived, finished = self._counted()
        loads = zip(view.slots.tolist(), running.tolist(), usage.tolist(), strict=True)
        self._signal.read(
            Reading(
                at=self._now(),
                ready=int((copy.state[rows] == State.FRESH).sum()),
                arrived=arrived,
                finished=finished,
                places=sum(batch_share(model, slot, n, used) for slot, n, used in loads),
                waiting=float(waiting.sum()) + self._waiting(),
                prompt_s=self.latency.prompt_s(),
            )
        )
        self._show()

    def _counted(self) -> tuple[int, int]:
        """Returns how many requests have arrived and how many have finished, since some moment."""
        counted = self._areas.counters()
        routed = counted["picks_total"] - counted["failed_answers_total"]
        return routed + counted["load_refusals_total"], routed - int(self._areas.inflight(self._table.schema.slots).sum())

    def _show(self) -> None:
        if self._area is None:
            return
        scalars, place, signal = self._area.scalars, self._area.schema.scalar, self._signal
        scalars[place[REPLICAS_NEEDED]] = signal.needed or 0
        headroom = signal.headroom
        scalars[place[HEADROOM]] = UNKNOWN_HEADROOM if headroom is None else round(THOUSANDTHS * max(HEADROOM_LEAST, headroom))


class PoolSignal(ScalingSignal):
    """The signal of one of several pools."""

    def __init__(self, present: Callable[[], Instance], latency: LatencyKeeper, now: Callable[[], float] = time.monotonic) -> None:
        """`present`: returns the instance as the pool sees it, under its present configuration."""
        pool = present()
        self._served = np.zeros(pool.layout.table.slots, dtype=np.int64)  # the served requests of all slots, at the last look
        self._finished = 0  # the requests finished by the endpoints of the pool, since the first look
        self._begun = False
        super().__init__(pool, None, latency, lambda: waiting_in(flow_areas(present())), now)

    def look(self) -> None:
        if self._endpoints.current():
            super().look()

    def _counted(self) -> tuple[int, int]:
        slots = self._endpoints.slots
        served, _ = self._areas.outcomes(len(self._served))
        if self._begun:
            self._finished += int((served - self._served)[slots].sum())
        self._served, self._begun = served, True
        return self._finished + int(self._areas.inflight(len(served))[slots].sum()), self._finished


class PoolSignals:
    """The signals of all pools with answers. Call `look` every READ_S. A pool that gets the place of another pool has another keeper, and
    so another signal.
    """

    def __init__(
        self,
        present: Callable[[], Sequence[Instance]],
        learned: Callable[[], Mapping[int, LatencyKeeper]],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`present`: returns the instance as each pool sees it, under the present configurations. `learned`: returns the keepers."""
        self._present = present
        self._learned = learned
        self._now = now
        self._signals: dict[int, PoolSignal] = {}

    def look(self) -> None:
        for pool, latency in self._learned().items():
            signal = self._signals.get(pool)
            if signal is None or signal.latency is not latency:
                signal = self._signals[pool] = PoolSignal(partial(self._pool, pool), latency, self._now)
            signal.look()

    def _pool(self, number: int) -> Instance:
        return self._present()[number]

    def shown(self) -> list[tuple[int, int, float | None]]:
        """Returns pool, replicas needed and headroom, for all pools with a known signal."""
        return [(pool, each.needed, each.headroom) for pool, each in self._signals.items() if each.needed]


def waiting_in(flow: FlowAreas | None) -> int:
    """Counts the requests that wait in flow control. `flow`: None if flow control is off."""
    return 0 if flow is None else flow.total(WAITING_REQUESTS)
