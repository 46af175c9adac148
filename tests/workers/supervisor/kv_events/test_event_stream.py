"""The state of one event stream, against a model of a publisher, with a clock that the tests move."""

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from epp.prefix.streams import LOST, NO_ANSWER, NO_EVENTS, NOT_CONNECTED, PARTIAL, REPLAYING, UNSURE
from tests.examples import examples
from workers.supervisor.kv_events.event_stream import (
    BACKLOG_MESSAGES_MAX,
    COOL_DOWN_S,
    LOST_S,
    REPEATED_MAX,
    REPLAY_IDLE_S,
    REPLAY_MAX_S,
    REPLAY_MESSAGES_MAX,
    RESTARTS_MAX,
    Stream,
)


class Recorder:
    """A sink that keeps what was applied since the last clear, and the open replay request."""

    def __init__(self) -> None:
        self.applied: list[bytes] = []
        self.cleared = 0
        self.asked: list[int] = []
        self.open: int | None = None

    def apply(self, payload: bytes) -> None:
        self.applied.append(payload)

    def clear(self) -> None:
        self.applied.clear()
        self.cleared += 1

    def ask(self, start: int) -> None:
        self.asked.append(start)
        self.open = start

    def stop_asking(self) -> None:
        self.open = None


def words(*numbers: int, life: str = "a") -> list[bytes]:
    return [f"{life}{number}".encode() for number in numbers]


class World:
    """A stream and its publisher, which keeps messages for replays."""

    def __init__(self, *, replays: bool = True, first: int = 0, kept: int = 10_000, position: int = 0, check: int = 0) -> None:
        self.sink = Recorder()
        self.stream = Stream(self.sink, replays=replays, position=position, check=check)
        self.now = 100.0
        self.next = first
        self.kept = kept
        self.history: list[tuple[int, bytes]] = []
        self.life = "a"
        self.under_way: list[tuple[int, bytes]] = []  # live messages that have not arrived yet

    def publish(self, count: int = 1, *, lost: bool = False, late: bool = False) -> None:
        for _ in range(count):
            payload = f"{self.life}{self.next}".encode()
            self.history = [*self.history, (self.next, payload)][-self.kept :]
            if not lost:
                self.under_way.append((self.next, payload))
            self.next += 1
        if not late:
            self.arrive()

    def arrive(self) -> None:
        """Delivers the live messages that are under way, in their order."""
        arrived, self.under_way = self.under_way, []
        for number, payload in arrived:
            self.stream.message(number, payload, self.now)

    def lose(self) -> None:
        self.under_way = []
        self.stream.lost(self.now)

    def restart(self, first: int = 0) -> None:
        self.life, self.next, self.history = self.life + "'", first, []

    def answer(self) -> None:
        """Answers replays until the stream asks for no more."""
        for _ in range(20):
            start, self.sink.open = self.sink.open, None
            if start is None:
                return
            for number, payload in self.history:
                if number >= start and self.sink.open is None:
                    self.stream.replayed(number, payload, self.now)
            if self.sink.open is None:
                self.stream.replay_ended(self.now)
        raise AssertionError("the stream asks without end")

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.stream.tick(self.now)

    @property
    def why(self) -> str:
        return self.stream.why(self.now)


@pytest.mark.parametrize("first", [0, 1])
def test_a_stream_is_whole_after_the_replay_whether_numbers_begin_at_0_or_1(first: int) -> None:
    world = World(first=first)
    assert world.why == NOT_CONNECTED
    world.publish(3, lost=True)
    world.stream.opened(world.now)
    assert world.why == REPLAYING
    world.publish()
    world.answer()
    assert (world.why, world.stream.remark) == ("", "")
    assert world.sink.applied == words(first, first + 1, first + 2, first + 3)


def test_a_publisher_that_is_older_than_its_buffer_is_accepted_with_what_there_is() -> None:
    world = World(kept=5)
    world.publish(100, lost=True)
    world.stream.opened(world.now)
    world.answer()
    assert (world.why, world.stream.remark) == ("", PARTIAL)
    assert world.sink.applied == words(95, 96, 97, 98, 99)


