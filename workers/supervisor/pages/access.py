"""Decides who may get which page of the metrics port.

    /healthz, /readyz     everybody
    /metrics              everybody; in Kubernetes, bearers of a token that may get it
    /debug/..., /ui/...   processes that can read the picker's file in the run directory, which has a secret for them;
                          in Kubernetes, bearers of a token that may get the page; elsewhere, clients on the loopback interface,
                          and others as flags allow

A client on the loopback interface has the address 127.0.0.1 or ::1 and asks for such an address or for localhost. Other loopback addresses
are treated as remote, because a service mesh shows all its clients as 127.0.0.6. So are other names, because a web page can point its own
DNS name to 127.0.0.1 and so make a browser send requests to this port (DNS rebinding). In Kubernetes, a sidecar may show clients as
127.0.0.1, too, so the loopback address proves nothing, unless `--debug-port-forward` is set.

This module does not review tokens of Kubernetes (`workers.supervisor.kube.review` does).
"""

import asyncio
import hmac
import re
from collections.abc import Callable
from http import HTTPStatus
from typing import Final

from workers.supervisor.pages.page import ALLOWED, Request, Verdict

PROBES: Final = ("/healthz", "/readyz")
PRIVATE: Final = ("/debug/", "/ui")
TENANTS: Final = ("/debug/decisions", "/debug/receipt")  # pages with single requests of each tenant
LOOPBACK: Final = ("127.0.0.1", "::1")
LOCAL_NAMES: Final = ("localhost", "127.0.0.1", "[::1]")
CHALLENGE: Final = (("WWW-Authenticate", 'Bearer realm="metrics"'),)
LOCAL_ONLY: Final = Verdict(
    HTTPStatus.FORBIDDEN,
    "only clients on the loopback interface that ask for localhost get this page, in Kubernetes with --debug-port-forward; "
    "--debug-remote allows all clients",
)
TOKEN_NEEDED: Final = Verdict(
    HTTPStatus.UNAUTHORIZED,
    "in Kubernetes this page needs `Authorization: Bearer TOKEN`, the token of a service account that may get it; "
    "for kubectl port-forward without a token, start the picker with --debug-port-forward",
    CHALLENGE,
)
_PORT: Final = re.compile(r":\d+$")

Review = Callable[[str, str], "Verdict | asyncio.Future[Verdict]"]


class Access:
    """The guard of the metrics port."""

    def __init__(self, *, secret: str, review: Review | None, loopback: bool, certified: bool = False, remote: bool = False) -> None:
        """`secret`: the token of processes on this machine. `review`: returns the verdict on a token and a path; None without reviews.

        `loopback`: whether clients on the loopback interface need no token. `certified`: whether the port verifies certificates of
        clients. `remote`: whether all other clients get private pages without a token, too, if there are no reviews.
        """
        self._secret = secret.encode()
        self._review = review
        self._loopback = loopback
        self._certified = certified
        self._remote = remote

    def __call__(self, request: Request) -> "Verdict | asyncio.Future[Verdict]":
        path = request.path
        if path in PROBES:
            return ALLOWED
        if not path.startswith(PRIVATE):
            return ALLOWED if self._review is None else self._review(request.token, path)
        if request.token and hmac.compare_digest(request.token.encode(), self._secret):
            return ALLOWED
        if self._loopback and is_local(request):
            return ALLOWED
        if self._review is not None:
            return self._review(request.token, path) if request.token else TOKEN_NEEDED
        if self._remote or (self._certified and not path.startswith(TENANTS)):
            return ALLOWED
        return LOCAL_ONLY


def is_local(request: Request) -> bool:
    """Returns whether a request comes from the loopback interface and asks for it."""
    name = request.host[: found.start()] if (found := _PORT.search(request.host)) else request.host
    return request.peer in LOOPBACK and name.lower() in LOCAL_NAMES
