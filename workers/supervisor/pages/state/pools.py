"""Computes the figures of each of several pools. Does no I/O."""

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import msgspec

from epp.data import WAITING
from epp.metrics.series import TIME_TO_FIRST
from shm.table import State
from workers.supervisor.pages.state.look import Configuration, Look, PoolLook
from workers.supervisor.pages.state.quantiles import quantile_since

FRESH: Final = State.FRESH.name.lower()


class Member(Protocol):
    """An endpoint, as `workers.supervisor.pages.state.figures.EndpointFigures` has it."""

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
    control. `requests_per_s`: those that got an endpoint. `errors_per_s`: those that failed, in the picker or at a server.
    `first_token_p50_s`, `first_token_p95_s`: quantiles of the time from a request to the first piece of its answer.
    `configuration`: None if it has none yet.
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
    """Returns the figures of each pool; none if the picker has one pool. `elapsed`: the seconds since the look before."""
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
