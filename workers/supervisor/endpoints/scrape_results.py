"""What becomes of scrapes: their results, the counts of them, and who gets them."""

from collections import Counter
from collections.abc import Mapping
from typing import Final, NamedTuple, Protocol

from epp.plugins.extractors._pages import Extracted

EXTRACT: Final = "extract"  # the cause of a failed scrape whose page was fetched, and refused as a whole


class Failure(NamedTuple):
    """Why a scrape failed."""

    cause: str  # one word
    text: str
    refused: bool = False  # no process listens at the endpoint's own address
    again: bool = False  # the next try comes at once, not at the next turn
    serves: bool = False  # the endpoint's own address accepts connections


class Sink(Protocol):
    """Receives the results of scrapes, in calls from the event loop. `tag`: the object with which the endpoint was added."""

    def scraped(self, tag: object, extracted: Extracted, inflight_at_scrape: int, now: float) -> float | None:
        """Takes the values of a good page. Returns the requests at the server, or None if the pages do not show them."""

    def failed(self, tag: object, failure: Failure, now: float) -> None: ...

    def sweep(self, now: float) -> None: ...


class ScrapeCounters:
    """Counts of the scraper since its start. No count ever falls.

    Each scrape ends as taken, poll error or extract error, unless its endpoint is removed before. `late` counts the turns at which a scrape
    was due while the previous one was still under way. Such a turn starts no scrape. `unread`: values of pages that were taken which
    cannot be read. A cause counts when it appears on an endpoint's page, not again while it lasts. `foreign`: pages that show more requests
    than are in flight there.
    """

    def __init__(self) -> None:
        self.scrapes = 0
        self.taken = 0
        self.late = 0
        self.extract_errors = 0
        self.unread = 0
        self.foreign = 0
        self.poll_errors: Counter[str] = Counter()

    def took(self, problems: Mapping[str, str], before: Mapping[str, str]) -> None:
        """Counts a page that was taken. `problems`: what could not be read of it. `before`: the same of the endpoint's previous page."""
        self.taken += 1
        if problems or before:
            self.unread += len(problems.keys() - before.keys())
