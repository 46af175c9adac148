"""Sums series of workers by pool, for all of several pools at once."""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from epp.metrics import POOL
from epp.metrics.series import (
    PREDICTED_TOKENS,
    PREDICTION_PROMPT_TOKENS,
    REPORTED_TOKENS,
    REQUEST_ERRORS,
    SCHEDULER_ATTEMPTS,
    TTFT_STREAMING,
    TTFT_WHOLE,
)
from shm.series_reader import SeriesReader
from workers.worker.telemetry.request_metrics import SUCCESS

COMPARED: Final = (PREDICTION_PROMPT_TOKENS.name, PREDICTED_TOKENS.name, REPORTED_TOKENS.name)

Ints = npt.NDArray[np.int64]


class PoolCounts(NamedTuple):
    """Counts since the start, one row for each pool.

    `routed`: requests that got an endpoint. `failed`: those that failed, in the picker or at a server. `first_token`: times to the first
    token, per bucket. `compared`: prompt tokens of requests with a prediction: all, predicted as cached and reported as cached.
    """

    routed: Ints
    failed: Ints
    first_token: Ints
    compared: Ints

    def since(self, before: "PoolCounts") -> "PoolCounts":
        """Returns what has been counted since `before`. Counts of label sets that are gone count as 0."""
        return PoolCounts(*(np.maximum(now - then, 0) for now, then in zip(self, before, strict=True)))


class CountsByPool:
    """Reads the counts. Series that the picker does not have count nothing."""

    def __init__(
        self, attempts: SeriesReader | None, errors: SeriesReader | None, figures: SeriesReader | None, predictions: SeriesReader | None
    ) -> None:
        self._attempts = attempts
        self._errors = errors
        self._figures = figures
        self._predictions = predictions

    def read(self, names: Sequence[str]) -> PoolCounts:
        """Returns the counts of the pools with these names."""
        routed = failed = np.zeros((len(names), 1), np.int64)
        first_token, compared = np.zeros((len(names), 1), np.int64), np.zeros((len(names), len(COMPARED)), np.int64)
        if (series := self._attempts) is not None:
            routed = _summed(series, names, [_counter(series, SCHEDULER_ATTEMPTS.name)], {"status": SUCCESS})
        if (series := self._errors) is not None:
            failed = _summed(series, names, [_counter(series, REQUEST_ERRORS.name)])
        if (series := self._figures) is not None:
            streamed, whole = (list(range(*_buckets(series, place))) for place in (TTFT_STREAMING, TTFT_WHOLE))
            first_token = _summed(series, names, streamed) + _summed(series, names, whole)
        if (series := self._predictions) is not None:
            compared = _summed(series, names, [_counter(series, name) for name in COMPARED])
        return PoolCounts(routed[:, 0], failed[:, 0], first_token, compared)


def _counter(series: SeriesReader, name: str) -> int:
    return series.schema.counter_at[name] - series.schema.values_at


def _buckets(series: SeriesReader, place: int) -> tuple[int, int]:
    schema = series.schema
    first = schema.histograms_at[place] - schema.values_at + 1
    return first, first + len(schema.histograms[place][1]) + 1


def _summed(series: SeriesReader, names: Sequence[str], words: Sequence[int], only: dict[str, str] | None = None) -> Ints:
    """Returns the sums of these words for each pool. `only`: label -> the value that rows must have."""
    labels, ints, _, _ = series.totals()
    at, wanted = series.schema.labels.index(POOL), [(series.schema.labels.index(name), value) for name, value in (only or {}).items()]
    numbers = {name: number for number, name in enumerate(names) if name}
    others = len(names)  # the row of what counts for none of these pools
    rows = [numbers.get(row[at], others) if all(row[place] == value for place, value in wanted) else others for row in labels]
    found = np.zeros((len(names) + 1, len(words)), np.int64)
    np.add.at(found, rows, ints[:, words])
    return found[:others]
