"""Fairness and priorities over several replicas, for `tests.bench.replicas`. The servers are those of the overload benchmarks.

fairness: two tenants, the big one asks for ten times as much. The Jain index of the tokens served, with requests spread at random and
with each tenant at a replica of its own, which is the worst that a gateway can do.
priorities: a class with high priority asks for little, and a class with low priority for twice the capacity; no place is held back for
the high one, so it waits until an answer ends. The time to the first token of the high class, compared with one picker.
"""

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any

import uvloop

from tests.bench.fairness import BIG_NAME, SMALL_NAME, arrivals, shares
from tests.bench.overload_stack import ENGINE, FAIR, SERVERS, config, estimate, flow_control, objectives
from tests.bench.overload_traffic import Call, Class, Generator, Result, between, firsts, percentile, plan
from tests.e2e.cluster import Cluster, eventually
from tests.e2e.replica_site import ReplicaSite, know_each_other, store_in

REPLICAS = 3
WARM_UP_S, SECONDS, SMOKE_SECONDS = 4.0, 10.0, 2.0
PATIENCE_S = 10.0
HIGH, LOW = Class("high", 1.0, objective="high"), Class("low", 1.0, objective="low", streamed=0.0)
HIGH_SHARE, LOW_SHARE = 0.15, 2.0  # of the capacity

Figures = dict[str, Any]


def fairness(smoke: bool) -> Figures:
    """Measures the Jain index of two tenants, of whom one asks for ten times as much."""
    seconds = SMOKE_SECONDS if smoke else SECONDS
    calls = arrivals(estimate(), WARM_UP_S + seconds, both=True)
    figures = {}
    for name, shared, apart in (
        ("Jain index, random spread", True, False),
        ("Jain index, a replica for each tenant", True, True),
        ("Jain index, a replica for each tenant, no store", False, True),
    ):
        flow = flow_control(FAIR, waiting_max=5000)
        results = _run(calls, flow, REPLICAS, shared=shared, at={BIG_NAME: 0, SMALL_NAME: 1} if apart else {})
        figures[name] = round(shares(name, results, WARM_UP_S, seconds).jain, 3)
    return figures


def priorities(smoke: bool) -> Figures:
    """Measures how long requests with high priority wait while others with low priority fill the servers."""
    seconds, rng = SMOKE_SECONDS if smoke else SECONDS, random.Random("priorities")
    calls = sorted(
        plan(rng, (HIGH,), HIGH_SHARE * estimate(), WARM_UP_S + seconds) + plan(rng, (LOW,), LOW_SHARE * estimate(), WARM_UP_S + seconds)
    )
    figures = {}
    for name, count, at in (
        ("one picker", 1, {}),
        ("three replicas", REPLICAS, {}),
        ("three, a replica for each class", REPLICAS, {HIGH.name: 0, LOW.name: 1}),
    ):
        flow = flow_control(FAIR, waiting_max=5000)
        del flow["flowControl"]["usageLimitPolicyPluginRef"]
        results = between(_run(calls, flow, count, shared=count > 1, at=at), WARM_UP_S, WARM_UP_S + seconds)
        waits = firsts(results, HIGH.name)
        figures[f"high priority, p50 ms, {name}"] = round(1e3 * percentile(waits, 0.5))
        figures[f"high priority, p95 ms, {name}"] = round(1e3 * percentile(waits, 0.95))
    return figures


def _run(calls: Sequence[Call], flow: Mapping[str, Any], count: int, *, shared: bool, at: Mapping[str, int]) -> list[Result]:
    """Sends the calls to `count` pickers. `at`: class -> the replica that gets all of it; {}: each request goes to a random one."""
    with Cluster() as cluster, store_in(cluster) as store:
        fleet = cluster.fleet(SERVERS, *ENGINE)
        flags = [f"--objects-dir={objectives(cluster.directory / 'objects')}", "--pool-name=pool"]
        text = config(fleet.file, flow)
        site = ReplicaSite(
            cluster, fleet, store.url if shared else "", *flags, "--allow-experimental-plugins", count=count, config_text=text
        )
        assert not shared or eventually(lambda: know_each_other(site.remotes(), count))
        ports = {name: cluster.envoy(site.pickers[number]) for name, number in at.items()}
        ways = [(port, [call for call in calls if call.kind.name == name]) for name, port in ports.items()]
        return uvloop.run(_send(ways or [(site.port, list(calls))]))


async def _send(ways: Sequence[tuple[int, list[Call]]]) -> list[Result]:
    """Sends the calls of each port at the same time."""
    results = await asyncio.gather(*(Generator(port, PATIENCE_S).run(calls) for port, calls in ways))
    return [result for part in results for result in part]
