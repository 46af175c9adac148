"""The verdict on a configuration is one line with its interval."""

import numpy as np

from loadtest.replay.run import Run, empty
from loadtest.replay.verdict import change, verdict


def run(first_s: list[float]) -> Run:
    made = empty(len(first_s))
    made.first_s[:] = first_s
    return made


def times(mean: float, seed: int, count: int = 960) -> list[float]:
    return np.random.default_rng(seed).exponential(mean, count).tolist()


def test_a_clear_difference_is_said_with_its_interval() -> None:
    found = change([run(times(0.1, 1))], [run([1.2 * each for each in times(0.1, 1)])])
    assert verdict("b.yaml", found) == "b.yaml: first tokens 20.0% later on average (95 % interval: 20.0% later to 20.0% later)"


def test_a_difference_that_chance_explains_is_called_so() -> None:
    shuffled = np.random.default_rng(1).permutation(times(0.1, 1)).tolist()
    said = verdict("b.yaml", change([run(times(0.1, 1))], [run(shuffled)]))
    assert said.startswith("b.yaml: the times to the first token differ no more than by chance (95 % interval: ")
    assert "sooner to" in said
    assert said.endswith("later)")


def test_only_requests_that_both_answered_count() -> None:
    nan = float("nan")
    found = change([run([0.1, 9.0, 0.1, nan])], [run([0.2, nan, 0.2, 9.0])])
    assert found is not None
    assert found.share == 1.0
    assert change([run([nan])], [run([0.1])]) is None
    assert "no request was answered" in verdict("b.yaml", None)
