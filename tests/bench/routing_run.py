"""Runs policies on the same traffic and computes their figures."""

import random
from dataclasses import dataclass

from tests.bench.routing_fleet import SCRAPE_S, Call, Fleet
from tests.bench.routing_servers import PLACES, PREFILL_S, Kind
from tests.bench.routing_traffic import BLOCK_TOKENS, Workload, paced
from tests.bench.routing_zoo import Policies

WARM_UP = 0.25  # the share of the time that fills the caches and does not count, unless a run is about that time
ASTRAY_AFTER_S = 3.0
TTFT_MAX_S = 1.0
TOKEN_MAX_S = 0.100


@dataclass(frozen=True, slots=True)
class Outcome:
    """The figures of one policy in one run, or their mean over runs. Times in seconds.

    `errors`: requests that failed. Shares, from 0 to 1: `goodput`, of requests with the first token within TTFT_MAX_S and at most
    TOKEN_MAX_S per further token on average; `cached`, of prompt tokens that servers had cached; `duplicates`, of requests of which a
    server computed most although another one held it (`Fleet.is_duplicate`). `load`: requests in flight of the busiest server divided by
    the mean of all servers. `astray`: the share of the requests that went to the server that answers errors (`Workload.fails`), from
    ASTRAY_AFTER_S after it began to. `work`: the share of what the servers can do that the requests took, see `work`. `scale`: times the
    requests per second of a trace.
    """

    requests: float
    errors: float
    goodput: float
    ttft_mean: float
    ttft_p95: float
    cached: float
    duplicates: float
    load: float
    astray: float = 0.0
    work: float = 0.0
    scale: float = 1.0


def outcome(calls: list[Call], kind: Kind, workload: Workload, seconds: float, warm_up: float = WARM_UP) -> Outcome:
    """Computes the figures of all requests that arrived after the warm-up. Failed ones count in `requests` and `errors` only."""
    counted = [call for call in calls if call.at >= warm_up * seconds]
    answered = [call for call in counted if not call.failed]
    waits = sorted(call.first_at - call.at for call in answered)
    busy = [0.0] * workload.servers
    for call in answered:
        busy[call.server] += call.ended_at - call.at
    return Outcome(
        requests=len(counted),
        errors=len(counted) - len(answered),
        goodput=sum(map(is_good, answered)) / len(counted),
        ttft_mean=sum(waits) / len(waits),
        ttft_p95=waits[int(0.95 * len(waits))],
        cached=sum(call.job.cached_tokens for call in answered) / sum(call.turn.tokens for call in answered),
        duplicates=sum(call.duplicate for call in answered) / len(answered),
        load=max(busy) / (sum(busy) / workload.servers),
        astray=astray(calls, workload, seconds),
        work=work(answered, kind, workload) / ((1 - warm_up) * seconds),
    )


def work(calls: list[Call], kind: Kind, workload: Workload) -> float:
    """Returns for how many seconds the requests keep each server busy, on average: with that of which it has least.

    That is its places for requests, its KV cache as far as requests in progress need it, or, without slots, its time to compute prompts.
    """
    held = [(call, call.ended_at - call.first_at + kind.pace * (call.job.first_token_at - call.job.admitted_at)) for call in calls]
    places = sum(seconds for _, seconds in held) / (kind.slots or PLACES)
    memory = sum(seconds * (call.turn.tokens + call.turn.output) for call, seconds in held) / (workload.kv_blocks * BLOCK_TOKENS)
    uncached = sum(call.turn.tokens - call.job.cached_tokens for call in calls)
    computes = 0.0 if kind.slots else uncached * PREFILL_S * kind.pace / kind.capacity
    return max(places, memory, computes) / workload.servers


def astray(calls: list[Call], workload: Workload, seconds: float) -> float:
    """Returns which share of the requests goes to the server that answers errors; 0 if there is none."""
    fails = workload.fails
    if fails is None:
        return 0.0
    later = [call.server == fails.server for call in calls if call.at >= fails.share * seconds + ASTRAY_AFTER_S]
    return sum(later) / len(later) if later else 0.0


def is_good(call: Call) -> bool:
    """Returns whether an answered request counts as goodput."""
    decode_s = call.ended_at - call.first_at
    return call.first_at - call.at <= TTFT_MAX_S and decode_s <= TOKEN_MAX_S * max(1, call.job.generated - 1)


def measure(
    kind: Kind,
    workload: Workload,
    policies: Policies,
    seed: int,
    seconds: float,
    scrape_s: float = SCRAPE_S,
    page_s: float = 0.0,
    warm_up: float = WARM_UP,
) -> dict[str, Outcome]:
    """Runs the same traffic under each policy. Returns policy -> figures. `seconds`: at a pace of 1."""
    rate = kind.rate.get(workload.name, kind.usual_rate)
    sessions = paced(workload.make(random.Random(f"{seed}/{workload.name}"), seconds, rate), kind.pace)
    seconds *= kind.pace
    outcomes = {}
    for name, make in policies.items():
        fleet = Fleet(
            sessions,
            lambda fleet, make=make: make(fleet, seed),  # type: ignore[misc]
            seed,
            kind=kind,
            workload=workload,
            seconds=seconds,
            scrape_s=scrape_s,
            page_s=page_s,
        )
        outcomes[name] = outcome(fleet.run(), kind, workload, seconds, warm_up)
    return outcomes
