"""Scrapes the endpoints' metrics pages into the endpoint table, and counts the scrapes.

    discovery ─ apply ─▶ EndpointTable ─▶ Scraper ─ pages ─▶ EndpointTable ─▶ shared memory: table and documents

`DataLayer` continues with the endpoints and counters of a predecessor. `configured_endpoints` or `kubernetes` find the endpoints and
call `apply` of the table.
"""

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from statistics import median

from epp.metrics.lanes import EXTRACT_ERRORS, OVERWRITTEN, POLL_ERRORS
from shm.answers import AnswersReader
from shm.documents import DocumentReader, DocumentWriter
from shm.lanes import Lane
from shm.prefix_writer import IndexWriter
from shm.table import TableReader, TableWriter
from workers.process.instance import Instance
from workers.process.sources import METRICS_BUDGET
from workers.shared.documents import DOCUMENT_NAMES, ENDPOINTS, EndpointsView, Identity, NamesView, decode_endpoints
from workers.shared.ejection import Ejections
from workers.shared.index_limits import IndexLimits
from workers.shared.outliers import Outliers
from workers.supervisor.endpoints.endpoint_log import EndpointLog, Snapshots
from workers.supervisor.endpoints.endpoints import EndpointTable, Indexed, Reading
from workers.supervisor.endpoints.further_pages import FurtherPages, page_address, scraper_of
from workers.supervisor.endpoints.scrape import Scraper
from workers.supervisor.endpoints.scrape_results import ScrapeCounters, Sink

SCRAPE_COUNTERS = (
    "scrapes_total",
    "scrapes_skipped_total",
    "datalayer_poll_errors_total",
    "datalayer_extract_errors_total",
    "endpoint_ejections_total",
    "scrapes_foreign_total",
)


PAGES_TO_JUDGE = 20  # of each server, before it is said what they cost
CULPRIT = "only another program of the same user or root writes there: find it"


class OverwrittenError(Exception):
    """Another program has overwritten shared memory that this supervisor writes. The text names the part."""


class DataLayer:
    """Joins the endpoint table, its scrapers and the ejections. `start` begins to scrape."""

    def __init__(
        self,
        instance: Instance,
        lane: Lane,
        index: IndexWriter,
        report: Callable[..., None],
        *,
        remembered: Mapping[Identity, int] | None,
        sink_of: Callable[[EndpointTable], Sink],
    ) -> None:
        """`lane`: the supervisor's. `remembered`: endpoint -> owner id for the endpoints in the index snapshot; None without a snapshot.
        `sink_of`: takes the table, and returns what gets the results of the first data source, and passes them on to the table.
        """
        loop = asyncio.get_running_loop()
        self._instance = instance
        self._lane = lane
        self._report = report
        self._cost_known = instance.sources.believed.paced
        self._debug = instance.options.log_level == "debug"
        lanes = instance.memory.lanes
        self._writer = writer = TableWriter(instance.layout.table, instance.memory.table)
        self._documents = DocumentWriter(instance.layout.documents, instance.memory.documents)
        self._repaired(writer.overwritten, self._documents.repair(), report)
        self.ejections = Ejections(
            lambda: lanes.outcomes(writer.used),
            lanes.serving_workers,
            lanes.slot_inflight,
            Outliers(AnswersReader(instance.layout.answers, instance.memory.answers)),
        )
        self.further = self._further_pages(loop, report)
        self.limits = IndexLimits(index, instance.sources.prefix_use, instance.layout.table_columns)
        self.table = self._table(loop, writer, index, report, remembered)
        self.scraper = scraper_of(
            instance.sources.scraped[0],
            loop,
            pacing=instance.sources.pacing,
            tls=instance.credentials.scrape_tls[instance.sources.scraped[0].name],
            inflight=instance.memory.lanes.slot_load,
            sink=sink_of(self.table),
            scrapes=instance.sources.scrapes,
        )
        further = [source.scraper for source in self.further]
        self._counts = ScrapeCounts(lane, self.scraper, self.ejections, further)

    def start(self, cleanup: contextlib.ExitStack) -> None:
        """Takes over a predecessor's endpoints and starts to scrape. At log level debug, also logs all endpoints regularly."""
        instance = self._instance
        documents = DocumentReader(instance.layout.documents, instance.memory.documents)
        table = TableReader(instance.layout.table, instance.memory.table)
        left = documents.read(ENDPOINTS)
        self.table.start(
            self.scraper,
            predecessor=decode_endpoints(left[1]) if left is not None and left[1] else (),
            copy=table.copy(),
            now=time.monotonic(),
        )
        for scraper in (self.scraper, *(pages.scraper for pages in self.further)):
            scraper.start()
            cleanup.callback(scraper.close)
        if self._debug:
            views = EndpointsView(documents), NamesView(documents)
            snapshots = Snapshots(asyncio.get_running_loop(), table, *views, now=time.monotonic)
            snapshots.start()
            cleanup.callback(snapshots.close)

    def publish_counts(self) -> None:
        """Copies the scraper's counts into the lane."""
        self._counts.copy()

    def look(self) -> None:
        """Reports once what scraping at a fixed interval costs the servers, if it is more than the usual budget."""
        costs = () if self._cost_known else self.scraper.wheel.costs()
        if not costs or self.scraper.counters.taken < PAGES_TO_JUDGE * len(costs):
            return
        self._cost_known = True
        cost_s, interval_s = median(costs), self.scraper.pacing.interval_s
        if cost_s > METRICS_BUDGET * interval_s:
            self._report(
                "scraping at a fixed interval takes time of the model servers",
                page_s=round(cost_s, 4),
                interval_s=interval_s,
                share=round(cost_s / interval_s, 3),
                reason="an interval is set, or a plugin reads what only pages tell; metricsBudget: 0.01 takes 1 % of a server's time",
            )

    def overwritten(self) -> str:
        """Returns which part of the state segment another program has overwritten; "" if there is none."""
        if not self._writer.intact(self.table.handles()):
            return "endpoint table"
        return "documents" if self._documents.overwritten() else ""

    def _repaired(self, rows: int, documents: Sequence[int], report: Callable[..., None]) -> None:
        """Counts and reports what another program has overwritten while no supervisor ran. Overwritten endpoints take slots again."""
        if rows or documents:
            self._lane.add(self._lane.schema.counter[OVERWRITTEN.name])
            report(
                "shared memory was overwritten: endpoints and objects are published again",
                segment=self._instance.memory.state_name,
                rows=rows,
                documents=[DOCUMENT_NAMES[index] for index in documents],
                reason=CULPRIT,
            )

    def _table(
        self,
        loop: asyncio.AbstractEventLoop,
        table: TableWriter,
        index: IndexWriter,
        report: Callable[..., None],
        remembered: Mapping[Identity, int] | None,
    ) -> EndpointTable:
        instance = self._instance
        source, extractor = instance.sources.scraped
        return EndpointTable(
            loop,
            table=table,
            documents=self._documents,
            index=Indexed(index, self.limits, remembered),
            reading=Reading(
                extractor,
                instance.layout.table_columns,
                instance.sources.fresh_for_s,
                functools.partial(page_address, source),
                self.further,
            ),
            slot_inflight=instance.memory.lanes.slot_inflight,
            report=report,
            log=EndpointLog(debug=self._debug),
            ejections=self.ejections,
        )

    def _further_pages(self, loop: asyncio.AbstractEventLoop, report: Callable[..., None]) -> list[FurtherPages]:
        instance = self._instance
        wanted = instance.layout.table_columns
        return [
            FurtherPages(
                loop, source, extractor, wanted=wanted, pacing=pacing, tls=instance.credentials.scrape_tls[source.name], report=report
            )
            for source, extractor, pacing in instance.sources.further
        ]


