"""The metrics port: /metrics, /healthz, /readyz, the live state, /debug/decisions and profiles of workers over HTTP.

`workers.supervisor.pages.access` decides who gets which page.
"""

import asyncio
import contextlib
import functools
import os
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, NamedTuple

from epp.decision.receipt import Seal
from epp.learning.model import LatencyModel
from epp.plugins.producers.inflight import InflightLoad
from epp.recording.keys import Keyed
from shm.areas import Area
from shm.documents import DocumentReader
from shm.observe import SECRET
from shm.table import TableReader
from workers.process.instance import Instance
from workers.shared import profiles, reload_status
from workers.shared.decisions import DecisionsAsking
from workers.shared.documents import EndpointsView
from workers.shared.reload_status import ReloadStatus
from workers.supervisor.data_layer import further_kinds
from workers.supervisor.endpoints.endpoints import EndpointTable
from workers.supervisor.index_keeper import IndexKeeper
from workers.supervisor.live import Live
from workers.supervisor.pages.access import Access
from workers.supervisor.pages.admin import AdminServer
from workers.supervisor.pages.decisions import DecisionsPage, ReceiptPage, Recorded, RecordedPage, WhatIfPage
from workers.supervisor.pages.page import Page, PageAnswer, Request, refusal
from workers.supervisor.pages.profile import COLLAPSED, PPROF, ProfilePage
from workers.supervisor.pages.ui.files import file_pages
from workers.supervisor.readiness import Readiness
from workers.supervisor.scaling import PoolSignals

if TYPE_CHECKING:
    from workers.replicas.exchange import Exchange
    from workers.supervisor.kubernetes import Kubernetes
    from workers.supervisor.pages.metrics import IndexFigures, MetricsPage, Readings

METRICS_PORT_ABUSE = "metrics_port_abuse_total"


class Shown(NamedTuple):
    """The parts of the supervisor that the pages show.

    `recorded`: where decisions are recorded at present. `latency(pool)`: returns the latency model of a pool, or None if it has learned
    nothing. `exchange`: the exchange with other replicas; None without a replica store. `signals`: the scaling signals of several pools;
    None if the picker has one pool.
    """

    keeper: IndexKeeper
    live: Live
    recorded: Callable[[], Recorded]
    latency: Callable[[int], LatencyModel | None]
    exchange: "Exchange | None"
    signals: PoolSignals | None = None


