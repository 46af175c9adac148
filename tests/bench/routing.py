"""Quality of routing: `python -m tests.bench.routing [--smoke] [--seeds N] [--seconds S] [--config FILE ...] [--json]`.

Eight simulated servers and four workers in virtual time: the figures depend only on the seed, not on the machine. Each workload runs
under these policies: the built-in default configuration; the same with the KV events of the servers (precise); the weights that are
common in the field, once with this picker's load (which includes requests in flight) and once with the load of the last scrape only;
three replicas that share nothing, with the default and with prefix-rendezvous-scorer, and one picker with that scorer;
round-robin; random; a greedy oracle with exact knowledge of queues and caches; one that only saves hits; and (for the cached share) the
default in one worker with an exact, unbounded prefix index. `--config` adds further configurations.

goodput: share of requests with the first token within 1 s and at most 100 ms per further token on average. TTFT: time to first token.
cached: share of the prompt tokens that servers had cached. load: in-flight requests of the busiest server divided by the mean of all
servers. The first quarter of the time fills the caches and does not count.
"""

import argparse
import json
import random
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from epp.config.load import DEFAULT_TEXT
from tests.bench.routing_fleet import SERVERS, Call, Fleet, Policy
from tests.bench.routing_policies import MostHits, Oracle, Picked, Random, RoundRobin
from tests.bench.routing_replicas import Replicas
from tests.bench.routing_traffic import WORKLOADS, Workload

WARM_UP = 0.25
TTFT_MAX_S = 1.0
TOKEN_MAX_S = 0.100
SECONDS = 40.0
SEEDS = 3
SMOKE_SECONDS = 2.0

FIELD_TEXT = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: queue-scorer
- type: kv-cache-utilization-scorer
- type: prefix-cache-scorer
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: queue-scorer, weight: 2}
  - {pluginRef: kv-cache-utilization-scorer, weight: 2}
  - {pluginRef: prefix-cache-scorer, weight: 3}
