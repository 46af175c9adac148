"""Simulated model servers: `epp sim --servers 4 --port 8000`.

The process runs any number of OpenAI-compatible servers. They behave like vLLM under load: they have
a queue, a batch, a KV cache with prefix reuse, LoRA slots, streamed answers and a metrics page. They
show faults on request (`POST /sim/fault`, header `x-sim-fault`). Servers with a role
(`--role prefill,decode`) serve disaggregated requests like vLLM behind a routing sidecar.
`GET /sim/stats` returns the counts of one server, `/sim/stats?all` those of all servers. Every answer
names its server in `x-sim-server`, and has digest and size of the received body in
`x-sim-body-sha256` and `x-sim-body-bytes`. The servers also render prompts to token ids, like vLLM.
With `--kv-events-port` they publish KV events; the names in `--endpoints-file` then end in -rank-N,
from which a picker computes the port of each server's events.

The process prints one line that begins with `ready` when all servers listen. It exits with code 0 on
SIGTERM and SIGINT. This file is the command line; `loadtest.sim.engine` is the model, `loadtest.sim.server`
has the servers.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from loadtest.sim.engine import EngineSettings
from loadtest.sim.fleet import Fleet
from loadtest.sim.kv_dialects import DIALECTS
from loadtest.sim.kv_settings import TOPIC, EventSettings
from loadtest.sim.server import ServerSettings
from loadtest.sim.stages import ROLE_LABEL, ROLES

SERVERS_MAX = 2_000
PORT_MAX = 65_535


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    line = argparse.ArgumentParser(prog="epp sim", description=__doc__.split("\n")[0])
    line.add_argument("--servers", type=_whole(1, SERVERS_MAX), default=1, help="number of servers")
    line.add_argument("--host", default="127.0.0.1")
    line.add_argument("--port", type=_whole(0, PORT_MAX), default=8000, help="port of the first server; 0: the system chooses")
    line.add_argument("--addresses", help="HOST:PORT,HOST:PORT,... instead of --servers")
    line.add_argument("--endpoints-file", type=Path, help="write the endpoints to this file (YAML, for file discovery) once ready")
    line.add_argument("--labels", default="", help="labels of every endpoint in that file, KEY=VALUE,...")
    line.add_argument("--role", default="", help=f"role of all servers, or one role per server, separated by commas: {', '.join(ROLES)}")
    line.add_argument("--model", default="sim-model", help="one name, or several separated by commas")
    line.add_argument("--loras", default="", help="names of LoRA adapters, separated by commas")
    line.add_argument("--max-loras", type=_whole(1, 1_000), default=2, help="adapter slots")
    line.add_argument("--seed", type=int, default=0, help="seed of the generated texts")
    line.add_argument("--time-scale", type=_number(1e-3, 1e4), default=1.0, help="2 = twice as fast")
    engine = line.add_argument_group("engine")
    engine.add_argument("--max-running", type=_whole(1, 100_000), default=256, help="requests in a batch")
    engine.add_argument("--slots", type=_whole(1, 100_000), help="slots with a prefill each, instead of a batch with common steps")
    engine.add_argument("--overhead-ms", type=_number(0, 1e6), default=20.0, help="of a prompt, with --slots")
    engine.add_argument("--kv-blocks", type=_whole(1, 10_000_000), default=20_000)
    engine.add_argument("--block-size", type=_whole(1, 1_024), default=16, help="tokens")
    engine.add_argument("--prefill-us-per-token", type=_number(0, 1e6), default=50.0)
    engine.add_argument("--decode-ms", type=_number(0, 1e6), default=20.0, help="time of a step with one request")
    engine.add_argument("--decode-growth", type=_number(0, 10), default=0.005, help="growth of a step per further request")
    engine.add_argument("--lora-load-ms", type=_number(0, 1e6), default=50.0)
    engine.add_argument("--cpu-blocks", type=_whole(0, 10_000_000), default=0, help="blocks of a CPU tier, which gets the evicted ones")
    _add_events(line.add_argument_group("KV events (need pyzmq)"))
    return line


def _add_events(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--kv-events-port", type=_whole(0, PORT_MAX), default=0, help="server N publishes on this port + N; 0: no events")
    group.add_argument("--kv-replay-port", type=_whole(0, PORT_MAX), default=0, help="server N replays on this port + N; 0: no replays")
    group.add_argument("--kv-events-connect", default="", help="publish to this address, such as tcp://127.0.0.1:5557")
    group.add_argument(
        "--kv-dialect", default="vllm", help=f"one for all servers, or one per server, separated by commas: {', '.join(DIALECTS)}"
    )
    group.add_argument("--kv-topic", default=TOPIC, help="{address} and {model} are replaced (default %(default)s)")
    group.add_argument("--kv-first", type=_whole(0, 1_000_000), default=0, help="number of the first message")
    group.add_argument("--kv-kept", type=_whole(1, 1_000_000), default=10_000, help="messages kept for replays")
    group.add_argument("--kv-old-replay", action="store_true", help="replay without topics, as older engines do")


def _whole(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")
        return int(text)

    return parse


def _number(low: float, high: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {low:g} to {high:g}")
        return value

    return parse


def names(text: str) -> tuple[str, ...]:
    """Splits a list at its commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def addresses(options: argparse.Namespace) -> list[tuple[str, int]]:
    """Returns the addresses on which the servers listen, in order. Raises ValueError."""
    if options.addresses is None:
        first = options.port
        if first and first + options.servers - 1 > PORT_MAX:
            raise ValueError(f"--servers {options.servers} from --port {first} exceed port {PORT_MAX}: lower one of them")
        return [(options.host, first + n if first else 0) for n in range(options.servers)]
    pairs = []
    for text in names(options.addresses):
        host, colon, port = text.rpartition(":")
        if not colon or not host or not port.isdigit() or int(port) > PORT_MAX:
            raise ValueError(f"--addresses contains {text!r}, which is not HOST:PORT")
        pairs.append((host, int(port)))
    if not 0 < len(pairs) <= SERVERS_MAX:
        raise ValueError(f"--addresses has {len(pairs)} entries: give 1 to {SERVERS_MAX}")
    return pairs


