"""`epp demo`: runs a whole cluster on this machine, and users who chat with it.

Simulated model servers, the picker and Envoy run as child processes, the users in this process. With `--seconds`, the time is divided
into two halves with the same conversations: first through the picker, then round-robin over equal servers with cold caches. The
summary shows both side by side, and says in a sentence what the picker gained, or that the machine was too busy to tell. Without
`--seconds`, the demo runs until Ctrl-C.

With `--precise`, the caches of the servers are too small for all conversations. In the first half, the picker follows the servers' KV
events. In the second half, the same conversations go to equal servers with cold caches, through another picker, which follows no events.

With `--replicas`, several pickers serve behind one Envoy, which spreads the requests over them at random. In the first half, the pickers
share what they know through a store (redis-server or valkey-server). In the second half, other pickers share nothing.

One event loop runs everything. SIGINT, SIGTERM and SIGHUP only set an event. At the end, the children are always terminated and the
directory is removed. With `--run`, a command replaces the users, for example a load generator.
"""

import asyncio
import contextlib
import importlib.util
import json
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import yaml
from rich.console import Console

from epp.config.load import Surroundings
from loadtest.demo import summary, view
from loadtest.demo.children import ChildFailed, Children
from loadtest.demo.ports import is_free
from loadtest.demo.stack import LOOPBACK, MODEL, Fleet, Plan, Stack, Unavailable
from loadtest.demo.traffic import Run
from workers.cli.configuration import load_text, read_file
from workers.cli.flags import Whole
from workers.cli.output import echo, echo_text
from workers.host.exit_codes import ExitCode

