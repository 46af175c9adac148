"""Shows the demo while it runs: a table every second on a terminal, otherwise a plain line every few seconds.

The figures of servers come from their page `/sim/stats`, the streams of workers and the cache predictions from the picker's metrics
page, and CPU times from /proc. If a page cannot be read, its last figures stay.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from loadtest.demo import children
from loadtest.demo.stack import Fleet, Replica, get
from loadtest.demo.summary import percentile
from loadtest.demo.traffic import Result

RECENT = 100
LINE_EVERY = 3  # without a terminal, every third reading is shown as a line
STREAMS = re.compile(rb'^llm_d_epp_streams_open\{worker="(\d+)"\} (\S+)$', re.MULTILINE)
PREDICTED = re.compile(rb'^llm_d_epp_prefix_(predicted|checked_prompt)_tokens_total\{[^\n]*,port="(\d+)"\} (\S+)$', re.MULTILINE)
WORKER = re.compile(r"epp: worker (\d+)")
UNKNOWN = "–"


@dataclass(frozen=True, slots=True)
class Server:
    """The present figures of one simulated server.

    `predicted_share`: the share of prompt tokens that the picker predicted as cached; None if the picker never chose the server.
    """

    name: str
    requests: int
    running: int
    waiting: int
    kv_use: float
    cached_share: float
    predicted_share: float | None = None


@dataclass(frozen=True, slots=True)
class Worker:
    """The present figures of one process of the picker. `cpu`: in cores. `streams`: None if the process is no worker."""

    name: str
    streams: int | None
    cpu: float


@dataclass(slots=True)
class Gauge:
    """Reads the figures of servers and workers."""

    pickers: Sequence[Replica]
    servers: list[Server] = field(default_factory=list)
    workers: list[Worker] = field(default_factory=list)
    # (number of the picker, port of the server) -> its `predicted` and `checked_prompt` tokens.
    tokens: dict[tuple[int, int], dict[bytes, float]] = field(default_factory=dict)
    _cpu: dict[int, tuple[float, float]] = field(default_factory=dict)

    def read_servers(self, fleet: Fleet) -> None:
        """Reads the figures of all servers of a fleet from one of them."""
        page = get(fleet.addresses[0][1], "/sim/stats?all")
        if page is not None:
            self.servers = [
                _server(stats, self.predicted_share([int(stats["address"].rpartition(":")[2])])) for stats in msgspec.json.decode(page)
            ]

    def predicted_share(self, ports: Iterable[int]) -> float | None:
        """Returns the share of the prompt tokens for these ports that the picker predicted as cached; None if not known."""
        wanted = set(ports)
        known = [tokens for (_, port), tokens in self.tokens.items() if port in wanted]
        prompt = sum(tokens.get(b"checked_prompt", 0.0) for tokens in known)
        return sum(tokens.get(b"predicted", 0.0) for tokens in known) / prompt if prompt else None

    def read_workers(self, now: float) -> None:
        """Reads the figures of the pickers' processes, and their predictions. `now`: monotonic time in seconds."""
        before, self._cpu, workers = self._cpu, {}, []
        for number, picker in enumerate(self.pickers, 1):
            page = get(picker.metrics_port, "/metrics")
            for kind, port, value in PREDICTED.findall(page or b""):
                self.tokens.setdefault((number, int(port)), {})[kind] = float(value)
            streams = {int(worker): int(float(value)) for worker, value in STREAMS.findall(page or b"")}
            of = f"picker {number} " if len(self.pickers) > 1 else ""
            for pid in children.descendants(picker.child.pid):
                name = children.command_name(pid)
                match = WORKER.match(name)
                spent = children.cpu_seconds(pid)
                then, at = before.get(pid, (spent, now))
                self._cpu[pid] = spent, now
                cpu = (spent - then) / (now - at) if now > at else 0.0
                shown = of + name.removeprefix("epp: ")
                workers.append(Worker(shown, streams.get(int(match[1])) if match else None, cpu))
        self.workers = sorted(workers, key=lambda worker: worker.name)


def _server(stats: dict[str, Any], predicted_share: float | None) -> Server:
    prompt = stats["prompt_tokens"]
    return Server(
        stats["address"],
        stats["requests"],
        stats["running"],
        stats["waiting"],
        stats["kv_blocks_in_use"] / stats["kv_blocks"],
        stats["cached_tokens"] / prompt if prompt else 0.0,
        predicted_share,
    )


def latest(results: Sequence[Result]) -> str:
    """Describes the latest results in a few words."""
    recent = [result.first_token_s * 1e3 for result in results[-RECENT:] if not result.error]
    errors = sum(1 for result in results if result.error)
    median, late = percentile(recent, 0.5), percentile(recent, 0.95)
    return f"{len(results)} requests, {errors} errors, first token p50 {median:.0f} ms p95 {late:.0f} ms"


def drawn(title: str, gauge: Gauge, results: Sequence[Result], curl: str) -> Group:
    """Returns the view for a terminal."""
    servers = Table("endpoint", title=title, title_justify="left")
    for name in ("requests", "running", "waiting", "KV in use", "prompt from cache", "predicted"):
        servers.add_column(name, justify="right")
    for each in gauge.servers:
        servers.add_row(
            each.name,
            str(each.requests),
            str(each.running),
            str(each.waiting),
            f"{each.kv_use:.0%}",
            f"{each.cached_share:.0%}",
            _share(each.predicted_share),
        )
    workers = Table("picker process")
    for name in ("streams", "CPU"):
        workers.add_column(name, justify="right")
    for worker in gauge.workers:
        workers.add_row(worker.name, "" if worker.streams is None else str(worker.streams), f"{worker.cpu:.1%}")
    return Group(servers, workers, Text(latest(results)), Text("try it:  " + curl, style="dim", no_wrap=True, overflow="ignore"))


def line(title: str, gauge: Gauge, results: Sequence[Result]) -> str:
    """Returns the view as one line for a log."""
    load = " ".join(
        f"{each.requests}/{each.running}/{each.waiting}/{each.cached_share:.0%}/{_share(each.predicted_share)}" for each in gauge.servers
    )
    workers = " ".join(f"{w.name}={w.cpu:.1%}" for w in gauge.workers)
    return f"{title}: {latest(results)}; servers (requests/running/waiting/cached/predicted) {load}; CPU {workers}"


def _share(share: float | None) -> str:
    return UNKNOWN if share is None else f"{share:.0%}"


class Screen:
    """Shows readings: as a live table on a terminal, otherwise every third reading as a line."""

    def __init__(self, console: Console, curl: str) -> None:
        self._console = console
        self._curl = curl
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._looks = 0

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, title: str, gauge: Gauge, results: Sequence[Result]) -> None:
        """Shows the present figures."""
        self._looks += 1
        if self._live is not None:
            self._live.update(drawn(title, gauge, results, self._curl), refresh=True)
        elif self._looks % LINE_EVERY == 0:
            self._console.print(line(title, gauge, results), soft_wrap=True, markup=False)
