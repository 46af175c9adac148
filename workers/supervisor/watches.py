"""Lists the checks that the supervisor makes every few seconds. Each reports a problem that no other process can see alone."""

import time
from collections.abc import Callable

from epp.metrics.series import PREDICTION
from shm.documents import DocumentReader
from shm.table import TableReader
from workers.process.instance import Instance
from workers.shared.documents import EndpointsView
from workers.supervisor.flow_watch import blind_watch
from workers.supervisor.index_keeper import IndexKeeper
from workers.telemetry.cache_prediction import LOOK_S, PredictionWatch, match_name

WATCH_EVERY_S = LOOK_S


def watches(instance: Instance, index: IndexKeeper, report: Callable[[str], None]) -> list[Callable[[], None]]:
    """Returns the checks that this configuration needs. The supervisor calls them every WATCH_EVERY_S.

    With a prefix producer, one check compares the servers' cached tokens with the predictions. With flow control, another one finds out
    whether requests wait because metrics are missing.
    """
    checks: list[Callable[[], None]] = []
    if match_name(instance.config.pipeline.recipe):
        predictions = _prediction_watch(instance, index, report)
        checks.append(lambda: predictions.look(time.monotonic()))
    if (blind := blind_watch(instance, report)) is not None:
        checks.append(lambda: blind.look(time.monotonic()))
    return checks


def _prediction_watch(instance: Instance, index: IndexKeeper, report: Callable[[str], None]) -> PredictionWatch:
    return PredictionWatch(
        instance.memory.series_reader(PREDICTION),
        TableReader(instance.layout.table, instance.memory.table),
        EndpointsView(DocumentReader(instance.layout.documents, instance.memory.documents)),
        lambda: index.lost,
        report,
    )
