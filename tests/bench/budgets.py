"""Tenants with budgets, one of which floods: `python -m tests.bench.overload --only budgets`.

The load goes through Envoy and a picker with eight workers to simulated servers. Three steady tenants ask for STEADY of the servers'
computed maximum each, less than their budgets. The flooder has a budget of BUDGET of the maximum, and asks for FLOOD times that. All
have the same priority.

wait: the time from the scheduled send time to the first token of the steady tenants. *alone*: the same requests without the flooder.
queued: the share of the steady tenants' requests that waited in flow control.
of budget: the tokens that the picker counts per second for a tenant, as a share of its rate. The burst is used up before. With `shed` it
should be 100 % for the flooder, within OFF; with `queue` it may be more, because a request beyond the budget goes on while no other waits.
"""

import asyncio
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import uvloop

from loadtest.demo.stack import get
from tests.bench.overload_stack import FAIR, Site, estimate, flow_control, site
from tests.bench.overload_traffic import FAIRNESS, TOKENS, Call, Class, Generator, Result, between, firsts, percentile, plan
from tests.e2e.cluster import Cluster

WORKERS: Final = 8
STEADY, BUDGET, FLOOD = 0.1, 0.15, 10
PROMPT_TOKENS: Final = 18
BURST_S: Final = 5.0
SECONDS: Final = 60.0
WARM_UP_S: Final = 10.0  # the burst is used up, and the debt is paid of what was in flight then
PATIENCE_S: Final = 10.0
OFF, LATER = 0.02, 1.1
SPENT: Final = ("input_tokens", "output_tokens")
FLOODER: Final = "flooder"
STEADY_NAMES: Final = ("one", "two", "three")
ALONE, SHED, QUEUE, NONE = "alone", "shed", "queue", "none"

Say = Callable[[str], None]


@dataclass(slots=True)
class Row:
    """The results of one run. `flooder`, `steady`: tokens as shares of budgets; the flooder's 0 if it sends nothing."""

    name: str
    answered: float  # share of the steady tenants' requests
    p50: float
    p99: float
    waited: float  # share of their requests, in flow control
    flooder: float
    steady: float
    flooder_refused: float  # share of its requests


def rate(share: float) -> float:
    """Returns the requests per second of a share of the servers' computed maximum."""
    return share * estimate()


def tokens_per_s() -> float:
    """Returns the rate of a budget."""
    return round(60 * rate(BUDGET) * (sum(TOKENS) / 2 + PROMPT_TOKENS)) / 60


def configuration(mode: str) -> dict[str, Any]:
    """Returns flow control and tenants. `mode`: of the budgets."""
    limits = {} if mode == NONE else {"tokensPerMinute": round(60 * tokens_per_s()), "burst": round(BURST_S * tokens_per_s())}
    return flow_control(FAIR, waiting_max=5000) | {
        "tenants": {"from": [{"header": FAIRNESS, "trusted": True}], "budget": {**limits, "mode": mode}}
    }


def arrivals(seconds: float, *, flood: bool) -> list[Call]:
    """Plans the requests. Those of the steady tenants are the same in all runs."""
    kinds = [Class(name, 1.0, tenant=name) for name in STEADY_NAMES]
    calls = plan(random.Random("steady"), kinds, len(kinds) * rate(STEADY), seconds)
    if flood:
        calls += plan(random.Random("flood"), [Class(FLOODER, 1.0, tenant=FLOODER, streamed=0.0)], FLOOD * rate(BUDGET), seconds)
    return sorted(calls, key=lambda call: call.at)


