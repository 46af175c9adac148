"""The downhill simplex."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from loadtest.replay.simplex import Point, lowest

COORDINATES = st.floats(-2, 2)


@given(st.lists(COORDINATES, min_size=2, max_size=4), st.integers(1, 30))
def test_finds_the_bottom_of_a_slanted_valley(bottom: list[float], slant: int) -> None:
    def cost(point: Point) -> float:
        off = point - np.array(bottom)
        return float((off**2).sum() + slant * off.sum() ** 2)

    point, least = lowest(cost, np.zeros(len(bottom)), 0.5, 800)
    assert least == cost(point) < 1e-3


@given(st.integers(3, 60))
def test_tries_at_most_about_as_many_points_as_it_may_and_returns_the_best(tries: int) -> None:
    costs: list[float] = []

    def cost(point: Point) -> float:
        costs.append(abs(point[0] - 1) + abs(point[1] + 3 * point[0]))
        return costs[-1]

    _, least = lowest(cost, np.zeros(2), 0.3, tries)
    assert least == min(costs)
    assert len(costs) < tries + 2 + 2


def test_stops_where_all_points_are_equal() -> None:
    costs: list[float] = []

    def cost(point: Point) -> float:
        costs.append(1.0 + float(((point - 3.0) ** 2).sum()))
        return costs[-1]

    point, _ = lowest(cost, np.zeros(2), 0.5, 10_000)
    assert len(costs) < 200 and np.allclose(point, 3.0, atol=0.05)
