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
from workers.worker.telemetry.cache_prediction import LOOK_S, PredictionWatch, match_name

WATCH_EVERY_S = LOOK_S


def watches(instance: Instance, index: IndexKeeper, report: Callable[..., None]) -> list[Callable[[], None]]:
    """Returns the checks that this configuration needs. The supervisor calls them every WATCH_EVERY_S.

    One check finds out whether names of shared memory were removed. With a prefix producer, another one compares the servers' cached
    tokens with the predictions. With flow control, a third one finds out whether requests wait because metrics are missing.
    """
    checks: list[Callable[[], None]] = [NamesWatch(instance, report).look]
    if match_name(instance.config.pipeline.wiring):
        predictions = _prediction_watch(instance, index, report)
        checks.append(lambda: predictions.look(time.monotonic()))
    if (blind := blind_watch(instance, report)) is not None:
        checks.append(lambda: blind.look(time.monotonic()))
    return checks


def _prediction_watch(instance: Instance, index: IndexKeeper, report: Callable[..., None]) -> PredictionWatch:
    return PredictionWatch(
        instance.memory.series_reader(PREDICTION),
        TableReader(instance.layout.table, instance.memory.table),
        EndpointsView(DocumentReader(instance.layout.documents, instance.memory.documents)),
        lambda: index.lost,
        report,
    )


class NamesWatch:
    """Reports once that another program has removed names of shared memory, or the instance's file."""

    def __init__(self, instance: Instance, report: Callable[..., None]) -> None:
        self._segments = list(instance.memory.segments.values())
        self._lock = instance.lock
        self._report = report
        self._reported = False

    def look(self) -> None:
        if self._reported:
            return
        gone = [segment.name for segment in self._segments if segment.is_removed()]
        gone += [self._lock.path] if self._lock.is_removed() else []
        if gone:
            self._reported = True
            self._report(
                "another program has removed names of this picker: it serves on, but commands such as epp top do not find it",
                names=gone,
                reason="find that program, then restart the picker, which makes new names",
            )
