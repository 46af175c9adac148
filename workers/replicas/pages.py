"""Shares metrics pages of model servers among replicas: the pages that this replica has read, and the pages that other replicas have read.

Messages have the values of pages. Each replica publishes the pages that it has read in its next message. Other replicas use these pages
like their own, if they read the same columns.

For each endpoint, only the last page waits. While the store is away, pages that wait too long are dropped.
"""

from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

from workers.replicas.endpoint_places import Places
from workers.replicas.wire import AGE_US_MAX, PAGES_MAX, REQUESTS_MAX, WIDTH_MAX, PageRows, page_row

US = 1e6  # per second


class Page(NamedTuple):
    """The values of a page. `at`: when the page was read, on this replica's clock. `inflight`: the requests of all replicas at the endpoint
    when the page was asked for. `values` and `present`: as `Extracted` has them.
    """

    at: float
    inflight: int
    values: tuple[float, ...]
    present: int


Use = Callable[[int, int, Page], bool]


def _use_none(_slot: int, _owner: int, _page: Page) -> bool:
    return False


class Pages:
    """The waiting pages. `used`: how many pages of other replicas this replica has used. `foreign`: how many it could not read."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._columns = self._width = 0
        self._use: Use = _use_none
        self._read: dict[int, Page] = {}  # owner -> the page that this replica has read since the last message
        self._heard: dict[int, Page] = {}  # key of an endpoint -> the page that another replica has read since the last `apply`
        self.used = self.foreign = 0

    def share(self, columns: int, width: int, use: Use = _use_none) -> None:
        """Shares pages from now on, unless a page has no values or too many. `columns`: a fingerprint of the `width` values of a page.

        `use(slot, owner, page)` takes a page of another replica, and returns whether it uses the page.
        """
        self._columns, self._width, self._use = columns, width if width <= WIDTH_MAX else 0, use
        self._read.clear()
        self._heard.clear()

    def read(self, owner: int, page: Page) -> None:
        """Adds a page that this replica has read. `owner`: the owner number of the endpoint."""
        if self._width:
            self._read.pop(owner, None)  # so that the oldest page is the first one
            self._read[owner] = page

    def take(self, now: float) -> PageRows | None:
        """Returns the new pages since the last call, as many as fit into a message."""
        if not self._read:
            return None
        row, keys = page_row(self._width), self._places.pages.keys
        rows: list[bytes] = []
        for owner in list(islice(self._read, PAGES_MAX)):
            at, inflight, values, present = self._read.pop(owner)
            age_us = round((now - at) * US)
            key = keys.get(owner)
            if key is not None and 0 <= age_us <= AGE_US_MAX:
                rows.append(row.pack(key, age_us, min(max(inflight, 0), REQUESTS_MAX), present, *values))
        return PageRows(self._columns, self._width, b"".join(rows)) if rows else None

    def hear(self, told: PageRows | None, now: float) -> None:
        """Adds the pages of a message that was read at `now`."""
        if told is None or not self._width:
            return
        if (told.columns, told.width) != (self._columns, self._width):
            self.foreign += 1
            return
        slots = self._places.pages.slots
        for key, age_us, inflight, present, *values in page_row(told.width).iter_unpack(told.rows):
            at = now - age_us / US
            if key in slots and ((other := self._heard.get(key)) is None or other.at < at):
                self._heard[key] = Page(at, inflight, tuple(values), present)

    def apply(self) -> None:
        """Uses the collected pages of other replicas."""
        heard, self._heard, places = self._heard, {}, self._places.pages
        for key, page in heard.items():
            slot = places.slots.get(key)
            self.used += slot is not None and self._use(slot, places.owners[key], page)
