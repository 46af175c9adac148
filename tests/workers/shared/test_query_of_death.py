"""Tests of queries of death: suspects after crashes, the list of queries of death, and its effect on streams."""

import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.decision.decision import Decision
from epp.plugin import NoParams, PreRequest
from epp.request import Request
from tests.pair import Pair
from tests.workers.worker.extproc.streams import BODY, Broken, Waits, pair, refusal
from workers.host.exit_codes import ExitCode
from workers.shared.query_of_death import HARMLESS, LISTED_S, MEMORY_S, OWN_HEADERS, PLACES, TRIED, WORDS, Deciding, Suspects, crashed

AREAS = 3


class World:
    def __init__(self) -> None:
        self.table = memoryview(bytearray(8 * WORDS)).cast("q")
        self.tried = [memoryview(bytearray(8 * PLACES)).cast("q") for _ in range(AREAS)]
        self.suspects = Suspects(self.table, lambda name: [area[TRIED.index(name)] for area in self.tried])

    def worker(self, area: int, **options: Any) -> Deciding:
        return Deciding(memoryview(bytearray(8)).cast("q"), self.table, self.tried[area], **options)

    def listed(self) -> list[int]:
        assert self.table[0] == sum(word != 0 for word in self.table[1:])
        return sorted(-word for word in self.table[1:] if word < 0)


@pytest.fixture
def world() -> World:
    return World()


def request(body: bytes = BODY, path: str = "/v1/completions", **headers: str) -> tuple[Request, bytes]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Request(id="", path=path, headers=named, now=0.0), body


def fingerprint(asked: tuple[Request, bytes], worker: Deciding | None = None, *, marked: bool = True) -> int:
    worker = worker if worker is not None else World().worker(0)
    return worker.begin(asked[0], worker.digest(asked[1]), marked)


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
    assert world.suspects.ended(7, LISTED_S + 1)
    assert world.listed() == [7]


def test_a_request_is_forgotten_when_its_last_crash_is_long_past(world: World) -> None:
    world.suspects.ended(7, 0)
    world.suspects.look(MEMORY_S + 1)
    assert not any(world.table)


@given(st.lists(st.tuples(st.integers(1, 80), st.floats(0, 200))))
def test_the_list_has_the_latest_requests_and_at_most_as_many_as_places(deaths: list[tuple[int, float]]) -> None:
    world, now = World(), 0.0
    until: dict[int, float] = {}
    for suspect, passed in deaths:
        now += passed
        world.suspects.look(now)
        if world.suspects.ended(suspect, now):
            until[suspect] = now + LISTED_S
        expected = [one for one, end in until.items() if end > now]
        assert set(world.listed()) <= set(expected)
        assert suspect in world.listed() or suspect not in expected


def test_a_listed_request_keeps_its_place_when_many_others_end_a_worker_each(world: World) -> None:
    for now in (0, 1):
        world.suspects.ended(7, now)
    for suspect in range(100, 100 + 2 * PLACES):
        assert not world.suspects.ended(suspect, 2)
    assert world.listed() == [7]
    assert not world.suspects.ended(100, 3)  # forgotten
    assert world.suspects.ended(100 + 2 * PLACES - 1, 3)


def test_a_request_that_workers_decide_often_is_not_listed_for_the_crashes_of_another(world: World) -> None:
    popular = fingerprint(request())
    world.suspects.ended(popular, 0)
    for area in range(AREAS - 1):
        for _ in range(HARMLESS):
            assert fingerprint(request(), world.worker(area)) == popular
    assert not world.suspects.ended(popular, 1)
    assert not world.suspects.ended(popular + 1, 2)
    assert world.listed() == []
    assert world.suspects.ended(popular, 3)  # nobody has decided it since its last crash


def test_a_request_that_ends_each_worker_is_listed_although_the_areas_of_successors_begin_at_0(world: World) -> None:
    deadly = fingerprint(request())
    world.suspects.ended(deadly, 0)
    fingerprint(request(), world.worker(0))
    world.tried[0][:] = memoryview(bytes(8 * PLACES)).cast("q")
    fingerprint(request(), world.worker(0))
    assert world.suspects.ended(deadly, 1)


@pytest.mark.parametrize(
    ("code", "counts"), [(-11, True), (-6, True), (-7, True), (1, True), (3, True), (-9, False), (-15, False), (0, False)]
)
def test_a_crash_counts_and_a_kill_from_outside_does_not(code: int, counts: bool) -> None:
    assert crashed(code) is counts


