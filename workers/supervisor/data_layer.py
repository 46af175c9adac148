"""Scrapes the endpoints' metrics pages into the endpoint table, and counts the scrapes.

    discovery ─ apply ─▶ EndpointTable ─▶ Scraper ─ pages ─▶ EndpointTable ─▶ shared memory: table and documents

Each pool has its own extractor and its own limits of the prefix index. Pools with the same data source share its scraper.

`DataLayer` continues with the endpoints and counters of a predecessor. `configured_endpoints` or `kubernetes` find the endpoints and
call `apply` of the table.
"""

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from itertools import islice
from statistics import median
from typing import Any, Generic, TypeVar

from epp.data import Column
from epp.metrics.areas import EXTRACT_ERRORS, FURTHER_SOURCES_MAX, OVERWRITTEN, POLL_ERRORS
from shm.answers import AnswersReader
from shm.areas import Area
from shm.documents import DocumentReader, DocumentWriter
from shm.prefix_writer import IndexWriter
from shm.table import TableReader, TableWriter
from workers.process.instance import Instance
from workers.process.sources import METRICS_BUDGET
from workers.shared.documents import ENDPOINTS, EndpointsView, NamesView, decode_endpoints, document_name
from workers.shared.ejection import Ejections
from workers.shared.index_limits import IndexLimits
from workers.shared.outliers import Outliers
from workers.supervisor.endpoints.endpoint_log import EndpointLog, Snapshots
from workers.supervisor.endpoints.endpoints import EndpointTable, Reading
from workers.supervisor.endpoints.further_pages import FurtherPages, page_address, scraper_of
from workers.supervisor.endpoints.scrape import ScrapeCounters, Scraper, Sink
from workers.supervisor.endpoints.slots import IndexOwners

SCRAPE_COUNTERS = (
    "scrapes_total",
    "scrapes_skipped_total",
    "datalayer_poll_errors_total",
    "datalayer_extract_errors_total",
    "endpoint_ejections_total",
    "scrapes_foreign_total",
)


M = TypeVar("M")
PAGES_TO_JUDGE = 20  # pages of each server before the supervisor reports their cost
CULPRIT = "only another program of the same user or root writes there: find it"


class OverwrittenError(Exception):
    """Another program has overwritten shared memory that this supervisor writes. The text names the part."""


class Shared(Generic[M]):
    """Objects that pools with an equal key share. Keys need no hash. `all`: all objects, each once."""

    def __init__(self) -> None:
        self._known: list[tuple[object, M]] = []

    @property
    def all(self) -> list[M]:
        return [each for _, each in self._known]

    def of(self, key: object, create: Callable[[], M]) -> M:
        """Returns the object with this key. Creates it if necessary."""
        found = next((each for known, each in self._known if known == key), None)
        if found is None:
            found = create()
            self._known.append((key, found))
        return found


