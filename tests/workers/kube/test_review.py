"""Tokens on the metrics port: who asks the API server, how often, and what becomes of each answer."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

import pytest

from workers.admin import ALLOWED, Request, Token, Verdict
from workers.kube import review as module
from workers.kube.api import ApiError, Unreachable
from workers.kube.review import (
    ACCESS_REVIEWS,
    ALLOWED_S,
    BURST,
    BUSY,
    FAILED,
    FAILED_S,
    NEEDED,
    REFUSED_S,
    REMEMBERED_MAX,
    TOKEN_CHARS_MAX,
    TOKEN_REVIEWS,
    UNDER_WAY_MAX,
    UNKNOWN,
    Reviewer,
)

PROMETHEUS = {
    "username": "system:serviceaccount:monitoring:prometheus",
    "uid": "u",
    "groups": ["g"],
    "extra": {"k": ["v"]},
}


class Server:
    """Knows tokens `good...` and `other...`, of whom only the first may get /metrics."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.failure: Exception | None = None
        self.go = asyncio.Event()
        self.go.set()

    async def request(self, verb: str, path: str, *, body: bytes | None = None, timeout_s: float = 0) -> bytes:
        assert verb == "POST"
        spec = json.loads(body or b"")["spec"]
        self.asked.append((path, spec))
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
    """Moves when it is told to."""

    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        return self.at

    def advance(self, seconds: float) -> None:
        self.at += seconds


