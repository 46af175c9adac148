"""Starts real processes for end-to-end tests: simulated servers, a picker, an Envoy. Also has a small HTTP client.

A `Cluster` has a directory and the processes that it starts. On exit it ends all of them and prints the log of a failed one. They listen
on free loopback ports.
"""

import asyncio
import http.client
import json
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import aiohttp

from loadtest.demo import envoy_config
from loadtest.demo.children import Child, ChildFailed, Children, environment, python
from loadtest.demo.ports import free_ports
from loadtest.demo.stack import LOOPBACK, envoy_command, envoy_path, get, picker_config, read_endpoints
from shm import observe
from shm.areas import Areas, AreaSchema
from tests.zygote import forked, started

READY_S = 40.0
ANSWER_S = 40.0
PAGE_S = 5.0  # of a metrics page
POLL_S, POLL_GROWTH, POLL_MAX_S = 0.02, 1.5, 0.3  # of `eventually`
STARTS_MAX = 3  # of a picker, if its ports are taken
MODEL = "sim-model"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
READY = re.compile(r"^llm_d_epp_ready_endpoints\{[^}]*\} [1-9]", re.MULTILINE)
GAUGE = r"^llm_d_epp_{name}\{{worker=\"(\d+)\"\}} (\S+)$"
SERVING = r"^llm_d_epp_worker_serving\{worker=\"\d+\"\} 1"


