"""Simulated model servers: `python -m loadtest.sim --servers 4 --port 8000`.

Any number of OpenAI-compatible servers in one process, which behave like vLLM under load: a queue,
a batch, a KV cache with prefix reuse, LoRA slots, streamed answers, a metrics page, and faults on
request (`POST /sim/fault`, header `x-sim-fault`). Servers with a role (`--role prefill,decode`)
serve disaggregated requests as vLLM does behind a routing sidecar. `GET /sim/stats` tells what a server did,
`/sim/stats?all` what all did. Every answer names its server in `x-sim-server`, and the bytes that
arrived in `x-sim-body-sha256` and `x-sim-body-bytes`.

Prints one line that begins with `ready` when all servers listen. SIGTERM and SIGINT end it with
exit code 0. This file is the command line; `loadtest.engine` is the model, `loadtest.sim_server`
the servers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from loadtest.engine import EngineSettings
from loadtest.sim_server import Fleet, ServerSettings
from loadtest.sim_stages import ROLE_LABEL, ROLES

SERVERS_MAX = 2_000
PORT_MAX = 65_535


def parser() -> argparse.ArgumentParser:
    """The command line."""
    line = argparse.ArgumentParser(prog="python -m loadtest.sim", description=__doc__.split("\n")[0])
    line.add_argument("--servers", type=_whole(1, SERVERS_MAX), default=1, help="how many")
    line.add_argument("--host", default="127.0.0.1")
    line.add_argument("--port", type=_whole(0, PORT_MAX), default=8000, help="of the first; 0: the system chooses")
    line.add_argument("--addresses", help="HOST:PORT,HOST:PORT,... instead of --servers")
    line.add_argument("--endpoints-file", type=Path, help="write a file-discovery YAML once ready")
    line.add_argument("--labels", default="", help="KEY=VALUE,... of every endpoint in that file")
    line.add_argument("--role", default="", help=f"of all servers, or one each by commas: {', '.join(ROLES)}")
    line.add_argument("--model", default="sim-model", help="one name or several, by commas")
    line.add_argument("--loras", default="", help="names of LoRA adapters, by commas")
    line.add_argument("--max-loras", type=_whole(1, 1_000), default=2, help="adapter slots")
    line.add_argument("--seed", type=int, default=0, help="changes the texts")
    line.add_argument("--time-scale", type=_number(1e-3, 1e4), default=1.0, help="2 = twice as fast")
    engine = line.add_argument_group("engine")
    engine.add_argument("--max-running", type=_whole(1, 100_000), default=256)
    engine.add_argument("--kv-blocks", type=_whole(1, 10_000_000), default=20_000)
    engine.add_argument("--block-size", type=_whole(1, 1_024), default=16, help="tokens")
    engine.add_argument("--prefill-us-per-token", type=_number(0, 1e6), default=50.0)
    engine.add_argument("--decode-ms", type=_number(0, 1e6), default=20.0, help="step of one request")
    engine.add_argument("--decode-growth", type=_number(0, 10), default=0.005, help="of a step per further request")
    engine.add_argument("--lora-load-ms", type=_number(0, 1e6), default=50.0)
    return line


def _whole(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {low} to {high}")
        return int(text)

    return parse


def _number(low: float, high: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is no number from {low:g} to {high:g}")
        return value

    return parse


def names(text: str) -> tuple[str, ...]:
    """A list by commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def addresses(options: argparse.Namespace) -> list[tuple[str, int]]:
    """Where to listen, in order. Raises ValueError."""
    if options.addresses is None:
        first = options.port
        if first and first + options.servers - 1 > PORT_MAX:
            raise ValueError(f"--servers {options.servers} from --port {first} go beyond {PORT_MAX}")
        return [(options.host, first + n if first else 0) for n in range(options.servers)]
    pairs = []
    for text in names(options.addresses):
        host, colon, port = text.rpartition(":")
        if not colon or not host or not port.isdigit() or int(port) > PORT_MAX:
            raise ValueError(f"--addresses has {text!r}, which is not HOST:PORT")
        pairs.append((host, int(port)))
    if not 0 < len(pairs) <= SERVERS_MAX:
        raise ValueError(f"--addresses has {len(pairs)} entries, 1 to {SERVERS_MAX} are possible")
    return pairs


