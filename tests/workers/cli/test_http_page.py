"""Pages that commands get from servers and from ports of this machine."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import click
import pytest

from workers.cli import http_page, metrics_port
from workers.cli.doctor import envoy_admin
from workers.cli.doctor.servers import server_findings

NOWHERE = "http://127.0.0.1:1"  # a proxy that nothing reaches
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nDate: today\r\n\r\nabc\n"
ODD = [
    b"\x15\x03\x01\x00\x02\x02\x16",  # TLS
    b"SSH-2.0-x\r\n" * 9,
    b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nabc\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nabc",
]


@contextlib.contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """A server that gives every client this answer."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listening.accept()
                with client:
                    client.recv(4096)
                    client.sendall(answer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"127.0.0.1:{listening.getsockname()[1]}"
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()
    thread.join()


def state(address: str) -> dict[str, object]:
    return {"endpoints": {"default/a": {"name": "a", "address": address, "state": "fresh"}}}


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "all_proxy"])
def test_no_page_is_asked_of_the_proxy_that_the_environment_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, NOWHERE)
    monkeypatch.delenv("no_proxy", raising=False)
    with answering(WHOLE) as address:
        assert http_page.get(f"http://{address}/x", 2.0, bytes_max=99) == (b"abc\n", "today")
        assert metrics_port.at(address, "").page("/x") == b"abc\n"
        assert server_findings(state(address)) == []


@pytest.mark.parametrize("answer", ODD)
def test_an_answer_that_is_no_http_is_a_finding_about_its_server(answer: bytes) -> None:
    with answering(answer) as address:
        (found,) = server_findings(state(address))
        assert found.rule == "server-unreachable"
        assert "no complete answer over HTTP" in found.evidence
        assert found.evidence.isprintable()


@pytest.mark.parametrize("answer", ODD)
def test_a_port_without_http_is_no_envoy(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(answer) as address:
        monkeypatch.setattr(envoy_admin, "PORTS", (int(address.rpartition(":")[2]),))
        assert envoy_admin.found() is None


@pytest.mark.parametrize("answer", ODD)
def test_a_command_that_gets_no_http_from_the_metrics_port_names_the_flags_for_tls(answer: bytes) -> None:
    with answering(answer) as address, pytest.raises(click.ClickException, match="give --ca-file or https://"):
        metrics_port.at(address, "").page("/x")


def test_a_page_that_takes_too_long_as_a_whole_is_given_up() -> None:
    with answering(WHOLE) as address, pytest.raises(TimeoutError, match="no whole page within -1 s"):
        http_page.get(f"http://{address}/x", 2.0, bytes_max=99, within_s=-1.0)