def labels(text: str) -> dict[str, str]:
    """Parses KEY=VALUE,... Raises ValueError."""
    pairs = [item.partition("=") for item in names(text)]
    if not all(key and equals for key, equals, _ in pairs):
        raise ValueError(f"--labels is {text!r}, which is not KEY=VALUE,KEY=VALUE")
    return {key: value for key, _, value in pairs}


def roles(options: argparse.Namespace, servers: int) -> tuple[str, ...]:
    """Returns one role for all servers, or one role per server. Raises ValueError."""
    chosen = names(options.role) or ("",)
    unknown = [role for role in chosen if role and role not in ROLES]
    if unknown:
        raise ValueError(f"--role contains {unknown[0]!r}; valid roles: {', '.join(ROLES)}")
    if len(chosen) not in (1, servers):
        raise ValueError(f"--role has {len(chosen)} roles for {servers} servers: give one role, or one per server")
    return chosen


def events(options: argparse.Namespace, servers: int) -> EventSettings | None:
    """Returns how the servers publish KV events; None if they do not. Raises ValueError."""
    ports = (options.kv_events_port, options.kv_replay_port)
    if not options.kv_events_port and not options.kv_events_connect:
        if options.kv_replay_port:
            raise ValueError("--kv-replay-port needs --kv-events-port or --kv-events-connect")
        return None
    if options.kv_events_port and options.kv_events_connect:
        raise ValueError("give --kv-events-port or --kv-events-connect, not both")
    if any(port and port + servers - 1 > PORT_MAX for port in ports):
        raise ValueError(f"--kv-events-port or --kv-replay-port is too high for {servers} servers: lower it")
    if all(ports) and abs(ports[0] - ports[1]) < servers:
        raise ValueError(f"--kv-events-port and --kv-replay-port must be {servers} apart, one port per server")
    chosen = names(options.kv_dialect)
    unknown = [dialect for dialect in chosen if dialect not in DIALECTS]
    if unknown or len(chosen) not in (1, servers):
        raise ValueError(f"--kv-dialect is {options.kv_dialect!r}: give one dialect, or one per server; valid: {', '.join(DIALECTS)}")
    if importlib.util.find_spec("zmq") is None:
        raise ValueError("KV events need the Python module zmq: pip install 'endpoint-picker[kv-events]'")
    return EventSettings(
        port=options.kv_events_port,
        replay_port=options.kv_replay_port,
        connect=options.kv_events_connect,
        dialects=chosen,
        topic=options.kv_topic,
        first=options.kv_first,
        kept=options.kv_kept,
        replay_topics=not options.kv_old_replay,
    )


