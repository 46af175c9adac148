"""Serves `/debug/state` and the pages under it. `docs/live-page.md` describes the documents.

    /debug/state           the whole state as JSON
    /debug/state/stream    Server-Sent Events: `state` with the whole state, then one `patch` per second
    /debug/state/history   figures of the last 15 minutes; ?endpoint=ID: those of one endpoint; ?pool=NAME: of one of several pools

A stream has no end, so at most VIEWERS_MAX clients may have one. A viewer that is BEHIND_MAX frames behind is disconnected; browsers
then connect again by themselves.
"""

import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from http import HTTPStatus
from itertools import islice
from typing import Final

from workers.supervisor.pages.page import JSON, PageAnswer, Pause, Piece, Request, refusal
from workers.supervisor.pages.state.figures import ENDPOINTS_AT_ONCE
from workers.supervisor.pages.state.frames import FRAME_S, Frames, State, encode
from workers.supervisor.pages.state.history import History, Rows, key_of

EVENTS: Final = "text/event-stream"
VIEWERS_MAX: Final = 8
BEHIND_MAX: Final = 4  # frames
NO_STORE: Final = (("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff"))
TOO_MANY: Final = refusal(HTTPStatus.SERVICE_UNAVAILABLE, f"{VIEWERS_MAX} viewers follow the state already", (("Retry-After", "5"),))


class StatePages:
    """Makes the pages. All viewers share the frames."""

    def __init__(self, frames: Callable[[], Frames], history: History, *, now: Callable[[], float]) -> None:
        """`frames`: returns the frames; called at the first request. `now`: monotonic seconds."""
        self._frames = frames
        self._history = history
        self._now = now
        self._viewers: weakref.WeakSet[Iterator[Piece]] = weakref.WeakSet()

    def state(self, _request: Request) -> PageAnswer:
        """The whole state."""
        return PageAnswer(self._whole(self._frames()), JSON, fields=NO_STORE)

    def stream(self, _request: Request) -> PageAnswer:
        """The state, and then its changes, once per second."""
        if len(self._viewers) >= VIEWERS_MAX:
            return TOO_MANY
        followed = self._followed(self._frames())
        self._viewers.add(followed)
        return PageAnswer(followed, EVENTS, fields=NO_STORE, endless=True)

    def history(self, request: Request) -> PageAnswer:
        """The figures of the last 15 minutes: of one endpoint, of one of several pools, or of all pools together."""
        wanted, pool = request.values("endpoint", "pool")
        if pool:
            number, why = self._frames().pool(pool)
            if number is None:
                return refusal(HTTPStatus.NOT_FOUND, why)
            return self._past(self._history.pools, number, key_of(pool))
        if not wanted:
            return self._past(self._history.together, 0, 0)
        slot = self._frames().slot(wanted)
        if slot is None:
            return refusal(HTTPStatus.NOT_FOUND, "no endpoint has this id")
        return self._past(self._history.endpoints, *slot)

    def _past(self, rows: Rows, place: int, key: int) -> PageAnswer:
        ages, figures = rows.of(place, key, self._now())
        return PageAnswer(_figures(ages, figures), JSON, fields=NO_STORE)

    def _whole(self, frames: Frames) -> Iterator[Piece]:
        state = yield from self._present(frames)
        yield from pieces(state)
        yield b"\n"

    def _followed(self, frames: Frames) -> Iterator[Piece]:
        state = yield from self._present(frames)
        seen = state.number
        yield b"event: state\nid: %d\n" % seen
        for piece in pieces(state):
            yield b"data: " + piece + b"\n"
        yield b"\n"
        while True:
            if frames.number == seen:
                yield from _step(frames)
                continue
            patch = frames.patch(seen + 1)
            if patch is None or frames.number - seen > BEHIND_MAX:
                return
            seen += 1
            yield b"event: patch\nid: %d\ndata: " % seen + patch + b"\n\n"

    def _present(self, frames: Frames) -> Generator[Piece, None, State]:
        """Returns a state that is at most FRAME_S older than this call. Makes a new state if necessary."""
        oldest = self._now() - FRAME_S
        while (state := frames.of(oldest)) is None:
            yield from _step(frames)
        return state


def _step(frames: Frames) -> Iterator[Piece]:
    wait_s = frames.wait_s()
    if wait_s:
        yield Pause(wait_s)
    else:
        frames.step()
        yield b""


def _figures(ages: Sequence[float], figures: Mapping[str, Sequence[float]]) -> Iterator[Piece]:
    yield b'{"version":1,"ages_s":' + encode(ages) + b',"figures":{'
    for number, (name, values) in enumerate(figures.items()):
        rounded = [float(f"{value:.4g}") for value in values]
        yield (b"," if number else b"") + encode(name) + b":" + encode(rounded)
    yield b"}}\n"


def pieces(state: State) -> Iterator[bytes]:
    """Yields the state as JSON, ENDPOINTS_AT_ONCE endpoints in each piece. No piece has a line break."""
    yield encode({"number": state.number, **state.values})[:-1] + b',"endpoints":{'
    items, separator = iter(state.endpoints.items()), b""
    while part := dict(islice(items, ENDPOINTS_AT_ONCE)):
        yield separator + encode(part)[1:-1]
        separator = b","
    yield b"}}"
