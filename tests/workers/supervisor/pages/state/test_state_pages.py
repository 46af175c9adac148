"""The pages of the state: who gets them, how many viewers there may be, and what they are sent."""

import json
from http import HTTPStatus

import pytest

from shm.table import DOWN
from tests.workers.supervisor.pages.state.looks import endpoint
from tests.workers.supervisor.pages.state.test_frames import World
from workers.supervisor.pages.page import PageAnswer, Pause, Request
from workers.supervisor.pages.state.frames import FRAME_S, PATCHES_KEPT
from workers.supervisor.pages.state.history import FIGURES, POOL_FIGURES, History
from workers.supervisor.pages.state.state_pages import VIEWERS_MAX, StatePages

LOCAL = Request("GET", "/debug/state")


class Pages:
    """The pages of one world."""

    def __init__(self) -> None:
        self.world = World()
        self.pages = StatePages(lambda: self.world.frames, History(), now=lambda: self.world.now)

    def pull(self, answer: PageAnswer) -> bytes:
        """Takes pieces until one has bytes; b"" at the end. The clock moves during pauses."""
        assert not isinstance(answer.body, bytes)
        for piece in answer.body:
            if isinstance(piece, Pause):
                self.world.now += piece.seconds
            elif piece:
                return piece
        return b""

    def whole(self, answer: PageAnswer) -> bytes:
        """Takes the whole page."""
        text = b""
        while piece := self.pull(answer):
            text += piece
        return text

    def event(self, answer: PageAnswer) -> bytes:
        """Takes one whole event."""
        event = b""
        while not event.endswith(b"\n\n") and (piece := self.pull(answer)):
            event += piece
        return event


def test_the_state_is_one_json_document_with_its_version() -> None:
    pages = Pages()
    answer = pages.pages.state(LOCAL)
    document = json.loads(pages.whole(answer))
    assert (document["version"], document["number"], len(document["endpoints"])) == (1, 1, 2)
    assert answer.content_type == "application/json"


@pytest.mark.parametrize("pause_s", [1.5, 6.0, 120.0])
def test_each_viewer_after_a_pause_gets_a_state_that_was_read_after_it_has_asked(pause_s: float) -> None:
    pages = Pages()
    pages.whole(pages.pages.state(LOCAL))
    pages.world.now += pause_s
    pages.world.endpoints[0] = endpoint("a", flags=DOWN)
    for run in range(3):
        asked = pages.world.now
        document = json.loads(pages.whole(pages.pages.state(LOCAL)))
        assert document["endpoints"]["default/a 10.0.0.1:8000"]["state"] == "down", f"run {run}"
        assert document["at"] >= asked - FRAME_S
        pages.world.now += pause_s


def test_a_stream_after_a_pause_begins_with_the_present_state() -> None:
    pages = Pages()
    pages.whole(pages.pages.state(LOCAL))
    pages.world.now += 120.0
    pages.world.endpoints = [endpoint("c")]
    assert b"default/c" in pages.event(pages.pages.stream(LOCAL))


def test_a_frame_that_its_viewer_has_left_half_made_is_not_shown_to_the_next_one() -> None:
    pages = Pages()
    pages.whole(pages.pages.state(LOCAL))
    pages.world.now += 2.0
    left = iter(pages.pages.state(LOCAL).body)
    assert next(left) == b"", "it has begun to read shared memory"
    pages.world.now += 120.0
    pages.world.endpoints = [endpoint("c")]
    document = json.loads(pages.whole(pages.pages.state(LOCAL)))
    assert list(document["endpoints"]) == ["default/c 10.0.0.1:8000"]


def test_a_state_is_sent_even_if_frames_take_longer_than_their_interval() -> None:
    pages = Pages()
    answer = pages.pages.state(LOCAL)
    sent = b""
    for piece in answer.body:  # type: ignore[union-attr]
        pages.world.now += 0.7 if not isinstance(piece, Pause) else 0.7 + piece.seconds
        sent += b"" if isinstance(piece, Pause) else piece
    assert json.loads(sent)["version"] == 1


def test_a_stream_begins_with_the_state_and_goes_on_with_a_patch_per_second() -> None:
    pages = Pages()
    stream = pages.pages.stream(LOCAL)
    assert stream.endless
    first = pages.event(stream)
    assert first.startswith(b"event: state\nid: 1\ndata: ")
    data = [line.removeprefix(b"data: ") for line in first.splitlines() if line.startswith(b"data: ")]
    assert json.loads(b"\n".join(data))["version"] == 1
    for number in (2, 3):
        assert pages.event(stream).startswith(b"event: patch\nid: %d\ndata: {" % number)


def test_viewers_share_the_frames() -> None:
    pages = Pages()
    streams = [pages.pages.stream(LOCAL) for _ in range(3)]
    for _ in range(4):
        for stream in streams:
            assert pages.event(stream)
    assert pages.world.frames.number == 4


def test_a_viewer_that_is_far_behind_is_disconnected() -> None:
    pages = Pages()
    slow, quick = pages.pages.stream(LOCAL), pages.pages.stream(LOCAL)
    pages.event(slow)
    for _ in range(PATCHES_KEPT + 2):
        pages.event(quick)
    assert pages.event(slow) == b""


def test_the_number_of_viewers_is_limited_and_one_that_leaves_makes_room() -> None:
    pages = Pages()
    streams = [pages.pages.stream(LOCAL) for _ in range(VIEWERS_MAX)]
    refused = pages.pages.stream(LOCAL)
    assert refused.status is HTTPStatus.SERVICE_UNAVAILABLE
    assert ("Retry-After", "5") in refused.fields
    del streams[0]
    assert pages.pages.stream(LOCAL).status is HTTPStatus.OK


def test_the_history_has_all_figures_of_the_pool() -> None:
    pages = Pages()
    answer = pages.pages.history(LOCAL)
    assert list(json.loads(pages.whole(answer))["figures"]) == list(FIGURES)


def test_the_history_of_one_of_several_pools_is_asked_for_by_its_name() -> None:
    pages = Pages()

    def asked(pool: str) -> PageAnswer:
        return pages.pages.history(Request("GET", "/debug/state/history", query=f"pool={pool}"))

    assert asked("a").status is HTTPStatus.NOT_FOUND
    pages.world.names = ("a", "")
    found = json.loads(pages.whole(asked("a")))
    assert (found["version"], found["ages_s"], set(found["figures"])) == (1, [], set(POOL_FIGURES))
    refused = asked("b")
    assert (refused.status, refused.body) == (HTTPStatus.NOT_FOUND, b"there is no pool 'b'; pools: a\n")