PORT = 8080
COMPARED_S = 60.0
LOOK_S = 1.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the command line asks for."""

    plan: Plan
    users: int
    seconds: float | None
    as_json: bool
    run: str = ""


@click.command("demo")
@click.option("--seconds", type=click.FloatRange(2, 3600), help="Stop after this time: half of it with the picker, half round-robin.")
@click.option("--workers", type=Whole(1, 64), default=2, show_default=True, help="Worker processes of the picker.")
@click.option("--servers", type=Whole(1, 64), default=4, show_default=True, help="Simulated model servers.")
@click.option("--port", type=Whole(1, 65535), help="Port of the gateway. [default: 8080, or a free one if it is taken]")
@click.option("--concurrency", type=Whole(1, 1000), default=24, show_default=True, help="Users who chat at once.")
@click.option("--seed", type=int, default=1, show_default=True, help="Seed of the conversations.")
@click.option("--loras", default="", help="LoRA adapters that the servers have, separated by commas. [default: none]")
@click.option(
    "--objects-dir",
    type=click.Path(exists=True, file_okay=False),
    help="Folder with objects for the picker, as in `epp serve`. [default: none]",
)
@click.option("--config-file", default="", help="Configuration of the picker. [default: the built-in one]")
@click.option("--record-dir", default="", help="Folder into which the picker records the traffic, for `epp record replay`.")
@click.option(
    "--precise", is_flag=True, help=f"Compare precise with approximate matches on caches that evict. [default --seconds: {COMPARED_S:.0f}]"
)
@click.option(
    "--replicas",
    type=Whole(2, 8),
    help=f"Compare this many pickers that share what they know with others that do not. [default --seconds: {COMPARED_S:.0f}]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON on stdout, everything else on stderr.")
@click.option(
    "--run",
    metavar="COMMAND",
    default="",
    help="Run this command instead of the users, with {url} replaced by the gateway's address. The demo ends with its exit code.",
)
def command(
    seconds: float | None,
    workers: int,
    servers: int,
    port: int | None,
    concurrency: int,
    seed: int,
    loras: str,
    objects_dir: str | None,
    config_file: str,
    record_dir: str,
    precise: bool,
    replicas: int | None,
    as_json: bool,
    run: str,
) -> None:
    """Run the picker with simulated model servers, Envoy and traffic.

    The exit code is 0, also after Ctrl-C, or 1 if a part is missing, cannot start or ends early.
    """
    compared = [f"--{name}" for name, given in (("precise", precise), ("replicas", replicas)) if given]
    if len(compared) > 1 or (compared and run):
        raise click.UsageError(
            f"{' and '.join([*compared, *(['--run'] if run else [])])} exclude each other: each compares two runs of the users"
        )
    if precise and importlib.util.find_spec("zmq") is None:
        raise click.ClickException("--precise needs the Python module zmq: pip install 'endpoint-picker[kv-events]'")
    if replicas and importlib.util.find_spec("redis") is None:
        raise click.ClickException("--replicas needs the Python module redis: pip install 'endpoint-picker[replicas]'")
    if precise and config_file:
        raise click.UsageError("--precise and --config-file exclude each other: --precise has a configuration of its own")
    plan = Plan(
        workers,
        servers,
        port or (PORT if is_free(PORT) else 0),
        seed,
        loras,
        objects_dir or "",
        compares=not (run or compared),
        name="precise" if precise else "sharing" if replicas else "",
        evicts=precise,
        precise=precise,
        replicas=replicas or 1,
        shares=bool(replicas),
        config=_config(config_file),
        record_dir=os.path.abspath(record_dir) if record_dir else "",
    )
    seconds = seconds or (COMPARED_S if compared else None)
    demo = Demo(Wanted(plan, concurrency, seconds, as_json, run))
    try:
        asyncio.run(demo.run())
        sys.exit(demo.exit_code)
    except (ChildFailed, Unavailable, OSError) as error:
        echo_text(f"error: {error}", err=True)
        sys.exit(ExitCode.FAULT)


def _config(path: str) -> dict[str, Any] | None:
    """Returns the configuration in a file, which must not name endpoints; None if no file is given."""
    if not path:
        return None
    text = read_file(path)
    load_text(text, path, allow_experimental=True, surroundings=Surroundings())
    found: dict[str, Any] = yaml.safe_load(text)
    if "discovery" in found.get("dataLayer", {}):
        raise click.UsageError(f"{path}: the demo has its own endpoints; remove dataLayer.discovery")
    return found


class Demo:
    """Runs the demo once."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._console = Console(stderr=wanted.as_json, highlight=False)
        self._runs: dict[str, Run] = {}
        self._stack: Stack
        self._gauge: view.Gauge
        self._curl = ""
        self.exit_code = int(ExitCode.OK)

    async def run(self) -> None:
        """Runs until the time is over, a signal arrives or a child fails. Raises the failure."""
        async with _signals() as stopped:
            with tempfile.TemporaryDirectory(prefix="epp-demo-") as directory:
                children = Children(Path(directory))
                self._stack = Stack(self._wanted.plan, children, self._say)
                work = asyncio.create_task(self._work(children))
                stop = asyncio.create_task(stopped.wait())
                try:
                    await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    work.cancel()
                    stop.cancel()
                    outcome = (await asyncio.gather(work, stop, return_exceptions=True))[0]
                    await children.end()
        if isinstance(outcome, Exception):
            raise outcome
        self._conclude()

    async def _work(self, children: Children) -> None:
        stack, wanted = self._stack, self._wanted
        await stack.start()
        self._curl = curl(stack.port)
        if wanted.run:
            await self._command(wanted.run.replace("{url}", f"http://{LOOPBACK}:{stack.port}"))
            return
        self._gauge = view.Gauge(stack.pickers)
        self._say(f"try it:  {self._curl}")
        half = wanted.seconds / 2 if wanted.seconds else None
        if not wanted.plan.compares and half is not None:
            await self._compare(half, children)
            return
        await self._phase("picker", stack.url, stack.picked, half, children)
        if half is not None:
            await self._phase("round robin", stack.round_robin_url, stack.round_robin, half, children)

    async def _compare(self, half: float, children: Children) -> None:
        """Runs two phases, each in its own cluster; the second one lacks precise matches, or the store."""
        stack, plan = self._stack, self._wanted.plan
        await self._phase(plan.name, stack.url, stack.picked, half, children)
        other = replace(plan, name="approximate" if plan.precise else "alone", precise=False, shares=False, port=0)
        self._stack = stack = Stack(other, children, self._say)
        await stack.start()
        self._gauge = view.Gauge(stack.pickers)
        await self._phase(other.name, stack.url, stack.picked, half, children)

    async def _command(self, text: str) -> None:
        """Runs a command with this terminal and waits for its end. Ctrl-C also reaches the command."""
        self._say(f"running  {text}")
        process = await asyncio.create_subprocess_exec(*shlex.split(text))
        try:
            self.exit_code = await process.wait()
        except asyncio.CancelledError:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()
            raise

    async def _phase(self, name: str, url: str, fleet: Fleet, seconds: float | None, children: Children) -> None:
        """Runs users and refreshes the view. `seconds`: the duration; None means no limit."""
        run = self._runs[name] = Run(url, MODEL, self._wanted.users, self._wanted.plan.seed)
        users = asyncio.create_task(run.go())
        watching = asyncio.create_task(self._watch(name, run, fleet, children))
        try:
            done, _ = await asyncio.wait({users, watching}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            users.cancel()
            watching.cancel()
            await asyncio.gather(users, watching, return_exceptions=True)
        for task in done:
            await task

    async def _watch(self, name: str, run: Run, fleet: Fleet, children: Children) -> None:
        loop = asyncio.get_running_loop()
        ports = [port for _, port in fleet.addresses]
        begun = loop.time()
        with view.Screen(self._console, self._curl) as screen:
            while True:
                await asyncio.sleep(LOOK_S)
                children.check()
                # In a thread: waiting for pages here would delay the users, and make their times wrong.
                await asyncio.to_thread(self._read, loop.time(), fleet)
                run.predicted_share = self._gauge.predicted_share(ports)
                screen.show(f"{name}, {loop.time() - begun:.0f} s", self._gauge, run.results)

    def _read(self, now: float, fleet: Fleet) -> None:
        self._gauge.read_workers(now)
        self._gauge.read_servers(fleet)

    def _say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False)

    def _conclude(self) -> None:
        """Prints the summary, if there are results."""
        columns = summary.columns(self._runs)
        if not columns:
            return
        if self._wanted.as_json:
            echo(json.dumps(summary.as_json(columns) | {"verdict": summary.verdict(self._runs)}))
            return
        self._console.print(summary.table(columns))
        if said := summary.verdict(self._runs):
            self._say(said)
        for name, run in self._runs.items():
            for error in sorted({result.error for result in run.results if result.error})[:3]:
                self._say(f"{name}: {error}")


def curl(port: int) -> str:
    """Returns a curl command that sends one request, to try by hand."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
    return f"curl -i http://{LOOPBACK}:{port}/v1/chat/completions -H 'content-type: application/json' -d '{json.dumps(body)}'"


@asynccontextmanager
async def _signals() -> AsyncIterator[asyncio.Event]:
    """Yields an event that SIGINT, SIGTERM and SIGHUP set."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in SIGNALS:
        loop.add_signal_handler(number, stopped.set)
    try:
        yield stopped
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
