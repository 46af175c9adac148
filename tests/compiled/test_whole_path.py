"""One request of each kind through a real worker: which functions of ours does it call that are not compiled?

`sys.setprofile` reports calls of interpreted functions. A function of a module on the list counts as compiled in both modes, so this
test gives the same result in both.
"""

import asyncio
import ssl
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import trustme
import uvloop

from compiled.modules import LEFT_OUT, PATHS
from epp.config.load import DEFAULT_TEXT
from epp.plugins.producers._held_tokens import LOOK_S
from loadtest.load.h2_client import ClientConnection
from loadtest.load.proto import ext_proc_pb2 as pb
from shm.table import State
from tests.bench.routing_zoo import FIELD_TEXT
from tests.epp.plugins import parser_bodies
from tests.workers.flow_world import World
from tests.workers.instances import made
from workers.host.options import TracingOptions
from workers.transport.native import Server
from workers.worker.extproc.stream import PATH

ROOT = Path(__file__).resolve().parents[2]
OURS = tuple(f"{ROOT / package}/" for package in ("epp", "shm", "workers"))
WAIT = 30.0
CHUNKS = 3
NEVER = 1e-12  # the share of sampled requests: traces are on, and no recorded request is sampled
RECORDED = 10  # requests; together they take longer than a snapshot is kept
ROLE = "llm-d.ai/role"
COMPLETION = b'{"model":"m","stream":true,"prompt":"' + b"a word " * 300 + b'","max_tokens":9}'
CHAT = b'{"model":"m","messages":[{"role":"user","content":"' + b"a word " * 300 + b'"}]}'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3}}\n\ndata: [DONE]\n\n'
GRPC_PATH = "/vllm.grpc.engine.VllmEngine/Generate"
GRPC_BODY = parser_bodies.frame(parser_bodies.field(1, "r") + parser_bodies.field(3, "a word " * 200))


@dataclass(frozen=True)
class Kind:
    """A kind of request, and the configuration of the picker that serves it."""

    config: str = DEFAULT_TEXT
    path: str = "/v1/completions"
    body: bytes = COMPLETION
    headers: dict[str, str] = field(default_factory=dict)
    roles: tuple[str, ...] = ("", "")
    tls: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    answer: bytes = USAGE


def shipped(name: str) -> str:
    return (ROOT / "deploy/config" / f"{name}.yaml").read_text()


KINDS = {
    "the default configuration": Kind(),
    "a chat": Kind(path="/v1/chat/completions", body=CHAT),
    "the field's weights": Kind(FIELD_TEXT),
    "prefill and decode": Kind(shipped("pd"), roles=("prefill", "decode")),
    "session affinity": Kind(shipped("session-affinity")),
    "a trace that is not sampled": Kind(options={"tracing": TracingOptions(exporter="console", ratio=NEVER)}),
    "TLS": Kind(tls=True),
    "gRPC": Kind(FIELD_TEXT + "requestHandler: {parsers: [{pluginRef: vllmgrpc-parser}]}\n", GRPC_PATH, GRPC_BODY, answer=b""),
    "a rewritten model": Kind(headers={"x-llm-d-model-name-rewrite": "base-v2"}),
    "stream metrics": Kind(options={"enable_grpc_stream_metrics": True}),
    "health checks on the same port": Kind(options={"health_checking": True}),
    "load in tokens": Kind(shipped("token-load")),
}


