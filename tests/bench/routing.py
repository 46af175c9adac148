"""Quality of routing: `python -m tests.bench.routing [--only MODEL/TRAFFIC/POLICY ...] [--seeds N] [--config FILE ...] [--json]`.

Eight simulated servers, or --servers, and four workers in virtual time: the figures depend only on the seed, not on the machine. Every
policy gets the same traffic on four models of servers (`routing_servers`), and is not told which: prefill shared by all requests of a
server; eight slots with a prefill each; chunked prefill with a budget of tokens per step; and the first model with mixed speeds: two
servers are three times slower, and a third one from half of the time on. Traffic: `routing_traffic`. Policies: `routing_zoo`.

mean, p95: time to the first token (TTFT), divided by that of a greedy oracle that knows queues, caches and speeds; the mean over the
seeds, and after ± half of the range. cached: share of the prompt tokens that servers had cached. dup: share of the requests of which a
server computed most although another one held it. errors: failed requests per run. astray: share of the requests that went to a server that
answers errors, from 3 s after it began to. The first quarter of the time does not count.

At the end, over all models and traffic: geometric means; the worst mean; near: cells with a mean up to 1.05 and a p95 up to 1.2;
behind: cells with a mean more than 5 % above the lower one of the field's weights and round-robin.

--cold is about the first quarter of the time only, with servers of 0.02 to 1 ms a token, with 4, 8 or 32 slots or without. It ends with
the cells in which the default misses its goal for this time: 1.10 times the oracle's mean, and 3 % above the better simple policy.
--trace plays a part of a trace of real traffic instead; each seed plays another part. work: which share of what the servers can do their
requests took, of that of which they have least: places for requests, memory for them, or time to compute prompts (`routing_run.work`).
--busy plays --seconds of the trace at the requests per second with which this is PERCENT under the oracle; scale is how many times those
of the trace this is. It ends with the cells in which the default misses its goal for traces: 1.05 times the oracle's mean, 1.15 times its
p95, 0.98 times its cached tokens.
"""

import argparse
import json
import multiprocessing
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

from loadtest.demo.children import ChildFailed
from tests.bench.routing_chart import chart
from tests.bench.routing_fleet import SCRAPE_S
from tests.bench.routing_live import MODELS, ORDERED, live
from tests.bench.routing_load import scale_for
from tests.bench.routing_run import WARM_UP, Outcome, measure
from tests.bench.routing_servers import KINDS, PACES, slower
from tests.bench.routing_table import BASELINES, Table, cold_text, digest_text, markdown, summary, text, traces_text
from tests.bench.routing_traces import name_of, traced
from tests.bench.routing_traffic import SERVERS, WORKLOADS, Workload
from tests.bench.routing_zoo import LINE, ORACLE, POLICIES, configured

SECONDS = 40.0
SEEDS = 3
SMOKE_SECONDS = 2.0
SMOKE_POLICIES = ("default", "round-robin", "LBGR")


COLD_POLICIES = ("default", *BASELINES)
COLD_TRAFFIC = ("chats", "documents", "nothing shared", "hot prefix", "bursts")


class Cell(NamedTuple):
    """One cell of the tables: a model, traffic and policies. `trace`: a file that is played as the traffic; "": none.

    `busy`: the share of the servers' work that the trace is scaled to; 0: it is not.
    """

    kind: str
    workload: str
    policies: tuple[str, ...]
    trace: str = ""
    busy: float = 0.0


class Task(NamedTuple):
    """One cell of the tables under one seed, in a form that processes can exchange. `files`: name -> text of a configuration.

    The first fields: see `Cell`. `scrape_s`, `page_s`: as of a `Fleet`. `warm_up`: the share of the time that does not count. `scale`:
    times the requests per second of the trace. `servers`: how many there are; 0: as many as the workload has.
    """

    kind: str
    workload: str
    policies: tuple[str, ...]
    trace: str
    busy: float
    files: tuple[tuple[str, str], ...]
    seed: int
    seconds: float
    scrape_s: float
    page_s: float
    warm_up: float
    scale: float
    servers: int