class Answer(NamedTuple):
    """An HTTP answer. Header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def server(self) -> str:
        return self.headers["x-sim-server"]

    def json(self) -> Any:
        return json.loads(self.body)


class Picker:
    """The process of a picker, and its pages."""

    def __init__(self, child: Child, grpc: int, health: int, metrics: int) -> None:
        self.child = child
        self.grpc, self.health, self.metrics = grpc, health, metrics

    def page(self) -> str:
        """Returns the metrics page. Asks again for a while if the supervisor is not there, or late."""
        pages: list[bytes | None] = []
        eventually(lambda: pages.append(get(self.metrics, "/metrics", PAGE_S)) or pages[-1] is not None, PAGE_S)
        return (pages[-1] or b"").decode()

    def gauge(self, name: str) -> list[float]:
        """Returns the values of a gauge, one per worker. Fails the test if the page has no such gauge."""
        values = re.findall(GAUGE.format(name=name), self.page(), re.MULTILINE)
        assert values, f"no gauge {name} on the metrics page"
        return [float(value) for _, value in sorted(values, key=lambda pair: int(pair[0]))]

    def counter(self, name: str) -> float:
        match = re.search(rf"^llm_d_epp_{name}(?:\{{[^}}]*\}})? (\S+)$", self.page(), re.MULTILINE)
        assert match, f"no counter {name} on the metrics page"
        return float(match[1])

    def ready(self) -> bool:
        return get(self.metrics, "/readyz") is not None

    def complete(self, workers: int) -> bool:
        """Returns whether the picker is ready and at least `workers` workers serve. (One is enough to be ready.)"""
        return self.ready() and len(re.findall(SERVING, self.page(), re.MULTILINE)) >= workers

    @property
    def instance(self) -> str:
        return f"epp-{self.grpc}"

    def in_flight(self) -> list[str]:
        """Returns a line for each endpoint that has load in flight."""
        segments, parts = observe.attach([f"/{path.name}" for path in Path("/dev/shm").glob(f"{self.instance}-*-areas")])
        schema, region = parts["areas"].schema, parts["areas"].region
        assert isinstance(schema, AreaSchema)
        counts = Areas(schema, region).inflight(schema.slots).tolist()
        del parts, region
        for segment in segments:
            segment.close()
        return [f"slot {slot}: {count} requests in flight" for slot, count in enumerate(counts) if count]


class Cluster:
    """Starts and ends all processes of one test."""

    def __init__(self) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="epp-e2e-")
        self.directory = Path(self._temporary.name)
        self.children = Children(self.directory, started)
        self._numbers = iter(range(1000))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        asyncio.run(self.children.end())
        self._temporary.cleanup()

    def wait(self, child: Child, probe: Callable[[], bool]) -> None:
        asyncio.run(self.children.ready(child, probe, READY_S))

    def fleet(self, servers: int, *flags: str) -> "Fleet":
        """Starts simulated servers in one process. `flags`: those of `epp sim`."""
        number = next(self._numbers)
        file = self.directory / f"endpoints-{number}.yaml"
        argv = python("loadtest.sim.main", "--servers", str(servers), "--port", "0", "--endpoints-file", str(file), *flags)
        child = self.children.start(f"servers {number}", argv)
        self.wait(child, lambda: "ready" in child.text())
        return Fleet(child, file)

    def fleets(self, count: int, *flags: str) -> list["Fleet"]:
        """Starts simulated servers, each in a separate process. `flags`: those of `epp sim`."""
        number = next(self._numbers)
        files = [self.directory / f"endpoints-{number}-{n}.yaml" for n in range(count)]
        options = ("--servers", "1", "--port", "0", *flags)
        started = [
            self.children.start(f"server {number}-{n}", python("loadtest.sim.main", *options, "--endpoints-file", str(file)))
            for n, file in enumerate(files)
        ]
        for child in started:
            self.wait(child, lambda child=child: "ready" in child.text())  # type: ignore[misc]
        return [Fleet(child, file) for child, file in zip(started, files, strict=True)]

    def picker(
        self,
        endpoints: Path,
        *flags: str,
        workers: int,
        run_dir: Path | None = None,
        ready: bool = True,
        config_text: str = "",
        pools_text: str = "",
        under: Sequence[str] = (),
    ) -> Picker:
        """Starts a plaintext picker. `config_text`: its configuration; "": the default one. `flags`: those of `epp serve`.

        `pools_text`: its pools file, instead of a configuration; "": it serves one pool.

        `ready`: whether to wait until it is ready. `under`: a command that runs the picker's command line. If another process has taken
        one of its ports meanwhile, it is started again with other ports.
        """
        for tries_left in reversed(range(STARTS_MAX)):
            number = next(self._numbers)
            config = self.directory / f"config-{number}.yaml"
            config.write_text(pools_text or config_text or picker_config(endpoints))
            grpc, health, metrics = free_ports(3)
            line = serve(config, grpc, health, metrics, workers, run_dir or self.directory / "run", pools=bool(pools_text))
            argv = [*under, *line, *flags]
            picker = Picker(self.children.start(f"picker {number}", argv), grpc, health, metrics)
            try:
                if ready:
                    self.wait(picker.child, partial(picker.complete, workers))
                return picker
            except ChildFailed as failed:
                if "is in use: another picker listens there" not in str(failed) or not tries_left:
                    raise
                self.forget(picker.child)
        raise AssertionError("a picker starts, or an exception says why not")

    def reference(self, binary: str, endpoints: Path, config_text: str, *more: str) -> Picker:
        """Starts another implementation with the same flags and configuration. `binary`: its path."""
        number = next(self._numbers)
        config = self.directory / f"config-{number}.yaml"
        config.write_text(config_text)
        grpc, health, metrics = free_ports(3)
        flags = {
            "pool-name": "bench",
            "config-file": config,
            "grpc-port": grpc,
            "grpc-health-port": health,
            "metrics-port": metrics,
            "metrics-endpoint-auth": "false",
            "tracing": "false",
        }
        argv = [binary, *(f"--{name}={value}" for name, value in flags.items()), *more]
        picker = Picker(self.children.start(f"reference {number}", argv), grpc, health, metrics)
        self.wait(picker.child, lambda: READY.search(picker.page()) is not None)
        return picker

    def envoy(
        self,
        picker: Picker,
        *,
        threads: int = 2,
        tls: envoy_config.PickerTls | None = None,
        replicas: Sequence[Picker] = (),
        change: Callable[[str], str] = str,
        edge: bool = False,
    ) -> int:
        """Starts an Envoy and returns its port. `tls`: its TLS to the picker; None: plaintext. `change`: edits its configuration.

        `replicas`: further pickers; each request goes to a random one. `edge`: whether it removes control headers, as the shipped one does.
        If a port is taken meanwhile, it starts again with other ports.
        """
        for tries_left in reversed(range(STARTS_MAX)):
            number = next(self._numbers)
            port, admin = free_ports(2)
            file = self.directory / f"envoy-{number}.yaml"
            config = envoy_config.bootstrap(
                listen=(LOOPBACK, port),
                picker=(LOOPBACK, picker.grpc),
                replicas=[(LOOPBACK, replica.grpc) for replica in replicas],
                admin=(LOOPBACK, admin),
                tls=tls,
                edge=edge,
            )
            file.write_text(change(envoy_config.to_yaml(config)))
            child = self.children.start(f"envoy {number}", envoy_command(envoy_path(), file, threads))
            try:
                self.wait(child, partial(_answers_ready, admin))
                return port
            except ChildFailed as failed:
                if "Address already in use" not in str(failed) or not tries_left:
                    raise
                self.forget(child)
        raise AssertionError("an Envoy starts, or an exception says why not")

    def forget(self, child: Child) -> None:
        """Tells the cluster that the child ended as intended."""
        self.children.all.remove(child)


def _answers_ready(admin_port: int) -> bool:
    return get(admin_port, "/ready") is not None


class Fleet:
    """A process with simulated servers, and the file with their addresses."""

    def __init__(self, child: Child, file: Path) -> None:
        self.child = child
        self.file = file
        self.addresses = read_endpoints(file)

    def stats(self) -> list[dict[str, Any]]:
        page = get(self.addresses[0][1], "/sim/stats?all")
        assert page is not None
        stats: list[dict[str, Any]] = json.loads(page)
        return stats

    def requests(self) -> list[int]:
        return [stats["requests"] for stats in self.stats()]


def serve(config: Path, grpc: int, health: int, metrics: int, workers: int, run_dir: Path, *, pools: bool = False) -> list[str]:
    """Returns the command line of a plaintext picker. `pools`: whether `config` is a pools file."""
    flags = {
        "pools-file" if pools else "config-file": config,
        "workers": workers,
        "grpc-port": grpc,
        "grpc-health-port": health,
        "metrics-port": metrics,
        "secure-serving": "false",
        "drain-timeout": "5s",
        "run-dir": run_dir,
    }
    return python("workers", "serve", *(f"--{name}={value}" for name, value in flags.items()))


def run(argv: Sequence[str], seconds: float = ANSWER_S) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = forked(argv, out.fileno(), err.fileno())
        if process is None:
            return subprocess.run(argv, env=environment(), capture_output=True, text=True, timeout=seconds, check=False)
        try:
            code = process.wait(seconds)
        finally:
            process.kill()
            process.wait()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(argv, code, out.read(), err.read())


def write_endpoints(file: Path, addresses: Iterable[tuple[str, int]]) -> Path:
    entries = "".join(f'- {{name: server-{n}, address: "{host}", port: "{port}"}}\n' for n, (host, port) in enumerate(addresses))
    file.write_text(f"endpoints:\n{entries}" if entries else "endpoints: []\n")
    return file


def completion(prompt: str, **more: Any) -> bytes:
    return json.dumps({"model": MODEL, "prompt": prompt, **more}).encode()


def chat(text: str, **more: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": text}], **more}).encode()


def ask(port: int, path: str, body: bytes | Iterator[bytes] | None, headers: Mapping[str, str] = {}, method: str = "POST") -> Answer:
    """Sends one request on a new connection. If `body` is an iterator, sends it in chunks."""
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=ANSWER_S)
    try:
        sent = {"content-type": "application/json", **headers}
        connection.request(method, path, body, sent, encode_chunked=not isinstance(body, bytes | None))
        response = connection.getresponse()
        return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
    finally:
        connection.close()


async def ask_all(port: int, path: str, bodies: Sequence[bytes], within_s: float = 0.0) -> list[Answer]:
    """Sends all requests at once, or evenly over `within_s` seconds, without waiting for earlier answers. Returns all answers."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def one(number: int, body: bytes) -> Answer:
            await asyncio.sleep(within_s * number / len(bodies))
            async with session.post(f"http://{LOOPBACK}:{port}{path}", data=body) as response:
                return Answer(response.status, {k.lower(): v for k, v in response.headers.items()}, await response.read())

        return await asyncio.gather(*(one(number, body) for number, body in enumerate(bodies)))


def eventually(condition: Callable[[], bool], seconds: float = 15.0) -> bool:
    """Waits until the condition is true, for at most `seconds`. Returns whether it became true.

    The pauses between two looks grow, because many conditions are dear: a metrics page takes 9 ms of CPU, and `epp doctor` 280 ms.
    """
    deadline = time.monotonic() + seconds
    pause_s = POLL_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(POLL_GROWTH * pause_s, POLL_MAX_S)
    return True


def events(body: bytes) -> list[Any]:
    """Decodes the JSON of server-sent events, without [DONE]."""
    lines = (line[6:] for line in body.split(b"\n") if line.startswith(b"data: "))
    return [json.loads(line) for line in lines if line != b"[DONE]"]
