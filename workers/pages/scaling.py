"""Shows the scaling signal, which the supervisor computes (`workers.supervisor.scaling`), on the metrics page."""

from collections.abc import Iterator

from epp.metrics import Metric
from epp.metrics.scaling import HEADROOM, NEEDED, PLAIN_PREFIX
from shm.lanes import Lanes
from workers.process import layout


def scaling_rows(lanes: Lanes, pool: str) -> Iterator[tuple[str, Metric, tuple[tuple[str, ...], float]]]:
    """Yields each metric with its whole name and its row: labels and value. Yields nothing while the signal is not known."""
    needed = lanes.scalars(layout.REPLICAS_NEEDED)[0]
    headroom = lanes.scalars(layout.HEADROOM)[0]
    if not needed:
        return
    yield PLAIN_PREFIX + NEEDED.name, NEEDED, ((pool,), needed)
    if headroom != layout.UNKNOWN_HEADROOM:
        yield PLAIN_PREFIX + HEADROOM.name, HEADROOM, ((pool,), headroom / 1000)
