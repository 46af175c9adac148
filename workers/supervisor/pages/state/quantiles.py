"""Estimates quantiles from the counts of a histogram. Each bucket is taken to be filled evenly."""

from collections.abc import Sequence
from itertools import accumulate


def quantile(q: float, bounds: Sequence[float], counts: Sequence[int]) -> float | None:
    """Returns the quantile `q` of a histogram; None if the histogram is empty.

    `counts`: one count per bucket; the last bucket counts the values above all `bounds`.
    """
    rank = q * sum(counts)
    if not rank:
        return None
    lower = 0.0
    for bound, count, reached in zip(bounds, counts, accumulate(counts), strict=False):
        if reached >= rank:
            return lower + (bound - lower) * (rank - (reached - count)) / count
        lower = bound
    return lower


def quantile_since(q: float, bounds: Sequence[float], counts: Sequence[int], before: Sequence[int]) -> float | None:
    """Returns the quantile of what was counted since `before`. A count that has fallen since then counts as 0."""
    return quantile(q, bounds, [max(0, now - then) for now, then in zip(counts, before, strict=True)])
