"""Timers, waits and the latency model of a replay."""

import pytest

from epp.config.load import load
from epp.learning.model import FULL_SCRAPES, FirstToken
from loadtest.replay.fleet import Fleet
from loadtest.replay.servers import UNBOUNDED, Speed
from loadtest.replay.services import ReplayLearning, ReplayServices, Timers
from tests.loadtest.replay.recordings import RANDOM, lifetime
from workers.cli.offline import worker_services

SPEED = Speed("steps", 0.001, 1e-4, 0.01, 0.0, 8192, UNBOUNDED, UNBOUNDED, 0, 0.0)


def test_timers_fire_each_at_its_time() -> None:
    timers = Timers()
    fired: list[tuple[str, float]] = []
    timers.after(0.3, lambda: fired.append(("every", timers.now)), every=0.3)
    timers.after(0.5, lambda: fired.append(("once", timers.now)))
    timers.passed(1.0)
    assert [name for name, _ in fired] == ["every", "once", "every", "every"]
    assert [at for _, at in fired] == pytest.approx([0.3, 0.5, 0.6, 0.9])
    assert timers.now == 1.0


def test_a_plugin_that_does_not_await_a_pause_is_called_after_it() -> None:
    services = worker_services(load(RANDOM, "test"), Fleet([lifetime(0)], [SPEED]), ReplayServices)
    called: list[object] = []
    services.after(0.5).add_done_callback(called.append)
    services.timers.passed(0.4)
    assert not called
    services.timers.passed(0.6)
    assert len(called) == 1


def test_the_latency_model_learns_from_scrapes_how_much_a_server_runs_at_most() -> None:
    learning = ReplayLearning(lambda: [(0, 8.0, 3.0), (1, 0.0, 0.0)])
    learning.look()
    assert learning.model().limit(0) == 0.0, "nothing was learned yet, as in the supervisor"
    learning.learn_first(FirstToken(0.1, 0, 0, 100.0, 0.0, 0.0, 1.0, 0.1, 0.1))
    for _ in range(FULL_SCRAPES + 1):
        learning.look()
    assert learning.model().limit(0) == 8.0