class DataLayer:
    """Joins the endpoint table, its scrapers and the ejections. `start` begins to scrape."""

    def __init__(
        self,
        instance: Instance,
        area: Area,
        index: IndexOwners,
        report: Callable[..., None],
        *,
        sink_of: Callable[[EndpointTable], Callable[[Instance], Sink]],
        earlier: "DataLayer | None" = None,
    ) -> None:
        """`area`: the area of the supervisor. `earlier`: the data layer that this one replaces.

        `sink_of`: takes the table, and returns a pool's sink, which gets the results of the first data source and passes them on to the
        table.
        """
        loop = asyncio.get_running_loop()
        self._instance = instance
        self._area = area
        self._report = report
        self._cost_known = instance.sources.believed.paced
        self._debug = instance.options.log_level == "debug"
        areas = instance.memory.areas
        self._writer = writer = TableWriter(instance.layout.table, instance.memory.table)
        self._documents = DocumentWriter(instance.layout.documents, instance.memory.documents)
        self._repaired(writer.overwritten, self._documents.repair(), report)
        self.ejections: Ejections = Ejections(
            lambda: areas.outcomes(writer.used),
            areas.serving_workers,
            areas.slot_inflight,
            Outliers(AnswersReader(instance.layout.answers, instance.memory.answers)) if earlier is None else earlier.ejections.outliers,
            earlier.ejections if earlier is not None else None,
        )
        furthers: Shared[FurtherPages] = Shared()
        scrapers: Shared[Scraper] = Shared()
        self._readings = _by_configuration(instance, lambda pool: self._reading(pool, index.writer, self._further(pool, furthers)))
        self.table = self._table(loop, writer, index, report)
        sink = sink_of(self.table)
        self._scrapers = _by_configuration(instance, lambda pool: _scraper(pool, sink(pool), scrapers))
        self.scrapers: Sequence[Scraper] = scrapers.all
        self.further: Sequence[FurtherPages] = furthers.all
        further = [[pages.scraper for pages in self.further if kind in (pages.kind, pages)] for kind in self._kinds()]
        self._counts = ScrapeCounts(area, self.scrapers, self.ejections, further)

    def start(self, cleanup: contextlib.ExitStack) -> None:
        """Takes over a predecessor's endpoints and starts to scrape. At log level debug, also logs all endpoints regularly."""
        instance = self._instance
        documents = DocumentReader(instance.layout.documents, instance.memory.documents)
        table = TableReader(instance.layout.table, instance.memory.table)
        left = documents.read(ENDPOINTS)
        self.table.start(
            self._scrapers,
            predecessor=decode_endpoints(left[1]) if left is not None and left[1] else (),
            copy=table.copy(),
            now=time.monotonic(),
        )
        for scraper in (*self.scrapers, *(pages.scraper for pages in self.further)):
            scraper.start()
            cleanup.callback(scraper.close)
        if self._debug:
            views = EndpointsView(documents), NamesView(documents)
            snapshots = Snapshots(asyncio.get_running_loop(), table, *views, now=time.monotonic)
            snapshots.start()
            cleanup.callback(snapshots.close)

    def publish_counts(self) -> None:
        """Copies the scraper's counts into the area."""
        self._counts.copy()

    def reported(self, owner: int, tokens: int) -> None:
        """Notes that an endpoint has reported `tokens` cached tokens for one prompt."""
        for limits in {id(reading.limits): reading.limits for reading in self._readings}.values():
            if limits is not None:
                limits.reported(owner, tokens)

    def close(self) -> None:
        """Ends the scrapes of the first data sources."""
        for scraper in self.scrapers:
            scraper.close()

    def look(self) -> None:
        """If scraping at a fixed interval costs the servers more than the usual budget, reports this cost once."""
        scraper = self.scrapers[0]
        costs = () if self._cost_known else scraper.wheel.costs()
        if not costs or scraper.counters.taken < PAGES_TO_JUDGE * len(costs):
            return
        self._cost_known = True
        cost_s, interval_s = median(costs), scraper.pacing.interval_s
        if cost_s > METRICS_BUDGET * interval_s:
            self._report(
                "scraping at a fixed interval takes time of the model servers",
                page_s=round(cost_s, 4),
                interval_s=interval_s,
                share=round(cost_s / interval_s, 3),
                reason="an interval is set, or a plugin reads what only pages tell; metricsBudget: 0.01 takes 1 % of a server's time",
            )

    def overwritten(self) -> str:
        """Returns the part of the state segment that another program has overwritten, or ""."""
        if not self._writer.intact(self.table.handles()):
            return "endpoint table"
        return "documents" if self._documents.overwritten() else ""

    def _repaired(self, rows: int, documents: Sequence[int], report: Callable[..., None]) -> None:
        """Counts and reports the parts that another program has overwritten while no supervisor ran. Overwritten endpoints take slots
        again.
        """
        if rows or documents:
            self._area.add(self._area.schema.counter[OVERWRITTEN.name])
            report(
                "shared memory was overwritten: endpoints and objects are published again",
                segment=self._instance.memory.state_name,
                rows=rows,
                documents=[document_name(index, len(self._instance.pools)) for index in documents],
                reason=CULPRIT,
            )

    def _table(self, loop: asyncio.AbstractEventLoop, table: TableWriter, index: IndexOwners, report: Callable[..., None]) -> EndpointTable:
        return EndpointTable(
            loop,
            table=table,
            documents=self._documents,
            index=index,
            readings=self._readings,
            slot_inflight=self._instance.memory.areas.slot_inflight,
            report=report,
            log=EndpointLog(debug=self._debug),
            ejections=self.ejections,
        )

    def _kinds(self) -> Sequence[object]:
        """Returns how further sources are counted: if there is one pool, each source for itself; if there are several, by the types of
        sources and extractors.
        """
        return further_kinds(self._instance) if self._instance.pools else self.further

    def _further(self, pool: Instance, known: Shared[FurtherPages]) -> list[FurtherPages]:
        """Returns the further sources of a pool, in the order of its configuration. Pools that read the same columns in the same way share
        a source.
        """
        loop, wanted = asyncio.get_running_loop(), columns_of(self._instance, pool)
        read = [(column.name, column.type) for column in wanted]
        found = []
        for source, extractor, pacing in pool.sources.further:
            tls = pool.credentials.scrape_tls[source.name]
            key = pool.pool is None and source.name, type(source), source.params, type(extractor), extractor.params, pacing, read, tls
            create = functools.partial(FurtherPages, loop, source, extractor, wanted=wanted, pacing=pacing, tls=tls, report=self._report)
            found.append(known.of(key, create))
        return found

    def _reading(self, pool: Instance, index: IndexWriter, further: Sequence[FurtherPages]) -> Reading:
        (source, extractor), columns = pool.sources.scraped, columns_of(self._instance, pool)
        limits = IndexLimits(index, pool.sources.prefix_use, columns)
        return Reading(extractor, columns, pool.sources.fresh_for_s, functools.partial(page_address, source), further, limits)


