"""Reads the values of a killed supervisor in the supervisor's area. The successor does this when it takes the area over."""

import time
from typing import NamedTuple

from shm.areas import SUPERVISOR_AREA, Areas
from workers.process.layout import LEADS_UNTIL, LOADED


class Predecessor(NamedTuple):
    """The supervisor before this one. At the first start of a picker there is no predecessor, and all values are false or 0."""

    existed: bool
    knew_endpoints: bool
    leads_until_ms: int  # milliseconds on the clock of `workers.supervisor.kube.lease`; 0 if the predecessor did not lead


def take_over(areas: Areas) -> Predecessor:
    """Takes over the supervisor's area, which clears its gauges, and sends the first heartbeat.

    The gauge LOADED keeps its value: the predecessor's endpoints are still in shared memory, so a probe that waited for this
    process gets the same answer as before.
    """
    existed = areas.successions()[SUPERVISOR_AREA] > 0
    area = areas.area(SUPERVISOR_AREA)
    scalars, place = area.scalars, area.schema.scalar
    loaded, leads_until_ms = scalars[place[LOADED]], scalars[place[LEADS_UNTIL]]
    area.take_over()
    scalars[place[LOADED]] = loaded
    area.heartbeat(time.monotonic())
    return Predecessor(existed, bool(loaded), leads_until_ms)
