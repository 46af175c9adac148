"""Shares the pages of the first data source with other replicas: one replica reads a page, and all replicas use it.

    Scraper ─ pages ─▶ SharedPages ─▶ EndpointTable
                        │       ▲
                        ▼       │
                    Pages ─ other replicas

There is no election. A replica that has got a page from another replica reads the next page a little later than that replica
(`scrape_pace`). So the same replica continues to read, and another replica takes over when no page arrives.

A replica uses pages of other replicas only for an endpoint with a page that it has read itself without trouble: it finds out itself whether
an endpoint is ready, unreachable or down. If a page of another replica lacks other values than its own last page, it reads the page itself
to find the reason.
"""

import random
from collections.abc import Callable, Mapping

from epp.plugins.extractors._pages import Extracted
from workers.replicas.pages import Page, Pages
from workers.supervisor.endpoints.endpoint_log import Condition
from workers.supervisor.endpoints.endpoints import EndpointTable
from workers.supervisor.endpoints.member import Member
from workers.supervisor.endpoints.scrape import Failure


class SharedPages:
    """A sink between a scraper and the table."""

    def __init__(self, table: EndpointTable, pages: Pages, inflight: Callable[[int], int], limits: Mapping[int, float]) -> None:
        """`inflight(slot)` returns the requests in flight at a slot, of all replicas. `limits`: the places of values that cannot be below
        0, and the most that each can be.
        """
        self._table = table
        self._pages = pages
        self._inflight = inflight
        self._limits = limits

    def scraped(self, tag: object, extracted: Extracted, inflight_at_scrape: int, now: float) -> float | None:
        assert isinstance(tag, Member)
        self._pages.read(tag.owner, Page(now, inflight_at_scrape, extracted.values, extracted.present))
        return self._table.scraped(tag, extracted, inflight_at_scrape, now)

    def failed(self, tag: object, failure: Failure, now: float) -> None:
        self._table.failed(tag, failure, now)

    def sweep(self, now: float) -> None:
        self._table.sweep(now)

    def told(self, slot: int, owner: int, page: Page) -> bool:
        """Writes the values of a page that another replica has read to the row. Returns whether the values are used."""
        member = self._table.by_slot.get(slot)
        if member is None or member.owner != owner or member.page is None:
            return False
        own, _, at = member.page
        if page.at <= at or page.present != own.present or member.failures or member.condition is not Condition.FRESH:
            return False
        if not all(0.0 <= page.values[at] <= most for at, most in self._limits.items()):
            return False
        member.target.pace.told(page.at, random.random())
        requests = self._table.scraped(member, own._replace(values=page.values), page.inflight, page.at)
        if requests is not None:
            member.target.pace.shows(requests, page.inflight, self._inflight(slot))
        return True