def labels(text: str) -> dict[str, str]:
    """KEY=VALUE,... Raises ValueError."""
    pairs = [item.partition("=") for item in names(text)]
    if not all(key and equals for key, equals, _ in pairs):
        raise ValueError(f"--labels is {text!r}, which is not KEY=VALUE,KEY=VALUE")
    return {key: value for key, _, value in pairs}


def roles(options: argparse.Namespace, servers: int) -> tuple[str, ...]:
    """One for all, or one each. Raises ValueError."""
    given = names(options.role) or ("",)
    unknown = [role for role in given if role and role not in ROLES]
    if unknown:
        raise ValueError(f"--role has {unknown[0]!r}; roles are {', '.join(ROLES)}")
    if len(given) not in (1, servers):
        raise ValueError(f"--role names {len(given)} roles for {servers} servers; give one, or one each")
    return given


def settings(options: argparse.Namespace) -> ServerSettings:
    """Options -> what all servers have in common."""
    loras = names(options.loras)
    engine = EngineSettings(
        max_running=options.max_running,
        kv_blocks=options.kv_blocks,
        block_size=options.block_size,
        prefill_s_per_token=options.prefill_us_per_token / 1e6,
        decode_s=options.decode_ms / 1e3,
        decode_growth=options.decode_growth,
        max_loras=options.max_loras if loras else 0,
        lora_load_s=options.lora_load_ms / 1e3,
    )
    models = names(options.model)
    if not models:
        raise ValueError("--model is empty; name at least one model")
    return ServerSettings(
        engine=engine,
        models=models,
        loras=loras,
        seed=options.seed,
        time_scale=options.time_scale,
    )


def endpoints_yaml(fleet: Fleet, with_labels: dict[str, str]) -> str:
    """The servers as a file-discovery document; every scalar is quoted."""
    lines = ["endpoints:"]
    for server in fleet.servers:
        lines.append(f"- name: {json.dumps(server.name)}")
        lines.append(f"  address: {json.dumps(server.host)}")
        lines.append(f'  port: "{server.port}"')
        every = with_labels | ({ROLE_LABEL: server.role} if server.role else {})
        if every:
            lines.append(f"  labels: {json.dumps(every)}")
    return "\n".join(lines) + "\n"


def write_whole(path: Path, text: str) -> None:
    """Replace a file at once, so that nobody reads half of it."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(text)
    part.replace(path)


async def serve(where: list[tuple[str, int]], options: argparse.Namespace) -> None:
    """Listen, say so, and wait for a signal."""
    ending = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)
    fleet = Fleet(where, settings(options), roles(options, len(where)))
    await fleet.listen()
    try:
        if options.endpoints_file is not None:
            text = endpoints_yaml(fleet, labels(options.labels))
            write_whole(options.endpoints_file, text)
        first, last = fleet.servers[0], fleet.servers[-1]
        ends = f"first={first.host}:{first.port} last={last.host}:{last.port}"
        print(f"ready servers={len(fleet.servers)} {ends}", flush=True)
        await ending.wait()
    finally:
        fleet.close()
    await asyncio.sleep(0)  # lets aborted connections go


def raise_file_limit() -> None:
    """Hundreds of servers with many connections each need more than the usual 1,024 files."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def run(work: Coroutine[Any, Any, None]) -> None:
    """Under uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(work)
    else:
        uvloop.run(work)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0 after a signal, 1 if nothing can be opened, 2 for a wrong command line."""
    line = parser()
    options = line.parse_args(arguments)
    try:
        where = addresses(options)
        settings(options)
        labels(options.labels)
        roles(options, len(where))
    except ValueError as error:
        line.error(str(error))
    raise_file_limit()
    try:
        run(serve(where, options))
    except OSError as error:
        print(f"sim: {error}; choose another --port, --addresses or file", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
