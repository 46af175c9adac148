"""What tests of single requests share: model servers that answer with what they got, a gateway and a picker in front of them."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from loadtest.demo import envoy_config
from loadtest.demo.ports import free_ports
from loadtest.demo.stack import LOOPBACK, envoy_command, envoy_path, get
from tests.e2e.cluster import Answer, Cluster, Picker, write_endpoints

HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
Json = dict[str, Any]


class Echo(BaseHTTPRequestHandler):
    """A model server that answers with the request that it got. A broken one answers with errors, but still serves its metrics page."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        server: Any = self.server
        self._answer(200, server.page if self.path == "/metrics" else b"{}")

    def do_POST(self) -> None:
        size = int(self.headers.get("content-length") or 0)
        body = self.rfile.read(size) if size else b"".join(self._chunks())
        server: Any = self.server
        server.requests += 1
        if server.broken == "closes":
            self.close_connection = True
            return
        if server.broken == "503":
            self._answer(503, b"not now")
            return
        fields = {"model": json.loads(body)["model"], "body": body.decode(), "server": server.address}
        self._answer(200, json.dumps(fields | {"headers": self.headers.items()}).encode())

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline() or b"0", 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Silences the log."""


class Server(ThreadingHTTPServer):
    daemon_threads = True
    broken = ""
    page = b""  # the metrics page
    requests = 0

    @property
    def address(self) -> str:
        return f"{self.server_address[0]!s}:{self.server_port}"


@contextmanager
def servers(count: int, kind: Callable[..., Server] = Server) -> Iterator[list[Server]]:
    with ExitStack() as stack:
        started = [stack.enter_context(kind((LOOPBACK, 0), Echo)) for _ in range(count)]
        for server in started:
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
            stack.callback(server.shutdown)
        yield started


def gateway(
    cluster: Cluster, picker_port: int, change: Callable[[Json, Json], None] = lambda _l, _c: None, listed: Sequence[Server] = ()
) -> int:
    """Starts an Envoy and returns its port. `change`: edits its HTTP connection manager and its whole bootstrap."""
    port, admin = free_ports(2)
    config = envoy_config.bootstrap(
        listen=(LOOPBACK, port),
        picker=(LOOPBACK, picker_port),
        admin=(LOOPBACK, admin),
        listed=[(LOOPBACK, server.server_port) for server in listed],
        edge=False,
    )
    manager = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    change(manager, config["static_resources"])
    file = cluster.directory / f"envoy-{port}.yaml"
    file.write_text(envoy_config.to_yaml(config))
    child = cluster.children.start(f"envoy {port}", envoy_command(envoy_path(), file, 1))
    cluster.wait(child, lambda: get(admin, "/ready") is not None)
    return port


def picker_for(cluster: Cluster, started: list[Server], text: str = "", *flags: str) -> Picker:
    file = cluster.directory / "servers.yaml"
    write_endpoints(file, [(LOOPBACK, server.server_port) for server in started])
    return cluster.picker(file, *flags, workers=1, config_text=text.format(file=file) if text else "")


def got(answer: Answer) -> list[tuple[str, str]]:
    """Returns the headers that the model server received, with names in lower case."""
    assert answer.status == 200, answer.body
    return [(name.lower(), value) for name, value in answer.json()["headers"]]