def run(task: Task) -> dict[str, Outcome]:
    kind = next(kind for kind in (*KINDS, *PACES) if kind.name == task.kind)
    scale, seconds = task.scale, task.seconds
    if task.busy:
        first = scale * (task.servers or SERVERS) / SERVERS
        scale = scale_for(task.busy, kind, lambda scale: _workload(task, scale), task.seed, seconds, first)
        seconds /= scale
    workload = _workload(task, scale)
    policies = {name: POLICIES[name] for name in task.policies}
    policies |= {name: configured(text) for name, text in task.files}
    found = measure(kind, workload, policies, task.seed, seconds, task.scrape_s, task.page_s, task.warm_up)
    return {name: replace(each, scale=scale) for name, each in found.items()}


def _workload(task: Task, scale: float) -> Workload:
    named = (workload for workload in WORKLOADS if workload.name == task.workload)
    workload = traced(task.trace, scale) if task.trace else next(named)
    return replace(workload, servers=task.servers) if task.servers else workload


def chosen(names: Sequence[str], at: int, only: Sequence[str], usual: Sequence[str]) -> list[str]:
    """Returns the models (`at` 0), traffic (1) or policies (2) to run. `only`: texts MODEL/TRAFFIC/POLICY.

    A part is a name, or the beginning of names.
    """
    parts = [parts[at] for parts in (text.split("/") for text in only) if len(parts) > at and parts[at]]
    if not parts:
        return [name for name in names if name in usual]
    found = {name for part in parts for name in ([part] if part in names else names) if name.startswith(part)}
    return [name for name in names if name in found]


def cells(only: Sequence[str], smoke: bool, cold: bool = False) -> list[Cell]:
    """Returns the cells to run. The oracle is always one of the policies."""
    models = [kind.name for kind in (PACES if cold else KINDS)]
    kinds = chosen(models, 0, only, models)
    usual = COLD_TRAFFIC if cold else [workload.name for workload in WORKLOADS if workload.usual]
    workloads = chosen([workload.name for workload in WORKLOADS], 1, only, usual)
    line = COLD_POLICIES if cold else SMOKE_POLICIES if smoke else tuple(LINE)
    policies = (ORACLE, *(name for name in chosen(list(POLICIES), 2, only, line) if name != ORACLE))
    return [Cell(kind, workload, policies) for kind in kinds for workload in workloads]


def with_traces(todo: Sequence[Cell], traces: Sequence[str], busy: Sequence[float]) -> list[Cell]:
    """Returns the cells of these traces, at these percentages of the servers' work, for the models and policies of `todo`."""
    kinds = {cell.kind: cell.policies for cell in todo}
    return [
        Cell(kind, name_of(trace) + (f", {percent:g} %" if percent else ""), policies, trace, percent / 100.0)
        for trace in traces
        for percent in busy or [0.0]
        for kind, policies in kinds.items()
    ]


def in_real_time(options: argparse.Namespace) -> int:
    """Runs the selected traffic, or traces, through an Envoy, for the configurations of `ORDERED` that are selected, and the given ones."""
    names = {workload for _, workload, *_ in cells(options.only, options.smoke)}
    workloads = [workload for workload in WORKLOADS if workload.name in names and not (workload.dies or workload.joins)]
    if options.trace:
        workloads = [replace(traced(trace, options.scale), name=name_of(trace)) for trace in options.trace]
    kinds = {cell.kind for cell in cells(options.only, options.smoke)}
    ordered = chosen(list(ORDERED), 2, options.only, ["default"] if options.smoke else list(ORDERED))
    try:
        for kind in MODELS:
            if kind.name in kinds and (kind.slots or not options.sim):
                live(
                    slower(kind, options.pace),
                    workloads,
                    {**{name: ORDERED[name] for name in ordered}, **{file.stem: file.read_text() for file in options.config}},
                    seconds=SMOKE_SECONDS if options.smoke else options.seconds,
                    seeds=range(1, 2 if options.smoke else options.seeds + 1),
                    simulator=options.sim,
                    reference=options.reference,
                )
    except ChildFailed as failed:
        print(f"routing: {failed}", file=sys.stderr)
        return 1
    return 0


