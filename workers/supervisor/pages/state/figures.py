"""Computes figures from a look at shared memory and the look before it. Does no I/O.

Rates and quantiles describe the time between two looks, so they are unknown (None) after the first look. Counters never fall while an
instance lives. Quantiles are interpolated linearly between the bounds of their bucket, as dashboards do. A quantile beyond the last bound
is given as that bound.

`Figures` is also the JSON document of `epp top --json`: its keys never change, but new keys may be added.
"""

import math
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from typing import Final, TypeVar, cast

import msgspec

from epp.data import CACHE_RANKS
from epp.metrics.areas import REQUEST_PROCESSING
from epp.metrics.flow_control import FLOW_QUEUE_DURATION
from epp.metrics.request_series import TIME_TO_FIRST
from epp.plugins.producers.tokenizer import WITHOUT_TOKENS
from epp.prefix.divergence import Sums
from epp.prefix.streams import of_ranks
from epp.request.tokens import no_tokens
from shm.observe import SILENT_S
from shm.table import DOWN, DRAINING, EJECTED, FAILING_AT, FAILING_MASK, State
from workers.host.memory import Leaving
from workers.process.layout import HEADROOM, REPLICAS_NEEDED, UNKNOWN_HEADROOM
from workers.supervisor.pages.state.look import (
    AreaLook,
    BandLook,
    Configuration,
    EndpointLook,
    FlowLook,
    IndexLook,
    Look,
    Others,
    OutcomeLook,
    counts_of,
    quantile_since,
)
from workers.supervisor.pages.state.pool_figures import PoolFigures, pool_figures

SUPERVISOR_SILENT_S: Final = 1.0  # a row is not fresh if its values and the supervisor's heartbeat are both older than this
REQUESTS: Final = ("picks_total", "refusals_total", "faults_total")
# The gauge `leaving` of a worker that has ended as intended -> the worker's state.
ENDED: Final[Mapping[int, str]] = {Leaving.LEAVES: "removed", Leaving.DRAINS: "ended"}
ERRORS: Final = ("refusals_total", "faults_total")
ENDPOINTS_AT_ONCE: Final = 100  # endpoints of one step, which takes about 1 ms

T = TypeVar("T")


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """The instance. `uptime_s`: the time since its segments were created. `life`: starting, running, draining or silent."""

    name: str
    pid: int
    ports: Mapping[str, int]
    life: str
    uptime_s: float


class Requests(msgspec.Struct, frozen=True, kw_only=True):
    """Requests over all workers. Errors are requests that the picker refused or failed.

    Shares are shares of the prompt tokens since the start. `cached_share`: the tokens that servers reported as cached, in all requests.
    `predicted_share`, `reported_share`: the tokens that the picker predicted and that servers reported as cached, in requests with both
    figures. `salt_lost_share`: the tokens that could also be cached at most, if tenants shared prefixes; None without cache salts.
    `first_token_p50_s`, `first_token_p95_s`: quantiles of the time from a request to the first piece of its answer. `waited_p50_s`,
    `waited_p95_s`: quantiles of the time in flow control; None without flow control.
    """

    per_s: float | None
    errors_per_s: float | None
    processing_p50_s: float | None
    processing_p99_s: float | None
    in_flight: int
    tokens_in_flight: int
    cached_share: float | None
    predicted_share: float | None
    reported_share: float | None
    salt_lost_share: float | None = None
    first_token_p50_s: float | None = None
    first_token_p95_s: float | None = None
    waited_p50_s: float | None = None
    waited_p95_s: float | None = None


class Supervisor(msgspec.Struct, frozen=True, kw_only=True):
    """The supervisor. `heartbeat_age_s` is None before the first heartbeat. `replicas_needed`, `headroom`: the scaling signal, or None if
    not known.
    """

    serving: bool
    heartbeat_age_s: float | None
    starts: int
    replicas_needed: int | None = None
    headroom: float | None = None


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """The worker of one ordinal. `accepted_share` is its share of all connections since the start; `gauges` has all gauges of its area."""

    worker: int
    state: str
    heartbeat_age_s: float | None
    starts: int
    streams: int
    connections: int
    accepted_share: float | None
    loop_lag_s: float | None
    requests_per_s: float | None
    in_flight: int
    gauges: Mapping[str, int]


class EndpointFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One endpoint. `scraped`: the columns that it reports. `traffic_share`: its share of the decisions since the last look.

    `predicted_share` and `reported_share`: as in `Requests`. `predicted_tokens`: predicted as cached, mean of the compared requests; None
    if none was compared. `not_precise`: why the prefix matches of the endpoint, or of most requests, are not precise, or "".
    `events_age_s`: seconds since the last message of its event stream. `held_blocks`: the number of blocks in its cache, according to its
    events. These three are None if the picker follows no event streams. `first_token`: the learned time to the first token in words, or
    None if the latency model has learned nothing. `pool`: its name; None if the picker has one pool.
    """

    name: str
    namespace: str
    address: str
    state: str
    age_s: float | None
    scraped: Mapping[str, float]
    in_flight: int
    tokens_in_flight: int
    picks_per_s: float | None
    traffic_share: float | None
    index_entries: int
    predicted_share: float | None
    reported_share: float | None
    predicted_tokens: float | None = None
    not_precise: str | None = None
    events_age_s: float | None = None
    held_blocks: int | None = None
    first_token: str | None = None
    pool: str | None = None


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """All figures of one moment. `interval_s` is the time since the previous look, None for the first look.

    `bands` is None without flow control, `others` without a replica store. The most important band comes first. `left_out` has the disabled
    plugins, with the number of workers that have disabled them. `flows`: the flows with waiting requests, the longest queue first.
    `outcomes`: how requests have left flow control since the start. `errors`: error code -> failed requests since the start. `pools`: the
    figures of several pools, in their order.
    """

    instance: Instance
    interval_s: float | None
    requests: Requests
    supervisor: Supervisor
    workers: Sequence[Worker]
    workers_serving: int
    endpoints: Sequence[EndpointFigures]
    index: IndexLook
    bus_drops: int
    counters: Mapping[str, int]
    bands: Sequence[BandLook] | None = None
    left_out: Mapping[str, int] = {}
    configuration: Configuration | None = None
    others: Others | None = None
    errors: Mapping[str, int] = {}
    flows: Sequence[FlowLook] = ()
    outcomes: Sequence[OutcomeLook] = ()
    pools: Sequence[PoolFigures] = ()


def figures(instance: Instance, look: Look, before: Look | None) -> Figures:
    """Computes all figures. Skips ordinals that never had a worker. Endpoints are in the order of their names."""
    return last(computing(instance, look, before))


def only(figures: Figures, pool: str) -> Figures:
    """Returns the figures with the pools, endpoints, bands and flows of one pool. The figures of workers and requests still cover all
    pools.
    """
    return msgspec.structs.replace(
        figures,
        pools=[each for each in figures.pools if each.name == pool],
        endpoints=[each for each in figures.endpoints if each.pool == pool],
        bands=None if figures.bands is None else [each for each in figures.bands if each.pool == pool],
        flows=[each for each in figures.flows if each.pool == pool],
        outcomes=[each for each in figures.outcomes if each.pool == pool],
    )


def last(steps: Generator[None, None, T]) -> T:
    """Runs all steps at once. Returns their result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return cast("T", end.value)


def computing(instance: Instance, look: Look, before: Look | None) -> Generator[None, None, Figures]:
    """Returns the figures. Yields after each short step, so that a caller can do other work in between."""
    elapsed = look.at - before.at if before is not None and look.at > before.at else None
    workers = _workers(look, before, elapsed)
    yield
    endpoints = yield from _endpoints(look, before, elapsed)
    return Figures(
        instance=instance,
        interval_s=elapsed,
        requests=_requests(look, before, elapsed),
        supervisor=_supervisor(look.areas[0]),
        workers=workers,
        workers_serving=sum(worker.state == "serving" for worker in workers),
        endpoints=sorted(endpoints, key=lambda e: (e.name, e.namespace, e.address)),
        index=look.index,
        bus_drops=look.counters.get("bus_drops_total", 0),
        counters=look.counters,
        bands=None if look.bands is None else sorted(look.bands, key=lambda b: b.priority, reverse=True),
        left_out=look.left_out,
        configuration=look.configuration,
        others=look.others,
        errors=look.errors,
        flows=look.flows,
        outcomes=look.outcomes,
        pools=pool_figures(look, before, elapsed, endpoints),
    )