"""

Policies = dict[str, Callable[[Fleet, int], Policy]]


def configured(text: str) -> Callable[[Fleet, int], Policy]:
    """Returns a function that makes the policy with the pipeline of this configuration."""
    return lambda _, seed: Picked(text, seed)


PRECISE = """\
- {type: token-producer}
- {type: precise-prefix-cache-producer, parameters: {speculativeIndexing: true}}
"""
PRECISE_TEXT = DEFAULT_TEXT.replace("plugins:\n", f"plugins:\n{PRECISE}", 1)
PRECISE_FIELD_TEXT = FIELD_TEXT.replace("plugins:\n", f"plugins:\n{PRECISE}", 1)
RENDEZVOUS_TEXT = (Path(__file__).parents[2] / "deploy/config/replicas.yaml").read_text()
POLICIES: Policies = {
    "default": configured(DEFAULT_TEXT),
    "default, precise": lambda _, seed: Picked(PRECISE_TEXT, seed, held=True),
    "field's weights": configured(FIELD_TEXT),
    "field's weights, precise": lambda _, seed: Picked(PRECISE_FIELD_TEXT, seed, held=True),
    "the same, scrapes alone": lambda _, seed: Picked(FIELD_TEXT, seed, scraped_only=True),
    "default, 3 replicas": lambda _, seed: Replicas(DEFAULT_TEXT, seed),
    "rendezvous, 3 replicas": lambda _, seed: Replicas(RENDEZVOUS_TEXT, seed),
    "rendezvous": configured(RENDEZVOUS_TEXT),
    "round-robin": lambda _, seed: RoundRobin(),
    "random": lambda _, seed: Random(seed),
    "oracle": lambda fleet, _: Oracle(fleet),
    "most hits": lambda fleet, _: MostHits(fleet),
    "default, limited index": lambda fleet, seed: Picked(DEFAULT_TEXT, seed, cache_blocks=fleet.kv_blocks),
    "default, exact index": lambda _, seed: Picked(DEFAULT_TEXT, seed, workers=1, exact=True),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """One row of the table. Shares are from 0 to 1, times in seconds."""

    requests: int
    goodput: float
    ttft_mean: float
    ttft_p95: float
    cached: float
    load: float


def outcome(calls: list[Call], warm_up_s: float) -> Outcome:
    """Computes the figures of all requests that arrived after the warm-up."""
    counted = [call for call in calls if call.at >= warm_up_s]
    waits = sorted(call.job.first_token_at - call.at for call in counted)
    good = sum(is_good(call) for call in counted)
    busy = [0.0] * SERVERS
    for call in counted:
        busy[call.server] += call.job.ended_at - call.at
    cached = sum(call.job.cached_tokens for call in counted)
    return Outcome(
        requests=len(counted),
        goodput=good / len(counted),
        ttft_mean=sum(waits) / len(waits),
        ttft_p95=waits[int(0.95 * len(waits))],
        cached=cached / sum(call.turn.tokens for call in counted),
        load=max(busy) / (sum(busy) / SERVERS),
    )


def is_good(call: Call) -> bool:
    """Returns whether the request counts as goodput."""
    job = call.job
    decode_s = job.ended_at - job.first_token_at
    return job.first_token_at - call.at <= TTFT_MAX_S and decode_s <= TOKEN_MAX_S * max(1, job.generated - 1)


def measure(workload: Workload, policies: Policies, seed: int, seconds: float) -> dict[str, Outcome]:
    """Runs the same traffic under each policy."""
    sessions = workload.make(random.Random(f"{seed}/{workload.name}"), seconds)
    outcomes = {}
    for name, policy in policies.items():
        fleet = Fleet(sessions, lambda fleet, policy=policy: policy(fleet, seed), seed, workload.kv_blocks)  # type: ignore[misc]
        outcomes[name] = outcome(fleet.run(), WARM_UP * seconds)
    return outcomes


def mean(outcomes: list[Outcome]) -> Outcome:
    """Returns the mean of each figure over the seeds."""
    rows = [asdict(outcome) for outcome in outcomes]
    return Outcome(**{key: sum(row[key] for row in rows) / len(rows) for key in rows[0]})


def line(name: str, outcome: Outcome) -> str:
    """A row of the table as text."""
    return (
        f"  {name:24} {100 * outcome.goodput:7.1f} {1000 * outcome.ttft_mean:8.0f} {1000 * outcome.ttft_p95:8.0f} "
        f"{100 * outcome.cached:8.1f} {outcome.load:8.2f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="routing", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--smoke", action="store_true", help="two seconds of each workload, once, to check that it works"
    )
    parser.add_argument(
        "--seeds", type=int, default=SEEDS, help=f"number of runs; the figures are their mean (default {SEEDS})"
    )
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help=f"seconds of virtual time (default {SECONDS:.0f})"
    )
    parser.add_argument(
        "--config", type=Path, action="append", default=[], help="a configuration to compare; repeatable"
    )
    parser.add_argument(
        "--workload", action="append", default=[], help="only workloads with names that begin like this; repeatable"
    )
    parser.add_argument(
        "--policy", action="append", default=[], help="only policies with names that begin like this; repeatable"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object: workload -> policy -> figures")
    options = parser.parse_args()
    policies: Policies = {
        name: policy
        for name, policy in POLICIES.items()
        if not options.policy or name.startswith(tuple(options.policy))
    }
    for file in options.config:
        policies[file.stem] = configured(file.read_text())
    seeds, seconds = (1, SMOKE_SECONDS) if options.smoke else (options.seeds, options.seconds)
    tables = {}
    for workload in WORKLOADS:
        if options.workload and not workload.name.startswith(tuple(options.workload)):
            continue
        runs = [measure(workload, policies, seed, seconds) for seed in range(1, seeds + 1)]
        table = tables[workload.name] = {name: mean([run[name] for run in runs]) for name in policies}
        if not options.json:
            requests = next(iter(table.values())).requests
            print(f"{workload.name + f', {requests:.0f} requests':26} goodput % mean ms   p95 ms cached %     load")
            for name, outcome in table.items():
                print(line(name, outcome), flush=True)
    if options.json:
        rows = {name: {policy: asdict(outcome) for policy, outcome in table.items()} for name, table in tables.items()}
        json.dump(rows, sys.stdout, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