def parsed() -> argparse.Namespace:
    """Returns the arguments of the command line."""
    parser = argparse.ArgumentParser(prog="routing", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="two seconds of a few policies, to check that it works")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"number of runs (default {SEEDS})")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"virtual time (default {SECONDS:.0f})")
    parser.add_argument("--scrape", type=float, default=SCRAPE_S, help="seconds between two scrapes (default 0.05)")
    parser.add_argument("--page", type=float, default=0.0, help="seconds that a server stands still for its metrics page")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default 1)")
    parser.add_argument("--config", type=Path, action="append", default=[], help="a configuration to compare; repeatable")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="MODEL/TRAFFIC/POLICY",
        help="only models, traffic and policies with names that begin like this; any part may be empty; repeatable",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object: model -> traffic -> policy -> runs")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file, as in the documentation")
    parser.add_argument("--svg", type=Path, help="write a chart to this file")
    parser.add_argument("--cold", action="store_true", help="the first quarter of the time, with servers of many paces")
    parser.add_argument("--trace", action="append", default=[], metavar="FILE", help="play this trace (Mooncake, Azure, ...); repeatable")
    parser.add_argument("--scale", type=float, default=1.0, help="times the requests per second of the trace (default 1)")
    parser.add_argument(
        "--busy",
        type=float,
        action="append",
        default=[],
        metavar="PERCENT",
        help="scale the traces until the servers are so busy under the oracle; repeatable",
    )
    parser.add_argument("--servers", type=int, default=0, help="number of servers (default 8)")
    parser.add_argument("--envoy", action="store_true", help="in real time, behind a real Envoy (`routing_live`)")
    parser.add_argument("--pace", type=float, default=1.0, help="with --envoy: times as slow servers and clients, for a busy machine")
    parser.add_argument("--sim", default="", metavar="BINARY", help="with --envoy: a simulator instead of `epp sim`")
    parser.add_argument("--reference", default="", metavar="BINARY", help="with --envoy: another picker to measure")
    options = parser.parse_args()
    if options.busy and not options.trace:
        parser.error("--busy scales traces: name one with --trace")
    return options


def main() -> int:
    options = parsed()
    if options.envoy:
        return in_real_time(options)
    seeds, seconds = (1, SMOKE_SECONDS) if options.smoke else (options.seeds, options.seconds)
    files = tuple((file.stem, file.read_text()) for file in options.config)
    todo = cells(options.only, options.smoke, options.cold)
    warm_up = 0.0 if options.cold else WARM_UP
    times = WARM_UP * seconds if options.cold else seconds, options.scrape, options.page, warm_up
    if options.trace:
        todo = with_traces(todo, options.trace, options.busy)
    played = options.scale, options.servers
    tasks = [Task(*cell, files, seed, *times, *played) for cell in todo for seed in range(1, seeds + 1)]
    tables: dict[str, dict[str, Table]] = {}
    raw: dict[str, dict[str, dict[str, list[dict[str, float]]]]] = {}
    with multiprocessing.get_context("fork").Pool(max(1, options.jobs)) as pool:
        results = pool.imap(run, tasks)
        for kind, workload, *_ in todo:
            runs = [next(results) for _ in range(seeds)]
            table = tables.setdefault(kind, {})[workload] = summary(runs, ORACLE)
            raw.setdefault(kind, {})[workload] = {name: [asdict(run[name]) for run in runs] for name in runs[0]}
            if not options.json:
                print(text(f"{kind}, {workload}", table), flush=True)
    if options.json:
        json.dump(raw, sys.stdout, indent=1)
    elif len(todo) > 1:
        print(digest_text(tables))
        if options.cold:
            print(cold_text(tables, "default"))
        if options.trace:
            print(traces_text(tables, "default"))
    if options.markdown:
        options.markdown.write_text(markdown(tables))
    if options.svg:
        options.svg.write_text(chart(tables))
    return 0


if __name__ == "__main__":
    sys.exit(main())
