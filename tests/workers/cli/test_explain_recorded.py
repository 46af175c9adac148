"""The time that `epp explain --at` means, and the decisions that workers remember of a time, a tenant or an endpoint."""

import datetime

import click
import pytest

from epp.decision.explain import Candidate, Explanation, Profiled
from workers.cli.explain_recorded import Wanted, moment

NOW = datetime.datetime(2026, 3, 5, 18, 30, tzinfo=datetime.UTC).timestamp()


@pytest.mark.parametrize(
    ("text", "ago_s"),
    [
        ("10m", 600),
        ("1.5h", 5400),
        ("30s", 30),
        ("18:05", 25 * 60),
        ("18:29:30", 30),
        ("18:31", 24 * 3600 - 60),
        ("19:05+01:00", 25 * 60),
        ("17:05-01:00", 25 * 60),
        ("00:30+14:00", 8 * 3600),
        ("2026-03-05T18:00", 1800),
        ("2026-03-05 19:00:00+01:00", 1800),
    ],
)
def test_a_time_is_how_long_ago_or_when(text: str, ago_s: float) -> None:
    assert NOW - moment(text, NOW) == ago_s


@pytest.mark.parametrize("text", ["", "yesterday", "10 minutes", "25:00", "-5m"])
def test_anything_else_is_refused_with_what_to_write(text: str) -> None:
    with pytest.raises(click.UsageError, match=r"write 10m \(ago\), 18:05 or 2026-01-31T18:05:30"):
        moment(text, NOW)


def decided(ago_s: float, flow: str = "a", target: str = "10.0.0.1:8000", name: str = "pod-1", worker: int = 0) -> Explanation:
    candidate = Candidate(name, target, "fresh", True, 1.0, [], {})
    run = Profiled("default", False, "max-score-picker", 1, [], [candidate], 0, [name], 1, "", None)
    return Explanation(
        request_id=f"{ago_s}", model="m", target_model="m", flow=flow, priority=0, body_bytes=9, ago_s=ago_s, worker=worker,
        targets=[target], primary="default", headers={}, profiles=[run],
    )  # fmt: skip


SEVERAL = [decided(1.0), decided(2.0, "b", "10.0.0.2:8000", "pod-2"), decided(9.0, "b")]


@pytest.mark.parametrize(
    ("wanted", "ages"),
    [
        (Wanted(flow="b"), [2.0, 9.0]),
        (Wanted(endpoint="pod-1"), [1.0, 9.0]),
        (Wanted(endpoint="10.0.0.2:8000"), [2.0]),
        (Wanted(flow="b", endpoint="pod-1"), [9.0]),
        (Wanted(flow="c"), []),
        (Wanted(at=NOW - 8.0), [9.0, 2.0, 1.0]),
        (Wanted(at=NOW - 600.0), [9.0, 2.0, 1.0]),
    ],
)
def test_what_workers_remember_is_found_by_tenant_endpoint_and_time(wanted: Wanted, ages: list[float]) -> None:
    assert [each.ago_s for each in wanted.remembered(SEVERAL, NOW)] == ages


def test_what_is_looked_for_can_be_said() -> None:
    assert str(Wanted("abc", None, "tenant", "pod-1")) == "on a request abc of flow tenant at pod-1"