def life(look: Look) -> str:
    """Returns the state of an instance by the most recent heartbeat of its processes: running, draining, starting or silent."""
    age = min(area.heartbeat_age_s for area in look.areas)
    if age < SILENT_S:
        draining = any(area.gauges.get("leaving") == Leaving.DRAINS for area in look.areas[1:])
        return "draining" if draining else "running"
    return "starting" if age == math.inf else "silent"


def _quantile(q: float, name: str, look: Look, before: Look | None) -> float | None:
    """Returns the quantile of the values that a histogram has counted since the look before."""
    if before is None or name not in look.histograms or name not in before.histograms:
        return None
    return quantile_since(q, look.bounds[name], look.histograms[name], before.histograms[name])


def state(endpoint: EndpointLook, *, supervised: bool) -> str:
    """Returns the state of an endpoint from the state and the flags of its row.

    `supervised`: whether the supervisor is alive. If it is not, a row with old values is stale.
    """
    if endpoint.flags & DRAINING:
        return "draining"
    if endpoint.flags & DOWN:
        return "down"
    if endpoint.flags & EJECTED:
        return "ejected" if endpoint.flags == EJECTED else "on trial"
    if endpoint.state == State.FRESH and not supervised and (endpoint.age_s or 0.0) > SUPERVISOR_SILENT_S:
        return "stale"
    if endpoint.state == State.FRESH and endpoint.flags >> FAILING_AT & FAILING_MASK:
        return "failing"
    return State(endpoint.state).name.lower()


def _requests(look: Look, before: Look | None, elapsed: float | None) -> Requests:
    then: Mapping[str, int] = before.counters if before is not None else {}
    prompt, cached = (look.counters.get(f"{kind}prompt_tokens_total", 0) for kind in ("", "cached_"))
    checked, lost = (look.counters.get(f"salt_{kind}_tokens_total", 0) for kind in ("checked", "lost"))
    predicted_share, reported_share = _shares([e.cached for e in look.endpoints])
    return Requests(
        per_s=_rate(look.counters, then, REQUESTS, elapsed),
        errors_per_s=_rate(look.counters, then, ERRORS, elapsed),
        processing_p50_s=_quantile(0.5, REQUEST_PROCESSING.name, look, before),
        processing_p99_s=_quantile(0.99, REQUEST_PROCESSING.name, look, before),
        first_token_p50_s=_quantile(0.5, TIME_TO_FIRST.name, look, before),
        first_token_p95_s=_quantile(0.95, TIME_TO_FIRST.name, look, before),
        waited_p50_s=_quantile(0.5, FLOW_QUEUE_DURATION.name, look, before),
        waited_p95_s=_quantile(0.95, FLOW_QUEUE_DURATION.name, look, before),
        in_flight=sum(endpoint.inflight_requests for endpoint in look.endpoints),
        tokens_in_flight=sum(endpoint.inflight_tokens for endpoint in look.endpoints),
        cached_share=cached / prompt if prompt else None,
        predicted_share=predicted_share,
        reported_share=reported_share,
        salt_lost_share=lost / checked if checked else None,
    )


def _shares(looks: Sequence[Sums | None]) -> tuple[float | None, float | None]:
    """Returns the predicted and the reported share of the prompt tokens, or None if no prediction was compared."""
    known = [look for look in looks if look is not None]
    prompt = sum(look.prompt for look in known)
    if not prompt:
        return None, None
    return sum(look.predicted for look in known) / prompt, sum(look.reported for look in known) / prompt


def _supervisor(area: AreaLook) -> Supervisor:
    needed, headroom = area.gauges.get(REPLICAS_NEEDED, 0), area.gauges.get(HEADROOM, UNKNOWN_HEADROOM)
    return Supervisor(
        serving=area.serving,
        heartbeat_age_s=_heartbeat_age(area),
        starts=area.starts,
        replicas_needed=needed or None,
        headroom=headroom / 1000 if needed and headroom != UNKNOWN_HEADROOM else None,
    )


