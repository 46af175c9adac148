"""`epp size`: what a picker needs for a load: cores, workers, memory, flags."""

import json
import math
from dataclasses import asdict
from typing import Any

import click

from workers.manifests.settled import memory_least_mib, shared_memory_mib
from workers.sizing import COSTS, MACHINE, REMEASURE, Cost, Load, Size, size


class Amount(click.FloatRange):
    """A number to calculate with: what is none is within any range, and infinity within an open one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found: float = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value} is no amount.", param, ctx)
        return found


@click.command("size")
@click.option("--rps", type=Amount(0), required=True, help="Requests per second.")
@click.option(
    "--prompt-kb",
    type=Amount(0, 1_000_000),
    default=4.0,
    show_default=True,
    help="Mean size of a request's body.",
)
@click.option("--pods", type=click.IntRange(1, 65_000), default=8, show_default=True, help="Model servers.")
@click.option(
    "--chunk-rate",
    type=Amount(0),
    default=0.0,
    show_default=True,
    help="Chunks of streamed answers per second, over all streams.",
)
@click.option(
    "--streams",
    type=click.IntRange(1),
    help="Requests open at once. [default: 25 chunks a second each, or 2 s a request]",
)
@click.option(
    "--workers", type=click.IntRange(1, 256), help="Show what so many would do. [default: as many as it takes]"
)
@click.option(
    "--cache-tokens",
    type=click.IntRange(1),
    default=500_000,
    show_default=True,
    help="Tokens of prompts that one server caches.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, the constants included.")
def command(
    rps: float,
    prompt_kb: float,
    pods: int,
    chunk_rate: float,
    streams: int | None,
    workers: int | None,
    cache_tokens: int,
    as_json: bool,
) -> None:
    """Size a picker: cores, workers, memory and flags for a load, from what was measured."""
    load = Load(rps, prompt_kb, pods, chunk_rate, streams or 0, workers or 0, cache_tokens)
    found = size(load)
    if as_json:
        click.echo(json.dumps(plain(load, found), indent=2))
        return
    click.echo("\n".join(told(load, found)))


def plain(load: Load, found: Size) -> dict[str, object]:
    """All of it for programs."""
    return {
        "load": {**asdict(load), "streams": load.open_streams},
        "needs": {**asdict(found), "cores": found.cores},
        "recommended": {"flags": found.flags(), "cpu_request": found.cpu_request, "cpu_limit": found.cpu_limit},
        "measured": {"machine": MACHINE, "costs": {name: cost._asdict() for name, cost in COSTS.items()}},
    }


def told(load: Load, found: Size) -> list[str]:
    """All of it for people: the load, what it takes, what to set, where the figures are from."""
    workers = f"{found.workers} worker{'s' * (found.workers > 1)}"
    flags = dict(flag.removeprefix("--").split("=") for flag in found.flags())
    # No less than `epp manifests` wants: what is recommended here is what people set there.
    limit = max(rounded(2 * found.memory_mib), memory_least_mib(found.workers, flags))
    lines = [
        f"{load.requests:,g} requests/s of {load.prompt_kb:,g} KB, {load.chunks:,g} chunks/s, {load.endpoints:,} endpoints, "
        f"{load.open_streams:,} streams open",
        "",
        f"  cores           {found.cores:8.2f}   {workers} {found.worker_cores:.2f} ({min(found.worker_share, 1):.0%} of each), "
        f"supervisor {found.supervisor_cores:.2f}",
        f"  memory          {found.memory_mib:8,.0f} MiB, of all processes, shared memory included as far as it is used",
        f"  shared memory   {found.shared_mib:8,.0f} MiB, which /dev/shm must hold",
        f"  body traffic    {2 * load.requests * load.prompt_kb / 1e3:8,.1f} MB/s from and to the gateway, together",
        "",
        "recommended",
        f"  epp serve {' '.join(found.flags())}",
        f"  resources: requests cpu {found.cpu_request:g}, memory {rounded(found.memory_mib)}Mi; limits cpu {found.cpu_limit}, memory "
        f"{limit}Mi; /dev/shm {shared_memory_mib(found.workers, flags)}Mi; open files {found.open_files:,}",
    ]
    lines += [f"  warning: {text}" for text in found.warnings]
    lines += ["", f"measured on {MACHINE}; expect a factor of 2, and measure yours: {REMEASURE}"]
    return lines + [f"  {price(cost):>26}  {cost.what:36} {cost.source}" for cost in COSTS.values()]


def price(cost: Cost) -> str:
    """A constant with its unit: what each costs, and what turning to them adds where there are few."""
    if cost.mib:
        return f"{cost.mib:g} MiB"
    added = f", +{1e6 * cost.most / cost.half:,.0f} µs where few" if cost.most else ""
    return f"{cost.each:g} µs{added}"


def rounded(mib: float) -> int:
    """Up to whole 16 MiB."""
    return 16 * -(-int(mib + 1) // 16)
