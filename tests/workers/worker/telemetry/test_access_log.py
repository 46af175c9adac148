"""A line in the log per request, off by default."""

import random
from typing import Any

from structlog.testing import capture_logs

from epp.errors import Cause
from epp.plugin import NoParams
from epp.request.tenants import FromHeader, Tenants
from tests.pair import Pair
from tests.workers.worker.extproc.streams import Denies, pair
from tests.workers.worker.telemetry.test_recorder import ID, answered
from workers.worker.telemetry.access_log import AccessLog

TENANT = {"x-llm-d-inference-fairness-id": "tenant-1", "x-request-id": ID}


def logged(site: Pair, share: float, requests: int = 1, **more: str) -> list[dict[str, Any]]:
    site.app.telemetry.access_log = AccessLog(share, random.Random(1))
    with capture_logs() as lines:
        for _ in range(requests):
            answered(site, **TENANT, **more)
    return [line for line in lines if line["event"] == "request"]


def test_a_line_says_who_asked_where_it_went_and_how_long_it_took() -> None:
    (line,) = logged(pair(), 1.0)
    assert (line["request_id"], line["flow"], line["model"]) == (ID, "tenant-1", "m")
    assert (line["status"], line["whole"], line["first_ms"], line["total_ms"]) == (200, True, 250.0, 750.0)
    assert line["target"].endswith(":8000") and line["prompt_tokens"] and line["output_tokens"]
    assert "prompt" not in line and not any("hello" in str(value) for value in line.values())


def test_a_refused_request_has_the_cause_in_place_of_a_target() -> None:
    site = pair(Denies("d", NoParams()))
    site.app.telemetry.access_log = AccessLog(1.0, random.Random(1))
    with capture_logs() as lines:
        envoy = site.open()
        envoy.headers(**TENANT)
        envoy.body(b'{"model": "m", "prompt": "hello"}')
    (line,) = [line for line in lines if line["event"] == "request"]
    assert (line["target"], line["refused"]) == ("", Cause.NO_ENDPOINT_LEFT.value)


def test_a_request_that_is_refused_before_its_body_has_its_id_and_the_cause() -> None:
    site = pair()
    site.app.telemetry.access_log = AccessLog(1.0, random.Random(1))
    site.app.tenants = Tenants([FromHeader("x-tenant")])
    with capture_logs() as lines:
        site.open().headers(**TENANT)
    (line,) = [line for line in lines if line["event"] == "request"]
    assert (line["request_id"], line["target"], line["refused"]) == (ID, "", Cause.UNKNOWN_TENANT.value)
    assert "flow" not in line


def test_a_share_of_the_requests_is_logged() -> None:
    assert 5 <= len(logged(pair(), 0.1, 100)) <= 20


def test_without_the_flag_nothing_is_logged() -> None:
    site = pair()
    with capture_logs() as lines:
        answered(site, **TENANT)
    assert not [line for line in lines if line["event"] == "request"]
