"""Tests of queries of death: suspects after crashes, the list of deadly requests, and its effect on streams."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.decision import Decision
from epp.plugin import NoParams, PreRequest
from epp.request import Request
from tests.pair import Pair
from tests.workers.extproc.streams import BODY, Broken, Waits, pair, refusal
from workers.host.exit_codes import ExitCode
from workers.shared.query_of_death import (
    LISTED_S,
    MEMORY_S,
    PLACES,
    REMEMBERED_MAX,
    WHOLE,
    WORDS,
    Suspects,
    crashed,
    fingerprint,
)


class World:
    def __init__(self) -> None:
        self.words = memoryview(bytearray(8 * WORDS)).cast("q")
        self.suspects = Suspects(self.words)

    def listed(self) -> list[int]:
        assert not any(self.words[1 + self.words[0] :])
        return self.words[1 : 1 + self.words[0]].tolist()


@pytest.fixture
def world() -> World:
    return World()


def test_a_request_that_ended_two_workers_is_listed_and_one_that_ended_one_is_not(world: World) -> None:
    assert not world.suspects.ended(7, 0)
    assert not world.suspects.ended(8, 1)
    assert world.listed() == []
    assert world.suspects.ended(7, 2)
    assert world.listed() == [7]


def test_the_second_crash_counts_only_while_the_first_is_remembered(world: World) -> None:
    world.suspects.ended(7, 0)
    assert not world.suspects.ended(7, MEMORY_S + 1)
    assert world.suspects.ended(7, MEMORY_S + 2)


def test_a_listed_request_expires_and_is_listed_again_after_another_crash(world: World) -> None:
    for now in (0, 1):
        world.suspects.ended(7, now)
    world.suspects.look(LISTED_S)
    assert world.listed() == [7]
    world.suspects.look(LISTED_S + 1)
    assert world.listed() == []
    assert world.suspects.ended(7, LISTED_S + 2 - 1)
    assert world.listed() == [7]


@given(st.lists(st.tuples(st.integers(1, 40), st.floats(0, 200))))
def test_the_list_has_the_latest_requests_and_at_most_as_many_as_places(deaths: list[tuple[int, float]]) -> None:
    world, now = World(), 0.0
    until: dict[int, float] = {}
    for suspect, passed in deaths:
        now += passed
        world.suspects.look(now)
        if world.suspects.ended(suspect, now):
            until.pop(suspect, None)
            until[suspect] = now + LISTED_S
        expected = [one for one, end in until.items() if end > now][-PLACES:]
        assert set(world.listed()) <= set(expected)
        assert len(world.listed()) <= PLACES
        assert suspect in world.listed() or suspect not in expected


def test_the_number_of_remembered_requests_is_bounded(world: World) -> None:
    for suspect in range(1, REMEMBERED_MAX + 2):
        world.suspects.ended(suspect, 0)
    assert not world.suspects.ended(1, 0)  # the first one was forgotten
    assert world.suspects.ended(REMEMBERED_MAX, 0)


@pytest.mark.parametrize(
    ("code", "counts"),
    [(-11, True), (-6, True), (-7, True), (1, True), (3, True), (-9, False), (-15, False), (0, False)],
)
def test_a_crash_counts_and_a_kill_from_outside_does_not(code: int, counts: bool) -> None:
    assert crashed(code) is counts


def test_intended_ends_do_not_count() -> None:
    assert not crashed(ExitCode.RECYCLED)


@given(st.binary(max_size=2 * WHOLE))
def test_a_fingerprint_depends_on_the_bytes_only_not_on_their_buffer(body: bytes) -> None:
    assert fingerprint(body) == fingerprint(memoryview(b"x" + body)[1:])
    assert (fingerprint(body) == 0) == (not body)


@given(st.integers(1, 3 * WHOLE), st.randoms(use_true_random=False))
def test_bodies_that_differ_at_either_end_or_in_length_have_different_fingerprints(
    size: int, rng: random.Random
) -> None:
    body = rng.randbytes(size)
    at = rng.randrange(min(size, WHOLE // 2))
    for place in (at, size - 1 - at):
        other = bytearray(body)
        other[place] ^= 1
        assert fingerprint(bytes(other)) != fingerprint(body)
    assert fingerprint(body + body[-1:]) != fingerprint(body)


class Reads(PreRequest):
    """Records the lane's fingerprint while the plugin runs."""

    def __init__(self) -> None:
        super().__init__("reads", NoParams())
        self.seen: list[int] = []
        self.pair: Pair

    def before_send(self, request: Request, decision: Decision) -> None:
        self.seen.append(self.pair.deciding[0])


def list_body(p: Pair, body: bytes) -> None:
    suspects = Suspects(p.deadly)
    for now in (0.0, 1.0):
        suspects.ended(fingerprint(body), now)


def test_a_listed_request_is_refused_and_others_pass() -> None:
    p = pair()
    list_body(p, BODY)
    envoy = p.open()
    envoy.headers()
    status, error, _ = refusal(envoy.body(BODY))
    assert status == 400
    assert "two processes of the endpoint picker ended while they read this request" in error["message"]
    other = p.open()
    other.headers()
    assert len(other.body(BODY + b" ")) == 2
    assert p.deciding[0] == 0


def test_a_request_with_an_empty_body_does_not_match_free_places_of_the_list() -> None:
    p = pair()
    list_body(p, BODY)
    envoy = p.open()
    envoy.headers()
    assert "two processes" not in refusal(envoy.body(b""))[1]["message"]


def test_a_listed_request_is_recognised_if_its_body_comes_in_pieces() -> None:
    p = pair()
    list_body(p, BODY)
    envoy = p.open()
    envoy.headers()
    envoy.body(BODY[:20], last=False)
    assert refusal(envoy.body(BODY[20:]))[0] == 400


def test_the_lane_names_the_request_during_its_decision_only() -> None:
    reads = Reads()
    p = reads.pair = pair(reads)
    for body in (BODY, BODY + b" "):
        envoy = p.open()
        envoy.headers()
        envoy.body(body)
        assert reads.seen.pop() == fingerprint(body)
        assert p.deciding[0] == 0


def test_a_request_that_waited_is_named_again_when_it_continues() -> None:
    reads, waits = Reads(), Waits()
    p = reads.pair = pair(reads, waits)
    envoy = p.open()
    envoy.headers()
    assert envoy.body(BODY) == []
    assert p.deciding[0] == 0
    waits.future.callback(None)
    assert reads.seen == [fingerprint(BODY)]
    assert p.deciding[0] == 0


@pytest.mark.parametrize("body", [b"{", b'{"prompt":"no model"}', b""])
def test_a_refused_request_is_no_longer_named(body: bytes) -> None:
    p = pair()
    envoy = p.open()
    envoy.headers()
    envoy.body(body)
    assert p.deciding[0] == 0


def test_a_request_that_fails_by_a_fault_is_no_longer_named() -> None:
    p = pair(Broken("b", NoParams()))
    envoy = p.open()
    envoy.headers()
    envoy.body(BODY)
    assert p.deciding[0] == 0
