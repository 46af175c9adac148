"""Keeps objects of a worker over changes of the configuration: `WorkerKept` for the process, and a `PoolKept` for each of its pools."""

import asyncio
import os
import random
import time
from functools import partial
from typing import Final

import msgspec
import structlog

from epp.decision.explain import Explanation
from epp.decision.receipt import Seal
from epp.metrics import Group
from epp.metrics.label_caps import LabelCaps
from epp.metrics.request_series import ATTEMPTS, ERROR, REQUEST, REQUEST_FIGURES
from epp.recording.keys import Keyed
from epp.recording.sample import Sample
from shm.answers import AnswersWriter
from shm.areas import Area
from shm.budgets import BudgetRow
from shm.documents import DocumentReader, DocumentWriter
from shm.prefills import Prefills, PromptStarts
from shm.series import SeriesWriter
from workers.process.instance import Instance
from workers.shared.bus import BusWriter
from workers.shared.decisions import Publisher, Recent
from workers.shared.objectives import ObjectivesView, static_bands
from workers.shared.profiles import ProfileAnswering
from workers.transport.interface import Clock
from workers.worker.extproc.answer_counts import AnswerCounts
from workers.worker.extproc.budgets import Budgets
from workers.worker.flow.flow_control import FlowControl
from workers.worker.plugin_handles import SharedLearning
from workers.worker.profiler import Profiler
from workers.worker.rewrites import RewritesView
from workers.worker.telemetry.call_timing import CallTimers
from workers.worker.telemetry.recorder import RecordSender
from workers.worker.telemetry.request_metrics import RequestMetrics
from workers.worker.telemetry.tracing_export import Exporter

log = structlog.get_logger()

NO_POOL: Final = ""  # the label of requests without a known pool
SWEEP_S: Final = 300.0  # a series without a count for this long may lose its room to a new series


class WorkerKept:
    """The objects that a worker keeps to its end: series, counts, views of documents, and the decisions to explain.

    It has one writer for each part of shared memory that the worker writes. All configurations share these writers.
    """

    def __init__(self, instance: Instance, index: int, area: Area, bus: BusWriter, *, clock: Clock) -> None:
        self.caps = LabelCaps()
        self.rng = random.Random(int.from_bytes(os.urandom(16), "big"))
        self.documents = DocumentReader(instance.layout.documents, instance.memory.documents)
        self.traces: Exporter | None = None
        self.pools: list[PoolKept] = []
        self.calls: tuple[int, CallTimers] | None = None  # with several pools: the number of histograms, and the timers of all pools
        self._index = index
        self._series: dict[str, SeriesWriter] = {}
        self._aging: list[SeriesWriter] = []
        for areas in instance.memory.flows:
            areas.area(index).take_over()
        later = asyncio.get_running_loop().call_later
        self._clock = clock
        self.metrics = self.request_metrics(instance)  # for the only pool, or for requests without a known pool
        self._sweep_at = time.monotonic() + SWEEP_S
        self._beat_at = 0.0
        debug = instance.options.log_level == "debug"
        self.latency = DocumentReader(instance.layout.latency, instance.memory.latency)
        self.starts = PromptStarts(instance.layout.starts, instance.memory.starts, index)
        self.bus = bus
        schema, serving = instance.layout.budgets, instance.memory.areas.serving_words[1:]
        self.budgets = BudgetRow(schema, instance.memory.budgets, index, serving)
        self.budgets.take_over()
        self.prefills = Prefills(instance.layout.prefills, instance.memory.prefills, index)
        self.answers = AnswerCounts(AnswersWriter(instance.layout.answers, instance.memory.answers, index), time.monotonic)
        lost = partial(area.add, area.schema.counter["recording_lost_records_total"])
        self.records = RecordSender(index, bus.offer, lambda records: lost(n=records))
        self.sample = Sample()
        self.keyed = Keyed(instance.credentials.prefix_seed)
        self.seal = Seal(instance.credentials.prefix_seed)
        self.recent = Recent(index, time.monotonic, log_decision if debug else None)
        published = DocumentWriter(instance.layout.decisions, instance.memory.decisions)
        self.publisher = Publisher(self.recent, instance.memory.areas, area, published, index)
        answers = DocumentWriter(instance.layout.profiles, instance.memory.profiles)
        answering = ProfileAnswering(instance.memory.areas, area, answers, index, time.monotonic)
        self.profiler = Profiler(answering, later)

    def flows(self) -> list[FlowControl]:
        """Returns the flow control of each pool that has flow control."""
        return [pool.flow for pool in self.pools if pool.flow is not None]

    def series(self, instance: Instance, group: Group) -> SeriesWriter:
        """Returns this worker's part of a table of labelled metrics. Creates it at the first call."""
        series = self._series.get(group.name)
        own = instance.layout.own_group(group)
        if series is None:
            series = self._series[group.name] = instance.memory.series_writer(own, self._index, self.caps)
            series.take_over()
            if group.ages:
                self._aging.append(series)
        if own.labels == group.labels:
            return series
        return series.part(len(group.labels), instance.options.pool_name if instance.pool is not None else NO_POOL)

    def request_metrics(self, instance: Instance) -> RequestMetrics:
        """Returns the metrics that count the requests of a pool."""
        groups = (REQUEST, REQUEST_FIGURES, ERROR, ATTEMPTS)
        requests, figures, errors, attempts = (self.series(instance, group) for group in groups)
        return RequestMetrics(self._clock, requests, figures, errors, attempts, self.caps)

    def heartbeat(self, now: float) -> None:
        """Does the work of a heartbeat that is common to all pools. Each pool with requests calls this with the same `now`, and only the
        first call has an effect.
        """
        if now == self._beat_at:
            return
        self._beat_at = now
        self.records.flush()
        if self.calls is not None:
            _, timers = self.calls
            timers.heartbeat(now)
        self.sweep(now)

    def sweep(self, now: float) -> None:
        """Frees series without a count for SWEEP_S, in tables with little room for new names. `now`: monotonic seconds."""
        if now < self._sweep_at:
            return
        self._sweep_at = now + SWEEP_S
        counted = [self.metrics, *(pool.metrics for pool in self.pools if pool.metrics is not self.metrics)]
        held = frozenset().union(*(metrics.held() for metrics in counted))
        figures = self._series[REQUEST_FIGURES.name]
        swept = [series.sweep(held if series is figures else ()) for series in self._aging]
        if any(swept):
            for metrics in counted:
                metrics.forget()
            for flow in self.flows():
                flow.forget_labels()


class PoolKept:
    """The objects that a worker keeps for one pool, under all its configurations."""

    def __init__(self, kept: WorkerKept, instance: Instance) -> None:
        self.metrics = kept.metrics if instance.pool is None else kept.request_metrics(instance)
        self.flow: FlowControl | None = None  # the last flow control, even if the present configuration has none
        self.rewrites: RewritesView | None = None
        self.objectives = ObjectivesView(kept.documents, static_bands(instance.config.flow), instance.pool)
        self.objectives.changed = self._bands_changed
        self.learning = SharedLearning(kept.latency, kept.starts, kept.bus.send, instance.pool or 0)
        self.budgets = Budgets(
            kept.budgets, instance.credentials.prefix_seed, instance.options.pool_name if instance.pool is not None else ""
        )

    def _bands_changed(self) -> None:
        if self.flow is not None:
            self.flow.know(self.objectives.content.places)


def log_decision(explained: Explanation) -> None:
    """Logs a decision at level debug."""
    log.debug("decision", **msgspec.to_builtins(explained))
