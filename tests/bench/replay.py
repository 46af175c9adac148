"""How close replays are to reality: `python -m tests.bench.replay`.

For each kind of traffic, the demo's cluster runs twice in real time, with the built-in configuration and with another one, and records.
Then the recording of the first run is replayed under both configurations, and its times to the first token are compared with those that
were measured in each run. Goal: p50 and p95 within 10 %.

    chats            the users of the demo: a closed loop of conversations
    nothing shared   prompts of 20 to 8,000 tokens that share nothing, at random times
    tenants          chats, questions about documents, prompts that share nothing, and batches, at once

The machine should run nothing else: what it takes from the cluster differs from run to run, and no model knows it.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import yaml

from loadtest.demo.children import Children, environment
from loadtest.demo.stack import MODEL, Plan, Stack
from loadtest.demo.traffic import Run
from tests.bench.routing_live import text_of
from tests.bench.routing_traffic import Session, tenants, unshared
from tests.bench.routing_zoo import FIELD_TEXT

USERS = 24
SEED = 3
ANSWER_S = 60.0
RATES = {"nothing shared": 0.3, "tenants": 0.2}
MAKE: Mapping[str, Callable[[random.Random, float, float], list[Session]]] = {"nothing shared": unshared, "tenants": tenants}
KINDS = ("chats", *MAKE)
GOAL = 0.10


class Compared(NamedTuple):
    """Times to the first token in seconds, measured and replayed: p50, p95."""

    measured: tuple[float, float]
    replayed: tuple[float, float]

    @property
    def off(self) -> list[float]:
        return [there / here - 1 for here, there in zip(self.measured, self.replayed, strict=True)]


async def play(url: str, sessions: Sequence[Session]) -> None:
    """Plays all sessions. A turn starts after the pause that follows the end of the last answer."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as client:

        async def one(session: Session) -> None:
            await asyncio.sleep(max(0.0, started + session.at - loop.time()))
            for turn in session.turns:
                await asyncio.sleep(turn.think_s)
                body = {
                    "model": MODEL, "messages": [{"role": "user", "content": text_of(turn.prompt)}], "max_tokens": turn.output,
                    "stream": True, "stream_options": {"include_usage": True},
                }  # fmt: skip
                async with client.post(url, json=body) as response:
                    async for _ in response.content.iter_any():
                        pass

        await asyncio.gather(*map(one, sessions), return_exceptions=True)


async def run(kind: str, config: str, folder: Path, seconds: float) -> None:
    """Runs the demo's cluster with a configuration, and records it. `config`: the text; "": the built-in one."""
    plan = Plan(compares=False, seed=SEED, config=yaml.safe_load(config) if config else None, record_dir=str(folder))
    with tempfile.TemporaryDirectory(prefix="epp-bench-") as directory:
        children = Children(Path(directory))
        try:
            stack = Stack(plan, children, lambda _: None)
            await stack.start()
            if kind == "chats":
                traffic: Any = Run(stack.url, MODEL, USERS, SEED).go()
            else:
                traffic = play(stack.url, MAKE[kind](random.Random(SEED), seconds, RATES[kind]))
            task = asyncio.create_task(traffic)
            await asyncio.wait({task}, timeout=seconds)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        finally:
            await children.end()


def replayed(folder: Path, base: str, *configs: str) -> dict[str, Any]:
    """Returns what `epp record replay --json` tells. `base`, `configs`: files."""
    flags = [f"--base={base}"] if base else []
    argv = [sys.executable, "-P", "-m", "workers", "replay", str(folder), "--json", *flags, *(f"--config={c}" for c in configs)]
    done = subprocess.run(argv, env=environment(), capture_output=True, text=True, check=True)
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def compare(kind: str, folder: Path, other: str, seconds: float) -> dict[str, Compared]:
    """Runs one kind of traffic under both configurations. Returns configuration -> times."""
    config = folder / "other.yaml"
    config.write_text(other)
    asyncio.run(run(kind, "", folder / "first", seconds))
    asyncio.run(run(kind, other, folder / "second", seconds))
    told = replayed(folder / "first", "", str(config))
    truth = replayed(folder / "second", str(config))["measured"]
    return {
        "recorded": Compared(_times(told["measured"]), _times(told["fit"])),
        "other": Compared(_times(truth), _times(told["configs"][str(config)])),
    }


def _times(figures: Mapping[str, float]) -> tuple[float, float]:
    return figures["ttft_p50"], figures["ttft_p95"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="replay", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="length of each run (default 60)")
    parser.add_argument("--only", action="append", choices=KINDS, help="kinds of traffic; repeatable")
    parser.add_argument("--config", type=Path, help="the other configuration (default: the field's weights)")
    parser.add_argument("--keep", type=Path, help="write the recordings into this folder and keep them")
    options = parser.parse_args()
    other = options.config.read_text() if options.config else FIELD_TEXT
    print(f"{'':32}{'measured p50, p95 ms':>22}{'replayed':>16}{'off':>16}")
    good = True
    for kind in options.only or KINDS:
        with tempfile.TemporaryDirectory() as temporary:
            folder = options.keep / kind.replace(" ", "-") if options.keep else Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            for name, found in compare(kind, folder, other, options.seconds).items():
                off = found.off
                good &= max(map(abs, off)) <= GOAL
                here, there = (" ".join(f"{1e3 * s:7.0f}" for s in side) for side in found)
                print(f"{kind + ', ' + name:32}{here:>22}{there:>16}   {off[0]:+6.1%} {off[1]:+6.1%}", flush=True)
    print(f"{'all' if good else 'not all'} within {GOAL:.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
