"""Decides whether the bearer of a token may get a page of the metrics port. The Kubernetes API server reviews the token.

    token ─▶ in the cache and not expired? ─▶ the cached verdict
          ─▶ TokenReview: which user is it?  ─▶ SubjectAccessReview: may this user get this path?  ─▶ cached

- Concurrent requests with the same token for the same path share one review.
- Verdicts are cached for a short time. Allowed and refused tokens have separate caches, so that a flood of made-up tokens does not
  evict the token of Prometheus. The caches contain tokens as keyed hashes only, and tokens are never logged.
- The number of concurrent reviews and of reviews per second is bounded: a client that guesses tokens cannot flood the API server.
- If a review fails, access is denied with 503 and the log says why. A failure on the picker's side (its own RBAC) says nothing about the
  user, so it is never answered with 401 or 403.
- A malformed token (empty, too long, not ASCII) is refused without a review.

`workers.supervisor.pages.connection` reads the HTTP, and `workers.supervisor.pages.access` decides which pages need a token.
"""

import asyncio
import hashlib
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final

import msgspec

from epp.errors import UNREADABLE
from workers.host.log import Rarely
from workers.supervisor.kube.api import Api
from workers.supervisor.kube.errors import ApiError, Unreachable
from workers.supervisor.pages.access import CHALLENGE
from workers.supervisor.pages.page import ALLOWED, Verdict

ALLOWED_S: Final = 60.0
REFUSED_S: Final = 10.0
FAILED_S: Final = 1.0
CACHED_MAX: Final = 256  # verdicts in each cache
REVIEW_S: Final = 5.0  # time-out of both reviews together
UNDER_WAY_MAX: Final = 8
REVIEWS_PER_S: Final = 10.0
BURST: Final = 20.0
TOKEN_CHARS_MAX: Final = 8192

TOKEN_REVIEWS: Final = "/apis/authentication.k8s.io/v1/tokenreviews"
ACCESS_REVIEWS: Final = "/apis/authorization.k8s.io/v1/subjectaccessreviews"

LATER: Final = (("Retry-After", "1"),)
NEEDED: Final = Verdict(
    HTTPStatus.UNAUTHORIZED,
    "this page needs `Authorization: Bearer TOKEN`, the token of a service account that may get the page",
    CHALLENGE,
)
UNKNOWN: Final = Verdict(HTTPStatus.UNAUTHORIZED, "the API server does not accept this token; it may have expired", CHALLENGE)
BUSY: Final = Verdict(HTTPStatus.SERVICE_UNAVAILABLE, "too many tokens are waiting for a review; try again in a second", LATER)
FAILED: Final = Verdict(HTTPStatus.SERVICE_UNAVAILABLE, "the API server could not review this token; the picker's log says why", LATER)


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
    """Reviews tokens and caches the verdicts."""

    def __init__(self, server: Callable[[], Api | None], report: Callable[..., None], now: Callable[[], float] = time.monotonic) -> None:
        """`server` returns the API server, or None before there is a connection to it."""
        self._server = server
        self._now = now
        self._secret = os.urandom(32)
        self._allowed = _Cache()
        self._refused = _Cache()
        self._under_way: dict[bytes, asyncio.Task[Verdict]] = {}
        self._left, self._left_at = BURST, now()
        self._rarely = Rarely("tokens for the metrics port that could not be reviewed", report)

    def ask(self, token: str, path: str) -> "Verdict | asyncio.Task[Verdict]":
        """Returns the verdict if it is known, otherwise the task of the review that finds it.

        Do not cancel the task, because other requests may wait for it.
        """
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
        if len(self._under_way) >= UNDER_WAY_MAX or not self._may_review(now):
            return BUSY
        task = self._under_way[key] = asyncio.get_running_loop().create_task(self._review(token, path, key))
        task.add_done_callback(lambda _: self._under_way.pop(key, None))
        return task

    def close(self) -> None:
        """Cancels all reviews."""
        for task in self._under_way.values():
            task.cancel()

    async def _review(self, token: str, path: str, key: bytes) -> Verdict:
        try:
            async with asyncio.timeout(REVIEW_S):
                verdict = await self._reviewed(token, path)
        except (ApiError, Unreachable, TimeoutError, *UNREADABLE) as failure:
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
        review["spec"] = {"token": str(token)}  # a plain str, because msgspec does not encode subclasses of str
        answer = await server.request("POST", TOKEN_REVIEWS, body=msgspec.json.encode(review), timeout_s=REVIEW_S)
        status = _token_review.decode(answer).status
        if not status.authenticated:
            return UNKNOWN
        user = status.user
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

    def _may_review(self, now: float) -> bool:
        self._left = min(BURST, self._left + (now - self._left_at) * REVIEWS_PER_S)
        self._left_at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class _Cache:
    """Keeps verdicts until they expire. If it is full, it drops the oldest one."""

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
        if len(self._until) > CACHED_MAX:
            self._until.popitem(last=False)
