"""A changed ConfigMap: the picker reloads, and an event on the pool says so, if the picker may create events."""

from tests.kube.objects import NEEDED
from tests.kube.reloading import events, reload, started
from tests.kube.world import World, until, warnings


def test_an_event_on_the_pool_says_what_became_of_a_reload(world: World) -> None:
    uid = world.pool()["metadata"]["uid"]
    picker, config = started(world)
    reload(picker, config)
    until(lambda: len(events(world)) == 1, "an event about the success")
    reload(picker, config, "plugins: [")
    until(lambda: len(events(world)) == 2, "an event about the refusal")
    success, refusal = events(world)
    assert (success["reason"], success["type"]) == ("ConfigurationReloaded", "Normal")
    assert "generation 2" in success["message"]
    assert (refusal["reason"], refusal["type"]) == ("ConfigurationRefused", "Warning")
    assert f"{config}:2:1: error[yaml-syntax]" in refusal["message"]
    assert {event["involvedObject"]["uid"] for event in (success, refusal)} == {uid}


def test_without_the_right_to_create_events_reloads_work_and_the_log_names_the_right(world: World) -> None:
    world.pool()
    rules = [rule for rule in NEEDED if rule[1] != "events"]
    picker, config = started(world, token=world.token(rules))
    reload(picker, config)
    until(lambda: "llm_d_epp_config_generation 2" in picker.page(), "the reload")
    until(lambda: any('resources: ["events"]' in line for line in warnings(picker)), "a line with the right")
    assert events(world) == []
