"""`epp demo`: a whole cluster on this machine, and users who chat with it.

Simulated model servers, the picker and Envoy run as child processes, the users in this one. With `--seconds` the time is
split in two halves with the same conversations: first through the picker, then round-robin over equal servers
with cold caches; the summary sets both side by side. Without it the picker runs until Ctrl-C.

One event loop runs everything. SIGINT, SIGTERM and SIGHUP only set an event; whatever happens, the children are ended, the
directory is removed and nothing stays behind. With `--run` a command takes the users' place: a load generator, for example.
"""

import asyncio
import contextlib
import json
import shlex
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console

from workers.demo import summary, view
from workers.demo.children import ChildFailed, Children, is_free
from workers.demo.stack import LOOPBACK, MODEL, Fleet, Plan, Stack, Unavailable
from workers.demo.traffic import Run
from workers.exit_codes import ExitCode

PORT = 8080
LOOK_S = 1.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Wanted:
    """The command line."""

    plan: Plan
    users: int
    seconds: float | None
    as_json: bool
    run: str = ""


@click.command("demo")
@click.option(
    "--seconds", type=click.FloatRange(2, 3600), help="End by itself: one half with the picker, one round-robin."
)
@click.option(
    "--workers", type=click.IntRange(1, 64), default=2, show_default=True, help="Worker processes of the picker."
)
@click.option("--servers", type=click.IntRange(1, 64), default=4, show_default=True, help="Simulated model servers.")
@click.option(
    "--port", type=click.IntRange(1, 65535), help="Of the gateway. [default: 8080, or a free one if it is taken]"
)
@click.option(
    "--concurrency", type=click.IntRange(1, 1000), default=24, show_default=True, help="Users who chat at once."
)
@click.option("--seed", type=int, default=1, show_default=True, help="Changes what is said.")
@click.option("--loras", default="", help="LoRA adapters that the servers have, by commas. [default: none]")
@click.option(
    "--objects-dir",
    type=click.Path(exists=True, file_okay=False),
    help="Folder with objects for the picker, as in `epp serve`. [default: none]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON on stdout, all else on stderr.")
@click.option(
    "--run",
    metavar="COMMAND",
    default="",
    help="Run this against the gateway instead of the users, {url} being its address; end with it, and with its exit code.",
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
    as_json: bool,
    run: str,
) -> None:
    """Run the picker with simulated model servers, Envoy and traffic.

    Exit code 0, also after Ctrl-C; 1 if something is missing, cannot start or ends early.
    """
    plan = Plan(workers, servers, port or (PORT if is_free(PORT) else 0), seed, loras, objects_dir or "")
    demo = Demo(Wanted(plan, concurrency, seconds, as_json, run))
    try:
        asyncio.run(demo.run())
        sys.exit(demo.exit_code)
    except (ChildFailed, Unavailable, OSError) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(ExitCode.FAULT)


class Demo:
    """One run."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._console = Console(stderr=wanted.as_json, highlight=False)
        self._runs: dict[str, Run] = {}
        self._stack: Stack
        self._gauge: view.Gauge
        self._curl = ""
        self.exit_code = int(ExitCode.OK)

    async def run(self) -> None:
        """Until the time is over, a signal comes or a child fails."""
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
        self._gauge = view.Gauge(stack.picker.pid, stack.metrics_port)
        self._say(f"try it:  {self._curl}")
        half = wanted.seconds / 2 if wanted.seconds else None
        await self._phase("picker", stack.url, stack.picked, half, children)
        if half is not None:
            await self._phase("round robin", stack.round_robin_url, stack.round_robin, half, children)

    async def _command(self, text: str) -> None:
        """Runs beside the cluster, on this terminal; Ctrl-C reaches it too, and it is waited for."""
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
        """Users chat for that long; the view is refreshed beside them."""
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
                self._gauge.read_workers(loop.time())
                self._gauge.read_servers(fleet)
                run.predicted_share = self._gauge.predicted_share(ports)
                screen.show(f"{name}, {loop.time() - begun:.0f} s", self._gauge, run.results)

    def _say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False)

    def _conclude(self) -> None:
        """The summary of what there is."""
        columns = summary.columns(self._runs)
        if not columns:
            return
        if self._wanted.as_json:
            click.echo(json.dumps(summary.as_json(columns)))
            return
        self._console.print(summary.table(columns))
        for name, run in self._runs.items():
            for error in sorted({result.error for result in run.results if result.error})[:3]:
                self._say(f"{name}: {error}")


def curl(port: int) -> str:
    """A request to try by hand."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
    return f"curl -i http://{LOOPBACK}:{port}/v1/chat/completions -H 'content-type: application/json' -d '{json.dumps(body)}'"


@asynccontextmanager
async def _signals() -> AsyncIterator[asyncio.Event]:
    """An event that SIGINT, SIGTERM and SIGHUP set."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in SIGNALS:
        loop.add_signal_handler(number, stopped.set)
    try:
        yield stopped
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
