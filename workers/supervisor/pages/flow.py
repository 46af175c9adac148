"""Computes the figures of flow control for each metrics page, from areas, documents and the pool.

All other metrics of flow control are series. The saturation of the pool is computed as in workers: by the same detector, from the same
shared memory.
"""

import time
from collections.abc import Iterator

from epp.flow.plan import FlowPlan
from epp.metrics import flow_control as names
from epp.metrics.computed import Count, Counts
from shm.documents import DocumentReader
from shm.flow_areas import WAITING, WAITING_BYTES
from shm.table import TableReader
from workers.process.instance import Instance
from workers.shared.documents import EndpointsView, NamesView
from workers.shared.objectives import ObjectivesView
from workers.worker.extproc.pool import IGNORED, SharedPool
from workers.worker.flow.eviction import reclaiming
from workers.worker.flow.probe import EFFECTIVE, PoolProbe

BY_BAND = ("priority", "inference_pool")
OF_POOL = ("inference_pool",)


class FlowFigures:
    """Computes the figures of flow control over all workers of a running instance."""

    def __init__(self, instance: Instance, plan: FlowPlan, documents: DocumentReader) -> None:
        self._plan = plan
        self._flow = instance.memory.flow
        self._probe = PoolProbe(pool_of(instance, documents).candidates, plan.detector, instance.memory.flow)
        self._objectives = ObjectivesView(documents, plan.static(), instance.pool)
        self._pool = instance.options.pool_name

    def families(self) -> Iterator[Counts]:
        """Yields all metrics, in the order of the page."""
        yield from self._bands()
        yield from self._totals()
        yield from self._saturation()
        pending, target = reclaiming(self._flow, time.monotonic())
        yield names.FLOW_RECLAIM_TARGET, OF_POOL, [((self._pool,), target)]
        yield names.FLOW_RECLAIM_PENDING, OF_POOL, [((self._pool,), pending)]

    def _bands(self) -> Iterator[Counts]:
        requests: list[Count] = []
        held: list[Count] = []
        oldest: list[Count] = []
        now = time.monotonic()
        self._objectives.look()
        for priority, place in sorted(self._objectives.content.places.items(), reverse=True):
            band, cell = self._plan.band(priority), self._flow.band(place)
            labels = str(priority), self._pool
            requests.append((labels, cell.requests / band.max_requests))
            held.append((labels, cell.bytes / band.max_bytes))
            oldest.append((labels, max(0.0, now - cell.oldest) if cell.oldest else 0.0))
        yield names.FLOW_CAPACITY["requests"], BY_BAND, requests
        yield names.FLOW_CAPACITY["bytes"], BY_BAND, held
        yield names.FLOW_OLDEST, BY_BAND, oldest

    def _totals(self) -> Iterator[Counts]:
        plan, flow = self._plan, self._flow
        for unit, word, limit in (("requests", WAITING, plan.max_requests), ("bytes", WAITING_BYTES, plan.max_bytes)):
            if limit:
                yield names.FLOW_CAPACITY_ALL[unit], OF_POOL, [((self._pool,), flow.total(word) / limit)]

    def _saturation(self) -> Iterator[Counts]:
        load = self._probe.load()
        stages = {**load.stages, EFFECTIVE: load.saturation}
        rows = [((self._pool, stage), value) for stage, value in stages.items()]
        yield names.FLOW_SATURATION, ("inference_pool", "stage"), rows
        yield names.FLOW_STALE, ("detector",), [((self._plan.detector.name,), self._probe.stale())]


def figures_of(instance: Instance, documents: DocumentReader | None = None) -> FlowFigures | None:
    """Returns the figures of a running instance, or None if flow control is off. `documents`: a reader that several pools share."""
    if (plan := instance.config.flow) is None:
        return None
    return FlowFigures(instance, plan, documents or DocumentReader(instance.layout.documents, instance.memory.documents))


def pool_of(instance: Instance, documents: DocumentReader) -> SharedPool:
    """Returns the pool as workers see it, for a process that serves no requests."""
    return SharedPool(
        TableReader(instance.layout.table, instance.memory.table),
        EndpointsView(documents, instance.pool),
        NamesView(documents),
        instance.memory.areas,
        columns=instance.config.pipeline.columns,
        fresh=instance.sources.believed,
        now=time.monotonic,
        failures=IGNORED,
    )