class Use:
    """What the picker counts for each tenant, in the seconds in which the requests are measured."""

    def __init__(self, at: Site, seconds: float) -> None:
        self._at = at
        self._end = WARM_UP_S + seconds
        self._looks: list[tuple[float, Mapping[str, Mapping[str, float]]]] = []

    def watch(self, second: float, _open: int) -> None:
        """Takes a look, in a thread, because the requests must not wait for it."""
        if WARM_UP_S <= second <= self._end:
            asyncio.get_running_loop().run_in_executor(None, self._look, second)

    def _look(self, second: float) -> None:
        if page := get(self._at.picker.metrics, "/debug/tenants"):  # None: it came too late
            self._looks.append((second, {each["tenant"]: each["hour"] for each in json.loads(page)["tenants"]}))

    def rate(self, tenant: str, *figures: str) -> float:
        """Returns the sum of some figures of a tenant per second: the slope of a line through all looks.

        An answer counts at its end, so what a flooding tenant uses swings by some seconds of its rate. The slope hardly sees that.
        """
        looks = sorted(self._looks, key=lambda look: look[0])
        sums = [sum(used[tenant][name] for name in figures) if tenant in used else 0.0 for _, used in looks]
        return float(np.polyfit([second for second, _ in looks], sums, 1)[0])


def row(name: str, results: Sequence[Result], use: Use, seconds: float) -> Row:
    within = between(results, WARM_UP_S, WARM_UP_S + seconds)
    steady = [result for result in within if result.call.kind.tenant != FLOODER]
    flooded = [result for result in within if result.call.kind.tenant == FLOODER]
    waits = firsts(steady)
    return Row(
        name=name,
        answered=sum(result.answered for result in steady) / max(1, len(steady)),
        p50=percentile(waits, 0.5),
        p99=percentile(waits, 0.99),
        waited=sum(use.rate(each, "waited") for each in STEADY_NAMES) / sum(use.rate(each, "requests") for each in STEADY_NAMES),
        flooder=use.rate(FLOODER, *SPENT) / tokens_per_s(),
        steady=sum(use.rate(each, *SPENT) for each in STEADY_NAMES) / len(STEADY_NAMES) / tokens_per_s(),
        flooder_refused=sum(result.status == 429 for result in flooded) / max(1, len(flooded)),
    )


def measure(name: str, mode: str, seconds: float, say: Say) -> Row:
    calls = arrivals(WARM_UP_S + seconds, flood=name != ALONE)
    with Cluster() as cluster:
        at = site(cluster, configuration(mode), workers=WORKERS)
        say(f"  budgets, {name}: {len(calls)} requests in {WARM_UP_S + seconds:.0f} s")
        use = Use(at, seconds)
        results = uvloop.run(Generator(at.port, PATIENCE_S).run(calls, use.watch))
        return row(name, results, use, seconds)


HEAD: Final = (
    f"  {'mode':8} {'steady: answered':>16} {'wait p50/p99':>16} {'queued':>7} {'of budget':>10} {'flooder: of budget':>19} {'refused':>8}"
)


def text(row: Row) -> str:
    waits = f"{1000 * row.p50:.0f}/{1000 * row.p99:.0f} ms"
    steady = f"{100 * row.answered:15.1f}% {waits:>16} {100 * row.waited:6.1f}% {100 * row.steady:9.1f}%"
    return f"  {row.name:8} {steady} {100 * row.flooder:18.1f}% {100 * row.flooder_refused:7.1f}%"


def report(say: Say, seconds: float, *, quiet: bool) -> list[dict[str, Any]]:
    rows = [measure(name, mode, seconds, say) for name, mode in ((ALONE, SHED), (SHED, SHED), (QUEUE, QUEUE), (NONE, NONE))]
    alone, shed, queue, _ = rows
    if not quiet:
        print(f"a tenant that asks for {FLOOD} times its budget of {60 * tokens_per_s():.0f} tokens per minute, {WORKERS} workers:")
        print("\n".join([HEAD, *map(text, rows)]))
        for row in (shed, queue):
            print(f"  {row.name}: p99 of the steady tenants' wait {row.p99 / alone.p99:.2f} times that alone (target {LATER})")
        print(f"  {SHED}: the flooder got {100 * shed.flooder:.1f} % of its budget (target 100 within {100 * OFF:.0f})", flush=True)
    return [asdict(row) for row in rows]