def test_intended_ends_do_not_count() -> None:
    assert not crashed(ExitCode.RECYCLED)


@given(st.binary(max_size=200_000), st.lists(st.integers(0, 200_000), max_size=4), st.integers(0, (1 << 64) - 1))
def test_the_hash_of_a_body_does_not_depend_on_its_pieces_or_buffer(body: bytes, cuts: list[int], seed: int) -> None:
    worker = World().worker(0, seed=seed)
    whole = worker.hashing()
    bounds = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    for begin, end in pairwise(bounds):
        whole.update(memoryview(body)[begin:end])
    assert whole.intdigest() == worker.digest(body) == worker.digest(memoryview(b"x" + body)[1:])


@given(st.integers(1, 100_000), st.randoms(use_true_random=False))
def test_bodies_that_differ_in_any_byte_or_in_length_have_different_fingerprints(size: int, rng: random.Random) -> None:
    body = rng.randbytes(size)
    other = bytearray(body)
    other[rng.randrange(size)] ^= 1
    assert len({fingerprint(request(each)) for each in (body, bytes(other), body + body[-1:])}) == 3


def test_the_path_and_the_headers_that_the_picker_reads_count_and_no_others() -> None:
    worker = World().worker(0, headers=("x-read",))
    same = [request(), request(x_request_id="1", x_other="2")]
    other = [request(path="/v1/chat/completions"), *(request(**{name: "1"}) for name in ("x-read", *OWN_HEADERS))]
    assert len({fingerprint(each, worker) for each in same}) == 1
    assert len({fingerprint(each, worker) for each in (*same, *other)}) == 1 + len(other)


def test_another_seed_makes_other_fingerprints() -> None:
    assert len({fingerprint(request(), World().worker(0, seed=seed)) for seed in range(8)}) == 8


class Reads(PreRequest):
    """Records the area's fingerprint while the plugin runs."""

    def __init__(self) -> None:
        super().__init__("reads", NoParams())
        self.seen: list[int] = []
        self.pair: Pair

    def before_send(self, request: Request, decision: Decision) -> None:
        self.seen.append(self.pair.deciding[0])


def list_body(p: Pair, body: bytes, **headers: str) -> None:
    """Lists the request with this body, as if it had ended two workers."""
    suspects = Suspects(p.deadly, lambda name: [p.tried[TRIED.index(name)]])
    deciding = p.app.guards.deciding
    suspect = fingerprint(request(body, **headers), deciding, marked=False)
    deciding.word[0] = 0
    for now in (0.0, 1.0):
        suspects.ended(suspect, now)


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


def test_a_body_that_differs_from_a_listed_one_only_in_its_middle_passes() -> None:
    p = pair()
    long = BODY.replace(b"}", b', "user": "%b"}' % (b"a" * 10_000))
    list_body(p, long)
    middle = len(long) // 2
    for body, answers in ((long, 1), (long[:middle] + b"b" + long[middle + 1 :], 2)):
        envoy = p.open()
        envoy.headers()
        assert len(envoy.body(body)) == answers


def test_the_same_body_with_another_value_of_a_header_that_a_plugin_reads_passes() -> None:
    reads = Reads()
    reads.reads_headers = ("x-read",)
    p = reads.pair = pair(reads)
    list_body(p, BODY, x_read="deadly")
    for value, answers in (("deadly", 1), ("harmless", 2)):
        envoy = p.open()
        envoy.headers(**{"x-read": value})
        assert len(envoy.body(BODY)) == answers


def test_the_area_names_the_request_during_its_decision_only() -> None:
    reads = Reads()
    p = reads.pair = pair(reads)
    for body in (BODY, BODY + b" "):
        envoy = p.open()
        envoy.headers()
        envoy.body(body)
        assert reads.seen.pop() == fingerprint(request(body), marked=False)
        assert p.deciding[0] == 0


def test_a_request_that_waited_is_named_again_when_it_continues() -> None:
    reads, waits = Reads(), Waits()
    p = reads.pair = pair(reads, waits)
    envoy = p.open()
    envoy.headers()
    assert envoy.body(BODY) == []
    assert p.deciding[0] == 0
    waits.future.callback(None)
    assert reads.seen == [fingerprint(request(), marked=False)]
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