def test_a_gap_is_replayed_from_the_first_missed_message() -> None:
    world = World()
    world.stream.opened(world.now)
    world.answer()
    world.publish(3)
    world.publish(2, lost=True)
    world.publish()
    assert (world.why, world.sink.asked[-1]) == (REPLAYING, 3)
    world.publish()
    world.answer()
    assert world.why == ""
    assert world.sink.applied == words(*range(7))
    assert world.sink.cleared == 0


@pytest.mark.parametrize("late", [1, 2, REPEATED_MAX])
def test_live_messages_that_arrive_after_a_replay_had_them_are_no_restart(late: int) -> None:
    world = World()
    world.publish(3, lost=True)
    world.stream.opened(world.now)
    world.publish(late, late=True)
    world.answer()
    assert (world.why, world.sink.applied) == ("", words(*range(3 + late)))
    world.arrive()
    world.publish(2)
    assert (world.why, world.stream.remark, world.stream.restarts, world.sink.cleared) == ("", "", 0, 0)
    assert world.sink.applied == words(*range(5 + late))


def test_a_restart_is_noticed_behind_a_replay_too() -> None:
    world = World()
    world.publish(3, lost=True)
    world.stream.opened(world.now)
    world.answer()
    world.restart()
    world.publish(1)
    assert (world.stream.restarts, world.sink.applied) == (1, words(0, life="a'"))


def test_a_publisher_that_starts_again_is_cleared_and_replayed() -> None:
    world = World()
    world.stream.opened(world.now)
    world.answer()
    world.publish(10)
    world.restart()
    world.publish(2, lost=True)
    world.publish()
    world.answer()
    assert (world.why, world.sink.applied) == ("", words(0, 1, 2, life="a'"))


def test_a_restart_during_a_lost_connection_is_noticed_although_its_numbers_reach_further() -> None:
    world = World()
    world.stream.opened(world.now)
    world.answer()
    world.publish(3)
    world.stream.lost(world.now)
    world.restart()
    world.publish(9, lost=True)
    world.stream.opened(world.now)
    assert world.sink.asked[-1] == 2
    world.answer()
    assert (world.why, world.sink.applied) == ("", words(*range(9), life="a'"))
    assert world.stream.restarts == 1


def test_a_restarted_publisher_with_fewer_messages_is_noticed_too() -> None:
    world = World()
    world.stream.opened(world.now)
    world.answer()
    world.publish(50)
    world.stream.lost(world.now)
    world.restart()
    world.stream.opened(world.now)
    world.answer()
    assert (world.why, world.sink.applied) == ("", [])


def test_a_reconnected_stream_that_missed_nothing_keeps_everything() -> None:
    world = World()
    world.stream.opened(world.now)
    world.answer()
    world.publish(4)
    world.stream.lost(world.now)
    world.publish(2, lost=True)
    world.stream.opened(world.now)
    world.answer()
    assert (world.why, world.sink.cleared, world.sink.applied) == ("", 0, words(*range(6)))


def test_a_lost_connection_counts_after_a_second() -> None:
    world = World()
    world.stream.opened(world.now)
    world.answer()
    world.publish()
    world.stream.lost(world.now)
    world.wait(LOST_S)
    assert world.why == ""
    world.wait(0.01)
    assert world.why == LOST


def test_a_replay_socket_without_an_answer_is_given_up_and_live_events_count_after_the_cool_down() -> None:
    world = World()
    world.stream.opened(world.now)
    world.publish(3)
    world.wait(REPLAY_IDLE_S + 0.1)
    assert world.why in ("", NO_ANSWER)
    world.publish(2)
    assert world.sink.applied == words(*range(5))
    assert world.stream.replays_failed == 1
    late = World()
    late.next = 500
    late.stream.opened(late.now)
    late.publish(3)
    late.wait(REPLAY_IDLE_S + 0.1)
    assert late.why == NO_ANSWER
    late.publish(2)
    late.wait(COOL_DOWN_S)
    assert (late.why, late.stream.remark) == ("", PARTIAL)
    assert late.sink.applied == words(*range(500, 505))


