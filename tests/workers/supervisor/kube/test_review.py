"""Reviews of tokens on the metrics port: when the API server is asked, how often, and what each answer causes."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

import pytest

from tests.waiting import turns
from tests.workers.recorder import texts
from workers.supervisor.kube import review as module
from workers.supervisor.kube.errors import ApiError, Unreachable
from workers.supervisor.kube.review import (
    ACCESS_REVIEWS,
    ALLOWED_S,
    BURST,
    BUSY,
    CACHED_MAX,
    FAILED,
    FAILED_S,
    NEEDED,
    REFUSED_S,
    TOKEN_CHARS_MAX,
    TOKEN_REVIEWS,
    UNDER_WAY_MAX,
    UNKNOWN,
    Reviewer,
)
from workers.supervisor.pages.page import ALLOWED, Request, Token, Verdict

PROMETHEUS = {"username": "system:serviceaccount:monitoring:prometheus", "uid": "u", "groups": ["g"], "extra": {"k": ["v"]}}


class Server:
    """Knows users with the tokens `good...` and `other...`. Only the first may get /metrics."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, Any]] = []
        self.failure: Exception | None = None
        self.go = asyncio.Event()
        self.go.set()

    async def request(self, verb: str, path: str, *, body: bytes | None = None, timeout_s: float = 0) -> bytes:
        assert verb == "POST"
        spec = json.loads(body or b"")["spec"]
        self.requests.append((path, spec))
        await self.go.wait()
        if self.failure is not None:
            raise self.failure
        if path == TOKEN_REVIEWS:
            known = spec["token"].startswith(("good", "other"))
            user = PROMETHEUS if spec["token"].startswith("good") else {"username": "mallory"}
            return json.dumps({"status": {"authenticated": known, "user": user if known else {}}}).encode()
        assert path == ACCESS_REVIEWS
        return json.dumps({"status": {"allowed": spec["user"] == PROMETHEUS["username"]}}).encode()


class Clock:
    """A clock that only `advance` moves."""

    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        return self.at

    def advance(self, seconds: float) -> None:
        self.at += seconds


