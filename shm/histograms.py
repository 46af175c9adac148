"""Counts values in histograms in shared memory. `shm.areas` and `shm.series` say where the histograms are.

    | sum | bucket 0 | ... | overflow |      one word each: the sum is float64, the counters are int64

A value is counted in the first bucket whose bound is at least the value, or in the overflow.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from compiled.calls import observe, observe_each
from shm.segment import Ints, Region

PLAN_COLUMNS: Final = 3


class Histograms:
    """Writes the histograms of one area.

    `base`, in its methods: how many words to add to the place of each histogram.
    """

    def __init__(self, region: Region, words: int, places: Sequence[int], bounds: Sequence[tuple[float, ...]]) -> None:
        """`words`: the length of the area. `places`: for each histogram, the index of its sum."""
        self._places = places
        self._bounds = bounds
        self._floats: memoryview[float] = region.bytes.cast("d")
        self._cells: Ints = region.array(np.int64, 0, words)
        # For the kernel: the bounds of all histograms, and for each histogram its place, its first bound and the number of its bounds.
        self._all_bounds = np.array([bound for one in bounds for bound in one], np.float64)
        counts = [len(one) for one in bounds]
        firsts = [sum(counts[:index]) for index in range(len(counts))]
        self._plan = np.array(list(zip(places, firsts, counts, strict=True)), np.int64).reshape(-1, PLAN_COLUMNS)

    def observe(self, base: int, index: int, value: float) -> None:
        """Counts a value in the histogram with this index."""
        observe(self._cells, self._plan, self._all_bounds, base, index, value)

    def observe_all(self, base: int, index: int, values: list[float], weight: int) -> None:
        """Counts each of `values` in the histogram with this index, `weight` times."""
        sum_at, first, bounds = base + self._places[index], int(self._plan[index, 1]), len(self._bounds[index])
        counts = np.bincount(self._all_bounds[first : first + bounds].searchsorted(values))
        self._cells[sum_at + 1 : sum_at + 1 + len(counts)] += weight * counts
        self._floats[sum_at] += weight * sum(values, 0.0)

    def observe_each(self, base: int, values: tuple[float, ...]) -> None:
        """Counts one value in each of the first histograms. NaN counts nowhere."""
        observe_each(self._cells, self._plan, self._all_bounds, base, values)
