"""Who may read a page: a bearer token and the page's path -> yes, or an answer that says why not.

    token ─▶ known for less than its time? ─▶ as then
          ─▶ TokenReview: whose is it?  ─▶ SubjectAccessReview: may he get this path?  ─▶ remembered

- All that ask with the same token for the same path at the same time share one review.
- Answers are remembered for a short time, those that allow apart from those that refuse, so that no flood of made-up tokens drives
  out what Prometheus uses. Tokens are remembered as keyed hashes only, and never logged.
- Reviews under way and reviews a second are bounded: whoever guesses tokens asks the API server not more often than that.
- A review that cannot be made allows nobody: 503, and the log says why. A refusal of ours (RBAC of the picker) is no refusal of his.
- A token that is no token (none, too long, not ASCII) is refused without asking.
- Probes are open to all, and pages that only loopback may see (`/debug`) ask no token of loopback.

What this does not do: read HTTP (`workers.admin` does).
"""

import asyncio
import hashlib
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final, Protocol

import msgspec

from workers.admin import ALLOWED, Request, Verdict
from workers.decisions_page import is_loopback
from workers.kube.api import ApiError, Unreachable
from workers.log import Rarely

ALLOWED_S: Final = 60.0
REFUSED_S: Final = 10.0
FAILED_S: Final = 1.0
REMEMBERED_MAX: Final = 256  # of each kind
REVIEW_S: Final = 5.0  # both reviews together
UNDER_WAY_MAX: Final = 8
REVIEWS_PER_S: Final = 10.0
BURST: Final = 20.0
TOKEN_CHARS_MAX: Final = 8192

TOKEN_REVIEWS: Final = "/apis/authentication.k8s.io/v1/tokenreviews"
OPEN: Final = ("/healthz", "/readyz")
DEBUG: Final = "/debug/"
ACCESS_REVIEWS: Final = "/apis/authorization.k8s.io/v1/subjectaccessreviews"


CHALLENGE: Final = 'WWW-Authenticate: Bearer realm="metrics"\r\n'
LATER: Final = "Retry-After: 1\r\n"
NEEDED: Final = Verdict(
    HTTPStatus.UNAUTHORIZED,
    "this page needs `Authorization: Bearer TOKEN`, the token of a service account that may get it",
    CHALLENGE,
)
UNKNOWN: Final = Verdict(
    HTTPStatus.UNAUTHORIZED, "the API server does not accept this token; it may have expired", CHALLENGE
)
BUSY: Final = Verdict(
    HTTPStatus.SERVICE_UNAVAILABLE, "too many tokens wait to be reviewed; try again in a second", LATER
)
FAILED: Final = Verdict(
    HTTPStatus.SERVICE_UNAVAILABLE,
    "this token could not be reviewed by the API server; the picker's log says why",
    LATER,
)


class Server(Protocol):
    """What is needed of `api.Api`."""

    async def request(self, verb: str, path: str, *, body: bytes | None = None, timeout_s: float = ...) -> bytes: ...


class _User(msgspec.Struct):
    username: str = ""
    uid: str = ""
    groups: list[str] | None = None
    extra: dict[str, list[str]] | None = None


class _TokenStatus(msgspec.Struct):
    authenticated: bool = False
    user: _User = msgspec.field(default_factory=_User)


class _TokenReview(msgspec.Struct):
    status: _TokenStatus = msgspec.field(default_factory=_TokenStatus)


class _AccessStatus(msgspec.Struct):
    allowed: bool = False


class _AccessReview(msgspec.Struct):
    status: _AccessStatus = msgspec.field(default_factory=_AccessStatus)


_token_review = msgspec.json.Decoder(_TokenReview)
_access_review = msgspec.json.Decoder(_AccessReview)