class PagePort:
    """Serves the pages of the metrics port."""

    def __init__(
        self,
        instance: Instance,
        area: Area,
        readiness: Readiness,
        *,
        shown: Shown,
        table: EndpointTable,
        kubernetes: "Kubernetes | None",
        report: Callable[..., None],
    ) -> None:
        """`area`: the area of the supervisor. `kubernetes`: None outside Kubernetes."""
        self._instance = instance
        self._area = area
        self._readiness = readiness
        self._shown = shown
        self._table = table
        self._kubernetes = kubernetes
        self._report = report
        self._status = DocumentReader(instance.layout.status, instance.memory.reload)

    def use(self, instance: Instance, table: EndpointTable) -> None:
        """Shows a later configuration and its table. Connections stay open."""
        self._instance, self._table = instance, table
        self._shown.live.use(instance)
        self.__dict__.pop("_metrics", None)  # the next scrape makes the page again

    def open(self, cleanup: contextlib.ExitStack) -> None:
        """Serves the pages until `cleanup` closes the port."""
        what_if, asking = WhatIfPage(), self._asking()
        server = AdminServer(
            {
                "/metrics": lambda request: self._metrics.page(request),
                "/healthz": lambda _: PageAnswer(b"ok\n"),
                "/readyz": self._readyz,
                **self._profiles(),
                **self._shown.live.pages(),
                "/debug/decisions": DecisionsPage(
                    asking, time.monotonic, answered=what_if.remember, pools=lambda: self._instance.pool_names
                ),
                "/debug/decisions/recorded": RecordedPage(self._shown.recorded, Keyed(self._instance.credentials.prefix_seed)),
                "/debug/receipt": self._receipts(asking, what_if),
                "/debug/decisions/what-if": what_if,
                **(file_pages() if self._instance.options.ui else {}),
            },
            self._report,
            self._access(cleanup),
            functools.partial(self._area.add, self._area.schema.counter[METRICS_PORT_ABUSE]),
        )
        certificates = self._instance.credentials.metrics
        if certificates is not None:
            certificates.follow(asyncio.get_running_loop(), speaks=True)
            cleanup.callback(certificates.close)
        server.serve(self._instance.sockets.metrics, certificates.context if certificates else None)
        cleanup.callback(server.close)

    def _access(self, cleanup: contextlib.ExitStack) -> Access:
        options, kubernetes = self._instance.options, self._kubernetes
        review = None
        if kubernetes is not None and options.metrics_endpoint_auth is not False:
            from workers.supervisor.kube.review import Reviewer  # imported before the fork, only if the picker needs it

            reviewer = Reviewer(lambda: kubernetes.api, self._report)
            cleanup.callback(reviewer.close)
            review = reviewer.ask
        return Access(
            secret=self._instance.lock.info[SECRET],
            review=review,
            loopback=kubernetes is None or options.debug_port_forward,
            certified=bool(options.metrics_client_ca_file),
            remote=options.debug_remote,
        )

    def _readyz(self, _request: Request) -> PageAnswer:
        if not (why := self._readiness.missing()):
            return PageAnswer(f"ok\n{self._configuration()}".encode())
        return refusal(HTTPStatus.SERVICE_UNAVAILABLE, f"not ready: {why}")

    def _reload(self) -> ReloadStatus | None:
        """Returns the state of the configuration, or of the list of several pools."""
        return reload_status.read(self._status, self._instance.layout.listed or 0)

    def _reloads(self) -> Mapping[str, ReloadStatus]:
        """Returns the states of the configurations of several pools by their names."""
        named = [(pool.options.pool_name, number) for number, pool in enumerate(self._instance.pools)]
        found = {name: reload_status.read(self._status, number) for name, number in named if name}
        return {name: status for name, status in found.items() if status is not None}

    def _configuration(self) -> str:
        """Returns lines that name the configurations in force, the candidates, and the reloads that failed."""
        if self._instance.pools:
            return "".join(_lines(status, f"pool {name}: ") for name, status in self._reloads().items())
        status = self._reload()
        return "" if status is None else _lines(status)

    def _asking(self) -> DecisionsAsking:
        instance = self._instance
        return DecisionsAsking(
            self._area,
            instance.memory.areas,
            DocumentReader(instance.layout.decisions, instance.memory.decisions),
            wake=lambda index: os.eventfd_write(instance.pipes.wakeups[index], 1),
            now=time.monotonic,
        )

    def _receipts(self, asking: DecisionsAsking, what_if: WhatIfPage) -> ReceiptPage:
        instance = self._instance
        endpoints = EndpointsView(DocumentReader(instance.layout.documents, instance.memory.documents))
        return ReceiptPage(
            Seal(instance.credentials.prefix_seed),
            asking,
            endpoints.current,
            lambda slot: (self._instance.number, self._instance.every[self._table.pool_of(slot) or 0].config.pipeline),
            time.monotonic,
            answered=what_if.remember,
        )

    def _profiles(self) -> dict[str, Page]:
        """Returns the pages with profiles by path, or no pages if they are turned off."""
        instance = self._instance
        if not instance.options.enable_pprof:
            return {}
        asking = profiles.ProfileAsking(
            self._area,
            instance.memory.areas,
            DocumentReader(instance.layout.profiles, instance.memory.profiles),
            wake=lambda index: os.eventfd_write(instance.pipes.wakeups[index], 1),
            now=time.monotonic,
        )
        forms = {"/debug/pprof/profile": PPROF, "/debug/profile": COLLAPSED}
        return {path: ProfilePage(asking, form) for path, form in forms.items()}

    @functools.cached_property
    def _metrics(self) -> "MetricsPage":
        """The metrics page, created by the first scrape."""
        from workers.supervisor.pages.flow import figures_of
        from workers.supervisor.pages.kv_events import kv_figures_of
        from workers.supervisor.pages.metrics import Content, MetricsPage
        from workers.supervisor.pages.pool_gauges import PoolGauges
        from workers.supervisor.pages.processes import ProcessFigures
        from workers.supervisor.pages.sections import Sections

        instance = self._instance
        table = TableReader(instance.layout.table, instance.memory.table)
        documents = DocumentReader(instance.layout.documents, instance.memory.documents)
        pools = [
            PoolGauges(table, EndpointsView(documents, pool.pool), name=pool.options.pool_name, fresh_for_s=pool.sources.believed.for_s)
            for pool in instance.every
            if pool.options.pool_name  # not an empty place
        ]
        plugins = instance.config.pipeline.plugins
        candidacy = self._kubernetes.candidacy if self._kubernetes is not None else None
        shown = Content(
            instance.layout.shown,
            [(group, instance.memory.series_reader(group)) for group in instance.layout.shown_groups],
            producer_name=next((name for name, p in plugins.items() if isinstance(p, InflightLoad)), ""),
            stream_metrics=instance.options.enable_grpc_stream_metrics,
            legacy_names=instance.options.metrics_legacy_names,
        )
        sections = Sections(
            flow=[figures for pool in instance.every if pool.options.pool_name and (figures := figures_of(pool, documents)) is not None],
            kv_events=kv_figures_of(instance),
            latency=self._shown.latency,
            replicas=self._shown.exchange,
            processes=ProcessFigures(instance),
            signals=self._shown.signals.shown if self._shown.signals is not None else None,
        )
        return MetricsPage(
            instance.memory.areas,
            shown,
            pools,
            self._index_figures(),
            self._readings(),
            sections,
            now=time.monotonic,
            reload=self._reload,
            reloads=self._reloads if instance.pools else None,
            leads=candidacy.by_lease() if candidacy is not None else {},
        )

    def _readings(self) -> "Readings":
        from workers.supervisor.pages.metrics import Readings

        sources = self._instance.sources
        source, extractor = sources.scraped
        return Readings(
            ((source.type_name, extractor.type_name), *further_kinds(self._instance)), self._table.scrape_seconds, self._table.failing
        )

    def _index_figures(self) -> "IndexFigures":
        from workers.supervisor.pages.metrics import IndexFigures

        index = self._shown.keeper
        return IndexFigures(index.writer, lambda: index.bus.corrupt)


def _lines(status: ReloadStatus, head: str = "") -> str:
    lines = [f"configuration {status.generation} ({status.hash})"]
    if (tried := status.tryout) is not None:
        lines.append(f"candidate {tried.generation} ({tried.hash}) {tried.share}")
    if not status.successful:
        lines.append(f"last reload failed: {status.text}")
    return "".join(f"{head}{line}\n" for line in lines)
