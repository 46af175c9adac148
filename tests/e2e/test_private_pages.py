"""Private pages of a picker's metrics port: a client that a service mesh shows as loopback gets none of them."""

import http.client

import pytest

from loadtest.demo.stack import LOOPBACK
from tests.e2e.conftest import Gateway

PAGES = ("/debug/state", "/debug/decisions", "/debug/profile?seconds=1", "/ui")


def status(port: int, path: str, *, source: str, host: str) -> int:
    """Asks for a page from a loopback address, with a Host header."""
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=20, source_address=(source, 0))
    try:
        connection.request("GET", path, headers={"host": host})
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("source", "host", "expected"),
    [
        ("127.0.0.1", "localhost:9090", 200),
        ("127.0.0.6", "10.0.0.7:9090", 403),
        ("127.0.0.6", "localhost:9090", 403),
        ("127.0.0.1", "10.0.0.7:9090", 403),
    ],
)
def test_only_127_0_0_1_that_asks_for_loopback_gets_private_pages(gateway: Gateway, source: str, host: str, expected: int) -> None:
    found = {path: status(gateway.picker.metrics, path, source=source, host=host) for path in PAGES}
    assert found == dict.fromkeys(PAGES, expected)
    assert status(gateway.picker.metrics, "/metrics", source=source, host=host) == 200
