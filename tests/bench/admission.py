"""Admission by objective under overload, in virtual time: `python -m tests.bench.admission [--smoke] [--seeds N] [--only MODEL/TRAFFIC]`.

Every request has an objective for its first token, one of OBJECTIVES_S. The load is WARM times the capacity for WARM_S seconds, from
which the model learns, and then OVER times the capacity. Only this second part counts. The server models and the traffic are those of
`tests.bench.routing`; requests go where the learned latency model says, under every policy.

    learned      `learned-latency-admitter`: admits, holds or refuses by what the model predicts
    limit N      admits while fewer than N requests are in flight per server, and refuses others at once; N is one of LIMITS
    all          admits everything

goodput: answers per second that met their objective. met: the part of the admitted requests that did. capacity: the most answers per
second that servers complete under any limit.
"""

import argparse
import random
import statistics
import sys
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass

from epp.config.load import DEFAULT_TEXT
from epp.decision.decide import choose
from epp.decision.decision import Decision
from epp.errors import Cause, Refused
from epp.learning.latency import TTFT_HEADERS
from epp.request import Request
from tests.bench.routing_fleet import WORKERS, Call, Fleet, Policy
from tests.bench.routing_policies import Pause, Picked
from tests.bench.routing_servers import KINDS, SERVERS, Kind
from tests.bench.routing_traffic import WORKLOADS, Session, Turn, Workload

OBJECTIVES_S = (1.0, 2.0, 4.0)
LIMITS = (6, 8, 12, 24, 48, 96, 192)
CAPACITY_LIMITS = (16, 64, 256)
WARM, OVER = 0.7, 2.0
WARM_S, OVER_S, SMOKE_S = 20.0, 40.0, 2.0
FLOOD = 12.0  # the traffic with which the capacity is measured, as a multiple of the usual one of `tests.bench.routing`
TRAFFIC = ("documents", "nothing shared", "hot prefix", "bursts")
MET, OF_BEST = 0.95, 0.95
NO_LIMIT = 10**9
ADMITTING_TEXT = DEFAULT_TEXT.replace(
    "- type: learned-latency-scorer\n", "- type: learned-latency-scorer\n- type: learned-latency-admitter\n"
).replace("  - pluginRef: learned-latency-scorer", "  - pluginRef: learned-latency-admitter\n  - pluginRef: learned-latency-scorer")


class Admitting(Picked):
    """The pipeline of a configuration behind a limit of requests in flight per server."""

    def __init__(self, text: str, seed: int, *, limit: int, cache_blocks: int) -> None:
        super().__init__(text, seed, cache_blocks=cache_blocks)
        self._limit = limit * SERVERS

    def begin(self, call: Call, now: float) -> "Underway":
        """Begins the decision. Raises Refused if the pool is full."""
        if self._inflight.sum() >= self._limit:
            raise Refused(Cause.SHED)
        request = self.asked(call, now)
        request.headers = {TTFT_HEADERS[0]: f"{1000.0 * objective_s(call)}"}
        request.wishes = True
        return Underway(call, request, choose(self.pipeline(call), request, self))


@dataclass(frozen=True, slots=True)
class Underway:
    """A request that is being decided."""

    call: Call
    request: Request
    deciding: Coroutine[Pause, None, Decision]


class AdmissionFleet(Fleet):
    """A fleet whose requests may be refused or held. A refused call has `failed`."""

    def __init__(self, sessions: list[Session], text: str, limit: int, seed: int, kind: Kind, workload: Workload) -> None:
        def make(fleet: Fleet) -> Policy:
            self._admitting = Admitting(text, seed, limit=limit, cache_blocks=fleet.kv_blocks)
            return self._admitting

        super().__init__(sessions, make, seed, kind=kind, workload=workload, seconds=WARM_S + OVER_S)

    def _decide(self, turn: Turn, following: Iterator[Turn], now: float) -> None:
        call = Call(len(self.calls), turn, now, self._rng.randrange(WORKERS), following)
        self.calls.append(call)
        try:
            self._step(self._admitting.begin(call, now), now)
        except Refused:
            self._refuse(call, now)

    def _step(self, underway: Underway, now: float) -> None:
        try:
            pause = underway.deciding.send(None)
        except StopIteration as done:
            self._send(underway.call, self._admitting.sent(underway.call, underway.request, done.value, now), now)
        else:
            self._at(now + pause.seconds, lambda now: self._resume(underway, now))

    def _resume(self, underway: Underway, now: float) -> None:
        try:
            self._step(underway, now)
        except Refused:
            self._refuse(underway.call, now)

    def _refuse(self, call: Call, now: float) -> None:
        call.failed = True
        call.ended_at = now
        self._open -= 1


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one policy. `goodput`, `done`: per second. Shares from 0 to 1. `refused_after_s`: the mean wait before a refusal."""

    goodput: float
    done: float
    met: float
    admitted: float
    refused_after_s: float


def objective_s(call: Call) -> float:
    """Returns the call's objective, the same under every policy."""
    return OBJECTIVES_S[call.id % len(OBJECTIVES_S)]


