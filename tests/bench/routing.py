"""How well requests are routed: `python -m tests.bench.routing [--smoke] [--seeds N] [--seconds S] [--config FILE ...] [--json]`.

Eight simulated servers, four workers, virtual time: the figures depend on the seed alone, not on the machine. Each workload is run
under the built-in default configuration; under the weights that the field uses by default, once with load as this picker counts it
(with what is in flight), once with what the last scrapes say alone; and under what these are compared with: round-robin, random, a
greedy oracle that knows queues and caches exactly, and (for the cached share) the default in one worker whose prefix index is exact
and unbounded. `--config` adds configurations to compare.

goodput: the share of requests whose first token came within 1 s and whose further ones within 100 ms each in the mean.
TTFT: time to first token. cached: the share of prompt tokens that servers had cached. load: in-flight requests of the busiest
server over the mean of all. The first quarter of the time fills the caches and does not count.
"""

import argparse
import json
import random
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from epp.config import DEFAULT_TEXT
from tests.bench.routing_fleet import SERVERS, Call, Fleet, Policy
from tests.bench.routing_policies import Oracle, Picked, Random, RoundRobin
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
    """The pipeline of a configuration, as the default is run."""
    return lambda _, seed: Picked(text, seed)


POLICIES: Policies = {
    "default": configured(DEFAULT_TEXT),
    "field's weights": configured(FIELD_TEXT),
    "the same, scrapes alone": lambda _, seed: Picked(FIELD_TEXT, seed, scraped_only=True),
    "round-robin": lambda _, seed: RoundRobin(),
    "random": lambda _, seed: Random(seed),
    "oracle": lambda fleet, _: Oracle(fleet),
    "default, exact index": lambda _, seed: Picked(DEFAULT_TEXT, seed, workers=1, exact=True),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """One row of the table. Shares from 0 to 1, times in seconds."""

    requests: int
    goodput: float
    ttft_mean: float
    ttft_p95: float
    cached: float
    load: float


def outcome(calls: list[Call], warm_up_s: float) -> Outcome:
    """Of the requests that came after the warm-up."""
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
    """Whether its user would be content."""
    job = call.job
    decode_s = job.ended_at - job.first_token_at
    return job.first_token_at - call.at <= TTFT_MAX_S and decode_s <= TOKEN_MAX_S * max(1, job.generated - 1)


def measure(workload: Workload, policies: Policies, seed: int, seconds: float) -> dict[str, Outcome]:
    """The same traffic under each policy."""
    sessions = workload.make(random.Random(f"{seed}/{workload.name}"), seconds)
    found = {}
    for name, policy in policies.items():
        fleet = Fleet(sessions, lambda fleet, policy=policy: policy(fleet, seed), seed)  # type: ignore[misc]
        found[name] = outcome(fleet.run(), WARM_UP * seconds)
    return found


def mean(outcomes: list[Outcome]) -> Outcome:
    """Over the seeds."""
    rows = [asdict(outcome) for outcome in outcomes]
    return Outcome(**{key: sum(row[key] for row in rows) / len(rows) for key in rows[0]})


def line(name: str, found: Outcome) -> str:
    """A row as text."""
    return (
        f"  {name:24} {100 * found.goodput:7.1f} {1000 * found.ttft_mean:8.0f} {1000 * found.ttft_p95:8.0f} "
        f"{100 * found.cached:8.1f} {found.load:8.2f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="routing", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="two seconds of each workload, once, to see that it works")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"mean over so many runs (default {SEEDS})")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"of virtual time (default {SECONDS:.0f})")
    parser.add_argument(
        "--config", type=Path, action="append", default=[], help="a configuration to compare, repeatable"
    )
    parser.add_argument("--workload", action="append", default=[], help="only those whose names begin so, repeatable")
    parser.add_argument("--policy", action="append", default=[], help="only those whose names begin so, repeatable")
    parser.add_argument("--json", action="store_true", help="one JSON object: workload -> policy -> figures")
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
            for name, found in table.items():
                print(line(name, found), flush=True)
    if options.json:
        rows = {name: {policy: asdict(found) for policy, found in table.items()} for name, table in tables.items()}
        json.dump(rows, sys.stdout, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
