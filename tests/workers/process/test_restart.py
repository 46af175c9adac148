"""Tests of the restart policy, with a clock that the tests move."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.host.exit_codes import ExitCode, ending
from workers.process.restart import (
    ABORT_TO_KILL_S,
    BACKOFF_FIRST_S,
    BACKOFF_MAX_S,
    BOOT_DEADLINE_S,
    BOOT_FAILURES_MAX,
    DECIDE_PERIOD_S,
    HEARTBEAT_ABORT_S,
    STABLE_S,
    Abort,
    Drain,
    Halt,
    Kill,
    Policy,
    Spawn,
    child_name,
    kv_events_ordinal,
)  # fmt: skip


class Story:
    """A policy, and a model of the children and the clock that it decides about."""

    def __init__(self, ordinals: int = 2, workers: int | None = None, leave_s: float = math.inf) -> None:
        self.policy = Policy(ordinals, workers, leave_s=leave_s)
        self.now = 1000.0
        self.heartbeats = [-math.inf] * ordinals
        self.hanging: set[int] = set()
        self.ordinals = ordinals

    def decide(self) -> list:
        for ordinal in range(self.ordinals):
            if ordinal not in self.hanging and self.heartbeats[ordinal] > -math.inf:
                self.heartbeats[ordinal] = self.now
        return self.policy.decide(self.now, [self.now - heartbeat for heartbeat in self.heartbeats])

    def wait(self, seconds: float) -> list:
        """Let time pass as in a healthy parent, with regular decisions. Spawn children as decided; return all actions."""
        actions, end = [], self.now + seconds
        while self.now < end - 1e-9:
            self.now = min(end, self.now + DECIDE_PERIOD_S / 4)
            decided = self.decide()
            for action in decided:
                if isinstance(action, Spawn):
                    self.spawn(action.ordinal)
            actions += decided
        return actions

    def spawn(self, ordinal: int) -> None:
        self.heartbeats[ordinal] = -math.inf
        self.policy.spawned(ordinal, self.now)

    def ready(self, ordinal: int) -> None:
        self.heartbeats[ordinal] = self.now
        self.policy.ready(ordinal, self.now)

    def exited(self, ordinal: int, code: int, message: str = "") -> None:
        self.policy.exited(ordinal, code, self.now, message)

    def all_ready(self) -> "Story":
        for action in self.decide():
            self.spawn(action.ordinal)
            self.ready(action.ordinal)
        return self

    def resize(self, workers: int) -> list:
        self.policy.resize(workers, self.now)
        return self.decide()

    def leaving(self, ordinal: int) -> list:
        self.policy.leaving(ordinal, self.now)
        return self.decide()


def test_every_ordinal_is_filled_at_the_start_beginning_with_the_supervisors() -> None:
    assert Story(3).decide() == [Spawn(0), Spawn(1), Spawn(2)]


def test_a_filled_ordinal_needs_no_action() -> None:
    assert Story().all_ready().wait(20) == []


def test_an_ordinal_is_filled_again_only_after_its_child_was_reaped() -> None:
    story = Story().all_ready()
    story.hanging.add(1)
    actions = story.wait(60)
    assert not [action for action in actions if isinstance(action, Spawn)]
    story.exited(1, -9)
    assert Spawn(1) in story.wait(1)


def test_a_stable_child_gets_a_successor_after_the_shortest_delay() -> None:
    story = Story().all_ready()
    story.wait(STABLE_S)
    story.exited(1, -9)
    assert story.decide() == []
    story.now += BACKOFF_FIRST_S
    assert story.decide() == [Spawn(1)]


def test_each_crash_soon_after_ready_doubles_the_delay_up_to_the_longest() -> None:
    story, delays = Story().all_ready(), []
    for _ in range(10):
        story.exited(1, -11)
        delays.append(story.policy._ordinals[1].retry - story.now)
        story.now += delays[-1]
        story.spawn(1)
        story.ready(1)
    expected = [min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2**n) for n in range(10)]
    assert delays == pytest.approx(expected)


def test_a_stable_run_resets_the_delay() -> None:
    story = Story().all_ready()
    for _ in range(5):
        story.exited(1, -11)
        story.spawn(1)
        story.ready(1)
    story.wait(STABLE_S)
    story.exited(1, -11)
    story.now += BACKOFF_FIRST_S
    assert story.decide() == [Spawn(1)]


def test_a_worker_that_drained_gets_a_successor_at_once() -> None:
    story = Story().all_ready()
    story.exited(1, ExitCode.OK)
    assert story.decide() == [Spawn(1)]


def test_a_hanging_child_is_aborted_then_killed() -> None:
    story = Story().all_ready()
    story.wait(1)
    story.hanging.add(1)
    assert story.wait(HEARTBEAT_ABORT_S - 0.01) == []
    (abort,) = story.wait(DECIDE_PERIOD_S)
    assert isinstance(abort, Abort) and abort.ordinal == 1
    killed = story.wait(ABORT_TO_KILL_S + DECIDE_PERIOD_S)
    assert killed and all(isinstance(action, Kill) and action.ordinal == 1 for action in killed)


def test_a_ready_child_that_never_heartbeats_is_aborted() -> None:
    story = Story().all_ready()
    story.heartbeats[1] = -math.inf
    actions = story.wait(HEARTBEAT_ABORT_S + DECIDE_PERIOD_S)
    assert [type(action) for action in actions[:1]] == [Abort]


def test_the_start_has_its_own_deadline_much_longer_than_that_of_heartbeats() -> None:
    story = Story()
    for action in story.decide():
        story.spawn(action.ordinal)
    story.ready(0)
    assert story.wait(BOOT_DEADLINE_S - 0.2) == []
    actions = story.wait(DECIDE_PERIOD_S + 0.2)
    assert [(type(action), action.ordinal) for action in actions] == [(Abort, 1)]
    assert "not ready" in actions[0].reason


def test_a_parent_that_was_stopped_ignores_old_heartbeats() -> None:
    story = Story().all_ready()
    story.wait(1)
    story.hanging.add(1)
    story.now += 60
    assert story.decide() == []
    assert story.wait(HEARTBEAT_ABORT_S - 0.1) == []
    assert [type(action) for action in story.wait(DECIDE_PERIOD_S)] == [Abort]


def test_a_parent_that_was_stopped_does_not_abort_starting_children() -> None:
    story = Story()
    for action in story.decide():
        story.spawn(action.ordinal)
    story.now += 2 * BOOT_DEADLINE_S
    assert story.decide() == []


def test_a_child_that_reports_that_it_cannot_start_halts_the_first_start_with_its_report() -> None:
    story = Story()
    for action in story.decide():
        story.spawn(action.ordinal)
    story.exited(0, ExitCode.BOOT_FAILED, "endpoints.yaml:3: port '0' is not a number")
    (halt,) = story.decide()
    assert isinstance(halt, Halt)
    assert halt.reason == "supervisor cannot start: endpoints.yaml:3: port '0' is not a number"


def test_repeated_deaths_during_the_start_halt_if_the_ordinal_never_was_ready() -> None:
    story = Story()
    for action in story.decide():
        story.spawn(action.ordinal)
    story.ready(0)
    for attempt in range(BOOT_FAILURES_MAX):
        story.exited(1, -11)
        if attempt < BOOT_FAILURES_MAX - 1:
            assert Spawn(1) in story.wait(BACKOFF_MAX_S + DECIDE_PERIOD_S)
    (halt,) = story.decide()
    assert isinstance(halt, Halt) and "worker 0 ended 5 times" in halt.reason and "signal 11" in halt.reason


@pytest.mark.parametrize("code", [ExitCode.BOOT_FAILED, -11])
def test_a_successor_that_cannot_start_does_not_end_serving_children(code: int) -> None:
    story = Story(3).all_ready()
    story.exited(1, -9)
    for _ in range(3 * BOOT_FAILURES_MAX):
        assert Spawn(1) in story.wait(BACKOFF_MAX_S + DECIDE_PERIOD_S)
        story.exited(1, code)
    assert story.decide() == []
    story.wait(BACKOFF_MAX_S + DECIDE_PERIOD_S)
    story.ready(1)
    assert story.wait(5) == []


def test_it_halts_when_no_child_is_ready_and_successors_cannot_start() -> None:
    story = Story(2).all_ready()
    story.exited(0, -9)
    story.exited(1, -9)
    halts: list = []
    for _ in range(BOOT_FAILURES_MAX):
        story.wait(BACKOFF_MAX_S + DECIDE_PERIOD_S)
        story.exited(1, ExitCode.BOOT_FAILED)
        halts = story.decide()
    assert [type(action) for action in halts] == [Halt]


def test_after_a_halt_the_only_action_is_the_halt() -> None:
    story = Story()
    story.policy.spawned(0, story.now)
    story.exited(0, ExitCode.BOOT_FAILED)
    assert [type(action) for action in story.decide() + story.decide()] == [Halt, Halt]


def test_the_next_deadline_is_the_next_retry_or_the_period() -> None:
    story = Story().all_ready()
    assert story.policy.next_deadline(story.now) == DECIDE_PERIOD_S
    story.wait(STABLE_S)
    story.exited(1, -9)
    assert story.policy.next_deadline(story.now) == pytest.approx(BACKOFF_FIRST_S)
    assert story.policy.next_deadline(story.now + 5) == 0.0


def test_ordinals_that_are_not_wanted_stay_empty() -> None:
    story = Story(5, workers=2)
    assert story.decide() == [Spawn(0), Spawn(1), Spawn(2)]
    assert (story.policy.workers, story.policy.workers_max) == (2, 4)


def test_an_added_worker_is_spawned_at_once_and_the_highest_drains_when_one_is_removed() -> None:
    story = Story(5, workers=2).all_ready()
    assert story.resize(3) == [Spawn(3)]
    story.spawn(3)
    story.ready(3)
    assert story.resize(2) == [Drain(3)]
    assert story.wait(20) == []
    story.exited(3, ExitCode.OK)
    assert story.wait(20) == []


@pytest.mark.parametrize(("asked", "workers"), [(0, 1), (-5, 1), (4, 4), (99, 4)])
def test_there_is_at_least_one_worker_and_at_most_one_per_ordinal(asked: int, workers: int) -> None:
    story = Story(5, workers=2).all_ready()
    story.resize(asked)
    assert story.policy.workers == workers


def test_an_ordinal_that_is_wanted_again_while_its_child_drains_is_refilled_after_the_childs_end() -> None:
    story = Story(3, workers=2).all_ready()
    assert story.resize(1) == [Drain(2)]
    assert story.resize(2) == []
    story.exited(2, ExitCode.OK)
    assert story.decide() == [Spawn(2)]


def test_a_child_in_an_ordinal_that_is_given_up_during_its_start_drains_when_it_is_ready() -> None:
    story = Story(3, workers=1).all_ready()
    story.resize(2)
    story.spawn(2)
    assert story.resize(1) == []
    story.ready(2)
    assert story.decide() == [Drain(2)]


def test_a_child_that_dies_in_an_unwanted_ordinal_gets_no_successor() -> None:
    story = Story(3, workers=2).all_ready()
    story.resize(1)
    story.exited(2, -9)
    assert story.wait(60) == []


def test_when_a_worker_leaves_by_itself_a_free_ordinal_is_filled_before_its_end() -> None:
    story = Story(4, workers=2).all_ready()
    assert story.leaving(1) == [Spawn(3)]
    story.spawn(3)
    story.ready(3)
    assert story.leaving(1) == []  # a repeated report
    story.exited(1, ExitCode.RECYCLED)
    assert story.wait(20) == []
    assert story.policy.workers == 2


def test_without_a_free_ordinal_a_worker_that_leaves_gets_a_successor_in_its_own_ordinal_without_back_off() -> None:
    story = Story(3, workers=2).all_ready()
    assert story.leaving(1) == []
    story.exited(1, ExitCode.RECYCLED)
    assert story.decide() == [Spawn(1)]


def test_a_child_that_leaves_and_does_not_end_is_killed() -> None:
    story = Story(4, workers=2, leave_s=40.0).all_ready()
    story.resize(1)
    assert story.wait(39) == []
    (kill,) = story.wait(1.1)[:1]
    assert isinstance(kill, Kill) and kill.ordinal == 2
    assert kill.reason == "it did not end within 40 s after it began to leave"


def test_a_child_that_hangs_while_it_leaves_is_aborted() -> None:
    story = Story(4, workers=2).all_ready()
    story.resize(1)
    story.hanging.add(2)
    assert [type(action) for action in story.wait(HEARTBEAT_ABORT_S + DECIDE_PERIOD_S)] == [Abort]


@pytest.mark.parametrize("code", [ExitCode.BOOT_FAILED, -11])
def test_an_added_worker_that_cannot_start_does_not_end_serving_children(code: int) -> None:
    story = Story(3, workers=1).all_ready()
    story.resize(2)
    story.spawn(2)
    for _ in range(3 * BOOT_FAILURES_MAX):
        story.exited(2, code)
        assert Spawn(2) in story.wait(BACKOFF_MAX_S + DECIDE_PERIOD_S)


@given(st.data())
def test_any_events_leave_every_wanted_ordinal_filled_exactly_once(data: st.DataObject) -> None:
    story = Story(6, workers=2, leave_s=5.0)
    filled: set[int] = set()

    def obey(actions: list) -> None:
        for action in actions:
            match action:
                case Spawn(ordinal):
                    assert ordinal not in filled
                    filled.add(ordinal)
                    story.spawn(ordinal)
                    story.ready(ordinal)
                case Drain(ordinal) | Abort(ordinal, _) | Kill(ordinal, _):
                    assert ordinal in filled
                    filled.discard(ordinal)
                    story.exited(ordinal, ExitCode.OK)

    for event in data.draw(st.lists(st.sampled_from(["more", "less", "leave", "die", "pass"]), max_size=40)):
        workers = sorted(filled - {0})
        if event in ("more", "less"):
            story.policy.resize(story.policy.workers + (1 if event == "more" else -1), story.now)
        elif event == "leave" and workers:
            story.policy.leaving(data.draw(st.sampled_from(workers)), story.now)
        elif event == "die" and workers:
            ordinal = data.draw(st.sampled_from(workers))
            filled.discard(ordinal)
            story.exited(ordinal, data.draw(st.sampled_from([-9, 0, 75])))
        story.now += 0.3
        obey(story.decide())
    for _ in range(100):
        story.now += DECIDE_PERIOD_S
        obey(story.decide())
    assert len(filled) == 1 + story.policy.workers
    assert 1 <= story.policy.workers <= 5


def test_the_texts_for_ordinals_and_endings() -> None:
    assert [child_name(0, 4), child_name(1, 4), child_name(3, 4), child_name(4, 4)] == ["supervisor", "worker 0", "worker 2", "kv-events"]
    assert child_name(kv_events_ordinal(4), 4) == "kv-events"
    assert [ending(-9), ending(-35)] == ["signal 9 (SIGKILL)", "signal 35"]
    assert [ending(75), ending(7)] == ["exit code 75 (RECYCLED)", "exit code 7"]
