"""What a command finds of a picker that does not answer as one of its own version."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import click
import msgspec
import pytest

from workers.cli import metrics_port
from workers.cli.doctor.running import Running, running
from workers.cli.which import Named
from workers.shared.doctor_report import DOCTOR, PICKER, Finding
from workers.supervisor.pages.state.frames import VERSION

FOUND = {"rule": "full", "severity": "warning", "title": "The pool is full", "evidence": "1.2", "fix": "add servers"}


class Page:
    """A metrics port that answers with `body` to everything."""

    def __init__(self) -> None:
        page = self
        self.body = b""

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(page.body)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def asked(self) -> Running:
        return running(Named(url=f"127.0.0.1:{self.server.server_port}"))


@pytest.fixture
def page() -> Iterator[Page]:
    page = Page()
    yield page
    page.server.shutdown()
    page.server.server_close()


def test_the_findings_of_the_picker_itself_are_taken_over(page: Page) -> None:
    findings = [FOUND | {"found_by": found_by} for found_by in (PICKER, DOCTOR)]
    page.body = json.dumps({"version": VERSION, "findings": findings}).encode()
    picker = page.asked()
    assert [(each.rule, each.found_by) for each in picker.findings] == [("full", PICKER)]


@pytest.mark.parametrize("body", [b"\xff", b'{"findings":["\xff"]}', b"[" * 100_000, b"null", b"[]", b"7", b'"x"', b'{"findings":7}'])
def test_a_page_that_is_no_state_is_a_finding(page: Page, body: bytes) -> None:
    page.body = body
    (found,) = page.asked().findings
    assert (found.rule, found.severity) == ("metrics-port", "error")
    with pytest.raises(click.ClickException, match="must name a picker's metrics port"):
        metrics_port.at(f"127.0.0.1:{page.server.server_port}", "").read("/x", msgspec.json.Decoder(Finding).decode)


def test_a_picker_of_another_version_is_named(page: Page) -> None:
    page.body = json.dumps({"version": VERSION + 1, "findings": []}).encode()
    (found,) = page.asked().findings
    assert (found.rule, found.severity) == ("version", "error")
    assert f"version {VERSION + 1}" in found.evidence


@pytest.mark.parametrize("body", [b"<html>", b"{}", b'{"version": 1, "findings": [3]}'])
def test_a_page_that_is_no_state_is_named_with_its_address(page: Page, body: bytes) -> None:
    page.body = body
    picker = page.asked()
    (found,) = picker.findings
    assert (found.rule, found.severity, picker.state) == ("metrics-port", "error", {})
    assert "/debug/state" in found.evidence


def test_a_port_without_a_listener_is_named() -> None:
    (found,) = running(Named(url="127.0.0.1:1")).findings
    assert found.rule == "metrics-port"
    assert "127.0.0.1:1" in found.evidence
