"""With a state directory, a restarted picker knows which blocks model servers hold, even if they cannot repeat the events any more."""

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from epp.prefix.streams import PARTIAL
from tests.e2e.cluster import Cluster, Fleet, Picker, eventually
from tests.e2e.test_precise import SERVERS, World, fleet, prompt
from tests.e2e.test_warm import events, stop

__all__ = ["fleet"]  # a fixture

REPEATED = 3  # messages that a server keeps for replays: fewer than it sends
SEEDS = 30
LONG_S = 40.0


@pytest.fixture
def world(cluster: Cluster, fleet: Fleet) -> Iterator[World]:
    """Starts servers and a picker that has read all their messages. The servers cannot replay the first messages any more."""
    state = f"--state-dir={cluster.directory / 'state'}"
    world = World(cluster, fleet, replay=True, flags=(state,), kept=REPEATED)
    try:
        for seed in range(SERVERS):
            world.hold(seed, prompt(seed))
        assert eventually(world.all_precise, LONG_S)
        for seed in range(SERVERS, SEEDS):
            world.hold(seed % SERVERS, prompt(seed))
        assert eventually(lambda: held(world, world.picker) == [200.0] * SERVERS, LONG_S)
        assert world.target(prompt(0)) == 0
        yield world
    finally:
        world.close()


def held(world: World, picker: Picker) -> list[float]:
    return [world.held(rank, picker) for rank in range(SERVERS)]


def again(world: World, *flags: str) -> Picker:
    """Starts another picker with the same configuration."""
    return world.cluster.picker(Path("unused"), *flags, workers=1, config_text=world.config_text)


def partly_known(picker: Picker) -> int:
    """Returns of how many servers the picker knows that it has missed events."""
    found = re.search(rf'^llm_d_epp_kv_cache_events_not_precise\{{reason="{PARTIAL}"\}} (\d+)', picker.page(), re.MULTILINE)
    return int(found[1]) if found else 0


def taken_over(picker: Picker) -> list[int]:
    """Returns the number of blocks that the kv-events process took over from the snapshot, at each of its starts."""
    return [event["blocks"] for event in events(picker) if event["event"].startswith("kv-events: held blocks taken")]


def test_a_restarted_picker_knows_what_was_held_and_what_has_changed_since(world: World) -> None:
    state = world.cluster.directory / "state"
    stop(world.cluster, world.picker)
    assert sorted(path.name for path in state.iterdir()) == ["held-blocks", "lock", "prefix-index", "prefix-secret", "recent"]
    world.hold(1, prompt(100))  # sent while no picker runs
    world.start_again(2)  # it holds this prompt and nothing else
    world.hold(2, prompt(5))

    picker = again(world, f"--state-dir={state}")
    assert eventually(lambda: picker.counter("kv_cache_events_active_subscribers") == SERVERS, LONG_S)
    began = time.monotonic()
    assert eventually(lambda: held(world, picker) == [200.0, 220.0, 20.0] and world.all_precise(picker), LONG_S)
    print(f"{sum(held(world, picker)):.0f} blocks {time.monotonic() - began:.2f} s after the connections")
    assert taken_over(picker) == [SEEDS * 20]
    world.gateway = world.cluster.envoy(picker)
    assert [world.target(prompt(seed)) for seed in (0, 3, 27, 1, 28, 100, 5)] == [0, 0, 0, 1, 1, 1, 2]

    cold = again(world)
    assert eventually(lambda: partly_known(cold) == SERVERS - 1, LONG_S)  # the restarted server repeats all of its messages
    assert sum(held(world, cold)) <= SERVERS * REPEATED * 20


def test_a_file_that_is_no_snapshot_is_named_and_ignored(world: World) -> None:
    state = world.cluster.directory / "state"
    stop(world.cluster, world.picker)
    (state / "held-blocks").write_bytes((state / "prefix-index").read_bytes())
    picker = again(world, f"--state-dir={state}")
    assert eventually(lambda: partly_known(picker) == SERVERS, LONG_S)
    assert taken_over(picker) == []
    (refused,) = [event for event in events(picker) if "starts empty" in event["event"]]
    assert refused["file"] == str(state / "held-blocks")
    assert refused["why"] == "it is not a snapshot of this kind"
    assert sum(held(world, picker)) <= SERVERS * REPEATED * 20
