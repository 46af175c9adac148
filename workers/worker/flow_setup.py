"""Creates the flow control of one worker from the instance. Called once per configuration."""

import asyncio
import os
import time
from collections.abc import Callable
from functools import partial

from epp.flow.eviction import grace_s
from epp.flow.plan import FlowPlan
from epp.metrics import Group
from epp.metrics.flow_control import FLOW_GROUPS, REVOKED
from epp.metrics.label_caps import LabelCaps
from shm.areas import Area
from shm.documents import DocumentReader
from shm.series import SeriesWriter
from workers.process.instance import Instance
from workers.process.names import CYCLES
from workers.shared.documents import EndpointsView
from workers.shared.freshness import SCRAPE_S_MAX
from workers.shared.objectives import ObjectivesView
from workers.worker.extproc.pool import SharedPool
from workers.worker.flow.eviction import Evictions, RevocationMetrics
from workers.worker.flow.flow_control import FlowControl, GatePoolState
from workers.worker.flow.metrics import FlowMetrics
from workers.worker.flow.peers import AreaPeers
from workers.worker.flow.probe import PoolProbe

COUNTED = "concurrency-detector"  # the type of the detector that uses no metrics of servers


def flow_control(
    instance: Instance,
    worker: int,
    area: Area,
    pool: SharedPool,
    objectives: ObjectivesView,
    series: Callable[[Group], SeriesWriter],
    caps: LabelCaps,
    policy_failed: Callable[[str, BaseException], None],
    before: FlowControl | None = None,
) -> FlowControl | None:
    """Creates the flow control of a worker. Returns None if flow control is off.

    `worker`: the worker's number, from 0. `series(group)` returns the worker's part of a table of labelled metrics. `before`: the flow
    control of an earlier configuration. If given, it continues with this configuration, and its waiting requests stay queued.
    """
    plan, flow_areas = instance.config.flow, instance.memory.flow
    if plan is None:
        return None
    now, areas, wakeups = time.monotonic, instance.memory.areas, instance.pipes.wakeups
    probe = PoolProbe(pool.candidates, plan.detector, flow_areas)
    control = before
    if control is None:
        name, remote = instance.options.pool_name, instance.memory.remote
        peers = AreaPeers(flow_areas, areas, worker, objectives.content.places, wakeups=wakeups, now=now, remote=remote, pool=name)
        control = FlowControl(
            plan,
            probe,
            peers,
            FlowMetrics({group: series(group) for group in FLOW_GROUPS}, name, caps),
            loop=asyncio.get_running_loop(),
            now=now,
            timed=partial(area.observe, area.schema.histogram[CYCLES.key]),
            policy_failed=policy_failed,
        )
    _prepare_evictions(instance, worker, control, objectives, series)
    control.know(objectives.content.places)
    if before is not None:
        before.use(plan, probe)
        before.know(objectives.content.places)
    _use_evictions(instance, control)
    return control


def _prepare_evictions(
    instance: Instance, worker: int, control: FlowControl, objectives: ObjectivesView, series: Callable[[Group], SeriesWriter]
) -> None:
    """Creates the objects for in-flight eviction, if this is the first configuration that evicts. A worker keeps these objects to its
    end.
    """
    plan, flow_areas, wakeups = instance.config.flow, instance.memory.flow, instance.pipes.wakeups
    assert plan is not None
    if control.evictions is not None or plan.eviction_filter is None or plan.eviction_order is None:
        return
    endpoints = EndpointsView(DocumentReader(instance.layout.documents, instance.memory.documents), instance.pool)
    control.evictions = Evictions(
        plan.eviction_filter,
        plan.eviction_order,
        grace(instance, plan),
        pool=GatePoolState(control, flow_areas, objectives, instance.memory.areas, endpoints),
        areas=flow_areas,
        worker=worker,
        now=time.monotonic,
        wake=lambda other: os.eventfd_write(wakeups[other], 1),
        observer=RevocationMetrics(instance.options.pool_name, *(series(group) for group in REVOKED)),
    )


def _use_evictions(instance: Instance, control: FlowControl) -> None:
    """Switches in-flight eviction on or off, as this configuration says."""
    plan, evictions = instance.config.flow, control.evictions
    assert plan is not None
    control.evicts = plan.eviction
    if evictions is None:
        return
    if plan.eviction_filter is not None and plan.eviction_order is not None:
        evictions.use(plan.eviction_filter, plan.eviction_order, grace(instance, plan))
    else:
        evictions.stop()


def grace(instance: Instance, plan: FlowPlan) -> float:
    """Returns the time until the detector sees the effect of an eviction, in seconds."""
    return grace_s(counted=type(plan.detector).type_name == COUNTED, interval_s=instance.sources.pacing.interval_s, scrape_s=SCRAPE_S_MAX)
