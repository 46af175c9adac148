"""`python -m tests.field FOLDER`: starts a picker with each configuration of a folder, and routes one request.

The endpoints are simulated: the configuration's discovery is replaced by a file with two servers per role, one of them with the labels
that the configuration selects by. Certificates that do not exist here are left out. Everything else stays. The rest of a
configuration that names other services (tokenizers, latency predictors) meets none, as on a bad day. A file that is refused is
counted and shown; `--expected` lists the names of files that may be.

Exit code 0: every accepted file started, chose an endpoint for its request, and ended with code 0 on SIGTERM. Also 0, with a clear
word, if the folder does not exist.

A picker is a fork of this process, so that nothing is imported twice: a start takes 0.3 s instead of 1.2 s of CPU.
"""

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import workers.cli.serve
import workers.supervisor.main
import workers.worker.main  # noqa: F401
from epp.config import yaml_nodes
from epp.config.load import ConfigErrors, EffectiveConfig, load
from epp.config.migrate import migrate
from epp.config.written import HeaderSource
from epp.plugins import screeners
from epp.plugins.parsers.vertexai import VertexAi
from epp.plugins.parsers.vllm_grpc import VllmGrpc
from epp.protocol.codec import field
from epp.request.client_headers import RANK_HEADER
from loadtest.demo.children import environment, python
from loadtest.demo.ports import free_ports
from loadtest.load.h2_client import ClientConnection, ClientStream
from loadtest.load.proto import ext_proc_pb2 as pb
from workers.cli import main as epp

METHOD: Final = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
DESTINATION: Final = "x-gateway-destination-endpoint"
SELECTION: Final = "test-epp-endpoint-selection"  # of header-based-testing-filter
ROLES: Final = ("prefill", "decode", "encode")
SERVERS: Final = 2 * ROLES  # the first ones have the labels that a configuration selects by, the others none of them
DISCOVERY: Final = "simulated-endpoints"
READY_S: Final = 60.0
ANSWER_S: Final = 30.0
END_S: Final = 30.0
LOG_LINES: Final = 12
COMPLETION: Final = json.dumps({"model": "sim-model", "prompt": "hello " * 200, "max_tokens": 4}).encode()
CHAT: Final = json.dumps({"model": "sim-model", "messages": [{"role": "user", "content": "hello"}]}).encode()

CERTIFICATES: Final = ("caCertPath", "clientCertPath", "clientKeyPath")  # files that only the field has

Json = dict[str, Any]


class Call(NamedTuple):
    """A request: its path, content type and body. `tenant_headers`: those that name its tenant."""

    path: str
    kind: str
    body: bytes
    tenant_headers: tuple[str, ...] = ()


def call_for(config: EffectiveConfig) -> Call:
    """Returns a request that the configuration's first parser reads."""
    (first, *_) = config.pipeline.wiring.parsers
    if isinstance(first, VllmGrpc):
        return Call("/vllm.grpc.engine.VllmEngine/Generate", "application/grpc", _frame(field(3, b"hello")))
    if isinstance(first, VertexAi):
        path = "/google.cloud.aiplatform.v1.PredictionService/ChatCompletions"
        return Call(path, "application/grpc", _frame(field(2, field(2, CHAT))))
    sources = config.tenants.sources if config.tenants is not None else ()
    return Call("/v1/completions", "application/json", COMPLETION, tuple(each.header for each in sources if isinstance(each, HeaderSource)))


def _frame(message: bytes) -> bytes:
    return b"\0" + len(message).to_bytes(4, "big") + message


def with_endpoints(text: str, endpoints: Path) -> str:
    """Returns the configuration in its current form, with its discovery replaced by a file."""
    document: Json = yaml_nodes.plain(migrate(text, "the configuration")[0])
    layer = document.get("dataLayer") or {}
    found = ((layer.get("discovery") or {}).get("endpoints") or {}).get("pluginRef")
    plugins = [entry for entry in document.get("plugins") or [] if (entry.get("name") or entry.get("type")) != found]
    plugins.append({"name": DISCOVERY, "type": "file-discovery", "parameters": {"path": str(endpoints)}})
    for entry in plugins:
        given = entry.get("parameters") or {}
        for name in [name for name in CERTIFICATES if given.get(name) and not Path(given[name]).exists()]:
            del given[name]
    document["plugins"] = plugins
    document["dataLayer"] = layer | {"discovery": {"endpoints": {"pluginRef": DISCOVERY}}}
    return yaml_nodes.dump(document)