def test_a_replay_without_an_end_is_given_up() -> None:
    world = World()
    world.stream.opened(world.now)
    number = 0
    while world.why == REPLAYING and world.now < 100 + 2 * REPLAY_MAX_S:
        world.stream.replayed(number, b"x", world.now)
        number += 1
        world.wait(1.0)
    assert REPLAY_MAX_S < world.now - 100 < REPLAY_MAX_S + 3
    assert world.why == NO_ANSWER


def test_a_replay_with_more_messages_than_any_server_keeps_is_given_up() -> None:
    world = World()
    world.stream.opened(world.now)
    for number in range(REPLAY_MESSAGES_MAX):
        world.stream.replayed(number, b"x", world.now)
    assert world.why == REPLAYING
    world.stream.replayed(REPLAY_MESSAGES_MAX, b"x", world.now)
    assert (world.why, world.sink.applied, world.sink.open) == (NO_ANSWER, [], None)
    assert world.stream.replays_failed == 1


def test_without_a_replay_socket_the_first_messages_must_be_seen() -> None:
    world = World(replays=False)
    world.stream.opened(world.now)
    assert world.why == NO_EVENTS
    world.publish()
    assert world.why == ""
    world.publish(1, lost=True)
    world.publish()
    assert world.why
    assert world.sink.applied == words(2)
    world.wait(COOL_DOWN_S)
    assert (world.why, world.stream.remark) == ("", PARTIAL)


def test_without_a_replay_socket_a_new_connection_is_unsure_until_the_next_number() -> None:
    world = World(replays=False)
    world.stream.opened(world.now)
    world.publish(3)
    world.stream.lost(world.now)
    world.stream.opened(world.now)
    assert world.why == UNSURE
    world.publish()
    assert (world.why, world.sink.cleared) == ("", 0)


def test_jumping_numbers_stop_the_replays_for_a_while() -> None:
    world = World()
    world.stream.opened(world.now)
    world.answer()
    for number in random.Random(1).sample(range(10, 10**6), 200):
        world.stream.message(number, b"x", world.now)
        world.answer()
    assert len(world.sink.asked) <= 3 * RESTARTS_MAX + 3
    assert world.why
    world.wait(COOL_DOWN_S + 1)
    assert world.why == ""


def test_the_backlog_of_a_replay_is_bounded_and_the_loss_is_noticed() -> None:
    world = World(kept=20_000)
    world.stream.opened(world.now)
    world.publish(BACKLOG_MESSAGES_MAX + 10)
    assert world.stream.dropped == 10
    world.history = world.history[:5]
    world.answer()
    assert (world.stream.gaps, world.sink.asked) == (1, [0, 5])
    assert (world.why, world.stream.remark) == ("", PARTIAL)
    assert world.sink.applied == words(*range(10, BACKLOG_MESSAGES_MAX + 10))


STEPS = ["publish", "publish late", "arrive", "miss", "restart", "cut", "open", "answer", "pause", "restart at 1"]
steps = st.lists(st.sampled_from(STEPS), max_size=60)


@examples(400)
@example(["restart at 1", "open", "answer", "miss", "publish", "miss", "publish", "answer"], True)
@example(["open", "answer", "miss", "publish"], True)
@given(steps, st.booleans())
def test_a_precise_stream_without_a_remark_has_applied_exactly_the_publishers_life(story: list[str], replays: bool) -> None:
    world = World(replays=replays)
    for step in story:
        match step:
            case "publish":
                world.publish(lost=not world.stream.is_open)
            case "publish late":
                world.publish(lost=not world.stream.is_open, late=True)
            case "arrive":
                world.arrive()
            case "miss":
                world.publish(lost=True, late=True)
            case "restart" | "restart at 1":
                world.lose()  # a process that ends closes its connections
                world.restart(int(step.endswith("1")))
            case "cut":
                world.lose()
            case "open":
                if not world.stream.is_open:
                    world.stream.opened(world.now)
            case "answer":
                if world.stream.is_open:
                    world.answer()
            case _:
                world.wait(1.5)
        if not world.why and not world.stream.remark and world.stream.is_open:
            applied, life = world.sink.applied, [payload for _, payload in world.history]
            assert applied == life[: len(applied)]  # what was missed shows with the next message
