"""The machine that changes configurations, in random orders of events, and its rules one by one."""

import math

import pytest

from tests.workers.process import rollout_orders, rollouts_orders
from workers.process.asks import Ask
from workers.process.rollout import (
    ASKS_MAX,
    CRASHES,
    KEPT,
    RELOAD,
    SPREAD_S,
    TRIAL_S,
    WATCH_S,
    Action,
    Asked,
    CannotUse,
    Crashed,
    Event,
    Fork,
    KillTrial,
    Publish,
    Restore,
    Rollout,
    Say,
    Spreading,
    Tick,
    Trial,
    TrialEnded,
    Try,
    Withdraw,
    Worse,
)

ORDERS = 4000
ORDERS_OF_POOLS = 400
TRY = Ask("try", "plugins: []")


class Story:
    """One rollout with a clock."""

    def __init__(self) -> None:
        self.now = 50.0
        self.rollout = Rollout(1, "first")

    def tell(self, event: Event) -> list[Action]:
        return self.rollout.on(event, self.now)

    def wait(self, seconds: float, *behind: int) -> list[Action]:
        self.now += seconds
        return self.tell(Tick(behind))

    def begins(self, ask: Ask = RELOAD) -> Trial:
        """Asks, and returns the trial that begins."""
        self.tell(Asked(ask))
        (fork, _) = self.wait(0.0)
        assert isinstance(fork, Fork)
        return fork.trial

    def publishes(self, content: str, ask: Ask = RELOAD) -> list[Action]:
        """Asks for a configuration that is good. Returns what follows from the end of its trial."""
        self.begins(ask)
        return self.tell(TrialEnded(content, ""))

    def in_force(self, content: str) -> None:
        self.publishes(content)
        self.wait(0.1)


def test_a_good_configuration_is_tried_published_and_in_force_when_all_processes_use_it() -> None:
    story = Story()
    assert story.begins() == Trial(2, 1, RELOAD)
    assert story.rollout.next_deadline(story.now) == TRIAL_S
    assert story.tell(TrialEnded("second", "warning")) == [Publish(1, 2)]
    assert story.rollout.next_deadline(story.now) == SPREAD_S
    assert story.wait(0.1, 1) == []
    assert story.wait(0.1) == [Say(1, 1, text="warning")]
    assert story.rollout.next_deadline(story.now) == math.inf


def test_a_refused_configuration_changes_nothing_and_its_number_is_not_used_again() -> None:
    story = Story()
    story.begins()
    assert story.tell(TrialEnded(None, "line 3")) == [Say(1, 1, successful=False, text="line 3")]
    assert story.begins().number == 3


def test_a_trial_that_takes_too_long_is_killed_once() -> None:
    story = Story()
    story.begins()
    assert story.wait(TRIAL_S) == [KillTrial()]
    assert story.rollout.late
    assert story.wait(TRIAL_S) == []
    assert story.rollout.next_deadline(story.now) == math.inf, "the end of the child is the next event"


@pytest.mark.parametrize("asks", [[RELOAD, RELOAD, RELOAD], [RELOAD, TRY, RELOAD]])
def test_reloads_that_wait_become_one_and_come_before_commands(asks: list[Ask | None]) -> None:
    story = Story()
    for ask in asks:
        story.tell(Asked(ask))
    forks = []
    while story.rollout.next_deadline(story.now) == 0.0:
        forks += [action.trial.ask for action in story.wait(0.1) if isinstance(action, Fork)]
        story.tell(TrialEnded(None, "no"))
    assert forks == [RELOAD, *(ask for ask in asks if ask is TRY)]


def test_a_command_too_many_is_refused_and_disturbs_nothing() -> None:
    story = Story()
    story.publishes("second")
    for _ in range(ASKS_MAX):
        assert story.tell(Asked(TRY)) == []
    (said,) = story.tell(Asked(TRY))
    assert isinstance(said, Say)
    assert (said.answered, said.successful, said.busy) == (1, False, True)
    assert "8 commands wait already" in said.text
    assert isinstance(story.rollout.state, Spreading)


def test_a_configuration_that_does_not_spread_is_replaced_by_the_one_before_under_a_new_number() -> None:
    story = Story()
    story.publishes("second")
    restore, publish = story.wait(SPREAD_S, 2)
    why = "processes in ordinals [2] do not use it after 10 s"
    assert restore == Restore(0, 2, 3, why)
    assert publish == Publish(2, 3)
    assert story.wait(0.1) == [Say(1, 1, successful=False, text=f"error[rolled-back]: generation 2 is taken back: {why}")]


def test_crashes_count_against_a_configuration_for_a_while_after_its_change() -> None:
    story = Story()
    story.in_force("second")
    for _ in range(CRASHES - 1):
        assert story.tell(Crashed("worker 0")) == []
    restore, publish, _ = story.tell(Crashed("worker 1"))
    assert isinstance(restore, Restore) and publish == Publish(2, 3)
    story.wait(0.1)
    for _ in range(2 * CRASHES):
        assert story.tell(Crashed("worker 1")) == [], "it was good before"
    story.in_force("third")
    story.now += WATCH_S
    for _ in range(2 * CRASHES):
        assert story.tell(Crashed("worker 1")) == []


