"""What the benchmark of predictions computes from observations."""

import pytest

from epp.learning.model import FirstToken
from tests.bench.prediction import errors, recovery
from tests.bench.routing_servers import SLOW_LATER


def seen(at: float, predicted: float, observed: float, slot: int = SLOW_LATER) -> FirstToken:
    return FirstToken(at, slot, 0, 100.0, 0.0, 0.0, 0.0, predicted, observed)


def test_the_error_of_each_server_leaves_out_its_first_answers() -> None:
    answers = [seen(n, 9.0, 1.0, slot) for n in range(3) for slot in (0, 1)]
    answers += [seen(9.0, 1.1, 1.0, 0), seen(9.0, 1.3, 1.0, 1), seen(9.0, 9.0, 1.0, 2)]
    assert errors(answers, 3) == pytest.approx([0.1, 0.3])


def test_recovery_counts_requests_of_the_slow_server_that_were_decided_after_it_became_slow() -> None:
    before = [seen(n * 1.0, 9.0, 1.0) for n in range(20)]
    wrong = [seen(30.0 + n, 0.4, 1.0) for n in range(15)]
    right = [seen(60.0 + n, 1.0, 1.0) for n in range(10)]
    others = [seen(31.0, 5.0, 1.0, 0)] * 50
    assert recovery([*before, *others, *wrong, *right], 19.5) == 20
    assert recovery([*before, *wrong], 19.5) == 15, "half of the error stays"
