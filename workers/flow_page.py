"""Flow control on the metrics page: what is read of lanes, documents and pool when the page is made; the rest are series.

The pool's saturation is computed here as workers compute it, by the same detector over the same memory.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from epp import metrics as m
from epp.flow.plan import FlowPlan
from epp.metrics import Metric
from shm.documents import DocumentReader
from shm.flow_lanes import WAITING, WAITING_BYTES, FlowLanes
from shm.table import TableReader
from workers.documents import EndpointsView, NamesView
from workers.eviction import reclaiming
from workers.flow_probe import EFFECTIVE, PoolProbe
from workers.instance import Instance
from workers.objectives import ObjectivesView
from workers.pool import SharedPool
from workers.scrape import fresh_for

Labels = tuple[str, ...]
BY_BAND: Labels = ("priority", "inference_pool")
OF_POOL: Labels = ("inference_pool",)


class Shown(NamedTuple):
    """One family's rows."""

    metric: Metric
    labels: Labels
    rows: Sequence[tuple[Labels, float]]


class FlowFigures:
    """What flow control comes to, over all workers."""

    def __init__(
        self,
        plan: FlowPlan,
        flow: FlowLanes,
        probe: PoolProbe,
        places: Callable[[], Mapping[int, int]],
        *,
        pool: str,
        now: Callable[[], float],
    ) -> None:
        self._plan = plan
        self._flow = flow
        self._probe = probe
        self._places = places
        self._pool = pool
        self._now = now

    def families(self) -> Iterator[Shown]:
        """In the order of the page."""
        yield from self._bands()
        yield from self._totals()
        yield from self._saturation()
        pending, target = reclaiming(self._flow, self._now())
        yield Shown(m.FLOW_RECLAIM_TARGET, OF_POOL, [((self._pool,), target)])
        yield Shown(m.FLOW_RECLAIM_PENDING, OF_POOL, [((self._pool,), pending)])

    def _bands(self) -> Iterator[Shown]:
        requests, held, oldest = [], [], []
        now = self._now()
        for priority, place in sorted(self._places().items(), reverse=True):
            band, cell = self._plan.band(priority), self._flow.band(place)
            labels = str(priority), self._pool
            requests.append((labels, cell.requests / band.max_requests))
            held.append((labels, cell.bytes / band.max_bytes))
            oldest.append((labels, max(0.0, now - cell.oldest) if cell.oldest else 0.0))
        yield Shown(m.FLOW_CAPACITY["requests"], BY_BAND, requests)
        yield Shown(m.FLOW_CAPACITY["bytes"], BY_BAND, held)
        yield Shown(m.FLOW_OLDEST, BY_BAND, oldest)

    def _totals(self) -> Iterator[Shown]:
        plan, flow = self._plan, self._flow
        for unit, word, limit in (
            ("requests", WAITING, plan.max_requests),
            ("bytes", WAITING_BYTES, plan.max_bytes),
        ):
            if limit:
                yield Shown(m.FLOW_CAPACITY_ALL[unit], OF_POOL, [((self._pool,), flow.total(word) / limit)])

    def _saturation(self) -> Iterator[Shown]:
        load = self._probe.load()
        stages = {**load.stages, EFFECTIVE: load.saturation}
        rows = [((self._pool, stage), value) for stage, value in stages.items()]
        yield Shown(m.FLOW_SATURATION, ("inference_pool", "stage"), rows)
        yield Shown(m.FLOW_STALE, ("detector",), [((self._plan.detector.name,), self._probe.stale())])


def figures_of(instance: Instance) -> FlowFigures | None:
    """Of a running instance; None: flow control is off."""
    plan, flow = instance.config.flow, instance.flow_lanes
    if plan is None or flow is None:
        return None
    documents = DocumentReader(instance.document_schema, instance.documents)
    objectives = ObjectivesView(documents, plan.static())

    def places() -> Mapping[int, int]:
        objectives.look()
        return objectives.places

    probe = PoolProbe(pool_of(instance, documents).candidates, plan.detector, flow)
    return FlowFigures(plan, flow, probe, places, pool=instance.options.pool_name, now=time.monotonic)


def pool_of(instance: Instance, documents: DocumentReader) -> SharedPool:
    """The pool as workers see it, for who only looks."""
    return SharedPool(
        TableReader(instance.table_schema, instance.table),
        EndpointsView(documents),
        NamesView(documents),
        instance.lanes,
        columns=instance.config.pipeline.columns,
        fresh_for_s=fresh_for(instance.scrape_interval_s),
        now=time.monotonic,
        producer_failed=lambda _producer, _failure: None,
        shadow_failed=lambda _profile, _problem: None,
    )
