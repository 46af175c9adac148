"""Sums up the use of each tenant in the last hour and the last day, and makes the page `/debug/tenants`.

Once a minute, the use of each tenant since the last minute goes into a bucket. There are 60 buckets of a minute and 24 of an hour. The sums
begin with the supervisor. A bucket has at most TENANTS_MAX tenants; the use of further tenants is added to `other`.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, Final

import msgspec

from epp.metrics import OTHER
from epp.metrics.request_series import TENANT
from shm.series_reader import SeriesReader
from workers.supervisor.pages.page import JSON, PageAnswer, Request

STEP_S: Final = 60.0
MINUTES: Final = 60
HOURS: Final = 24
TENANTS_MAX: Final = 256
FIGURES: Final = ("requests", "waited", "input_tokens", "cached_tokens", "output_tokens", "over_budget", "refused")
NOTHING: Final = (0,) * len(FIGURES)

Used = Mapping[str, Sequence[int]]  # tenant -> FIGURES


class TenantUse:
    """Keeps the use of tenants. `read`: returns the use of each tenant since some fixed time."""

    def __init__(self, read: Callable[[], Used]) -> None:
        self._read = read
        self._last: Used = {}
        self._minutes: deque[Used] = deque(maxlen=MINUTES)
        self._hours: deque[Used] = deque(maxlen=HOURS)
        self._samples = 0

    def sample(self) -> None:
        """Closes a bucket. Call it once per STEP_S."""
        now = dict(self._read())
        self._minutes.append(_bounded(self._new(now)))
        self._last = now
        self._samples += 1
        if self._samples % MINUTES == 0:
            self._hours.append(_bounded(_sum(self._minutes)))

    def hour(self) -> Used:
        """Returns the use of tenants in the last hour."""
        return _sum([*self._minutes, self._new(self._read())])

    def day(self) -> Used:
        """Returns the use of tenants in the last 24 hours."""
        rest = self._samples % MINUTES
        return _sum([*self._hours, *islice(reversed(self._minutes), rest), self._new(self._read())])

    def tenants(self, most: int = TENANTS_MAX) -> list[dict[str, Any]]:
        """Returns the figures of the tenants, ordered by the tokens of the last day, the most first."""
        hour, day = self.hour(), self.day()
        order = sorted(day, key=lambda tenant: (-day[tenant][2] - day[tenant][4], -day[tenant][0], tenant))
        return [{"tenant": name, "hour": _named(hour.get(name, NOTHING)), "day": _named(day[name])} for name in order[:most]]

    def page(self, _request: Request) -> PageAnswer:
        """Returns the page as JSON."""
        known_s = self._samples * STEP_S
        return PageAnswer(msgspec.json.encode({"known_s": known_s, "tenants": self.tenants()}) + b"\n", JSON)

    def _new(self, now: Used) -> Used:
        """Returns the use since the last bucket. A tenant with a series that was given away begins anew."""
        found = {}
        for tenant, figures in now.items():
            before = self._last.get(tenant, NOTHING)
            grown = [a - b if a >= b else a for a, b in zip(figures, before, strict=True)]
            if any(grown):
                found[tenant] = grown
        return found


def reader_of(series: SeriesReader) -> Callable[[], Used]:
    """Returns a function that reads the series of tenants, over all pools."""
    assert len(TENANT.counters) == len(FIGURES)
    return lambda: _sum([{labels[0]: values.counters} for labels, values in series.rows().items()])


def _named(figures: Sequence[int]) -> dict[str, int]:
    return dict(zip(FIGURES, figures, strict=True))


def _sum(buckets: Sequence[Used] | deque[Used]) -> Used:
    found: dict[str, list[int]] = {}
    for bucket in buckets:
        for tenant, figures in bucket.items():
            before = found.get(tenant)
            found[tenant] = list(figures) if before is None else [a + b for a, b in zip(before, figures, strict=True)]
    return found


def _bounded(used: Used) -> Used:
    if len(used) <= TENANTS_MAX:
        return used
    tokens = Counter({tenant: figures[2] + figures[4] for tenant, figures in used.items() if tenant != OTHER})
    kept = dict(tokens.most_common(TENANTS_MAX - 1))
    rest = _sum([{OTHER: figures} for tenant, figures in used.items() if tenant not in kept])
    return {tenant: used[tenant] for tenant in kept} | dict(rest)
