"""Does `epp record tune` find better weights than the field's? `python -m tests.bench.tune`.

For each kind of traffic of the routing benchmark, the field's weights serve it in virtual time, and the run is recorded through the code
of workers and supervisor. `epp record tune` gets the recording. Then both configurations serve other traffic of the same kind, which nobody
has seen, on the real models of servers, not on fitted ones. Below 1, the tuned one has the better p95 of the time to the first token.

Goal: better on at least 5 of 7 kinds, and never worse by more than noise (the range over seeds of one configuration).
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from epp.decision.decision import Decision, Usage
from epp.request import Request
from loadtest.demo.children import environment
from loadtest.sim.server_model import ServerModel
from tests.bench.recorded import Writer
from tests.bench.routing_fleet import Call, Fleet
from tests.bench.routing_policies import Picked
from tests.bench.routing_run import measure
from tests.bench.routing_servers import KINDS, Kind
from tests.bench.routing_traffic import BLOCK_TOKENS, WORKLOADS, Workload
from tests.bench.routing_zoo import FIELD_TEXT, configured

FRESH, DOWN = 1, 4
RECORDED_SEED, FRESH_SEEDS = 1, (11, 12, 13)
USUAL = [workload.name for workload in WORKLOADS if workload.usual and workload.dies is None]


class RecordedPicked(Picked):
    """A picker that is recorded. One worker decides."""

    def __init__(self, fleet: Fleet, text: str, seed: int, folder: Path) -> None:
        self._fleet = fleet
        self._folder = folder
        self._begun: Writer | None = None
        self._numbers: dict[int, int] = {}
        super().__init__(text, seed, workers=1, cache_blocks=fleet.kv_blocks)

    @property
    def writer(self) -> Writer:
        """The recording, which begins with the endpoints that are there when it is first needed."""
        if self._begun is None:
            self._begun = Writer(self._folder, [self._endpoints[server] for server in self._members.tolist()])
            self._begun.use(self._pipelines[0])
        return self._begun

    def sent(self, call: Call, request: Request, decision: Decision, now: float) -> int:
        self._numbers[call.id] = self.writer.decided(request, decision, call.at, now)
        return super().sent(call, request, decision, now)

    def ended(self, call: Call, now: float) -> None:
        usage = Usage(call.turn.tokens, call.turn.output, call.job.cached_tokens)
        self._end(call, now, usage)
        super().ended(call, now)

    def failed(self, call: Call, now: float) -> None:
        self._end(call, now, None)
        super().failed(call, now)

    def scraped(self, server: int, model: ServerModel, now: float) -> None:
        super().scraped(server, model, now)
        if server == min(self._members.tolist()):
            self._look(now)

    def members(self, servers: Sequence[int]) -> None:
        if self._begun is not None:
            for server in set(self._members.tolist()) ^ set(servers):
                self._begun.member(self._endpoints[server], self._now, joined=server in servers)
        super().members(servers)

    def _end(self, call: Call, now: float, usage: Usage | None) -> None:
        first_s = call.first_at - call.at if call.first_at else float("nan")
        status = 200 if usage is not None else 503
        self.writer.ended(self._numbers.pop(call.id), call.server, call.at, first_s, now, usage, status)

    def _look(self, now: float) -> None:
        servers = self._fleet.servers
        rows = [(each.running, each.waiting, each.pool.total * BLOCK_TOKENS) for each in servers]
        self.writer.scraped(now, rows, [FRESH + DOWN * (not up) for up in self._fleet.up])


class Found(NamedTuple):
    """What tuning brought for one kind of traffic. `predicted`: the gain that `epp record tune` expects, None: nothing is better.

    `ratios`: the p95 of the tuned configuration over that of the base on fresh traffic, per seed.
    """

    predicted: float | None
    ratios: list[float]


def record(kind: Kind, workload: Workload, folder: Path, seconds: float) -> None:
    """Serves the traffic with the field's weights, and records it."""
    rate = kind.rate.get(workload.name, kind.usual_rate)
    sessions = workload.make(random.Random(f"{RECORDED_SEED}/{workload.name}"), seconds, rate)
    made: list[RecordedPicked] = []

    def policy(fleet: Fleet) -> RecordedPicked:
        made.append(RecordedPicked(fleet, FIELD_TEXT, RECORDED_SEED, folder))
        return made[0]

    Fleet(sessions, policy, RECORDED_SEED, kind=kind, workload=workload, seconds=seconds).run()
    made[0].writer.end()


def tuned(folder: Path, base: Path, trials: int, added: Sequence[str]) -> dict[str, Any]:
    """Returns what `epp record tune --json` tells; it writes a better configuration beside `base`. `added`: scorers beside its own."""
    argv = [sys.executable, "-P", "-m", "workers", "tune", str(folder), f"--base={base}", f"--trials={trials}", "--json"]
    more = [f"--output={base.with_name('tuned.yaml')}", *(f"--add={scorer}" for scorer in added)]
    done = subprocess.run([*argv, *more], env=environment(), stdout=subprocess.PIPE, check=True)
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def judged(kind: Kind, workload: Workload, options: argparse.Namespace) -> Found:
    """Tunes for one kind of traffic, and judges the result on fresh traffic."""
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory) / "base.yaml"
        base.write_text(FIELD_TEXT)
        record(kind, workload, Path(directory) / "rec", options.seconds)
        told = tuned(Path(directory) / "rec", base, options.trials, options.add or ())
        if not told["better"]:
            return Found(None, [1.0])
        text = base.with_name("tuned.yaml").read_text()
    ratios = []
    for seed in FRESH_SEEDS[: options.seeds]:
        policies = {"base": configured(FIELD_TEXT), "tuned": configured(text)}
        found = measure(kind, workload, policies, seed, options.seconds)
        ratios.append(found["tuned"].ttft_p95 / found["base"].ttft_p95)
    return Found(told["held_out"]["gain"], ratios)


def main() -> int:
    parser = argparse.ArgumentParser(prog="tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="virtual time of each run (default 60)")
    parser.add_argument("--trials", type=int, default=40, help="configurations that epp record tune tries (default 40)")
    parser.add_argument("--seeds", type=int, default=2, choices=(1, 2, 3), help="fresh traffic (default 2)")
    parser.add_argument("--servers", default="shared", choices=[kind.name for kind in KINDS], help="the model of servers")
    parser.add_argument("--add", action="append", metavar="SCORER", help="scorers that epp record tune may add; repeatable")
    parser.add_argument("--only", action="append", choices=USUAL, help="kinds of traffic; repeatable")
    options = parser.parse_args()
    kind = next(kind for kind in KINDS if kind.name == options.servers)
    better = worst = 0.0
    chosen = [workload for workload in WORKLOADS if workload.name in (options.only or USUAL)]
    for workload in chosen:
        found = judged(kind, workload, options)
        ratio = statistics.fmean(found.ratios)
        better += ratio < 1.0
        worst = max(worst, ratio)
        told = "nothing is better" if found.predicted is None else f"expected gain {found.predicted:6.1%}"
        print(f"{workload.name:18} {told}; p95 on fresh traffic / field's weights: {ratio:.2f}", flush=True)
    print(f"better on {better:.0f} of {len(chosen)} kinds of traffic; worst {worst:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