def further_kinds(instance: Instance) -> list[tuple[str, str]]:
    """Returns the types of the further sources and of their extractors: if there is one pool, in their order; if there are several, each
    pair of types once.
    """
    found = [(source.type_name, extractor.type_name) for pool in instance.every for source, extractor, _ in pool.sources.further]
    return (list(dict.fromkeys(found)) if instance.pools else found)[:FURTHER_SOURCES_MAX]


def columns_of(instance: Instance, pool: Instance) -> list[Column[Any]]:
    """Returns the columns to read for a pool, in the layout of all pools: the configuration of another pool may have brought further
    columns.
    """
    return instance.layout.of_pool(pool.options, pool.config).table_columns


def _scraper(pool: Instance, sink: Sink, known: Shared[Scraper]) -> Scraper:
    """Returns the scraper of a pool. Pools with the same data source share it."""
    sources = pool.sources
    source, inflight = sources.scraped[0], pool.memory.areas.slot_load
    tls = pool.credentials.scrape_tls[source.name]
    key = type(source), source.params, sources.pacing, sources.scrapes, tls, id(sink)
    loop, pacing, scrapes = asyncio.get_running_loop(), sources.pacing, sources.scrapes
    create = functools.partial(scraper_of, source, loop, pacing=pacing, scrapes=scrapes, tls=tls, inflight=inflight, sink=sink)
    return known.of(key, create)


def _by_configuration(instance: Instance, made: Callable[[Instance], M]) -> list[M]:
    """Returns the object `made` for each pool. Pools with the same configuration share an object."""
    known: dict[int, M] = {}
    for pool in instance.every:
        if id(pool.config) not in known:
            known[id(pool.config)] = made(pool)
    return [known[id(pool.config)] for pool in instance.every]


def read_by(instance: Instance) -> list[object]:
    """Returns the parts of a configuration on which the data layer depends. If a reload leaves them equal, the data layer stays."""
    sources = instance.sources
    used = [sources.scraped, *((source, extractor) for source, extractor, _ in sources.further)]
    discovery = instance.config.discovery
    return [
        [(plugin.name, type(plugin), plugin.params) for pair in used for plugin in pair],
        [(column.name, column.type) for column in instance.layout.table_columns],
        (sources.scrapes, sources.pacing, sources.fresh_for_s, sources.prefix_use),
        # A new object equals no other object: with certificate files, every reload makes a new data layer, which reads them again.
        object() if any(source.files for source in sources.all) else None,
        (type(discovery), discovery.params if discovery is not None else None),
    ]


class ScrapeCounts:
    """Adds the counts of the scrapers to the counts of predecessors in the area."""

    def __init__(self, area: Area, scrapers: Sequence[Scraper], ejections: Ejections, further: Sequence[Sequence[Scraper]]) -> None:
        """`further`: the scrapers that are counted together."""
        self._area = area
        self._counters = [each.counters for each in scrapers]
        self._further = [[each.counters for each in group] for group in further]
        self._ejections = ejections
        of_further = (name for pair in zip(POLL_ERRORS, EXTRACT_ERRORS, strict=True) for name in pair)
        names = (*SCRAPE_COUNTERS, *islice(of_further, 2 * len(further)))
        self._places = [area.schema.counter[name] for name in names]
        self._before = [area.counters[place] for place in self._places]

    def copy(self) -> None:
        """Copies all counts into the area. A counter never falls."""
        every = self._counters
        failed = sum(sum(each.poll_errors.values()) for each in every)
        taken, late, foreign = (sum(counts) for counts in zip(*((each.taken, each.late, each.foreign) for each in every), strict=True))
        counts = [taken, late, failed, sum(map(_unusable, every)), self._ejections.total, foreign]
        for further in self._further:
            counts += (sum(sum(each.poll_errors.values()) for each in further), sum(map(_unusable, further)))
        for place, before, count in zip(self._places, self._before, counts, strict=True):
            self._area.counters[place] = max(self._area.counters[place], before + count)


def _unusable(counters: ScrapeCounters) -> int:
    """Returns how many pages were refused, plus how many values of other pages could not be read."""
    return counters.extract_errors + counters.unread
