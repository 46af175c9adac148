"""How well the learned latency model predicts, in virtual time: `python -m tests.bench.prediction [--smoke] [--seeds N]`.

The built-in configuration routes the traffic of `tests.bench.routing`. Each request's prediction, made at its decision, is compared with
its time to the first token.

    median, worst   |predicted - observed| / observed after ENOUGH answers per server: the median over all servers, and of the worst one
    recovery        requests that a server answers, from the one after it becomes three times slower, until the mean error of the last
                    WINDOW answers is at most half of that of the first WINDOW
"""

import argparse
import random
import statistics
import sys
from collections.abc import Sequence

from epp.config.load import DEFAULT_TEXT
from epp.learning.model import FirstToken
from tests.bench.routing_fleet import Fleet
from tests.bench.routing_learning import SharedLearning
from tests.bench.routing_policies import Picked
from tests.bench.routing_servers import KINDS, SERVERS, SLOW_LATER, Kind
from tests.bench.routing_traffic import WORKLOADS

SECONDS, SMOKE_S = 320.0, 16.0
ENOUGH, SMOKE_ENOUGH = 500, 20
WINDOW = 10
TRAFFIC = ("chats", "documents", "nothing shared")
MIXED = KINDS[-1].name


class Watched(SharedLearning):
    """Keeps what was observed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[FirstToken] = []

    def learn_first(self, seen: FirstToken) -> None:
        self.seen.append(seen)
        super().learn_first(seen)


def observed(kind: Kind, traffic: str, seed: int, seconds: float) -> list[FirstToken]:
    """Returns what the picker observed in one run, in order of time."""
    workload = next(workload for workload in WORKLOADS if workload.name == traffic)
    rate = kind.rate.get(traffic, kind.usual_rate)
    sessions = workload.make(random.Random(f"{seed}/{traffic}"), seconds, rate)
    learning = Watched()
    Fleet(
        sessions,
        lambda fleet: Picked(DEFAULT_TEXT, seed, cache_blocks=fleet.kv_blocks, learning=learning),
        seed,
        kind=kind,
        workload=workload,
        seconds=seconds,
    ).run()
    return learning.seen


def error(seen: FirstToken) -> float:
    return abs(seen.predicted - seen.observed) / seen.observed


def errors(seen: Sequence[FirstToken], enough: int) -> list[float]:
    """Returns the median error of each server that has answered more than `enough` requests, without these."""
    by_server = [[error(one) for one in seen if one.slot == server][enough:] for server in range(SERVERS)]
    return [statistics.median(later) for later in by_server if later]


def recovery(seen: Sequence[FirstToken], slow_at: float) -> int:
    """Returns after how many requests, decided after `slow_at` at the server that becomes slow, half of the error is gone.

    That is the number of its requests if half of the error stays.
    """
    after = [error(one) for one in seen if one.slot == SLOW_LATER and one.at - one.observed > slow_at]
    half = 0.5 * statistics.fmean(after[:WINDOW])
    for end in range(WINDOW, len(after) + 1):
        if statistics.fmean(after[end - WINDOW : end]) <= half:
            return end
    return len(after)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few seconds, to check that it works")
    parser.add_argument("--seeds", type=int, default=3, help="number of runs (default 3)")
    options = parser.parse_args()
    seeds, seconds, enough = options.seeds, SECONDS, ENOUGH
    if options.smoke:
        seeds, seconds, enough = 1, SMOKE_S, SMOKE_ENOUGH
    print("| servers | traffic | median | worst | recovery |\n|---|---|---|---|---|")
    for kind in KINDS:
        for traffic in TRAFFIC:
            runs = [observed(kind, traffic, seed, seconds) for seed in range(1, seeds + 1)]
            found = [each for run in runs for each in errors(run, enough)]
            shown = f"{statistics.median(found):.1%} | {max(found):.1%}" if found else "– | –"
            recovered = "–"
            if kind.name == MIXED:
                recovered = ", ".join(str(recovery(run, kind.slowed[SLOW_LATER][0] * seconds)) for run in runs)
            print(f"| {kind.name} | {traffic} | {shown} | {recovered} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
