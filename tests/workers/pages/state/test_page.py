"""The pages of the state: who gets them, how many viewers there may be, and what they are sent."""

import json
from http import HTTPStatus

from tests.workers.pages.state.test_frames import World
from workers.pages.page import PageAnswer, Pause, Request
from workers.pages.state.frames import PATCHES_KEPT
from workers.pages.state.history import FIGURES, History
from workers.pages.state.page import VIEWERS_MAX, StatePages

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
