"""`epp size`: computes what a picker needs for a load: cores, workers, memory, flags."""

import json
import math
from dataclasses import asdict
from typing import Any

import click

from loadtest.sizing.model import COSTS, MACHINE, REMEASURE, Cost, Load, Size, memory_limit_mib, memory_request_mib, shared_memory_mib, size
from loadtest.sizing.trace_load import TraceLoad, load_of
from workers.cli.flags import Whole
from workers.cli.output import echo, echo_lines, echo_text
from workers.shared.recording import Unreadable
from workers.shared.recording.reader import arrivals

PROMPT_KB = 4.0


class Amount(click.FloatRange):
    """A flag's type for finite numbers. click alone would accept NaN in every range, and infinity in an open range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


@click.command("size")
@click.option("--rps", type=Amount(0), help="Requests per second. Needed without --trace.")
@click.option("--prompt-kb", type=Amount(0, 1_000_000), help="Mean size of a request's body, in KB. [default: 4, or that of the trace]")
@click.option("--pods", type=Whole(1, 65_000), default=8, show_default=True, help="Model servers.")
@click.option(
    "--chunk-rate",
    type=Amount(0),
    help="Chunks of streamed answers per second, of all streams together. [default: 0, or the trace's output tokens]",
)
@click.option("--streams", type=Whole(1), help="Streams open at once. [default: from 25 chunks per second and stream, or 2 s per request]")
@click.option("--workers", type=Whole(1, 256), help="Compute for this number of workers. [default: as many as needed]")
@click.option("--cache-tokens", type=Whole(1), default=500_000, show_default=True, help="Prompt tokens that one model server caches.")
@click.option("--kv-events", is_flag=True, help="A precise prefix producer follows the servers' KV events.")
@click.option(
    "--trace",
    default="",
    help="Take the load from the busiest minute of a trace: a recording, or a file of Mooncake, Azure LLM inference, BurstGPT, "
    "vLLM's or llm-d's benchmarks.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with all constants.")
def command(
    rps: float | None,
    prompt_kb: float | None,
    pods: int,
    chunk_rate: float | None,
    streams: int | None,
    workers: int | None,
    cache_tokens: int,
    kv_events: bool,
    trace: str,
    as_json: bool,
) -> None:
    """Size a picker: cores, workers, memory and flags for a load, from measured costs."""
    if trace:
        found = _measured(trace)
        rps = found.rps if rps is None else rps
        prompt_kb = found.prompt_kb if prompt_kb is None else prompt_kb
        chunk_rate = found.chunk_rate if chunk_rate is None else chunk_rate
    if rps is None:
        raise click.UsageError("give --rps, or a --trace that has it")
    prompt_kb = PROMPT_KB if prompt_kb is None else prompt_kb
    load = Load(rps, prompt_kb, pods, chunk_rate or 0.0, streams or 0, workers or 0, cache_tokens, kv_events)
    needs = size(load)
    if as_json:
        echo_text(json.dumps(plain(load, needs), indent=2))
        return
    echo_lines(report(load, needs))


def _measured(trace: str) -> TraceLoad:
    """Measures the load of a trace, and says on standard error what it has read. Raises ClickException."""
    try:
        found = load_of(arrivals(trace, lambda problem: echo(f"warning: {problem}", err=True)))
    except Unreadable as wrong:
        raise click.ClickException(str(wrong)) from wrong
    if not found.requests:
        raise click.ClickException(f"{trace}: the trace has no request")
    echo(f"{trace}: {found.requests:,} requests in {found.seconds:,.0f} s", err=True)
    return found


def plain(load: Load, needs: Size) -> dict[str, object]:
    """Returns the result as plain values, for JSON."""
    return {
        "load": {**asdict(load), "streams": load.open_streams},
        "needs": {**asdict(needs), "cores": needs.cores},
        "recommended": {
            "flags": needs.flags(),
            "cpu_request": needs.cpu_request,
            "cpu_limit": needs.cpu_limit,
            "memory_request_mib": memory_request_mib(needs),
            "memory_limit_mib": memory_limit_mib(needs),
        },
        "measured": {"machine": MACHINE, "costs": {name: cost._asdict() for name, cost in COSTS.items()}},
    }


def report(load: Load, needs: Size) -> list[str]:
    """Returns the result as lines of text: the load, its needs, the recommended settings, the constants and their sources."""
    workers = f"{needs.workers} worker{'s' * (needs.workers > 1)}"
    flags = dict(flag.removeprefix("--").split("=") for flag in needs.flags())
    lines = [
        f"{load.requests:,g} requests/s of {load.prompt_kb:,g} KB, {load.chunks:,g} chunks/s, {load.endpoints:,} endpoints, "
        f"{load.open_streams:,} streams open",
        "",
        f"  cores           {needs.cores:8.2f}   {workers} {needs.worker_cores:.2f} ({min(needs.worker_share, 1):.0%} of each), "
        f"supervisor {needs.supervisor_cores:.2f}",
        f"  memory          {needs.memory_mib:8,.0f} MiB of all processes, including the used part of shared memory",
        f"  shared memory   {needs.shared_mib:8,.0f} MiB, which /dev/shm must hold",
        f"  body traffic    {2 * load.requests * load.prompt_kb / 1e3:8,.1f} MB/s, from and to the gateway together",
        "",
        "recommended",
        f"  epp serve {' '.join(needs.flags())}",
        f"  resources: requests cpu {needs.cpu_request:g}, memory {memory_request_mib(needs)}Mi; limits cpu {needs.cpu_limit}, "
        f"memory {memory_limit_mib(needs)}Mi; /dev/shm {shared_memory_mib(needs.workers, flags)}Mi; open files {needs.open_files:,}",
    ]
    lines += [f"  warning: {text}" for text in needs.warnings]
    lines += ["", f"measured on {MACHINE}; other machines differ by up to a factor of 2, so measure yours: {REMEASURE}"]
    return lines + [f"  {price(cost):>28}  {cost.what:36} {cost.source}" for cost in COSTS.values()]


def price(cost: Cost) -> str:
    """Formats a constant with its unit: the cost of one item, and how much more an item costs at low rates."""
    if cost.mib:
        return f"{cost.mib:g} MiB"
    added = f", +{1e6 * cost.most / cost.half:,.0f} µs at low rates" if cost.most else ""
    return f"{cost.each:g} µs{added}"
