"""Who used what: the sums of the last hour and day, and the page with them."""

import json
from typing import Any

from epp.decision.decision import Decision, Usage
from epp.metrics.request_series import TENANT
from epp.request import Request
from shm.segment import Region
from shm.series import SeriesWriter
from shm.series_reader import SeriesReader
from workers.process.layout import series_schema_of
from workers.supervisor.pages.page import Request as Asked
from workers.supervisor.pages.tenant_use import FIGURES, MINUTES, TENANTS_MAX, TenantUse, reader_of
from workers.worker.telemetry.tenant_counts import TenantCounts


def of(tenant: str) -> Request:
    return Request(id="r", path="/", headers={}, now=1.0, fairness_id=tenant)


class Counted:
    """Series of one worker, and the sums that the supervisor makes of them."""

    def __init__(self) -> None:
        schema = series_schema_of(TENANT, areas=1)
        region = Region(memoryview(bytearray(schema.bytes)))
        self.writer = SeriesWriter(schema, schema.area(region, 0))
        self.counts = TenantCounts(self.writer)
        self.use = TenantUse(reader_of(SeriesReader(schema, region, serving=lambda _: True)))

    def serve(self, tenant: str, prompt: int = 100, cached: int = 40, output: int = 10, *, waited: bool = False) -> None:
        self.counts.routed(of(tenant), waited=waited)
        self.counts.answered(of(tenant), Decision((), {}, primary=""), Usage(prompt, output, cached))

    def minutes(self, count: int) -> None:
        for _ in range(count):
            self.use.sample()

    def shown(self) -> dict[str, Any]:
        answer = self.use.page(Asked("GET", "/debug/tenants", "", {}, ""))
        assert isinstance(answer.body, bytes)
        found: dict[str, Any] = json.loads(answer.body)
        return found


def test_the_page_has_what_each_tenant_used_at_once() -> None:
    counted = Counted()
    counted.serve("acme", waited=True)
    counted.serve("acme")
    counted.counts.refused(of("acme"), over_budget=True)
    counted.counts.refused(of("bee"), over_budget=False)
    acme, bee = counted.shown()["tenants"]
    assert acme["tenant"] == "acme"
    assert acme["hour"] == acme["day"] == dict(zip(FIGURES, (2, 1, 200, 80, 20, 1, 1), strict=True))
    assert bee["day"] == dict(zip(FIGURES, (0, 0, 0, 0, 0, 0, 1), strict=True))


def test_an_hour_forgets_after_an_hour_and_a_day_after_a_day() -> None:
    counted = Counted()
    counted.serve("acme")
    counted.minutes(MINUTES - 1)
    counted.serve("acme")
    assert counted.use.hour()["acme"][0] == counted.use.day()["acme"][0] == 2
    counted.minutes(2)
    assert (counted.use.hour()["acme"][0], counted.use.day()["acme"][0]) == (1, 2)
    counted.minutes(MINUTES)
    assert ("acme" in counted.use.hour(), counted.use.day()["acme"][0]) == (False, 2)
    assert counted.shown()["known_s"] == (2 * MINUTES + 1) * 60
    counted.minutes(24 * MINUTES)
    assert counted.shown()["tenants"] == []


def test_those_with_the_most_tokens_come_first() -> None:
    counted = Counted()
    for tenant, prompt in (("small", 1), ("large", 1000), ("middle", 100)):
        counted.serve(tenant, prompt)
    assert [each["tenant"] for each in counted.use.tenants()] == ["large", "middle", "small"]
    assert [each["tenant"] for each in counted.use.tenants(1)] == ["large"]


def test_very_many_tenants_take_bounded_memory() -> None:
    counts = {f"tenant-{number}": (1, 0, number, 0, 0, 0, 0) for number in range(3 * TENANTS_MAX)}
    use = TenantUse(lambda: counts)
    use.sample()
    assert len(use.hour()) == TENANTS_MAX
    assert sum(figures[0] for figures in use.hour().values()) == 3 * TENANTS_MAX
    assert use.hour()["other"][0] == 2 * TENANTS_MAX + 1


def test_a_series_that_was_given_away_begins_anew() -> None:
    counts = {"acme": (5, 0, 50, 0, 0, 0, 0)}
    use = TenantUse(lambda: counts)
    use.sample()
    counts["acme"] = (2, 0, 20, 0, 0, 0, 0)
    assert use.hour()["acme"][:3] == [7, 0, 70]


def test_blocks_are_looked_up_again_after_some_were_freed() -> None:
    counted = Counted()
    counted.serve("acme")
    for number in range(TENANT.blocks):
        counted.counts.routed(of(f"tenant-{number}"), waited=False)
    counted.writer.sweep(())
    counted.writer.sweep(())
    counted.serve("new")
    assert counted.use.hour()["new"][0] == 1
