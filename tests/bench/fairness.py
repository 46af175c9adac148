"""Two tenants with the same priority, one with ten times as many requests: `python -m tests.bench.overload --only fairness`.

The load goes through Envoy and a picker with four workers to simulated servers. The small tenant asks for SMALL of the capacity, a bit
less than its half. (Some places are reserved for higher priorities, so SMALL is nine tenths of its half.) The big tenant asks for ten
times as much. Together they ask for about five times what the servers can do.

Jain index of the tokens served: (a + b)^2 / (2 (a^2 + b^2)). 1 means equal shares, 0.5 means that one tenant got everything.
wait: the time from the scheduled send time to the first token. *alone*: the same requests without the other tenant, once with all
servers and once with half of them. Half of the servers are worth a fair share: a share that is fair to the token cannot guarantee a
shorter wait than that. The run with all servers shows how much the small tenant notices of the big one.

*small one first*: both tenants, and the small tenant's requests go first, by a weight of 1000. No policy makes the wait shorter unless
it reserves a place: all places are taken, so that a new request waits until an answer ends. SERVERS x BATCH places free one place every
24 ms on average, and the first token of an answer takes about 50 ms. With so few places even this order takes more than WAIT_TARGET
times as long as alone. With six times as many servers it does not (`tests/bench/test_flow_fleet.py`, in virtual time).
"""

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import uvloop

from tests.bench.overload_stack import FAIR, SERVERS, STRICT, Site, flow_control, site
from tests.bench.overload_traffic import TOKENS, Call, Class, Generator, Result, between, firsts, percentile, plan, reasons
from tests.e2e.cluster import Cluster

SMALL = 0.42
TIMES = 10
PATIENCE_S = 10.0
WARM_UP_S = 5.0
BIG_NAME, SMALL_NAME = "big", "small"
JAIN_TARGET, WAIT_TARGET = 0.95, 1.5
FIRST = {SMALL_NAME: 1000.0}

Say = Callable[[str], None]


@dataclass(slots=True)
class Shares:
    """The results of one run, by tenant."""

    name: str
    small_tokens: float  # per second
    big_tokens: float
    small_answered: float  # share of its requests
    big_answered: float
    jain: float
    small_p50: float
    small_p95: float
    small_whole_p95: float


def arrivals(capacity: float, seconds: float, *, both: bool) -> list[Call]:
    """Plans the requests. `both`: whether the big tenant sends, too. The small tenant's requests are the same in both cases."""
    small = Class(SMALL_NAME, 1.0, tenant=SMALL_NAME)
    big = Class(BIG_NAME, 1.0, tenant=BIG_NAME, streamed=0.0)
    rng, rate = random.Random("small"), SMALL * capacity
    calls = [Call((n + rng.random()) / rate, small, rng.randint(*TOKENS), streamed=True) for n in range(int(seconds * rate))]
    if both:
        calls += plan(random.Random("big"), (big,), TIMES * SMALL * capacity, seconds)
    return sorted(calls, key=lambda call: call.at)


def jain(a: float, b: float) -> float:
    return (a + b) ** 2 / (2 * (a * a + b * b)) if a + b else 0.0


def shares(name: str, results: list[Result], start: float, seconds: float) -> Shares:
    """Computes the results from the requests that were planned for the measured time. Counts the tokens of all answers that ended in it."""
    tokens, answered = {}, {}
    counted = between(results, start, start + seconds)
    for tenant in (SMALL_NAME, BIG_NAME):
        ended = [r for r in results if r.call.kind.tenant == tenant and r.answered]
        tokens[tenant] = sum(r.call.tokens for r in ended if start <= r.call.at + r.whole_s < start + seconds) / seconds
        planned = [r for r in counted if r.call.kind.tenant == tenant]
        answered[tenant] = sum(r.answered for r in planned) / max(1, len(planned))
    waits = firsts(counted, SMALL_NAME)
    wholes = [r.whole_s for r in counted if r.call.kind.tenant == SMALL_NAME and r.answered]
    return Shares(
        name=name,
        small_tokens=tokens[SMALL_NAME],
        big_tokens=tokens[BIG_NAME],
        small_answered=answered[SMALL_NAME],
        big_answered=answered[BIG_NAME],
        jain=jain(tokens[SMALL_NAME], tokens[BIG_NAME]),
        small_p50=percentile(waits, 0.5),
        small_p95=percentile(waits, 0.95),
        small_whole_p95=percentile(wholes, 0.95),
    )


def measure(at: Site, name: str, capacity: float, seconds: float, say: Say, *, both: bool) -> Shares:
    calls = arrivals(capacity, WARM_UP_S + seconds, both=both)
    say(f"  fairness, {name}: {len(calls)} requests in {WARM_UP_S + seconds:.0f} s")
    results = uvloop.run(Generator(at.port, PATIENCE_S).run(calls))
    result = shares(name, results, WARM_UP_S, seconds)
    if odd := {reason: n for reason, n in reasons(results).items() if not reason.startswith(("rejected-", "evicted"))}:
        say(f"  fairness, {name}: {odd}")
    return result


def run(say: Say, seconds: float, capacity: float) -> list[Shares]:
    rows = []
    with Cluster() as cluster:
        fair = site(cluster, flow_control(FAIR, waiting_max=5000))
        rows.append(measure(fair, "alone", capacity, seconds, say, both=False))
        rows.append(measure(fair, "both, token-weighted", capacity, seconds, say, both=True))
    with Cluster() as cluster:
        half = site(cluster, flow_control(FAIR, waiting_max=5000), servers=SERVERS // 2)
        rows.append(measure(half, "alone, half the servers", capacity, seconds, say, both=False))
    with Cluster() as cluster:
        strict = site(cluster, flow_control(STRICT, waiting_max=5000))
        rows.append(measure(strict, "both, global-strict", capacity, seconds, say, both=True))
    with Cluster() as cluster:
        first = site(cluster, flow_control(FAIR, waiting_max=5000, weights=FIRST))
        rows.append(measure(first, "both, small one first", capacity, seconds, say, both=True))
    return rows


HEAD = f"  {'':24} {'tokens/s small':>14} {'big':>6} {'answered small':>15} {'big':>6} {'Jain':>6} {'wait p50/p95':>16} {'whole p95':>10}"


def text(row: Shares) -> str:
    waits = f"{1000 * row.small_p50:.0f}/{1000 * row.small_p95:.0f} ms"
    return (
        f"  {row.name:24} {row.small_tokens:14.0f} {row.big_tokens:6.0f} {100 * row.small_answered:14.1f}% "
        f"{100 * row.big_answered:5.1f}% {row.jain:6.3f} {waits:>16} {1000 * row.small_whole_p95:7.0f} ms"
    )


def report(say: Say, seconds: float, capacity: float, *, quiet: bool) -> list[dict[str, Any]]:
    rows = run(say, seconds, capacity)
    alone, both, half, _, first = rows
    if not quiet:
        print(f"two tenants, {TIMES}:1 in arrivals, the small one at {SMALL:.2f} of the capacity of {capacity:.1f} requests/s:")
        print("\n".join([HEAD, *map(text, rows)]))
        print(f"  token-weighted: Jain index {both.jain:.3f} (target {JAIN_TARGET})")
        for row in (alone, half, first):
            print(
                f"  small tenant's p95 against {row.name}: wait {both.small_p95 / row.small_p95:.2f} times, whole answer "
                f"{both.small_whole_p95 / row.small_whole_p95:.2f} times (target {WAIT_TARGET})"
            )
    return [asdict(row) for row in rows]
