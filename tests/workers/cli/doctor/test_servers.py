"""The findings about model servers, from what they answer."""

import email.utils
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from workers.cli.doctor.servers import Answer, findings_of, server_findings

PAGE = b'vllm:cache_config_info{block_size="16",enable_prefix_caching="False"} 1.0\n'
PATH = "/custom"


class Server(BaseHTTPRequestHandler):
    """A server whose clock is a minute behind, without prefix caching, and with its page at PATH."""

    def do_GET(self) -> None:
        self.send_response_only(200 if self.path == PATH else 404)
        self.send_header("Date", email.utils.formatdate(time.time() - 60, usegmt=True))
        self.end_headers()
        self.wfile.write(PAGE)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def address() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def state(address: str, path: str) -> dict[str, Any]:
    effective = (
        "apiVersion: llm-d.ai/v1\n"
        f"plugins: [{{name: m, type: metrics-data-source, parameters: {{scheme: http, path: {path}, port: null}}}}]\n"
    )
    endpoint = {"name": "a", "address": address, "state": "fresh"}
    return {"endpoints": {"default/a": endpoint}, "settings": {"effective": effective}}


def test_a_server_is_asked_where_the_configuration_says(address: str) -> None:
    clock, caching = server_findings(state(address, PATH))
    assert (clock.rule, caching.rule) == ("clock", "prefix-caching-off")
    assert address in clock.evidence
    assert "-60" in clock.evidence or "-61" in clock.evidence


def test_a_server_that_reports_no_hits_is_left_to_the_finding_of_the_picker(address: str) -> None:
    found = state(address, PATH)
    found["endpoints"]["default/a"] |= {"predicted_share": 0.9, "predicted_tokens": 9000.0, "scraped": {}}
    assert [each.rule for each in server_findings(found)] == ["clock"]


def test_a_server_that_answers_the_picker_only_is_named(address: str) -> None:
    (found,) = server_findings(state(address, "/metrics"))
    assert (found.rule, found.severity) == ("server-unreachable", "error")
    assert "404" in found.evidence


def test_one_wrong_clock_is_that_of_the_server_and_all_wrong_clocks_are_ours() -> None:
    right, wrong = Answer("a", "1", ahead_s=1.0), Answer("b", "2", ahead_s=-90.0)
    (found,) = findings_of([right, wrong], {})
    assert found.title == "The clock of 1 server is wrong"
    (found,) = findings_of([wrong, wrong], {})
    assert found.title == "The clock of this machine is wrong"
    assert findings_of([right, Answer("c", "3")], {}) == []


def test_an_endpoint_that_the_picker_cannot_reach_either_is_not_named_twice() -> None:
    assert findings_of([Answer("a", "1", failed="refused")], {"1": "down"}) == []