class World:
    """A reviewer with its server, clock and log."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.server = Server()
        self.reports: list[str] = []
        self.reviewer = Reviewer(lambda: self.server, texts(self.reports), self.clock.now)

    async def verdict(self, token: str, path: str = "/metrics") -> Verdict:
        found = self.reviewer.ask(token, path)
        return found if isinstance(found, Verdict) else await found


def in_a_world(scenario: Callable[[World], Awaitable[None]]) -> None:
    async def run() -> None:
        await scenario(World())

    asyncio.run(run())


def test_a_token_of_a_user_with_access_to_the_path_is_allowed_after_two_reviews() -> None:
    async def scenario(world: World) -> None:
        assert await world.verdict("good") == ALLOWED
        (first, token), (second, access) = world.server.requests
        assert (first, token) == (TOKEN_REVIEWS, {"token": "good"})
        assert second == ACCESS_REVIEWS
        assert access == {
            "user": PROMETHEUS["username"],
            "uid": "u",
            "groups": ["g"],
            "extra": {"k": ["v"]},
            "nonResourceAttributes": {"path": "/metrics", "verb": "get"},
        }

    in_a_world(scenario)


def test_missing_and_malformed_tokens_are_refused_without_a_review() -> None:
    async def scenario(world: World) -> None:
        assert await world.verdict("") == NEEDED
        for token in ("a b", "\u00fc", "x" * (TOKEN_CHARS_MAX + 1), "a\x00"):
            assert await world.verdict(token) == UNKNOWN
        assert not world.server.requests
        assert NEEDED.status == UNKNOWN.status == HTTPStatus.UNAUTHORIZED
        assert dict(NEEDED.fields)["WWW-Authenticate"].startswith("Bearer ")

    in_a_world(scenario)


def test_an_unknown_token_gets_401_and_a_user_without_access_gets_403_with_the_missing_rule() -> None:
    async def scenario(world: World) -> None:
        assert await world.verdict("stranger") == UNKNOWN
        refused = await world.verdict("other")
        assert refused.status == HTTPStatus.FORBIDDEN
        assert refused.text == (
            'mallory may not get /metrics; bind it to a ClusterRole with the rule {nonResourceURLs: ["/metrics"], verbs: ["get"]}'
        )

    in_a_world(scenario)


@pytest.mark.parametrize(("token", "reviews", "seconds"), [("good", 2, ALLOWED_S), ("stranger", 1, REFUSED_S), ("other", 2, REFUSED_S)])
def test_a_verdict_is_cached_for_its_time(token: str, reviews: int, seconds: float) -> None:
    async def scenario(world: World) -> None:
        first = await world.verdict(token)
        world.clock.advance(seconds - 0.1)
        assert await world.verdict(token) == first
        assert len(world.server.requests) == reviews
        world.clock.advance(0.2)
        assert await world.verdict(token) == first
        assert len(world.server.requests) == 2 * reviews

    in_a_world(scenario)


def test_each_path_has_its_own_review() -> None:
    async def scenario(world: World) -> None:
        await world.verdict("good", "/metrics")
        await world.verdict("good", "/debug/decisions")
        assert [spec["nonResourceAttributes"]["path"] for path, spec in world.server.requests if path == ACCESS_REVIEWS] == [
            "/metrics",
            "/debug/decisions",
        ]

    in_a_world(scenario)


def test_concurrent_requests_with_the_same_token_share_one_review_which_outlives_each_of_them() -> None:
    async def scenario(world: World) -> None:
        world.server.go.clear()
        reviews = [world.reviewer.ask("good", "/metrics") for _ in range(50)]
        assert len({id(task) for task in reviews}) == 1
        task = reviews[0]
        assert isinstance(task, asyncio.Task)
        waiting = asyncio.ensure_future(asyncio.shield(task))
        await turns()
        waiting.cancel()
        world.server.go.set()
        assert await task == ALLOWED
        assert len(world.server.requests) == 2

    in_a_world(scenario)


@pytest.mark.parametrize(
    "failure",
    [
        Unreachable("https://api: connection refused"),
        ApiError(403, "Forbidden", "no", "create", TOKEN_REVIEWS),
        ApiError(500, "InternalError", "no", "create", TOKEN_REVIEWS),
    ],
)
def test_a_failed_review_gives_503_for_a_second_and_the_log_has_the_cause_without_the_token(failure: Exception) -> None:
    async def scenario(world: World) -> None:
        world.server.failure = failure
        assert await world.verdict("good-secret") == FAILED
        assert FAILED.status == HTTPStatus.SERVICE_UNAVAILABLE
        (line,) = world.reports
        assert str(failure) in line
        assert "good-secret" not in line
        assert await world.verdict("good-secret") == FAILED
        assert len(world.server.requests) == 1
        world.server.failure = None
        world.clock.advance(FAILED_S)
        assert await world.verdict("good-secret") == ALLOWED

    in_a_world(scenario)


def test_a_picker_without_the_right_to_review_tokens_reports_the_missing_rule() -> None:
    async def scenario(world: World) -> None:
        world.server.failure = ApiError(403, "Forbidden", "no", "create", TOKEN_REVIEWS)
        await world.verdict("good")
        assert '{apiGroups: ["authentication.k8s.io"], resources: ["tokenreviews"], verbs: ["create"]}' in world.reports[0]

    in_a_world(scenario)


def test_a_silent_server_and_a_missing_connection_give_503(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REVIEW_S", 0.01)

    async def scenario(world: World) -> None:
        world.server.go.clear()
        assert await world.verdict("good") == FAILED
        assert "no answer within" in world.reports[0]
        reviewer = Reviewer(lambda: None, texts(world.reports), world.clock.now)
        found = reviewer.ask("good", "/metrics")
        assert not isinstance(found, Verdict)
        assert await found == FAILED

    in_a_world(scenario)


@pytest.mark.parametrize(
    "answer", [b"<html>", b'{"status":{"authenticated":"\xff"}}', b'{"status":{"user":{"username":"\xff"}}}', b'{"more":' + b"[" * 100_000]
)
def test_an_invalid_answer_gives_503(answer: bytes) -> None:
    async def scenario(world: World) -> None:
        async def nonsense(*_: object, **__: object) -> bytes:
            return answer

        world.server.request = nonsense  # type: ignore[method-assign]
        assert await world.verdict("good") == FAILED

    in_a_world(scenario)


def test_a_flood_of_made_up_tokens_is_bounded_and_does_not_evict_an_allowed_token() -> None:
    async def scenario(world: World) -> None:
        await world.verdict("good")
        for number in range(4 * CACHED_MAX):
            await world.verdict(f"guess-{number}")
        assert len(world.server.requests) <= 2 + BURST
        for number in range(2 * CACHED_MAX):
            world.clock.advance(0.101)
            await world.verdict(f"later-{number}")
        before = len(world.server.requests)
        assert await world.verdict("good") == ALLOWED
        assert len(world.server.requests) == before
        assert len(world.reviewer._refused._until) == CACHED_MAX

    in_a_world(scenario)


def test_the_number_of_concurrent_reviews_is_limited_and_further_tokens_get_503() -> None:
    async def scenario(world: World) -> None:
        world.server.go.clear()
        for number in range(UNDER_WAY_MAX):
            assert isinstance(world.reviewer.ask(f"good-{number}", "/metrics"), asyncio.Task)
        assert world.reviewer.ask("good-more", "/metrics") == BUSY
        assert BUSY.status == HTTPStatus.SERVICE_UNAVAILABLE
        world.reviewer.close()

    in_a_world(scenario)


def test_tokens_are_kept_as_hashes_only_and_a_printed_request_does_not_show_its_token() -> None:
    async def scenario(world: World) -> None:
        await world.verdict("good-secret")
        assert "good-secret" not in repr(vars(world.reviewer)) + repr(vars(world.reviewer._allowed))
        assert "good-secret" not in repr(Request("GET", "/metrics", "", token=Token("good-secret")))

    in_a_world(scenario)
