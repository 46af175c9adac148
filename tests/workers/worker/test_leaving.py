"""How a worker ends: with a fake server, and an event loop that jumps to its next timer without waiting."""

import asyncio
import selectors
from collections.abc import Awaitable, Callable
from typing import Any

from structlog.testing import capture_logs

from workers.worker.leaving import CLOSED_S, REFUSED_S, RELIEF_S, Drain

TIMEOUT_S = 30.0


class Instant(selectors.DefaultSelector):
    """Moves the loop's clock instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        self.now += timeout or 0.0
        return super().select(0)


def run(main: Callable[["World"], Awaitable[None]], **world: Any) -> "World":
    """Runs `main` without waiting. Returns its world."""
    selector = Instant()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]
    made = World(selector, **world)
    try:
        loop.run_until_complete(main(made))
    finally:
        loop.close()
    return made


class World:
    """A server with connections that close some time after GOAWAY. Records all calls with their times."""

    def __init__(
        self,
        clock: Instant,
        *,
        connections: int = 3,
        busy_until: float = 0.0,
        close_after: float = 1.0,
        waiting: int = 0,
        hurried_at: float = float("inf"),
        relieved_at: float = 0.0,
    ) -> None:
        self.clock = clock
        self.events: list[tuple[float, str]] = []
        self._connections = connections
        self._busy_until = busy_until
        self._close_after = close_after
        self._waiting = waiting
        self._hurried_at = hurried_at
        self._relieved_at = relieved_at
        self._goaway_at: float | None = None
        self._cut = False

    @property
    def connections(self) -> int:
        if self._cut:
            return 0
        closed = self._goaway_at is not None and self.clock.now >= max(
            self._goaway_at + self._close_after, self._busy_until if not self._waiting else float("inf")
        )
        return 0 if closed else self._connections

    @property
    def streams(self) -> int:
        return self.connections

    def stop_accepting(self) -> None:
        self.note("stop accepting")

    def drain(self) -> None:
        if self._goaway_at is None:
            self._goaway_at = self.clock.now
            self.note("goaway")

    def abort(self) -> None:
        self.note("abort" if self.connections else "end")
        self._cut = True

    async def closed(self) -> None:
        assert not self.connections

    def refuse_waiting(self) -> int:
        waiting, self._waiting = self._waiting, 0
        if waiting:
            self.note("refuse")
            self._busy_until = self.clock.now + 0.1
        return waiting

    def note(self, what: str) -> None:
        self.events.append((round(self.clock.now, 1), what))

    def at(self, what: str) -> float:
        return next(time for time, event in self.events if event == what)

    def order(self) -> list[str]:
        return list(dict.fromkeys(event for _, event in self.events))

    def drain_of(self) -> Drain:
        return Drain(self, timeout_s=TIMEOUT_S, hurried=lambda: self.clock.now >= self._hurried_at, refuse_waiting=self.refuse_waiting)

    async def together(self) -> None:
        await self.drain_of().together(lambda: self.clock.now < self._busy_until)

    async def alone(self) -> None:
        await self.drain_of().alone(lambda: self.clock.now >= self._relieved_at)


def test_an_idle_picker_sends_goaway_and_ends_at_once() -> None:
    world = run(World.together, close_after=0.2)
    assert world.order() == ["goaway", "stop accepting", "end"]
    assert world.at("end") < 0.5


def test_while_any_worker_has_a_stream_all_workers_accept_and_none_sends_goaway() -> None:
    world = run(World.together, busy_until=10.0)
    assert world.at("goaway") >= 10.0
    assert world.at("stop accepting") >= world.at("goaway") + 1.0
    assert world.order()[-1] == "end"


def test_at_half_of_the_timeout_connections_get_goaway_and_new_ones_are_still_served() -> None:
    world = run(World.together, busy_until=20.0)
    assert TIMEOUT_S / 2 <= world.at("goaway") < TIMEOUT_S / 2 + 0.5
    assert world.at("stop accepting") >= 20.0
    assert world.order()[-1] == "end"


def test_at_the_deadline_waiting_requests_are_refused_before_the_rest_is_cut() -> None:
    world = run(World.together, busy_until=1e9, waiting=3)
    assert world.order() == ["goaway", "stop accepting", "refuse", "end"]
    assert TIMEOUT_S <= world.at("refuse") < TIMEOUT_S + 0.5
    assert world.at("end") <= TIMEOUT_S + REFUSED_S + CLOSED_S


def test_streams_that_do_not_end_are_cut_at_the_deadline() -> None:
    with capture_logs() as lines:
        world = run(World.together, busy_until=1e9)
    assert [(line["event"], line["streams"]) for line in lines] == [("drain is over: open streams are cut", 3)]
    assert world.order()[-1] == "abort"
    assert TIMEOUT_S <= world.at("abort") < TIMEOUT_S + 0.5


def test_a_hurried_drain_refuses_and_cuts_soon() -> None:
    world = run(World.together, busy_until=1e9, waiting=1, hurried_at=3.0, close_after=0.1)
    assert 3.0 <= world.at("refuse") < 3.5
    assert world.at("end") < 4.0


def test_a_worker_that_leaves_alone_stops_accepting_and_sends_goaway_at_once() -> None:
    world = run(World.alone, busy_until=10.0)
    assert world.order() == ["stop accepting", "goaway", "end"]
    assert world.at("goaway") == 0.0
    assert 10.0 <= world.at("end") < 10.5


def test_a_worker_that_leaves_alone_waits_until_another_serves_but_not_for_ever() -> None:
    assert 3.0 <= run(World.alone, relieved_at=3.0).at("stop accepting") < 3.5
    assert RELIEF_S <= run(World.alone, relieved_at=1e9).at("stop accepting") < RELIEF_S + 0.5
