"""Flow control of one worker, put together from what the instance shares: called once, after the fork."""

import asyncio
import os
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from epp.flow.eviction import grace_s
from epp.metrics import FLOW_CYCLE, FLOW_GROUPS, REVOKED, Group, LabelCaps
from shm.flow_lanes import FlowLanes
from shm.lanes import Lane
from shm.series import SeriesWriter
from workers.eviction import Evictions, RevocationMetrics
from workers.flow import FlowControl, ShutBands
from workers.flow_metrics import FlowMetrics
from workers.flow_peers import LanePeers
from workers.flow_probe import PoolProbe
from workers.instance import Instance
from workers.objectives import ObjectivesView
from workers.pool import SharedPool
from workers.scrape import fresh_for

COUNTED = "concurrency-detector"  # reads nothing that servers say


def flow_control(
    instance: Instance,
    worker: int,
    lane: Lane,
    pool: SharedPool,
    objectives: ObjectivesView,
    series: Callable[[Group], SeriesWriter],
    caps: LabelCaps,
    policy_failed: Callable[[str, BaseException], None],
) -> FlowControl | None:
    """None: it is off. `worker` counts from 0; `series` makes this worker's part of a table."""
    plan, flow_lanes = instance.config.flow, instance.flow_lanes
    if plan is None or flow_lanes is None:
        return None
    flow_lanes.lane(worker).take_over()
    now = time.monotonic
    peers = LanePeers(flow_lanes, instance.lanes, worker, objectives.places, wakeups=instance.wakeups, now=now)
    own = {group: series(group) for group in FLOW_GROUPS}
    made = FlowControl(
        plan,
        PoolProbe(pool.candidates, plan.detector, flow_lanes),
        peers,
        FlowMetrics(own, instance.options.pool_name, caps.fairness_id),
        loop=asyncio.get_running_loop(),
        now=now,
        timed=partial(lane.observe, lane.schema.histogram[FLOW_CYCLE.name]),
        policy_failed=policy_failed,
    )
    made.know(objectives.places)
    if plan.eviction and plan.eviction_filter is not None and plan.eviction_order is not None:
        made.evictions = Evictions(
            plan.eviction_filter,
            plan.eviction_order,
            grace(instance),
            shut=ShutBands(made, _waits(flow_lanes, objectives), _in_flight(instance)),
            lanes=flow_lanes,
            worker=worker,
            now=now,
            wake=lambda other: os.eventfd_write(instance.wakeups[other], 1),
            told=RevocationMetrics(instance.options.pool_name, *(own[group] for group in REVOKED)),
        )
    return made


def grace(instance: Instance) -> float:
    """How long it takes until the detector can see that something was given up."""
    detector = instance.config.flow.detector
    return grace_s(
        counted=type(detector).type_name == COUNTED,
        interval_s=instance.scrape_interval_s,
        staleness_s=fresh_for(instance.scrape_interval_s),
    )


def _waits(flow_lanes: FlowLanes, objectives: ObjectivesView) -> Callable[[int], bool]:
    def waits(priority: int) -> bool:
        place = objectives.places.get(priority)
        return place is not None and flow_lanes.band(place).requests > 0

    return waits


def _in_flight(instance: Instance) -> Callable[[], int]:
    def in_flight() -> int:
        return int(np.add.reduce(instance.lanes.inflight(instance.lanes.schema.slots)))

    return in_flight