def _workers(look: Look, before: Look | None, elapsed: float | None) -> list[Worker]:
    accepted = look.counters.get("connections_total", 0)
    found = []
    for ordinal, area in enumerate(look.areas[1:], 1):
        if not area.starts and not area.serving:
            continue
        then: Mapping[str, int] = before.areas[ordinal].counters if before is not None else {}
        lag = area.gauges.get("loop_lag_us")
        found.append(
            Worker(
                worker=ordinal - 1,
                state=_worker_state(area),
                heartbeat_age_s=None if _worker_state(area) in ENDED.values() else _heartbeat_age(area),
                starts=area.starts,
                streams=area.gauges.get("streams", 0),
                connections=area.gauges.get("connections", 0),
                accepted_share=area.counters.get("connections_total", 0) / accepted if accepted else None,
                loop_lag_s=None if lag is None else lag / 1e6,
                requests_per_s=_rate(area.counters, then, REQUESTS, elapsed),
                in_flight=area.inflight,
                gauges=area.gauges,
            )
        )
    return found


def _worker_state(area: AreaLook) -> str:
    leaving = area.gauges.get("leaving")
    if not area.serving:
        return ENDED.get(leaving or 0, "not serving")
    if leaving == Leaving.DRAINS:
        return "draining"
    return "leaving" if leaving else "serving"


def _endpoints(look: Look, before: Look | None, elapsed: float | None) -> Generator[None, None, list[EndpointFigures]]:
    """Returns the figures of all endpoints. Yields after each ENDPOINTS_AT_ONCE."""
    earlier = {(e.name, e.namespace, e.address, e.pool): e.picks for e in before.endpoints} if before is not None else {}
    new = [_new_picks(e, earlier) for e in look.endpoints]
    total = sum(picks or 0 for picks in new)
    tokenless = _without_tokens(look, before, total)
    supervised = look.areas[0].heartbeat_age_s <= SUPERVISOR_SILENT_S
    found: list[EndpointFigures] = []
    for e, picks in zip(look.endpoints, new, strict=True):
        predicted, reported = _shares([e.cached])
        found.append(
            EndpointFigures(
                name=e.name,
                namespace=e.namespace,
                address=e.address,
                state=state(e, supervised=supervised),
                age_s=e.age_s,
                scraped=e.scraped,
                in_flight=e.inflight_requests,
                tokens_in_flight=e.inflight_tokens,
                picks_per_s=picks / elapsed if elapsed and picks is not None else None,
                traffic_share=picks / total if elapsed and total and picks is not None else None,
                index_entries=e.index_entries,
                predicted_share=predicted,
                reported_share=reported,
                predicted_tokens=e.cached.predicted / e.cached.requests if e.cached and e.cached.requests else None,
                not_precise=None if e.stream is None else e.stream.why or of_ranks(e.scraped.get(CACHE_RANKS.name, 1.0)) or tokenless,
                events_age_s=e.stream.age_s if e.stream is not None else None,
                held_blocks=e.stream.held if e.stream is not None else None,
                first_token=e.first_token,
                pool=e.pool,
            )
        )
        if len(found) % ENDPOINTS_AT_ONCE == 0:
            yield
    return found


def _without_tokens(look: Look, before: Look | None, decided: int) -> str:
    """Returns why most of the decisions since the look before had no tokens; without such decisions, most of the decisions since the
    start.
    """
    then = counts_of(before.counters, WITHOUT_TOKENS) if before is not None and decided else {}
    new = Counter[str]()
    for labels, count in counts_of(look.counters, WITHOUT_TOKENS).items():
        new[labels.partition(" ")[2]] += count - then.get(labels, 0)
    requests = decided or sum(e.picks or 0 for e in look.endpoints)
    return no_tokens(new.most_common(1)[0][0]) if 2 * new.total() > requests else ""


def _new_picks(endpoint: EndpointLook, earlier: Mapping[tuple[str, str, str, str | None], int | None]) -> int | None:
    then = earlier.get((endpoint.name, endpoint.namespace, endpoint.address, endpoint.pool))
    return None if endpoint.picks is None or then is None else max(0, endpoint.picks - then)


def _rate(now: Mapping[str, int], then: Mapping[str, int], names: Sequence[str], elapsed: float | None) -> float | None:
    if elapsed is None:
        return None
    return max(0, sum(now.get(name, 0) - then.get(name, 0) for name in names)) / elapsed


def _heartbeat_age(area: AreaLook) -> float | None:
    return area.heartbeat_age_s if area.heartbeat_age_s != math.inf else None
