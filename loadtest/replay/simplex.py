"""Finds the lowest point of a cost function without derivatives: the downhill simplex (Nelder and Mead, 1965)."""

from collections.abc import Callable
from typing import Final

import numpy as np

Point = np.ndarray[tuple[int], np.dtype[np.float64]]

FURTHER: Final = 2.0  # times as far as the reflected point, if that is the best so far
NEARER: Final = 0.5
CLOSE: Final = 1e-3  # the search ends when all points differ by less than this, and their costs by this share of the least


def lowest(cost: Callable[[Point], float], start: Point, size: float, tries: int) -> tuple[Point, float]:
    """Returns the best of at most about `tries` points, and its cost. `size`: by how much the first points differ from `start`."""
    points = [start, *(start + size * direction for direction in np.eye(len(start)))]
    costs = [cost(point) for point in points]
    tried = len(points)
    while tried < tries:
        order = np.argsort(costs, kind="stable")
        points, costs = [points[at] for at in order], [costs[at] for at in order]
        if costs[-1] - costs[0] <= CLOSE * costs[0] and np.ptp(points, axis=0).max() <= CLOSE:
            break
        middle = np.mean(points[:-1], axis=0)
        reflected = 2 * middle - points[-1]
        found = cost(reflected)
        tried += 1
        if costs[0] <= found < costs[-2]:
            points[-1], costs[-1] = reflected, found
            continue
        towards = reflected if found < costs[-1] else points[-1]
        other = middle + (FURTHER if found < costs[0] else NEARER) * (towards - middle)
        further = cost(other)
        tried += 1
        best_point, best_cost = min((reflected, found), (other, further), key=lambda pair: pair[1])
        if best_cost < costs[-1]:
            points[-1], costs[-1] = best_point, best_cost
        else:
            points = [points[0] + NEARER * (point - points[0]) for point in points]
            costs = [costs[0], *map(cost, points[1:])]
            tried += len(points) - 1
    best = int(np.argmin(costs))
    return points[best], costs[best]
