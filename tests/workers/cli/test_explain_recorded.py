"""The time that `epp explain --at` means."""

import datetime

import click
import pytest

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


def test_what_is_looked_for_can_be_said() -> None:
    assert str(Wanted("abc", None, "tenant", "pod-1")) == "on a request abc of flow tenant at pod-1"