def selected_labels(document: Any) -> dict[str, str]:
    """Returns labels with which an endpoint matches the label selectors in a configuration."""
    if isinstance(document, list):
        return {key: value for child in document for key, value in selected_labels(child).items()}
    if not isinstance(document, dict):
        return {}
    labels = {key: value for child in document.values() for key, value in selected_labels(child).items()}
    match document:
        case {"matchLabels": dict() as wanted}:
            labels |= wanted
        case {"key": str() as key, "operator": "In", "values": [value, *_]}:
            labels[key] = str(value)
        case {"label": str() as key, "validValues": [value, *_]}:
            labels[key] = str(value)
        case {"labelSelector": str() as selector}:
            labels |= dict(part.split("=", 1) for part in selector.split(",") if part.count("=") == 1)
        case {"mode": "sum" | "max-role", **gating}:  # the revisions of a DisaggregatedSet: all servers are of one
            labels[gating.get("revisionLabelKey", screeners.REVISION_LABEL)] = "r1"
            labels[gating.get("roleLabelKey", screeners.ROLE_LABEL)] = ROLES[0]
    return labels


def write_endpoints(file: Path, addresses: Sequence[str], labels: Mapping[str, str]) -> None:
    """Writes two endpoints per role. The label of the role always wins over `labels`."""
    entries = []
    for number, (role, address) in enumerate(zip(SERVERS, addresses, strict=True)):
        host, _, port = address.rpartition(":")
        given = labels if number < len(ROLES) else {}
        own = {key: role if value in ROLES else value for key, value in given.items()} | {"llm-d.ai/role": role}
        entries.append({"name": f"server-{number}-{role}", "address": host, "port": port, "labels": own})
    file.write_text(yaml_nodes.dump({"endpoints": entries}))


# One picker


class Answer:
    """The caller of one stream. It keeps the picker's first message."""

    def __init__(self) -> None:
        self.came: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def message(self, message: bytes) -> None:
        if not self.came.done():
            self.came.set_result(message)

    def ended(self, status: str, text: str) -> None:
        if not self.came.done():
            self.came.set_exception(ConnectionError(f"the stream ended with status {status}: {text}"))


async def ask(port: int, call: Call, addresses: Sequence[str]) -> Mapping[str, str]:
    """Sends one request. Returns the headers that the picker sets. Raises ConnectionError or TimeoutError, or ValueError for a refusal."""
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(lambda: ClientConnection(METHOD, "picker"), "127.0.0.1", port)
    async with asyncio.timeout(ANSWER_S):
        await connection.opened
        answer = Answer()
        stream = connection.open(answer)
        assert isinstance(stream, ClientStream)
        headers, body = pb.ProcessingRequest(), pb.ProcessingRequest()
        pairs = (
            (":method", "POST"), (":path", call.path), ("content-type", call.kind), ("x-request-id", "field"),
            (SELECTION, ",".join(addresses)), *((name, "tenant") for name in call.tenant_headers),
        )  # fmt: skip
        for key, value in pairs:
            headers.request_headers.headers.headers.add(key=key, raw_value=value.encode())
        body.request_body.body, body.request_body.end_of_stream = call.body, True
        stream.send(headers.SerializeToString())
        stream.send(body.SerializeToString())
        message = pb.ProcessingResponse.FromString(await answer.came)
    connection.close()
    if message.HasField("immediate_response"):
        raise ValueError(f"{message.immediate_response.status.code}: {message.immediate_response.body.decode()}")
    options = message.request_headers.response.header_mutation.set_headers
    return {option.header.key: option.header.raw_value.decode() for option in options}


def try_one(file: Path, directory: Path, addresses: Sequence[str]) -> str:
    """Starts a picker with a file and routes one request. Returns what went wrong, or an empty text."""
    text = file.read_text(encoding="utf-8")
    endpoints, config, log = (directory / f"{file.stem}.{kind}" for kind in ("endpoints", "yaml", "log"))
    write_endpoints(endpoints, addresses, selected_labels(yaml_nodes.plain(text)))
    config.write_text(with_endpoints(text, endpoints))
    try:
        call = call_for(load(config.read_text(), str(config), allow_experimental=True))
    except ConfigErrors as errors:
        return f"the endpoints cannot be replaced: {errors}"
    grpc, health, metrics = free_ports(3)
    picker = forked_picker(config, (grpc, health, metrics), directory, log)
    try:
        why = ready(metrics, picker) or chosen(grpc, call, addresses)
    finally:
        code = ended(picker)
    if not why and code != 0:
        why = f"the picker ended with code {code}"
    return f"{why}\n{tail(log)}" if why else ""


def chosen(port: int, call: Call, addresses: Sequence[str]) -> str:
    """Sends one request. Returns what went wrong, or an empty text."""
    try:
        headers = asyncio.run(ask(port, call, addresses))
    except (OSError, ValueError, TimeoutError) as failure:
        return f"no endpoint was chosen: {type(failure).__name__}: {failure}"
    target = headers.get(DESTINATION, "")
    # With a port for all ranks, the target has that port and a header names the endpoint.
    wrong = [name for name in headers.get(RANK_HEADER, target).split(",") if name not in addresses]
    return f"the chosen endpoint '{target}' is none of {', '.join(addresses)}" if wrong else ""


