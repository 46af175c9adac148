"""Computes the scaling signal once per second. The supervisor is the only writer of its two words in shared memory.

lanes: requests routed, refused for load, failed, ended ────────────┐
flow control: requests that wait ───────────────────────────────────┤
endpoint table: batches, KV usage ──────────────────────────────────┼▶ ReplicasNeeded ─▶ gauges of the supervisor's lane
latency model: limits, speeds, prompt times ────────────────────────┘
"""

import time
from collections.abc import Callable

import numpy as np

from epp.data import KV_USAGE, RUNNING, WAITING
from epp.learning.model import LatencyModel
from epp.learning.replicas_needed import Reading, ReplicasNeeded, batch_share
from shm.documents import DocumentReader
from shm.flow_lanes import WAITING as WAITING_REQUESTS
from shm.flow_lanes import FlowLanes
from shm.lanes import Lane
from shm.table import State, TableReader
from workers.process.instance import Instance
from workers.process.layout import HEADROOM, REPLICAS_NEEDED, UNKNOWN_HEADROOM
from workers.shared.documents import EndpointsView

READ_S = 1.0
THOUSANDTHS = 1000
HEADROOM_LEAST = -9.999


class ScalingSignal:
    """Reads the pool and shows the signal. Call `look` every READ_S."""

    def __init__(
        self,
        instance: Instance,
        lane: Lane,
        model: Callable[[], LatencyModel],
        prompt_s: Callable[[], float],
        waiting: Callable[[], int],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`lane`: the supervisor's. `prompt_s`: returns the seconds that a server works on one prompt.

        `waiting`: returns the requests that wait in the picker.
        """
        layout, memory = instance.layout, instance.memory
        self._table = TableReader(layout.table, memory.table)
        self._columns = [layout.table.columns.index(column.name) for column in (RUNNING, WAITING, KV_USAGE)]
        self._endpoints = EndpointsView(DocumentReader(layout.documents, memory.documents))
        self._lanes = memory.lanes
        self._lane = lane
        self._model = model
        self._prompt_s = prompt_s
        self._waiting = waiting
        self._now = now
        self._signal = ReplicasNeeded()
        self._show()

    def look(self) -> None:
        """Takes a reading and shows what it says."""
        copy, model = self._table.copy(), self._model()
        slots = [e.slot for e in self._endpoints.current() if e.slot < len(copy.rows)]
        running, waiting, usage = (np.nan_to_num(copy.column(index)[slots]) for index in self._columns)
        counted = self._lanes.counters()
        routed = counted["picks_total"] - counted["failed_answers_total"]
        self._signal.read(
            Reading(
                at=self._now(),
                ready=int((copy.state[slots] == State.FRESH).sum()),
                arrived=routed + counted["load_refusals_total"],
                finished=routed - int(self._lanes.inflight(len(copy.rows)).sum()),
                places=sum(batch_share(model, slot, float(n), float(used)) for slot, n, used in zip(slots, running, usage, strict=True)),
                waiting=float(waiting.sum()) + self._waiting(),
                prompt_s=self._prompt_s(),
            )
        )
        self._show()

    def _show(self) -> None:
        scalars, place, signal = self._lane.scalars, self._lane.schema.scalar, self._signal
        scalars[place[REPLICAS_NEEDED]] = signal.needed or 0
        headroom = signal.headroom
        scalars[place[HEADROOM]] = UNKNOWN_HEADROOM if headroom is None else round(THOUSANDTHS * max(HEADROOM_LEAST, headroom))


def waiting_in(flow: FlowLanes | None) -> int:
    """Counts the requests that wait in flow control. `flow`: None if it is off."""
    return 0 if flow is None else flow.total(WAITING_REQUESTS)