def read_by(instance: Instance) -> list[object]:
    """Returns the parts of a configuration on which the data layer depends. If a reload leaves them equal, the data layer stays."""
    sources = instance.sources
    used = [sources.scraped, *((source, extractor) for source, extractor, _ in sources.further)]
    discovery = instance.config.discovery
    return [
        [(plugin.name, type(plugin), plugin.params) for pair in used for plugin in pair],
        [(column.name, column.type) for column in instance.layout.table_columns],
        (sources.scrapes, sources.pacing, sources.fresh_for_s, sources.prefix_use),
        # A new object equals no other one: with certificate files, every reload makes a new data layer, which reads them again.
        object() if any(source.files for source in sources.all) else None,
        (type(discovery), discovery.params if discovery is not None else None),
    ]


class ScrapeCounts:
    """Copies the counts of the scrapers into the lane, and adds them to the counts of predecessors there."""

    def __init__(self, lane: Lane, scraper: Scraper, ejections: Ejections, further: Sequence[Scraper]) -> None:
        self._lane = lane
        self._counters = scraper.counters
        self._further = [each.counters for each in further]
        self._ejections = ejections
        of_further = (name for pair in zip(POLL_ERRORS, EXTRACT_ERRORS, strict=True) for name in pair)
        names = (*SCRAPE_COUNTERS, *islice(of_further, 2 * len(further)))
        self._places = [lane.schema.counter[name] for name in names]
        self._before = [lane.counters[place] for place in self._places]

    def copy(self) -> None:
        """Copies all counts. A counter never falls."""
        counters = self._counters
        failed = sum(counters.poll_errors.values())
        counts = [counters.taken, counters.late, failed, _unusable(counters), self._ejections.total, counters.foreign]
        for further in self._further:
            counts += (sum(further.poll_errors.values()), _unusable(further))
        for place, before, count in zip(self._places, self._before, counts, strict=True):
            self._lane.counters[place] = max(self._lane.counters[place], before + count)


def _unusable(counters: ScrapeCounters) -> int:
    """Returns how many pages were refused, plus how many values of other pages could not be read."""
    return counters.extract_errors + counters.unread
