"""`epp tenants`: the table, and its JSON."""

import json

import pytest
from click.testing import CliRunner

from workers.cli import tenants
from workers.cli.metrics_port import MetricsPort

ACME = dict(zip(tenants.COLUMNS, (12, 1, 123_456, 100_000, 9_999, 3, 4), strict=True))
LESS = dict.fromkeys(tenants.COLUMNS, 0)
PAGE = {"known_s": 60.0, "tenants": [{"tenant": "acme", "hour": LESS, "day": ACME}, {"tenant": "bee\n", "hour": LESS, "day": LESS}]}


def asked(monkeypatch: pytest.MonkeyPatch, page: object, *flags: str) -> tuple[int, str]:
    monkeypatch.setattr(MetricsPort, "page", lambda _self, path: json.dumps(page).encode() if path == "/debug/tenants" else b"")
    result = CliRunner().invoke(tenants.command, ["--url", "localhost:9090", *flags])
    return result.exit_code, result.output


def test_each_tenant_has_a_line_for_the_hour_and_one_for_the_day(monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = asked(monkeypatch, PAGE)
    assert code == 0
    assert [line.split() for line in text.splitlines()] == [
        ["tenant", "requests", "waited", "in", "cached", "out", "over", "budget", "refused"],
        ["acme", "1h", *"0000000"],
        ["24h", "12", "1", "123k", "100k", "9999", "3", "4"],
        ["bee\\n", "1h", *"0000000"],
        ["24h", *"0000000"],
    ]


def test_json_is_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = asked(monkeypatch, PAGE, "--json")
    assert (code, json.loads(text)) == (0, PAGE)


def test_without_tenants_it_says_why_the_table_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = asked(monkeypatch, {"known_s": 0.0, "tenants": []})
    assert (code, "no section tenants" in text) == (0, True)


def test_a_page_of_another_program_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = asked(monkeypatch, [1])
    assert (code, "--url must name a picker's metrics port" in text) == (1, True)