class World:
    """A reviewer, its server, its clock and its log."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.server = Server()
        self.said: list[str] = []
        self.reviewer = Reviewer(lambda: self.server, self.said.append, self.clock.now)

    async def verdict(self, token: str, path: str = "/metrics") -> Verdict:
        found = self.reviewer.ask(token, path)
        return found if isinstance(found, Verdict) else await found


def in_a_world(scenario: Callable[[World], Awaitable[None]]) -> None:
    async def run() -> None:
        await scenario(World())

    asyncio.run(run())


def test_a_token_whose_user_may_get_the_path_is_allowed_and_both_reviews_say_what_is_asked() -> None:
    async def scenario(world: World) -> None:
        assert await world.verdict("good") == ALLOWED
        (first, token), (second, access) = world.server.asked
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


def test_no_token_and_one_that_cannot_be_one_are_refused_without_asking() -> None:
    async def scenario(world: World) -> None:
        assert await world.verdict("") == NEEDED
        for token in ("a b", "\u00fc", "x" * (TOKEN_CHARS_MAX + 1), "a\x00"):
            assert await world.verdict(token) == UNKNOWN
        assert not world.server.asked
        assert NEEDED.status == UNKNOWN.status == HTTPStatus.UNAUTHORIZED
        assert "WWW-Authenticate: Bearer" in NEEDED.fields

    in_a_world(scenario)


def test_a_token_that_nobody_has_is_401_and_one_whose_user_may_not_is_403_and_says_which_rule_is_missing() -> None:
    async def scenario(world: World) -> None:
        assert await world.verdict("stranger") == UNKNOWN
        refused = await world.verdict("other")
        assert refused.status == HTTPStatus.FORBIDDEN
        assert refused.text == (
            "mallory may not get /metrics; bind it to a ClusterRole with the rule "
            '{nonResourceURLs: ["/metrics"], verbs: ["get"]}'
        )

    in_a_world(scenario)


@pytest.mark.parametrize(
    ("token", "reviews", "seconds"), [("good", 2, ALLOWED_S), ("stranger", 1, REFUSED_S), ("other", 2, REFUSED_S)]
)
def test_an_answer_is_remembered_for_its_time(token: str, reviews: int, seconds: float) -> None:
    async def scenario(world: World) -> None:
        first = await world.verdict(token)
        world.clock.advance(seconds - 0.1)
        assert await world.verdict(token) == first
        assert len(world.server.asked) == reviews
        world.clock.advance(0.2)
        assert await world.verdict(token) == first
        assert len(world.server.asked) == 2 * reviews

    in_a_world(scenario)


def test_a_user_who_may_get_one_path_is_asked_about_for_another() -> None:
    async def scenario(world: World) -> None:
        await world.verdict("good", "/metrics")
        await world.verdict("good", "/debug/decisions")
        assert [
            spec["nonResourceAttributes"]["path"] for path, spec in world.server.asked if path == ACCESS_REVIEWS
        ] == [
            "/metrics",
            "/debug/decisions",
        ]

    in_a_world(scenario)


def test_all_that_ask_at_once_with_one_token_share_one_review_and_nobody_who_leaves_ends_it() -> None:
    async def scenario(world: World) -> None:
        world.server.go.clear()
        asked = [world.reviewer.ask("good", "/metrics") for _ in range(50)]
        assert len({id(task) for task in asked}) == 1
        task = asked[0]
        assert isinstance(task, asyncio.Task)
        waiting = asyncio.ensure_future(asyncio.shield(task))
        await asyncio.sleep(0)
        waiting.cancel()
        world.server.go.set()
        assert await task == ALLOWED
        assert len(world.server.asked) == 2

    in_a_world(scenario)


@pytest.mark.parametrize(
    "failure",
    [
        Unreachable("https://api: connection refused"),
        ApiError(403, "Forbidden", "no", "create", TOKEN_REVIEWS),
        ApiError(500, "InternalError", "no", "create", TOKEN_REVIEWS),
    ],
)
def test_a_review_that_cannot_be_made_is_503_for_a_second_and_the_log_says_why_without_the_token(
    failure: Exception,
) -> None:
    async def scenario(world: World) -> None:
        world.server.failure = failure
        assert await world.verdict("good-secret") == FAILED
        assert FAILED.status == HTTPStatus.SERVICE_UNAVAILABLE
        (line,) = world.said
        assert str(failure) in line
        assert "good-secret" not in line
        assert await world.verdict("good-secret") == FAILED
        assert len(world.server.asked) == 1
        world.server.failure = None
        world.clock.advance(FAILED_S)
        assert await world.verdict("good-secret") == ALLOWED

    in_a_world(scenario)


def test_the_picker_that_may_not_review_tokens_names_the_rule_that_it_lacks() -> None:
    async def scenario(world: World) -> None:
        world.server.failure = ApiError(403, "Forbidden", "no", "create", TOKEN_REVIEWS)
        await world.verdict("good")
        assert '{apiGroups: ["authentication.k8s.io"], resources: ["tokenreviews"], verbs: ["create"]}' in world.said[0]

    in_a_world(scenario)


def test_a_server_that_never_answers_and_one_that_is_not_there_yet_are_503(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REVIEW_S", 0.01)

    async def scenario(world: World) -> None:
        world.server.go.clear()
        assert await world.verdict("good") == FAILED
        assert "no answer within" in world.said[0]
        reviewer = Reviewer(lambda: None, world.said.append, world.clock.now)
        found = reviewer.ask("good", "/metrics")
        assert not isinstance(found, Verdict)
        assert await found == FAILED

    in_a_world(scenario)


def test_an_answer_that_is_none_is_503() -> None:
    async def scenario(world: World) -> None:
        async def nonsense(*_: object, **__: object) -> bytes:
            return b"<html>"

        world.server.request = nonsense  # type: ignore[method-assign]
        assert await world.verdict("good") == FAILED

    in_a_world(scenario)


def test_a_flood_of_made_up_tokens_is_bounded_and_does_not_drive_out_one_that_is_allowed() -> None:
    async def scenario(world: World) -> None:
        await world.verdict("good")
        for number in range(4 * REMEMBERED_MAX):
            await world.verdict(f"guess-{number}")
        assert len(world.server.asked) <= 2 + BURST
        for number in range(2 * REMEMBERED_MAX):
            world.clock.advance(0.101)
            await world.verdict(f"later-{number}")
        before = len(world.server.asked)
        assert await world.verdict("good") == ALLOWED
        assert len(world.server.asked) == before
        assert len(world.reviewer._refused._until) == REMEMBERED_MAX

    in_a_world(scenario)


def test_not_more_than_so_many_reviews_are_under_way_and_the_others_are_told_to_come_again() -> None:
    async def scenario(world: World) -> None:
        world.server.go.clear()
        for number in range(UNDER_WAY_MAX):
            assert isinstance(world.reviewer.ask(f"good-{number}", "/metrics"), asyncio.Task)
        assert world.reviewer.ask("good-more", "/metrics") == BUSY
        assert BUSY.status == HTTPStatus.SERVICE_UNAVAILABLE
        world.reviewer.close()

    in_a_world(scenario)


def test_probes_are_open_to_all_and_debug_pages_to_loopback() -> None:
    async def scenario(world: World) -> None:
        def asked(path: str, peer: str, token: str = "") -> Verdict | asyncio.Task[Verdict]:
            return world.reviewer.guard(Request("GET", path, "", True, peer=peer, token=Token(token)))

        for peer in ("127.0.0.1", "10.0.0.1"):
            assert asked("/healthz", peer) == asked("/readyz", peer) == ALLOWED
            assert asked("/metrics", peer) == NEEDED
        assert asked("/debug/decisions", "::1") == ALLOWED
        assert asked("/debug/decisions", "10.0.0.1") == NEEDED
        task = asked("/debug/decisions", "10.0.0.1", "good")
        assert isinstance(task, asyncio.Task)
        assert await task == ALLOWED

    in_a_world(scenario)


def test_tokens_are_kept_as_hashes_only_and_no_request_that_is_printed_shows_its_own() -> None:
    async def scenario(world: World) -> None:
        await world.verdict("good-secret")
        assert "good-secret" not in repr(vars(world.reviewer)) + repr(vars(world.reviewer._allowed))
        assert "good-secret" not in repr(Request("GET", "/metrics", "", True, token=Token("good-secret")))

    in_a_world(scenario)
