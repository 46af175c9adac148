"""Finds how many requests per second keep servers busy to a given share."""

import math
from collections.abc import Callable

from tests.bench.routing_run import measure
from tests.bench.routing_servers import Kind
from tests.bench.routing_traffic import Workload
from tests.bench.routing_zoo import LINE, ORACLE

TRIES = 6
NEAR = 0.01  # of the wanted share


def scale_for(busy: float, kind: Kind, workload: Callable[[float], Workload], seed: int, seconds: float, first: float = 1.0) -> float:
    """Returns the scale of a trace at which the oracle keeps the servers busy for this share of the time (`Outcome.work`).

    `workload`: scale -> the workload. `seconds`: of the trace, so that all scales play the same requests. `first`: the scale to begin
    with. After TRIES runs it returns the scale that came closest.
    """
    tried: dict[float, float] = {}
    scale, low, high = first, 0.0, math.inf
    for _ in range(TRIES):
        found = measure(kind, workload(scale), {ORACLE: LINE[ORACLE]}, seed, seconds / scale)[ORACLE].work
        tried[scale] = abs(found / busy - 1.0)
        if tried[scale] <= NEAR:
            break
        low, high = (scale, high) if found < busy else (low, scale)
        scale *= busy / found
        if not low < scale < high:
            scale = math.sqrt(low * high)
    return min(tried, key=lambda each: tried[each])