class Called:
    """Records the interpreted functions of ours that run inside `with`, without those of compiled modules."""

    def __init__(self) -> None:
        self.functions: set[str] = set()
        self._compiled = {str(ROOT / path) for path in PATHS}

    def __enter__(self) -> "Called":
        sys.setprofile(self._seen)
        return self

    def __exit__(self, *_exception: object) -> None:
        sys.setprofile(None)

    def _seen(self, frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            code = frame.f_code
            if code.co_filename.startswith(OURS) and code.co_filename not in self._compiled:
                module = code.co_filename.removeprefix(f"{ROOT}/").removesuffix(".py").removesuffix("/__init__")
                self.functions.add(f"{module.replace('/', '.')}:{code.co_qualname}")


class Gateway:
    """Envoy's side of one stream over HTTP/2: request, streamed answer, end. `done` has the error, "" if all went well."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.stream: Any = None
        self.picked = ""

    def begin(self) -> None:
        headers = pb.ProcessingRequest()
        pairs = {":method": "POST", ":path": self.kind.path, "x-request-id": "r-1", **self.kind.headers}
        for name, value in pairs.items():
            headers.request_headers.headers.headers.add(key=name, raw_value=value.encode())
        self.stream.send(headers.SerializeToString())
        body = pb.ProcessingRequest(request_body=pb.HttpBody(body=self.kind.body, end_of_stream=True))
        self.stream.send(body.SerializeToString())

    def message(self, message: bytes) -> None:
        answer = pb.ProcessingResponse.FromString(message)
        which = answer.WhichOneof("response")
        if which == "immediate_response":
            self.ended("", f"refused: {answer.immediate_response}")
        elif which == "request_headers":
            for option in answer.request_headers.response.header_mutation.set_headers:
                if option.header.key == "x-gateway-destination-endpoint":
                    self.picked = option.header.raw_value.decode()
        elif which == "request_body" and ends(answer.request_body):
            self._answer()
        elif which == "response_body" and ends(answer.response_body):
            self.stream.half_close()

    def _answer(self) -> None:
        headers = pb.ProcessingRequest()
        for name, value in {":status": "200", "content-type": "text/event-stream"}.items():
            headers.response_headers.headers.headers.add(key=name, raw_value=value.encode())
        self.stream.send(headers.SerializeToString())
        for _ in range(CHUNKS):
            piece = pb.HttpBody(body=b'data: {"model":"base-v2","choices":[{"text":"a"}]}\n\n')
            self.stream.send(pb.ProcessingRequest(response_body=piece).SerializeToString())
        last = pb.HttpBody(body=self.kind.answer, end_of_stream=True)
        self.stream.send(pb.ProcessingRequest(response_body=last).SerializeToString())

    def ended(self, status: str, text: str) -> None:
        if not self.done.done():
            self.done.set_result("" if status == "0" and self.picked else text or f"status {status}")


def ends(answer: Any) -> bool:
    return bool(answer.response.body_mutation.streamed_response.end_of_stream)


async def requested(connection: ClientConnection, kind: Kind) -> str:
    """The endpoint that one request gets. Waits until its stream has ended."""
    gateway = Gateway(kind)
    gateway.stream = connection.open(gateway)
    gateway.begin()
    async with asyncio.timeout(WAIT):
        problem = await gateway.done
    assert problem == ""
    return gateway.picked


async def called(kind: Kind, folder: Path) -> set[str]:
    """The functions that requests call, after two that fill the caches."""
    loop = asyncio.get_running_loop()
    options = {"endpoints": "", **kind.options}
    with made(folder, kind.config, allow_experimental=True, **options) as instance:
        world = World(instance, folder)
        for number, role in enumerate(kind.roles):
            world.endpoint(f"pod-{number}", **({ROLE: role} if role else {}))
        shard = world.shard()
        context, trusting = contexts() if kind.tls else (None, None)
        server = Server(loop, clock=shard.app.clock, now=time.monotonic, on_error=raised)
        listening = instance.sockets.ext_proc
        server.serve(listening, shard.worker.application(), context)
        _, connection = await loop.create_connection(
            lambda: ClientConnection(PATH, "picker"),
            *listening.getsockname()[:2],
            ssl=trusting,
            server_hostname="picker" if trusting else None,
        )
        await connection.opened
        for _ in range(2):
            await requested(connection, kind)
        world.mark_all(State.FRESH)  # the recorded requests make a new snapshot, and read the saturation anew
        if shard.parts.flow is not None:
            shard.flow.know(shard.parts.objectives.content.places)
        with Called() as recorded:
            for _ in range(RECORDED):
                await requested(connection, kind)
            await asyncio.sleep(2 * LOOK_S)  # a timer that an earlier request has set is due, and is set anew for these
        connection.close()
        server.abort()
        await server.closed()
        shard.close()
        await shard.parts.close()
    return recorded.functions


def raised(problem: BaseException) -> None:
    raise AssertionError("a stream failed") from problem


def contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """TLS contexts of a server with a certificate, and of a client that trusts it."""
    authority = trustme.CA()
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority.issue_cert("picker").configure_cert(server)
    authority.configure_trust(client)
    for context in (server, client):
        context.set_alpn_protocols(["h2"])
    return server, client


def justified(function: str) -> str:
    """Why a function is not compiled; empty: it should be."""
    module = function.partition(":")[0]
    return LEFT_OUT.get(function) or LEFT_OUT.get(module) or ""


def in_loop(work: Callable[[], Any]) -> Any:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work())


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "run").mkdir()
    yield tmp_path / "run"


@pytest.mark.parametrize("name", KINDS)
def test_a_request_calls_no_interpreted_function_that_is_not_justified(name: str, folder: Path) -> None:
    unjustified = {function for function in in_loop(lambda: called(KINDS[name], folder)) if not justified(function)}
    assert unjustified == set(), "put their modules on the list in compiled/modules.py, or into LEFT_OUT with the reason"


def test_nothing_is_justified_that_no_request_calls(folder: Path) -> None:
    seen: set[str] = set()
    for kind in KINDS.values():
        seen |= in_loop(lambda kind=kind: called(kind, folder))
    assert {name for name in LEFT_OUT if name not in seen | {function.partition(":")[0] for function in seen}} == set()
