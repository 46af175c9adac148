"""Probes and certificates of a real picker while processes die and files are replaced."""

import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path

import grpc

from loadtest.demo.children import command_name, descendants
from tests.e2e.cluster import Cluster, Picker
from tests.workers.authority import CLIENT, Authority, Volume, write
from workers.worker.extproc.health import CHECK, NOT_SERVING, SERVING
from workers.worker.extproc.stream import PATH

EVERY_S = 0.1
SETTLED_S = 20.0
LOOPBACK = "127.0.0.1"
SECURE = "--secure-serving=true"
HTTP1 = b"GET /healthz HTTP/1.1\r\n\r\n"
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"


def probe(port: int, service: str = "", credentials: grpc.ChannelCredentials | None = None) -> bytes:
    """Makes one gRPC health check on a new connection, as a kubelet does. Returns the answer. Raises RpcError."""
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.ssl_target_name_override", "localhost"))
    target = f"{LOOPBACK}:{port}"
    secure = credentials is not None
    channel = grpc.secure_channel(target, credentials, options) if secure else grpc.insecure_channel(target, options)
    with channel:
        name = service.encode()
        answer: bytes = channel.unary_unary(CHECK)(bytes((0x0A, len(name))) + name, timeout=10)
        return answer


def child(picker: Picker, name: str) -> int | None:
    """Returns the pid of the picker's child with this name; None if there is none."""
    pids = [pid for pid in descendants(picker.child.pid) if command_name(pid) == f"epp: {name}"]
    return pids[0] if pids else None


def killed(picker: Picker, name: str) -> int:
    pid = child(picker, name)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    return pid


def until(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + SETTLED_S
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(EVERY_S)


def test_no_probe_is_refused_while_the_supervisor_is_killed_and_replaced(cluster: Cluster) -> None:
    picker = cluster.picker(cluster.fleet(1).file, "--health-checking", workers=2)
    answers: list[bytes] = []
    threads: list[threading.Thread] = []

    def ask(port: int, service: str) -> None:
        try:
            answers.append(probe(port, service))
        except grpc.RpcError as refused:
            answers.append(str(refused).encode())

    def probe_for(rounds: int) -> None:
        for _ in range(rounds):
            for port, service in ((picker.health, ""), (picker.health, "liveness"), (picker.grpc, "")):
                threads.append(threading.Thread(target=ask, args=(port, service)))
                threads[-1].start()
            time.sleep(EVERY_S)

    probe_for(5)
    for thread in threads:
        thread.join()  # a probe on a connection that the dying supervisor has accepted would lose it
    before = killed(picker, "supervisor")
    probe_for(25)
    for thread in threads:
        thread.join()
    assert len(answers) == 90
    assert set(answers) == {SERVING}
    assert child(picker, "supervisor") not in (None, before)


def test_a_stopping_picker_with_an_open_stream_is_alive_and_not_serving(cluster: Cluster) -> None:
    picker = cluster.picker(cluster.fleet(1).file, "--health-checking", workers=1)
    over = threading.Event()
    with grpc.insecure_channel(f"{LOOPBACK}:{picker.grpc}") as channel:
        stream = channel.stream_stream(PATH)(iter(over.wait, True))
        until(lambda: sum(picker.gauge("streams_open")) == 1)
        picker.child.signal(signal.SIGTERM)
        until(lambda: probe(picker.health) == NOT_SERVING)
        assert probe(picker.grpc) == NOT_SERVING
        assert probe(picker.grpc, "liveness") == probe(picker.health, "liveness") == SERVING
        stream.cancel()
        over.set()
    assert picker.child.process.wait(SETTLED_S) == 0
    cluster.forget(picker.child)


def test_new_certificates_reach_all_workers_and_their_successors(cluster: Cluster, tmp_path: Path) -> None:
    authority, clients = Authority(), Authority("clients")
    write(tmp_path / "ca.pem", clients.pem)
    first, second, third = (authority.pair() for _ in range(3))
    volume = Volume(tmp_path / "volume", first)
    flags = (
        SECURE,
        f"--cert-path={volume.directory}",
        "--enable-cert-reload",
        f"--client-ca-file={tmp_path / 'ca.pem'}",
        f"--metrics-cert-dir={volume.directory}",
        f"--metrics-client-ca-file={tmp_path / 'ca.pem'}",
        "--health-checking",
    )
    picker = cluster.picker(cluster.fleet(1).file, *flags, workers=2, ready=False)
    client = clients.pair(use=CLIENT)
    credentials = grpc.ssl_channel_credentials(authority.pem, client.key, client.chain)
    cluster.wait(picker.child, lambda: answered(lambda: probe(picker.grpc, "", credentials) == SERVING))
    trusting = authority.client(client, tmp_path / "client")

    def seen(port: int) -> set[bytes]:
        return {certificate(port, trusting) for _ in range(8)}

    for port in (picker.grpc, picker.metrics):
        assert seen(port) == {first.der}
        assert not answered(lambda port=port: certificate(port, authority.client()))  # type: ignore[misc]
    volume.swap(second)
    until(lambda: seen(picker.grpc) == seen(picker.metrics) == {second.der})
    until(lambda: picker.child.text().count("certificate replaced") == 2)  # once from a worker, once from the supervisor
    old = {killed(picker, "worker 0"), killed(picker, "worker 1")}
    volume.swap(third)
    until(lambda: None not in (pids := {child(picker, "worker 0"), child(picker, "worker 1")}) and not pids & old)
    until(lambda: seen(picker.grpc) == {third.der})
    assert probe(picker.grpc, "", credentials) == SERVING


def answered(ask: Callable[[], object]) -> bool:
    """Makes the call. Returns whether it succeeded with a true result."""
    try:
        return bool(ask())
    except (OSError, grpc.RpcError):
        return False


def certificate(port: int, context: ssl.SSLContext) -> bytes:
    """Connects to a port and returns its certificate. Raises OSError if the port refuses the client."""
    plain = socket.create_connection((LOOPBACK, port), 10)
    with context.wrap_socket(plain, server_hostname="localhost") as secure:
        secure.sendall(HTTP2 if secure.selected_alpn_protocol() == "h2" else HTTP1)
        if not secure.recv(1):
            raise ConnectionResetError
        return secure.getpeercert(binary_form=True) or b""
