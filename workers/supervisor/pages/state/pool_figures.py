"""Computes the figures of each of several pools: sums series of workers by pool, and compares two looks."""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from epp.data import WAITING
from epp.metrics import POOL
from epp.metrics.request_series import (
    PREDICTED_TOKENS,
    PREDICTION_PROMPT_TOKENS,
    REPORTED_TOKENS,
    REQUEST_ERRORS,
    SCHEDULER_ATTEMPTS,
    TIME_TO_FIRST,
    TTFT_STREAMING,
    TTFT_WHOLE,
)
from shm.series_reader import SeriesReader
from shm.table import State
from workers.supervisor.pages.state.look import Configuration, Look, PoolLook, quantile_since
from workers.worker.telemetry.request_metrics import SUCCESS

FRESH: Final = State.FRESH.name.lower()
COMPARED: Final = (PREDICTION_PROMPT_TOKENS.name, PREDICTED_TOKENS.name, REPORTED_TOKENS.name)

Ints = npt.NDArray[np.int64]


class PoolCounts(NamedTuple):
    """Counts since the start, one row for each pool.

    `routed`: requests that got an endpoint. `failed`: requests that failed, in the picker or at a server. `first_token`: times to the first
    token, per bucket. `compared`: prompt tokens of requests with a prediction: all, predicted as cached and reported as cached.
    """

    routed: Ints
    failed: Ints
    first_token: Ints
    compared: Ints

    def since(self, before: "PoolCounts") -> "PoolCounts":
        """Returns the counts since `before`. Counts of label sets that are gone are 0."""
        return PoolCounts(*(np.maximum(now - then, 0) for now, then in zip(self, before, strict=True)))


def counts_by_pool(
    names: Sequence[str],
    attempts: SeriesReader | None,
    errors: SeriesReader | None,
    figures: SeriesReader | None,
    predictions: SeriesReader | None,
) -> PoolCounts:
    """Returns the counts of the pools with these names. For series that the picker does not have, all counts are 0."""
    routed = failed = first_token = np.zeros((len(names), 1), np.int64)
    compared = np.zeros((len(names), len(COMPARED)), np.int64)
    if attempts is not None:
        routed = _summed(attempts, names, [_counter(attempts, SCHEDULER_ATTEMPTS.name)], {"status": SUCCESS})
    if errors is not None:
        failed = _summed(errors, names, [_counter(errors, REQUEST_ERRORS.name)])
    if figures is not None:
        streamed, whole = (_summed(figures, names, figures.schema.counts(place)) for place in (TTFT_STREAMING, TTFT_WHOLE))
        first_token = streamed + whole
    if predictions is not None:
        compared = _summed(predictions, names, [_counter(predictions, name) for name in COMPARED])
    return PoolCounts(routed[:, 0], failed[:, 0], first_token, compared)


def _counter(series: SeriesReader, name: str) -> int:
    return series.schema.counter_at[name] - series.schema.values_at


def _summed(series: SeriesReader, names: Sequence[str], words: list[int] | slice, only: dict[str, str] | None = None) -> Ints:
    """Returns the sums of these words for each pool. `only`: label -> the value that rows must have."""
    labels, ints, _, _ = series.totals()
    at, wanted = series.schema.labels.index(POOL), [(series.schema.labels.index(name), value) for name, value in (only or {}).items()]
    numbers = {name: number for number, name in enumerate(names) if name}
    others = len(names)  # the row of counts for none of these pools
    rows = [numbers.get(row[at], others) if all(row[place] == value for place, value in wanted) else others for row in labels]
    values = ints[:, words]
    found = np.zeros((len(names) + 1, values.shape[1]), np.int64)
    np.add.at(found, rows, values)
    return found[:others]


class Member(Protocol):
    """The part of `workers.supervisor.pages.state.figures.EndpointFigures` that this module uses."""

    @property
    def pool(self) -> str | None: ...
    @property
    def state(self) -> str: ...
    @property
    def in_flight(self) -> int: ...
    @property
    def scraped(self) -> Mapping[str, float]: ...


class PoolFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One of several pools. `fresh`: its endpoints with fresh metrics. `waiting`: requests that wait at its servers; `queued`: in flow
    control. `requests_per_s`: requests that got an endpoint. `errors_per_s`: requests that failed, in the picker or at a server.
    `first_token_p50_s`, `first_token_p95_s`: quantiles of the time from a request to the first piece of its answer. `configuration`: None
    if it has none yet.
    """

    name: str
    endpoints: int
    fresh: int
    in_flight: int
    waiting: int
    queued: int
    requests_per_s: float | None
    errors_per_s: float | None
    first_token_p50_s: float | None = None
    first_token_p95_s: float | None = None
    configuration: Configuration | None = None


def pool_figures(look: Look, before: Look | None, elapsed: float | None, endpoints: Sequence[Member]) -> list[PoolFigures]:
    """Returns the figures of each pool, or no figures if the picker has one pool. `elapsed`: the seconds since the previous look."""
    then = {each.name: each for each in before.pools} if before is not None else {}
    bounds, members = look.bounds.get(TIME_TO_FIRST.name, ()), dict[str | None, list[Member]]()
    for endpoint in endpoints:
        members.setdefault(endpoint.pool, []).append(endpoint)
    found = []
    for each in look.pools:
        if not each.name:  # an empty place
            continue
        mine, earlier = members.get(each.name, ()), then.get(each.name)
        known = elapsed if earlier is not None else None
        found.append(
            PoolFigures(
                name=each.name,
                endpoints=len(mine),
                fresh=sum(endpoint.state == FRESH for endpoint in mine),
                in_flight=sum(endpoint.in_flight for endpoint in mine),
                waiting=round(sum(endpoint.scraped.get(WAITING.name, 0.0) for endpoint in mine)),
                queued=each.queued,
                requests_per_s=max(0, each.routed - earlier.routed) / known if known and earlier else None,
                configuration=each.configuration,
                errors_per_s=max(0, each.failed - earlier.failed) / known if known and earlier else None,
                first_token_p50_s=_first_token(0.5, bounds, each, earlier),
                first_token_p95_s=_first_token(0.95, bounds, each, earlier),
            )
        )
    return found


def _first_token(q: float, bounds: Sequence[float], now: PoolLook, before: PoolLook | None) -> float | None:
    if before is None or len(now.first_token) != len(before.first_token):
        return None
    return quantile_since(q, bounds, now.first_token, before.first_token)
