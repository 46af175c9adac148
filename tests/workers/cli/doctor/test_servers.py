"""The findings about model servers, from what they answer."""

import email.utils
import json
import ssl
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.workers.authority import CLIENT, Authority, write_pair
from workers.cli.doctor.command import Gateway, Visit
from workers.cli.doctor.running import Running
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


def serving(context: ssl.SSLContext | None = None) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def address() -> Iterator[str]:
    yield from serving()


def state(address: str, path: str, kind: str = "metrics-data-source", **parameters: str) -> dict[str, Any]:
    source = {"name": "m", "type": kind, "parameters": {"scheme": "http", "path": path, "port": None, **parameters}}
    effective = json.dumps({"apiVersion": "llm-d.ai/v1", "plugins": [source]})
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


def skipped(state: dict[str, Any]) -> tuple[list[str], str]:
    """Returns the rules of the findings about servers, and why the servers were not asked."""
    visit = Visit(Running(None, "", state, []), Gateway(), ())
    visit._servers("")
    return [each.rule for each in visit.findings], visit.skipped.get("servers", "")


def test_pages_of_other_clusters_are_not_asked_where_they_are_not(address: str) -> None:
    assert skipped(state(address, "/metrics", "multicluster-metrics-data-source")) == ([], "their pages are those of other clusters")


def test_a_server_that_needs_a_client_certificate_gets_that_of_the_picker(tmp_path: Path) -> None:
    authority = Authority()
    theirs, ours = write_pair(tmp_path / "server", authority.pair()), write_pair(tmp_path / "client", authority.pair(use=CLIENT))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(theirs / "tls.crt", theirs / "tls.key")
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=authority.pem.decode())
    certificate = {"clientCertPath": str(ours / "tls.crt"), "clientKeyPath": str(ours / "tls.key")}
    for address in serving(context):
        asked = state(address, PATH, scheme="https", **certificate)
        assert skipped(asked) == (["clock", "prefix-caching-off"], "")
        (ours / "tls.key").unlink()
        rules, why = skipped(asked)
        assert (rules, why) == ([], "the picker's client certificate cannot be read here: No such file or directory")


def test_the_servers_of_other_pools_are_asked_if_one_pool_cannot_be(address: str) -> None:
    one, other = state(address, PATH), state(address, PATH, "multicluster-metrics-data-source")
    configurations = [{"pools": [name], **each["settings"]} for name, each in (("a", one), ("b", other))]
    endpoints = {name: {**one["endpoints"]["default/a"], "name": name, "pool": name, "scraped": {}} for name in "ab"}
    visit = Visit(
        Running(None, "", {"pools": {"a": {}, "b": {}}, "settings": {"configurations": configurations}, "endpoints": endpoints}, []),
        Gateway(),
        (),
    )
    visit._servers("")
    assert [each.title for each in visit.findings] == ["The clock of 1 server is wrong", "Pool a: Prefix caching is off in 1 server"]
    assert visit.skipped == {"servers of pools b": "their pages are those of other clusters"}