def figures(calls: Sequence[Call], since: float, seconds: float) -> Figures:
    """Computes the figures of the calls that arrived in `seconds` from `since` on."""
    counted = [call for call in calls if since <= call.at < since + seconds]
    answered = [call for call in counted if not call.failed]
    waits = [call.ended_at - call.at for call in counted if call.failed]
    met = sum(call.first_at - call.at <= objective_s(call) for call in answered)
    done = sum(since <= call.ended_at < since + seconds for call in calls if not call.failed)
    return Figures(
        goodput=met / seconds,
        done=done / seconds,
        met=met / max(1, len(answered)),
        admitted=len(answered) / max(1, len(counted)),
        refused_after_s=statistics.fmean(waits) if waits else 0.0,
    )


def traffic(workload: Workload, seed: int, warm: float, over: float, seconds: float) -> list[Session]:
    """Makes WARM_S of the traffic at the rate `warm`, then `seconds` of it at the rate `over`, with the same shared prompts."""
    first = workload.make(random.Random(f"{seed}/{workload.name}"), WARM_S, warm)
    second = workload.make(random.Random(f"{seed}/{workload.name}"), seconds, over)
    return first + [Session(WARM_S + session.at, session.turns) for session in second]


def run(kind: Kind, workload: Workload, text: str, limit: int, sessions: list[Session], seed: int, seconds: float) -> Figures:
    """Runs one policy."""
    return figures(AdmissionFleet(sessions, text, limit, seed, kind, workload).run(), WARM_S, seconds)


def compared(kind: Kind, workload: Workload, seed: int, seconds: float) -> dict[str, Figures]:
    """Returns policy -> figures, the best static limit as BEST."""
    usual = kind.rate.get(workload.name, kind.usual_rate)
    flood = traffic(workload, seed, usual, FLOOD * usual, seconds)
    flooded = [run(kind, workload, DEFAULT_TEXT, limit, flood, seed, seconds).done for limit in CAPACITY_LIMITS]
    offered = sum(session.at >= WARM_S for session in flood) / seconds
    rate = FLOOD * usual * max(flooded) / offered  # at which as many requests arrive as the servers complete
    sessions = traffic(workload, seed, WARM * rate, OVER * rate, seconds)
    rows = {"learned": run(kind, workload, ADMITTING_TEXT, NO_LIMIT, sessions, seed, seconds)}
    for limit in LIMITS:
        rows[f"limit {limit}"] = run(kind, workload, DEFAULT_TEXT, limit, sessions, seed, seconds)
    rows["all"] = run(kind, workload, DEFAULT_TEXT, NO_LIMIT, sessions, seed, seconds)
    return rows


def best_limit(rows: dict[str, Figures]) -> str:
    """Returns the name of the static limit with the most goodput."""
    return max((name for name in rows if name.startswith("limit")), key=lambda name: rows[name].goodput)


def main() -> int:
    parser = argparse.ArgumentParser(prog="admission", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help=f"one run of {SMOKE_S:.0f} s, to check that it works")
    parser.add_argument("--seeds", type=int, default=3, help="number of runs (default 3)")
    parser.add_argument("--only", default="/", metavar="MODEL/TRAFFIC", help="names that begin like this")
    options = parser.parse_args()
    model, _, named = options.only.partition("/")
    seeds, seconds = (1, SMOKE_S) if options.smoke else (options.seeds, OVER_S)
    missed = 0
    print("| servers | traffic | met | goodput/s | best static limit | of the best limit | admit all: goodput/s | refused after |")
    print("|---|---|---|---|---|---|---|---|")
    for kind in KINDS:
        for workload in WORKLOADS:
            if workload.name in TRAFFIC and kind.name.startswith(model) and workload.name.startswith(named):
                runs = [compared(kind, workload, seed, seconds) for seed in range(1, seeds + 1)]
                missed += not show(f"| {kind.name} | {workload.name} |", runs)
    return 1 if missed and not options.smoke else 0


def show(begin: str, runs: list[dict[str, Figures]]) -> bool:
    """Prints the means over the runs. Returns whether every run reached MET and OF_BEST."""
    learned = [rows["learned"] for rows in runs]
    best = [rows[best_limit(rows)] for rows in runs]
    parts = [mine.goodput / static.goodput for mine, static in zip(learned, best, strict=True)]
    mean = statistics.fmean
    print(
        begin,
        f"{mean(mine.met for mine in learned):.3f} | {mean(mine.goodput for mine in learned):.1f} |",
        f"{', '.join(best_limit(rows)[6:] for rows in runs)}: {mean(static.goodput for static in best):.1f} |",
        f"{mean(parts):.2f} | {mean(rows['all'].goodput for rows in runs):.1f} |",
        f"{1000.0 * mean(mine.refused_after_s for mine in learned):.0f} ms |",
        flush=True,
    )
    return min(mine.met for mine in learned) >= MET and min(parts) >= OF_BEST


if __name__ == "__main__":
    sys.exit(main())