def settings(options: argparse.Namespace) -> ServerSettings:
    """Returns the settings that all servers share. Raises ValueError."""
    loras = names(options.loras)
    engine = EngineSettings(
        max_running=options.slots or options.max_running,
        kv_blocks=options.kv_blocks,
        block_size=options.block_size,
        overhead_s=options.overhead_ms / 1e3,
        prefill_s_per_token=options.prefill_us_per_token / 1e6,
        decode_s=options.decode_ms / 1e3,
        decode_growth=options.decode_growth,
        max_loras=options.max_loras if loras else 0,
        lora_load_s=options.lora_load_ms / 1e3,
        cpu_blocks=options.cpu_blocks,
    )
    models = names(options.model)
    if not models:
        raise ValueError("--model is empty; name at least one model")
    return ServerSettings(
        engine=engine, slots=bool(options.slots), models=models, loras=loras, seed=options.seed, time_scale=options.time_scale
    )


def endpoints_yaml(fleet: Fleet, with_labels: dict[str, str]) -> str:
    """Returns the servers as a YAML document that pickers can read as their endpoints file. Every scalar is quoted."""
    lines = ["endpoints:"]
    for rank, server in enumerate(fleet.servers):
        name = server.name if server.events is None else f"sim-rank-{rank}"
        lines.append(f"- name: {json.dumps(name)}")
        lines.append(f"  address: {json.dumps(server.host)}")
        lines.append(f'  port: "{server.port}"')
        every = with_labels | ({ROLE_LABEL: server.role} if server.role else {})
        if every:
            lines.append(f"  labels: {json.dumps(every)}")
    return "\n".join(lines) + "\n"


def write_whole(path: Path, text: str) -> None:
    """Replaces a file atomically, so that no reader sees half of it."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(text)
    part.replace(path)


async def serve(where: list[tuple[str, int]], options: argparse.Namespace) -> None:
    """Starts the servers, prints the ready line, and runs until SIGTERM or SIGINT."""
    ending = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)
    fleet = Fleet(where, settings(options), roles(options, len(where)), events(options, len(where)))
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
    await asyncio.sleep(0)  # lets the event loop drop aborted connections


def raise_file_limit() -> None:
    """Raises the limit of open files: hundreds of servers with many connections exceed the usual 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def run(work: Coroutine[Any, Any, None]) -> None:
    """Runs `work` under uvloop, if it is installed."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(work)
    else:
        uvloop.run(work)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the servers. Returns the exit code: 0 after a signal, 1 if a socket or file cannot be opened, 2 for a wrong command line."""
    line = parser()
    options = line.parse_args(arguments)
    try:
        where = addresses(options)
        settings(options)
        labels(options.labels)
        roles(options, len(where))
        events(options, len(where))
    except ValueError as error:
        line.error(str(error))
    raise_file_limit()
    try:
        run(serve(where, options))
    except OSError as error:
        print(f"sim: {error.strerror or error}; choose another --port, --addresses or file", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
