"""The delays of the shared latency model in the routing benchmark."""

from epp.learning.model import FirstToken
from tests.bench.routing_learning import LEARN_S, SharedLearning


def observe(learning: SharedLearning, now: float) -> None:
    learning.learn_first(FirstToken(now, 3, 0, 1_000.0, 0.0, 0.0, 0.0, 0.1, 0.2))


def test_workers_see_a_sample_when_the_model_is_published_after_its_arrival() -> None:
    learning = SharedLearning()
    learning.passed(0.05)
    observe(learning, 0.05)
    learning.passed(0.06 + LEARN_S)
    assert not learning.model().endpoints
    learning.passed(0.1)
    assert learning.model().endpoints[3].samples == 1


def test_a_sample_that_is_underway_waits_for_the_next_publication() -> None:
    learning = SharedLearning()
    learning.passed(0.09)
    observe(learning, 0.09)
    learning.passed(0.1)
    assert not learning.model().endpoints
    learning.passed(0.19)
    assert not learning.model().endpoints
    learning.passed(0.2)
    assert learning.model().endpoints[3].samples == 1


def test_endpoints_that_left_are_forgotten() -> None:
    learning = SharedLearning()
    observe(learning, 0.0)
    learning.passed(0.1)
    learning.listed([1, 2])
    learning.passed(0.2)
    assert not learning.model().endpoints
