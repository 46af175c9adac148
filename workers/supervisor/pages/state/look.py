"""Defines a look: one copy of a picker's shared memory, as plain values. `source` takes a look, and `figures` computes from it.

Histograms are counts per bucket; the last bucket counts the values above all bounds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import msgspec

from epp.decision.tryout import CANDIDATE, IN_FORCE, WHOLE
from epp.metrics import Metric
from epp.prefix.divergence import Sums
from workers.shared.reload_status import TryoutStatus
from workers.supervisor.pages.kv_events import StreamFigures


@dataclass(frozen=True, slots=True, kw_only=True)
class AreaLook:
    """The area of one process. The age of the heartbeat is infinite before the first heartbeat."""

    serving: bool
    heartbeat_age_s: float
    starts: int
    gauges: Mapping[str, int]
    counters: Mapping[str, int]
    inflight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointLook:
    """The row of one endpoint. `picks`: decisions so far, or None if the picker does not count them per endpoint.

    `cached`: the compared predictions, or None. `stream`: None if the picker follows no event streams.
    """

    name: str
    namespace: str
    address: str
    state: int
    flags: int
    age_s: float | None
    scraped: Mapping[str, float]
    inflight_requests: int
    inflight_tokens: int
    index_entries: int
    picks: int | None
    cached: Sums | None = None
    stream: StreamFigures | None = None
    pool: str | None = None  # its name; None if the picker has one pool
    first_token: str | None = None  # the learned time to the first token in words, or None if the latency model has learned nothing


class IndexLook(msgspec.Struct, frozen=True, kw_only=True):
    """The prefix index. `used`: all entries in use, also those of retired owners; extrapolated from a sample if `estimated` is true."""

    entries: int
    used: int
    used_share: float
    estimated: bool
    owners_live: int
    owners_retired: int
    evictions: int
    dropped: int


class TriedSide(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of one configuration since the tryout of a candidate began. None means unknown.

    `computed_tokens`: prompt tokens per request that were not cached. `decision_s`: mean duration of a decision in seconds.
    """

    configuration: str
    requests: int
    errors: int
    error_share: float | None
    first_token_p50_s: float | None
    first_token_p95_s: float | None
    cached_share: float | None
    computed_tokens: float | None
    decision_s: float | None


class TryoutFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The candidate. `share`: the share of the requests that the candidate decides.

    If `share` is 0, the decisions of the candidate are only compared with the real decisions, and counted as `agreed`, `differed` or
    `failed`.
    """

    generation: int
    hash: str
    source: str
    share: float
    by: str
    since: float
    agreed: int
    differed: int
    failed: int
    sides: Sequence[TriedSide]


class Configuration(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration in force. `workers`: how many workers use it. `last_reload_failed`: the findings of the last reload if it failed.

    `tryout`: None if no candidate is tried.
    """

    generation: int
    hash: str
    workers: int
    last_reload_failed: str = ""
    tryout: TryoutFigures | None = None


class PoolLook(msgspec.Struct, frozen=True, kw_only=True):
    """One of several pools. `routed`: requests that got an endpoint since the start. `failed`: requests that failed, in the picker or at a
    model server. `queued`: requests that wait in flow control. `first_token`: times to the first token, per bucket. `configuration`: None
    before the first configuration.
    """

    name: str
    routed: int = 0
    failed: int = 0
    queued: int = 0
    first_token: Sequence[int] = ()
    configuration: Configuration | None = None


class FlowLook(msgspec.Struct, frozen=True, kw_only=True):
    """The waiting requests of one flow over all workers. `bytes`: the size of their bodies. `pool`: None if the picker has one pool."""

    fairness_id: str
    priority: int
    requests: int
    bytes: int
    pool: str | None = None


class OutcomeLook(msgspec.Struct, frozen=True, kw_only=True):
    """How many requests of one priority have left flow control with this outcome since the start."""

    outcome: str
    priority: int
    requests: int
    pool: str | None = None


class BandLook(msgspec.Struct, frozen=True, kw_only=True):
    """The waiting requests of one band of flow control over all workers. `oldest_age_s` is None without waiting requests, and if the picker
    has several pools. `pool`: None if the picker has one pool.
    """

    priority: int
    requests: int
    bytes: int
    oldest_age_s: float | None
    pool: str | None = None


class Others(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of other replicas in flight and in queues. `age_s`: the age of these figures; above a second they are ignored."""

    replicas: int
    requests: int
    tokens: int
    waiting: int
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The values in shared memory at time `at`. Area 0 is the supervisor's."""

    at: float
    areas: Sequence[AreaLook]
    counters: Mapping[str, int]
    histograms: Mapping[str, Sequence[int]]
    bounds: Mapping[str, Sequence[float]]
    endpoints: Sequence[EndpointLook]
    index: IndexLook
    bands: Sequence[BandLook] | None = None  # None without flow control
    others: Others | None = None  # other replicas; None without a replica store
    configuration: Configuration | None = None
    errors: Mapping[str, int] = field(default_factory=dict)  # error code -> requests that failed with it
    flows: Sequence[FlowLook] = ()
    outcomes: Sequence[OutcomeLook] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)  # disabled plugin -> the number of workers that have disabled it
    pools: Sequence[PoolLook] = ()  # empty if the picker has one pool


def counter_name(metric: Metric, value: str) -> str:
    """Returns the key in `Look.counters` of a metric with one label that has this value."""
    return f"{metric.name}@{value}"


def counts_of(counters: Mapping[str, int], metric: Metric) -> dict[str, int]:
    """Returns the counts of a metric with one label, by the label's value."""
    prefix = counter_name(metric, "")
    return {name.removeprefix(prefix): count for name, count in counters.items() if name.startswith(prefix)}


def tryout_figures(tried: TryoutStatus | None) -> TryoutFigures | None:
    """Returns the figures of the candidate, or None."""
    if tried is None:
        return None
    named = ((IN_FORCE, tried.in_force), (CANDIDATE, tried.candidate))
    return TryoutFigures(
        generation=tried.generation,
        hash=tried.hash,
        source=tried.source,
        share=tried.share.millionths / WHOLE,
        by=tried.share.by,
        since=tried.since,
        agreed=tried.agreed,
        differed=tried.differed,
        failed=tried.failed,
        sides=[
            TriedSide(
                configuration=name,
                requests=side.requests,
                errors=side.errors,
                error_share=side.error_share,
                first_token_p50_s=side.first_token_s(0.5),
                first_token_p95_s=side.first_token_s(0.95),
                cached_share=side.cached_share,
                computed_tokens=side.computed_tokens,
                decision_s=side.seconds_per_decision,
            )
            for name, side in named
        ],
    )


def quantile(q: float, bounds: Sequence[float], counts: Sequence[int]) -> float | None:
    """Returns the quantile `q` of a histogram, as if each bucket were filled evenly; None if the histogram is empty."""
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
    """Returns the quantile of the values counted since `before`. If a count has fallen since then, its difference is 0."""
    return quantile(q, bounds, [max(0, now - then) for now, then in zip(counts, before, strict=True)])