def test_a_rollback_during_a_trial_keeps_the_reservation_until_the_child_is_reaped_and_makes_the_trial_again() -> None:
    story = Story()
    story.in_force("second")
    trial = story.begins()
    kill, restore, publish = story.tell(CannotUse(2, "worker 0 cannot use it"))
    assert isinstance(kill, KillTrial) and isinstance(restore, Restore) and isinstance(publish, Publish)
    assert (restore.slot, restore.number) == (publish.slot, publish.number)
    assert restore.slot != trial.slot and restore.number == trial.number + 1
    (said,) = story.wait(0.1)
    assert isinstance(said, Say)
    assert (said.answered, said.owed, said.busy) == (1, True, True)
    assert story.wait(0.1) == [], "its child may still write"
    assert story.tell(TrialEnded("third", "")) == [], "it was tried beside another configuration"
    (fork,) = story.wait(0.1)
    assert isinstance(fork, Fork)
    assert fork.trial.number == restore.number + 1


def test_a_candidate_is_tried_promoted_and_keeps_its_number() -> None:
    story = Story()
    assert story.publishes("candidate", TRY) == [Try(1, 2)]
    story.wait(0.1)
    story.tell(Asked(Ask("promote")))
    assert story.wait(0.1) == [Publish(1, 2), Withdraw(""), Say(1, 1, owed=True, busy=True)]
    assert story.wait(0.1) == [Say(2, 2)]


def test_a_candidate_that_is_worse_is_withdrawn_while_another_trial_goes_on() -> None:
    story = Story()
    story.publishes("candidate", TRY)
    story.wait(0.1)
    story.begins()
    withdraw, said = story.tell(Worse("slow"))
    assert withdraw == Withdraw("it is worse: slow")
    assert isinstance(said, Say)
    assert (said.answered, said.successful, said.owed) == (1, False, True)
    assert story.tell(TrialEnded("second", "")) == [Publish(2, 3)]
    assert story.tell(Worse("slow")) == [], "there is none any more"


def test_a_configuration_that_comes_into_force_withdraws_the_candidate_first() -> None:
    story = Story()
    story.publishes("candidate", TRY)
    story.wait(0.1)
    why = "the configuration in force changes"
    assert story.publishes("second") == [Withdraw(why), Publish(2, 3)]
    (said,) = story.wait(0.1)
    assert isinstance(said, Say)
    assert said.text == f"candidate 2 is taken back: {why}"


def test_operators_go_back_through_the_last_good_configurations_that_differ() -> None:
    story = Story()
    slots: dict[int, str] = {}
    contents = [f"content {number}" for number in range(KEPT + 2)]
    for content in (*contents, contents[-1]):
        (publish,) = story.publishes(content)
        assert isinstance(publish, Publish)
        slots[publish.slot] = content
        story.wait(0.1)
    for content in reversed(contents[-KEPT:-1]):
        story.tell(Asked(Ask("rollback")))
        restore, *_ = story.wait(0.1)
        assert isinstance(restore, Restore)
        assert slots[restore.source] == content
        slots[restore.slot] = content
        story.wait(0.1)
    story.tell(Asked(Ask("rollback")))
    (said,) = story.wait(0.1)
    assert isinstance(said, Say)
    assert "there is no good one before it" in said.text


def test_without_a_good_one_before_it_a_configuration_stays_and_that_is_said_once() -> None:
    story = Story()
    story.in_force("first")
    (said,) = story.tell(CannotUse(2, "worker 0 cannot use it"))
    assert isinstance(said, Say)
    assert "generation 2 stays: there is no good one before it (worker 0 cannot use it)" in said.text
    assert story.tell(CannotUse(2, "worker 0 cannot use it")) == []


def test_what_must_always_hold_holds_after_any_order_of_events() -> None:
    for seed in range(ORDERS):
        rollout_orders.order(seed)


def test_what_must_always_hold_holds_for_several_pools_and_none_influences_another() -> None:
    for seed in range(ORDERS_OF_POOLS):
        rollouts_orders.order(seed)


def test_a_pool_that_comes_later_is_taken_out_if_its_first_configuration_crashes_processes_and_a_command_does_not_do_that() -> None:
    story = Story()
    story.rollout = Rollout(4, None)
    story.publishes("first")
    story.wait(0.1)
    assert story.rollout.number == 5
    story.tell(Asked(Ask("rollback")))
    assert "there is no good one before it" in story.wait(0.0)[-1].text  # type: ignore[union-attr]
    assert story.rollout.number == 5
    for _ in range(CRASHES):
        actions = story.tell(Crashed("worker 0"))
    assert actions[0] == Publish(0, 0)
    assert story.rollout.number == 0
    story.tell(Asked(Ask("promote")))
    assert "no configuration is in force" in story.wait(0.0)[-1].text  # type: ignore[union-attr]
    assert story.begins() == Trial(6, 0, RELOAD)


def test_a_pool_that_is_taken_out_loses_its_candidate_first() -> None:
    story = Story()
    story.rollout = Rollout(4, None)
    story.publishes("first")
    story.wait(0.1)
    story.publishes("candidate", TRY)
    story.wait(0.1)
    for _ in range(CRASHES):
        actions = story.tell(Crashed("worker 0"))
    assert actions[:2] == [Withdraw("the configuration in force is taken back"), Publish(0, 0)]
    assert story.rollout.candidate is None
