"""What the terms of the learned latency model are worth: `EPP_COMPILED=0 python -m tests.bench.ablations [--smoke] [--seeds N]`.

Each row leaves out one term while requests are routed; the model learns as usual. The figures are means of the time to the first token,
divided by that of the whole model: the geometric mean over all traffic of `tests.bench.routing`, per model of servers, and the cell that
changes most. Above 1, the term helps. The patches need the interpreted code.
"""

import argparse
import math
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from unittest import mock

from compiled.kernels.latency_reference import PARAMETERS
from epp.config.load import DEFAULT_TEXT
from epp.learning import choice, waits
from epp.learning.model import LatencyModel, Table
from tests.bench.routing_run import measure
from tests.bench.routing_servers import KINDS
from tests.bench.routing_traffic import WORKLOADS
from tests.bench.routing_zoo import configured

SECONDS, SMOKE_S = 40.0, 2.0
WHOLE = "the whole model"
Patches = list[AbstractContextManager[object]]


def predicting(change: Callable[[Table], None]) -> Patches:
    """Changes what the model predicts with."""
    tabulated = LatencyModel._tabulated

    def changed(model: LatencyModel, now: float) -> Table:
        table = tabulated(model, now)
        change(table)
        return table

    return [mock.patch.object(LatencyModel, "_tabulated", changed)]


def without(*names: str) -> Patches:
    """Sets parameters of `first_tokens` to 0."""

    def change(table: Table) -> None:
        for name in names:
            table.parameters[PARAMETERS.index(name)] = 0.0

    return predicting(change)


def equal_speeds(table: Table) -> None:
    table.speeds[:] = table.parameters[PARAMETERS.index("usual_speed")] = 1.0


ROWS: Mapping[str, Callable[[], Patches]] = {
    WHOLE: list,
    "without speeds": lambda: predicting(equal_speeds),
    "without tokens ahead": lambda: without("rest", "busy"),
    "without overdue first tokens": lambda: without("overdue_s", "serial"),
    "without the wait for a place": lambda: without("queue"),
    "without running requests": lambda: without("running"),
    "the wait in turn counts once": lambda: without("in_turn"),
    "without the cost of a place": lambda: without("place"),
    "without what a long prompt delays later ones": lambda: without("later"),
    "without what memory is taken from later ones": lambda: without("displaced"),
    "without waits for siblings": lambda: [mock.patch.object(waits, "LONG_TOKENS", 10**9)],
    "the cheapest one, however near": lambda: [mock.patch.object(choice, "NEAR_S", 0.0), mock.patch.object(choice, "NEAR_MAX", 0.0)],
}


def times(patches: Patches, seeds: int, seconds: float) -> dict[tuple[str, str], float]:
    """Returns (model of servers, traffic) -> mean time to the first token over all seeds."""
    found = {}
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        for kind in KINDS:
            for workload in filter(lambda each: each.usual, WORKLOADS):
                runs = [
                    measure(kind, workload, {WHOLE: configured(DEFAULT_TEXT)}, seed, seconds)[WHOLE].ttft_mean
                    for seed in range(1, seeds + 1)
                ]
                found[kind.name, workload.name] = sum(runs) / len(runs)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="two seconds, to check that it works")
    parser.add_argument("--seeds", type=int, default=2, help="number of runs (default 2)")
    options = parser.parse_args()
    seeds, seconds = (1, SMOKE_S) if options.smoke else (options.seeds, SECONDS)
    names = [kind.name for kind in KINDS]
    print(f"| term | {' | '.join(names)} | most |\n|---{'|---' * len(names)}|---|")
    whole: dict[tuple[str, str], float] = {}
    for row, patches in ROWS.items():
        found = times(patches(), seeds, seconds)
        whole = whole or found
        logs = {cell: math.log(found[cell] / whole[cell]) for cell in whole}
        if row == WHOLE:
            continue
        means = [math.exp(sum(logs[cell] for cell in logs if cell[0] == name) / sum(cell[0] == name for cell in logs)) for name in names]
        most = max(logs, key=lambda cell: abs(logs[cell]))
        shown = " | ".join(f"{mean:.2f}" for mean in means)
        print(f"| {row} | {shown} | {math.exp(logs[most]):.2f} ({', '.join(most)}) |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
