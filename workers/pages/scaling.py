"""Shows the scaling signal, which the supervisor computes (`workers.supervisor.scaling`), on the metrics page."""

from collections.abc import Iterator, Sequence

from epp.metrics import Metric
from epp.metrics.scaling import HEADROOM, NEEDED
from shm.lanes import Lanes
from workers.process import layout

Rows = Sequence[tuple[tuple[str, ...], float]]


def scaling_rows(lanes: Lanes, pool: str) -> Iterator[tuple[Metric, tuple[str, ...], Rows]]:
    """Yields each metric, its labels, and rows of label values and value. Yields nothing while the signal is not known."""
    needed = lanes.scalars(layout.REPLICAS_NEEDED)[0]
    headroom = lanes.scalars(layout.HEADROOM)[0]
    if not needed:
        return
    yield NEEDED, NEEDED.labels, [((pool,), needed)]
    if headroom != layout.UNKNOWN_HEADROOM:
        yield HEADROOM, HEADROOM.labels, [((pool,), headroom / 1000)]