def forked_picker(config: Path, ports: tuple[int, int, int], directory: Path, log: Path) -> int:
    """Starts `epp serve` in a fork. Returns its process id."""
    flags = {
        "config-file": config, "allow-experimental-plugins": "true", "secure-serving": "false", "workers": 1,
        "grpc-port": ports[0], "grpc-health-port": ports[1], "metrics-port": ports[2], "run-dir": directory / "run",
        "index-entries": 65536, "drain-timeout": "1s",
    }  # fmt: skip
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        epp(["serve", *(f"--{name}={value}" for name, value in flags.items())], prog_name="epp")
    except SystemExit as leaving:
        os._exit(leaving.code if isinstance(leaving.code, int) else 1)
    finally:
        os._exit(1)


def ready(port: int, pid: int) -> str:
    """Waits until the picker is ready. Returns why it is not, or an empty text."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return "the picker ended before it was ready"
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/readyz")
            if connection.getresponse().status == 200:
                return ""
        time.sleep(0.03)
    return f"the picker was not ready after {READY_S:.0f} s"


def ended(pid: int) -> int:
    """Ends the picker with SIGTERM. Returns its exit code."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -signal.SIGKILL


def tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join(f"    {line[:300]}" for line in lines[-LOG_LINES:])


# All of them


def refusal(file: Path) -> ConfigErrors | None:
    """Loads a file. Returns the errors with which it is refused; None if it is accepted."""
    try:
        load(file.read_text(encoding="utf-8"), file.name, allow_experimental=True)
    except ConfigErrors as errors:
        return errors
    return None


@contextlib.contextmanager
def simulated(directory: Path) -> Iterator[list[str]]:
    """Starts two simulated servers per role. Yields their addresses."""
    file = directory / "fleet.yaml"
    argv = python("loadtest.sim.main", "--servers", str(len(SERVERS)), "--port", "0", "--endpoints-file", str(file))
    with subprocess.Popen([*argv, "--role", ",".join(SERVERS)], stdout=subprocess.PIPE, env=environment(), text=True) as sim:
        try:
            assert sim.stdout is not None
            while (line := sim.stdout.readline()) and not line.startswith("ready"):
                pass
            entries = yaml_nodes.plain(file.read_text())["endpoints"]
            yield [f"{entry['address']}:{entry['port']}" for entry in entries]
        finally:
            sim.terminate()


def run(files: Sequence[Path], directory: Path, jobs: int) -> dict[str, str]:
    """Tries all files, `jobs` at once, each in a fork of its own. Returns what went wrong by file."""
    wrong: dict[str, str] = {}
    running: dict[int, Path] = {}
    waiting = list(reversed(files))
    with simulated(directory) as addresses:
        while waiting or running:
            while waiting and len(running) < jobs:
                file = waiting.pop()
                if pid := os.fork():
                    running[pid] = file
                else:
                    _child(file, directory, addresses)
            pid, status = os.wait()
            if pid in running:
                file = running.pop(pid)
                report = directory / f"{file.stem}.report"
                why = report.read_text() if report.exists() else f"the trial ended with status {status}"
                if why:
                    wrong[file.name] = why
    return wrong


def _child(file: Path, directory: Path, addresses: Sequence[str]) -> None:
    """Tries one file, writes the result and exits."""
    try:
        why = try_one(file, directory, addresses)
    except Exception as failure:  # the report of the parent names the file
        why = f"{type(failure).__name__}: {failure}"
    (directory / f"{file.stem}.report").write_text(why)
    os._exit(0)


def main(arguments: Sequence[str]) -> int:
    line = argparse.ArgumentParser(prog="field", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    line.add_argument("folder", type=Path)
    line.add_argument("--jobs", type=int, default=3, help="pickers at once")
    line.add_argument("--only", default="", help="only files with this text in their names")
    line.add_argument("--expected", type=Path, help="file with the names of files that may be refused, one per line")
    options = line.parse_args(arguments)
    if not options.folder.is_dir():
        print(f"skipped: there is no folder {options.folder}")
        return 0
    files = [file for file in sorted(options.folder.glob("*.yaml")) if options.only in file.name]
    listed = options.expected.read_text().splitlines() if options.expected else []
    expected = {words[0] for words in map(str.split, listed) if words and not words[0].startswith("#")}
    refused = {file: errors for file in files if (errors := refusal(file)) is not None}
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="epp-field-") as directory:
        wrong = run([file for file in files if file not in refused], Path(directory), max(options.jobs, 1))
    unexpected = {file.name: errors for file, errors in refused.items() if expected and file.stem not in expected}
    for name, why in ({name: str(errors.errors[0]) for name, errors in unexpected.items()} | wrong).items():
        print(f"{name}: {why}")
    tried = len(files) - len(refused)
    print(f"{tried - len(wrong)} of {tried} accepted files start and route a request ({time.monotonic() - begun:.0f} s)")
    print(f"refused: {len(refused)}" + (f", {len(unexpected)} not expected" if expected else ""))
    return int(bool(wrong or unexpected) or not tried)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
