"""Further data sources: each source scrapes another page of every endpoint and adds its columns to the endpoint's row.

    Scraper ─ pages ─▶ FurtherPages ─ changed ─▶ EndpointTable ─ overlay ─▶ the row

Only the first source decides which endpoints are fresh or down. If a page of a further source fails, its last values stay for `kept_for`
seconds, and are treated as not reported after that.
"""

import asyncio
import math
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from epp.data import Column
from epp.plugins.extractors._pages import NONE, Extracted, PageExtractor
from epp.plugins.extractors.metrics_source import MetricsDataSource
from workers.shared.freshness import SCRAPE_S_MAX
from workers.shared.scrape_pace import Pacing
from workers.supervisor.endpoints.discovery import EndpointSpec
from workers.supervisor.endpoints.http_client import CONNECT_S_MAX, Dialer, Dialing
from workers.supervisor.endpoints.scrape import Failure, Scraper, Sink
from workers.supervisor.endpoints.wheel import Target

KEPT_INTERVALS = 4
KEPT_S_MIN = 5.0
FAILURES_TO_REPORT = 5  # failures in a row before a report
REPORT_EVERY_S = 60.0


def kept_for(interval_s: float) -> float:
    """Returns how long the values of a good page are kept, in seconds."""
    return max(KEPT_INTERVALS * interval_s, KEPT_S_MIN)


def page_address(source: MetricsDataSource, spec: EndpointSpec) -> tuple[str, int]:
    """Returns host and port of an endpoint's page. The caller replaces the port if the source has its own port."""
    if source.at_node and spec.node:
        return spec.node, spec.port
    return spec.page or (spec.host, spec.port)


def pod_of(spec: EndpointSpec) -> str:
    """Returns the name of the endpoint's pod: its own name without the rank that discovery appends."""
    pod, mark, rank = spec.name.rpartition("-rank-")
    return pod if mark and rank.isdigit() else spec.name


def scraper_of(
    source: MetricsDataSource,
    loop: asyncio.AbstractEventLoop,
    *,
    pacing: Pacing,
    tls: ssl.SSLContext | None,
    inflight: Callable[[int], int],
    sink: Sink,
    scrapes: bool = True,
) -> Scraper:
    """Creates the scraper of a configured data source. `tls`: the result of `source_tls`."""
    dialer = Dialer(loop, tls)
    return Scraper(
        loop,
        pacing=pacing,
        path=source.path,
        port=source.port,
        # With TLS, the limit of the whole scrape applies.
        dialing=Dialing(dialer.dial, dialer.knock, SCRAPE_S_MAX if tls else CONNECT_S_MAX),
        inflight=inflight,
        sink=sink,
        scrapes=scrapes,
    )


@dataclass(slots=True)
class _Held:
    """The last values of one endpoint. `extracted` is None before the first good page, and after the values have become too old."""

    target: Target
    extracted: Extracted | None = None
    at: float = -math.inf
    failures: int = 0


class FurtherPages:
    """Scrapes the pages of one further source. Calls `changed(tag)` when the values of an endpoint have changed."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        source: MetricsDataSource,
        extractor: PageExtractor,
        *,
        wanted: Sequence[Column[Any]],
        pacing: Pacing,
        tls: ssl.SSLContext | None,
        report: Callable[..., None],
    ) -> None:
        self.kind = source.type_name, extractor.type_name
        self._source = source
        self._extractor = extractor
        self._wanted = tuple(wanted)
        self._report = report
        self._kept_s = kept_for(pacing.interval_s)
        self._held: dict[object, _Held] = {}
        self._say_at = -math.inf
        self.changed: Callable[[object], None] = lambda _tag: None
        self.scraper = scraper_of(source, loop, pacing=pacing, tls=tls, inflight=lambda _slot: 0, sink=self)

    def add(self, tag: object, slot: int, spec: EndpointSpec) -> None:
        """Starts scraping an endpoint."""
        self._held[tag] = _Held(self.scraper.add(tag, slot, *self._scrape_of(spec)))

    def change(self, tag: object, spec: EndpointSpec) -> None:
        """Scrapes an endpoint with its new labels and address from now on."""
        self.scraper.change(self._held[tag].target, *self._scrape_of(spec))

    def remove(self, tag: object) -> None:
        """Stops scraping an endpoint."""
        self.scraper.remove(self._held.pop(tag).target)

    def overlay(self, tag: object, extracted: Extracted) -> Extracted:
        """Returns the values of the first source, `extracted`, with the values of this source added or in their place."""
        own = self._held[tag].extracted
        if own is None:
            return extracted
        values = extracted.values
        if own.present:
            values = tuple(
                mine if own.present >> at & 1 else value for at, (value, mine) in enumerate(zip(values, own.values, strict=True))
            )
        names = {**extracted.names, **own.names} if own.names else extracted.names
        return Extracted(values, extracted.present | own.present, names)

    def scraped(self, tag: object, extracted: Extracted, inflight_at_scrape: int, now: float) -> None:
        """Keeps the values of a good page. Reports its unreadable values."""
        held = self._held[tag]
        held.failures, held.at = 0, now
        before, held.extracted = held.extracted, extracted
        if before != extracted:
            self.changed(tag)
            if extracted.problems.keys() - (before.problems if before is not None else NONE).keys():
                self._say("data source cannot read all values of pages", 1, held, "; ".join(extracted.problems.values()), now)

    def failed(self, tag: object, failure: Failure, now: float) -> None:
        """Counts a failed page. Reports endpoints whose pages have failed several times in a row."""
        held = self._held[tag]
        held.failures += 1
        if held.failures >= FAILURES_TO_REPORT and now >= self._say_at:
            bad = sum(other.failures >= FAILURES_TO_REPORT for other in self._held.values())
            self._say("data source cannot read the pages of endpoints", bad, held, failure.text, now)

    def _say(self, event: str, count: int, last: _Held, reason: str, now: float) -> None:
        """Reports at most once in REPORT_EVERY_S."""
        if now >= self._say_at:
            self._say_at = now + REPORT_EVERY_S
            address = f"{last.target.host}:{last.target.port}"
            self._report(event, source=self._source.name, count=count, last=address, reason=reason)

    def sweep(self, now: float) -> None:
        """Drops values that are too old."""
        oldest = now - self._kept_s
        for tag, held in self._held.items():
            if held.at < oldest and held.extracted is not None:
                held.extracted = None
                self.changed(tag)

    def _scrape_of(self, spec: EndpointSpec) -> tuple[tuple[str, int], Any, str]:
        reader = self._extractor.extraction(dict(spec.labels), self._wanted, pod_of(spec))
        return page_address(self._source, spec), reader, spec.server