class Reviewer:
    """Reviews tokens, and remembers."""

    def __init__(
        self,
        server: Callable[[], Server | None],
        report: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`server`: the API server, None while there is no connection to it yet."""
        self._server = server
        self._now = now
        self._secret = os.urandom(32)
        self._allowed = _Remembered()
        self._refused = _Remembered()
        self._under_way: dict[bytes, asyncio.Task[Verdict]] = {}
        self._left, self._left_at = BURST, now()
        self._rarely = Rarely("tokens for the metrics port that could not be reviewed", report)

    def guard(self, request: Request) -> "Verdict | asyncio.Task[Verdict]":
        """For the metrics port."""
        if request.path in OPEN or (request.path.startswith(DEBUG) and is_loopback(request.peer)):
            return ALLOWED
        return self.ask(request.token, request.path)

    def ask(self, token: str, path: str) -> "Verdict | asyncio.Task[Verdict]":
        """A verdict that is known, or the review that will bring it; it is shared: do not cancel it."""
        if not token:
            return NEEDED
        if len(token) > TOKEN_CHARS_MAX or not token.isascii() or not token.isprintable() or " " in token:
            return UNKNOWN
        key, now = self._key(token, path), self._now()
        known = self._allowed.get(key, now) or self._refused.get(key, now)
        if known is not None:
            return known
        if (task := self._under_way.get(key)) is not None:
            return task
        if len(self._under_way) >= UNDER_WAY_MAX or not self._may_ask(now):
            return BUSY
        task = self._under_way[key] = asyncio.get_running_loop().create_task(self._review(token, path, key))
        task.add_done_callback(lambda _: self._under_way.pop(key, None))
        return task

    def close(self) -> None:
        """Ask no more."""
        for task in self._under_way.values():
            task.cancel()

    async def _review(self, token: str, path: str, key: bytes) -> Verdict:
        try:
            async with asyncio.timeout(REVIEW_S):
                verdict = await self._reviewed(token, path)
        except (ApiError, Unreachable, TimeoutError, msgspec.DecodeError) as failure:
            why = str(failure) or f"no answer within {REVIEW_S:g} s"
            self._rarely.tell(self._now(), why)
            verdict = FAILED
        if verdict is ALLOWED:
            self._allowed.put(key, verdict, self._now() + ALLOWED_S)
        else:
            self._refused.put(key, verdict, self._now() + (FAILED_S if verdict is FAILED else REFUSED_S))
        return verdict

    async def _reviewed(self, token: str, path: str) -> Verdict:
        server = self._server()
        if server is None:
            raise Unreachable("not connected to the API server yet")
        review: dict[str, Any] = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview"}
        review["spec"] = {"token": str(token)}  # msgspec wants no subclass
        answer = await server.request("POST", TOKEN_REVIEWS, body=msgspec.json.encode(review), timeout_s=REVIEW_S)
        said = _token_review.decode(answer).status
        if not said.authenticated:
            return UNKNOWN
        user = said.user
        review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview"}
        review["spec"] = {
            "user": user.username,
            "uid": user.uid,
            "groups": user.groups or [],
            "extra": user.extra or {},
            "nonResourceAttributes": {"path": path, "verb": "get"},
        }
        answer = await server.request("POST", ACCESS_REVIEWS, body=msgspec.json.encode(review), timeout_s=REVIEW_S)
        if _access_review.decode(answer).status.allowed:
            return ALLOWED
        return Verdict(
            HTTPStatus.FORBIDDEN,
            f"{user.username or 'this user'} may not get {path}; bind it to a ClusterRole with the rule "
            f'{{nonResourceURLs: ["{path}"], verbs: ["get"]}}',
        )

    def _key(self, token: str, path: str) -> bytes:
        return hashlib.blake2b(f"{path} {token}".encode(), key=self._secret, digest_size=16).digest()

    def _may_ask(self, now: float) -> bool:
        self._left = min(BURST, self._left + (now - self._left_at) * REVIEWS_PER_S)
        self._left_at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class _Remembered:
    """Verdicts until their time; the oldest leave when there are too many."""

    def __init__(self) -> None:
        self._until: OrderedDict[bytes, tuple[float, Verdict]] = OrderedDict()

    def get(self, key: bytes, now: float) -> Verdict | None:
        found = self._until.get(key)
        if found is None:
            return None
        if now >= found[0]:
            del self._until[key]
            return None
        return found[1]

    def put(self, key: bytes, verdict: Verdict, until: float) -> None:
        self._until[key] = until, verdict
        self._until.move_to_end(key)
        if len(self._until) > REMEMBERED_MAX:
            self._until.popitem(last=False)
