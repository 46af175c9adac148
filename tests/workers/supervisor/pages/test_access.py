"""Who gets which page of the metrics port."""

import asyncio
from http import HTTPStatus

import pytest

from tests.cases import cases
from workers.supervisor.pages.access import LOCAL_ONLY, TOKEN_NEEDED, Access, is_local
from workers.supervisor.pages.page import ALLOWED, Request, Token, Verdict

SECRET = "0f" * 16
REVIEWED = Verdict(HTTPStatus.FORBIDDEN, "reviewed")
PRIVATE = (
    "/debug/state",
    "/debug/state/stream",
    "/debug/decisions",
    "/debug/decisions/what-if",
    "/debug/receipt",
    "/debug/profile",
    "/debug/pprof/profile",
    "/ui",
    "/ui/app.js",
)
LOCAL = Request("GET", "/metrics", peer="127.0.0.1", host="localhost:9090")
MESH = LOCAL._replace(peer="127.0.0.6", host="10.0.0.7:9090")
REMOTE = LOCAL._replace(peer="10.0.0.9", host="10.0.0.7:9090")


def review(token: str, path: str) -> "Verdict | asyncio.Future[Verdict]":
    return Verdict(REVIEWED.status, f"{token} {path}")


def alone(*, certified: bool = False, remote: bool = False) -> Access:
    return Access(secret=SECRET, review=None, loopback=True, certified=certified, remote=remote)


def in_kubernetes(*, loopback: bool = False, remote: bool = False) -> Access:
    return Access(secret=SECRET, review=review, loopback=loopback, remote=remote)


@cases(
    ("peer", "host", "local"),
    [
        ("127.0.0.1", "localhost:9090", True),
        ("127.0.0.1", "LOCALHOST", True),
        ("127.0.0.1", "127.0.0.1:9090", True),
        ("::1", "[::1]:9090", True),
        ("::1", "[::1]", True),
        ("127.0.0.6", "localhost:9090", False),
        ("127.0.0.2", "127.0.0.2:9090", False),
        ("127.0.0.1", "10.0.0.7:9090", False),
        ("127.0.0.1", "127.0.0.2:9090", False),
        ("127.0.0.1", "[fd00::7]:9090", False),
        ("127.0.0.1", "", False),
        ("127.0.0.1", ":9090", False),
        ("10.0.0.9", "localhost:9090", False),
        ("", "localhost", False),
        ("127.0.0.1", "evil.example:9090", False),
        ("127.0.0.1", "localhost.evil.example", False),
        ("127.0.0.1", "127.0.0.1.evil.example", False),
        ("127.0.0.1", "evil.example@localhost", False),
    ],
)
def test_loopback_means_127_0_0_1_or_1_that_asks_for_loopback(peer: str, host: str, local: bool) -> None:
    request = LOCAL._replace(path="/debug/state", peer=peer, host=host)
    assert is_local(request) is local
    assert alone()(request) == (ALLOWED if local else LOCAL_ONLY)


@cases("path", PRIVATE)
@cases("request_", [MESH, REMOTE])
def test_private_pages_are_for_loopback_unless_all_clients_are_allowed(path: str, request_: Request) -> None:
    request = request_._replace(path=path)
    assert alone()(LOCAL._replace(path=path)) == ALLOWED
    assert alone()(request) == LOCAL_ONLY
    assert alone(remote=True)(request) == ALLOWED


@pytest.mark.parametrize("path", PRIVATE)
def test_a_client_certificate_opens_all_private_pages_but_those_with_single_requests(path: str) -> None:
    single = path.startswith(("/debug/decisions", "/debug/receipt"))
    assert alone(certified=True)(REMOTE._replace(path=path)) == (LOCAL_ONLY if single else ALLOWED)


@pytest.mark.parametrize("path", PRIVATE)
def test_in_kubernetes_loopback_needs_a_token_unless_port_forward_is_asked_for(path: str) -> None:
    request = LOCAL._replace(path=path)
    assert in_kubernetes()(request) == TOKEN_NEEDED
    assert in_kubernetes(remote=True)(request) == TOKEN_NEEDED
    assert in_kubernetes(loopback=True)(request) == ALLOWED
    assert in_kubernetes(loopback=True)(MESH._replace(path=path)) == TOKEN_NEEDED
    assert in_kubernetes()(request._replace(token=Token("t"))) == Verdict(REVIEWED.status, f"t {path}")


def test_in_kubernetes_without_reviews_loopback_needs_the_flag() -> None:
    access = Access(secret=SECRET, review=None, loopback=False)
    assert access(LOCAL._replace(path="/debug/state")) == LOCAL_ONLY
    assert access(LOCAL) == ALLOWED


@pytest.mark.parametrize("access", [alone(), in_kubernetes()])
def test_the_secret_of_the_instance_opens_private_pages(access: Access) -> None:
    for path in PRIVATE:
        assert access(MESH._replace(path=path, token=Token(SECRET))) == ALLOWED
        assert access(MESH._replace(path=path, token=Token(SECRET[:-1]))) != ALLOWED
        assert access(MESH._replace(path=path, token=Token("\xff"))) != ALLOWED


def test_probes_are_open_and_metrics_need_a_token_in_kubernetes_only() -> None:
    for request in (LOCAL, MESH, REMOTE):
        for path in ("/healthz", "/readyz"):
            assert in_kubernetes()(request._replace(path=path)) == ALLOWED
        assert alone()(request) == ALLOWED
        assert in_kubernetes(loopback=True)(request) == Verdict(REVIEWED.status, " /metrics")
