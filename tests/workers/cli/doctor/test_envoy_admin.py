"""The doctor asks an Envoy at its admin port, also at the usual ones that nobody names."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from workers.cli.doctor import envoy_admin
from workers.cli.doctor.command import Gateway, Visit
from workers.cli.doctor.running import Running

CONFIG = yaml.safe_load((Path(__file__).parents[4] / "deploy/envoy.yaml").read_text())
HEALTHY = {"upstream_cx_total": 100, "upstream_cx_connect_timeout": 1, "streams_started": 900, "streams_failed": 2}


class Admin:
    """An admin port with this configuration, and counters by whole name."""

    def __init__(self) -> None:
        self.config: Any = {"configs": [CONFIG]}
        self.stats: dict[str, Any] = {}
        admin = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                stats = {"stats": [{"name": name, "value": value} for name, value in admin.stats.items()]}
                body = json.dumps(admin.config if self.path.startswith("/config_dump") else stats).encode()
                self.send_response(200)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def admin() -> Iterator[Admin]:
    admin = Admin()
    yield admin
    admin.server.shutdown()
    admin.server.server_close()


def test_an_envoy_at_a_usual_port_is_found(admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(envoy_admin, "PORTS", (1, admin.server.server_port))
    assert envoy_admin.found() == (admin.address, admin.config)
    admin.config = {"something": "else"}
    assert envoy_admin.found() is None


def test_counters_of_cluster_and_filter_are_read(admin: Admin) -> None:
    admin.stats = {
        "cluster.endpoint-picker.upstream_cx_connect_timeout": 7,
        "http.gateway.ext_proc.streams_failed": 3,
        "http.other.ext_proc.streams_failed": 2,
    }
    assert envoy_admin.stats(admin.address, "endpoint-picker") == {"upstream_cx_connect_timeout": 7, "streams_failed": 5}


@pytest.mark.parametrize("answer", [b"null", b"[]", b"{}", b'{"stats":7}', b'{"stats":{}}'])
def test_counters_of_something_else_are_refused(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(envoy_admin, "_page", lambda *_: answer.decode())
    with pytest.raises(ValueError, match="no counters of an Envoy"):
        envoy_admin.stats("127.0.0.1:9901", "endpoint-picker")


def test_a_gateway_that_reaches_the_picker_has_no_finding() -> None:
    assert envoy_admin.stats_findings({}) == envoy_admin.stats_findings(HEALTHY) == []


@pytest.mark.parametrize(
    ("changes", "rule", "evidence"),
    [
        ({"upstream_cx_connect_timeout": 60}, "gateway-cannot-connect", "60 of 100 connections timed out"),
        ({"upstream_rq_pending_failure_eject": 500}, "gateway-cannot-connect", "500 requests failed"),
        ({"streams_failed": 90}, "gateway-streams-fail", "90 of 900 ext_proc streams failed"),
    ],
)
def test_a_gateway_that_does_not_reach_the_picker_is_found(changes: dict[str, int], rule: str, evidence: str) -> None:
    (finding,) = envoy_admin.stats_findings(HEALTHY | changes)
    assert finding.rule == rule
    assert evidence in finding.evidence


def test_an_envoy_that_nobody_named_is_checked_only_if_it_calls_this_picker(admin: Admin) -> None:
    state = {"version": 1, "endpoints": {}, "settings": {}}
    visit = Visit(Running(None, "", state, []), Gateway(admin.config, admin.address, named=False), ())
    visit.make()
    assert "does not call this picker" in visit.skipped["gateway"]
    named = Visit(Running(None, "", state, []), Gateway(admin.config, admin.address), ())
    admin.stats = {"cluster.endpoint-picker.upstream_cx_connect_timeout": 7}
    named.make()
    assert [each.rule for each in named.found["gateway"]][-1] == "gateway-cannot-connect"
