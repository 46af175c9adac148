"""The transport over grpc.aio: real sockets, a server in the thread of its loop, synchronous grpcio clients."""

import contextlib
import itertools
import os
import queue
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import grpc
import pytest

from tests.tls_client import client_context
from tests.workers.transport.echo import application
from tests.workers.transport.helpers import DATA, HEADERS, SETTINGS, block, frame, framed, setting
from tests.workers.transport.sites import PATH, WAIT, Site
from workers.process import StartError
from workers.process.sockets import hold, listen
from workers.transport import grpcio
from workers.transport.frames import PREFACE
from workers.transport.interface import Clock, Stream
from workers.transport.limits import Budget, Limits
from workers.transport.tls import Material, self_signed

ROOT = Path(__file__).parents[3]


@pytest.fixture
def site() -> Iterator[Site]:
    with Site() as site:
        yield site
    assert site.errors == []
    assert site.server.budget.used == 0


def stream(channel: grpc.Channel, path: str = "/test/Mirror") -> Any:
    return channel.stream_stream(path, _registered_method=False)


def ended(call: Any) -> tuple[list[bytes], grpc.StatusCode, str]:
    """All answers of a call, its status and its text."""
    answers: list[bytes] = []
    try:
        answers.extend(call)
    except grpc.RpcError as error:
        assert error is call
    return answers, call.code(), call.details()


class Sends:
    """Sends messages of a client when its test calls it. Half-closes at the end of the block."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def __iter__(self) -> Iterator[bytes]:
        while (message := self._queue.get(timeout=WAIT)) is not None:
            yield message

    def __call__(self, message: bytes) -> None:
        self._queue.put(message)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._queue.put(None)


@contextlib.contextmanager
def opened(site: Site) -> Iterator[tuple[Any, Sends]]:
    """A stream that the server holds open, after its first message."""
    with site.channel() as channel, Sends() as sends:
        call = stream(channel, PATH)(iter(sends), timeout=WAIT)
        sends(b"x")
        site.expect("message")
        yield call, sends


def test_messages_of_any_size_come_back_in_order(site: Site) -> None:
    messages = [b"a", b"", b"x" * 300_000, b"", b"b" * 70_000]
    with site.channel() as channel:
        answers, code, text = ended(stream(channel)(iter(messages), timeout=WAIT))
    assert answers == messages
    assert (code, text) == (grpc.StatusCode.OK, "")


def test_messages_that_have_their_prefixes_already_are_split(site: Site) -> None:
    with opened(site) as (call, _):

        def answer() -> None:
            held = site.held[0].stream
            held.send_raw(framed(b"one") + framed(b"") + framed(b"three" * 30_000))
            held.send(b"four")
            held.end(9, "50 % of \u00e9\n")
            held.send(b"too late")
            held.end(0, "too late")

        site.call(answer)
        answers, code, text = ended(call)
    assert answers == [b"one", b"", b"three" * 30_000, b"four"]
    assert (code, text) == (grpc.StatusCode.FAILED_PRECONDITION, "50 % of \u00e9\n")
    site.until(lambda: site.server.streams == 0)
    assert site.held[0].events == ["message"], "it ended the stream itself"


def test_half_closed_is_called_after_the_last_message(site: Site) -> None:
    with site.channel() as channel:
        call = stream(channel, PATH)(iter([b"1", b"2"]), timeout=WAIT)
        site.expect("message", "message", "half_closed")
        assert site.held[0].messages == [b"1", b"2"]
        site.call(site.held[0].stream.end)
        assert ended(call) == ([], grpc.StatusCode.OK, "")


def test_half_closed_is_not_called_when_a_client_cancels(site: Site) -> None:
    for _ in range(30):
        with opened(site) as (call, _):
            call.cancel()
            site.expect("message", "closed")
        site.held.clear()
    assert site.server.streams == site.server.connections == 0


def test_a_client_may_cancel_after_it_half_closed(site: Site) -> None:
    with site.channel() as channel:
        call = stream(channel, PATH)(iter([b"x"]), timeout=WAIT)
        site.expect("message", "half_closed")
        call.cancel()
        site.expect("message", "half_closed", "closed")


def test_a_lost_connection_closes_its_streams(site: Site) -> None:
    with socket.create_connection(("127.0.0.1", site.port), WAIT) as peer:
        peer.sendall(PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, 4, 1, block(path=PATH)))
        site.until(lambda: site.held)
        assert site.call(site.server.handlers) == site.held
        assert site.server.connections == site.server.streams == 1
    site.expect("closed")
    site.until(lambda: site.server.connections == site.server.streams == 0)


def test_an_unknown_method_and_a_failing_application_are_answered_as_by_the_native_engine() -> None:
    def breaks(path: str, metadata: Any, stream: Any) -> None:
        if path == "/test/Breaks":
            raise ZeroDivisionError

    answers = []
    for transport in ("grpcio", "native"):
        with Site(transport) as site, site.channel() as channel:
            site.serves = breaks
            calls = [stream(channel, path)(iter([]), timeout=WAIT) for path in ("/test/No", "/test/Breaks")]
            answers.append([ended(call) for call in calls])
        assert [type(error) for error in site.errors] == [ZeroDivisionError]
    assert answers[0] == answers[1]
    assert [code for _, code, _ in answers[0]] == [grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INTERNAL]


def test_a_failing_handler_ends_its_stream_and_gets_closed() -> None:
    def fail(message: bytes) -> None:
        raise ZeroDivisionError

    with Site() as site, opened(site) as (call, sends):
        site.held[0].message = fail  # type: ignore[method-assign]
        sends(b"y")
        assert ended(call)[1:] == (grpc.StatusCode.INTERNAL, "the handler of this stream failed")
    assert site.held[0].events == ["message", "closed"]
    assert [type(error) for error in site.errors] == [ZeroDivisionError]


def test_the_clock_is_set_before_any_call_of_a_handler() -> None:
    clock, times, seen = Clock(), itertools.count(1), []

    class Looks:
        def __init__(self, path: str, metadata: Any, stream: Stream) -> None:
            self.stream = stream
            seen.append(clock.now)

        def message(self, message: bytes) -> None:
            seen.append(clock.now)

        def half_closed(self) -> None:
            seen.append(clock.now)
            self.stream.end()

        def closed(self) -> None:
            """Nothing to record."""

    with Site(clock=clock, now=lambda: float(next(times))) as site, site.channel() as channel:
        site.serves = Looks
        ended(stream(channel)(iter([b"x"]), timeout=WAIT))
    assert len(seen) == 3 and seen == sorted(set(seen))


def test_a_message_over_the_limit_ends_its_stream() -> None:
    with Site(limits=Limits(message=100_000)) as site, site.channel() as channel:
        call = stream(channel, PATH)(iter([b"x" * 100_000, b"x" * 100_001]), timeout=WAIT)
        assert ended(call)[1] is grpc.StatusCode.RESOURCE_EXHAUSTED
        site.expect("message", "closed")


def peer_that_reads_nothing(site: Site) -> socket.socket:
    """A peer that has opened a stream and gives no window for the answer."""
    peer = socket.create_connection(("127.0.0.1", site.port), WAIT)
    peer.sendall(PREFACE + frame(SETTINGS, 0, 0, setting(4, 0)) + frame(SETTINGS, 1, 0))
    peer.sendall(frame(HEADERS, 4, 1, block(path=PATH)) + frame(DATA, 0, 1, framed(b"x")))
    site.expect("message")
    return peer


@pytest.mark.parametrize("more", [{"limits": Limits(stream_output=200_000)}, {"budget": Budget(200_000)}])
def test_a_peer_that_reads_no_answers_costs_bounded_memory(more: dict[str, Any]) -> None:
    with Site(**more) as site, peer_that_reads_nothing(site):
        for _ in range(3):
            site.call(site.held[0].stream.send, b"x" * 90_000)
        site.expect("message", "closed")
        site.call(site.held[0].stream.send, b"x" * 90_000)
        (abuse,) = site.abuses
        assert abuse.startswith("output_limit: from ipv4:127.0.0.1:")
        assert site.server.budget.used == 0
        site.until(lambda: site.server.streams == 0)


def test_the_stream_of_a_peer_that_reads_nothing_for_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpcio, "TICK", 0.01)
    with Site(limits=Limits(stall_seconds=0.05)) as site, peer_that_reads_nothing(site):
        site.call(site.held[0].stream.send, b"x" * 90_000)
        site.expect("message", "closed")
        (abuse,) = site.abuses
        assert abuse.startswith("output_stalled: from ipv4:127.0.0.1:")
        assert site.server.budget.used == 0


def test_a_drain_serves_open_streams_to_their_end_and_refuses_new_ones(site: Site) -> None:
    with opened(site) as (call, sends), site.channel() as late:
        site.call(site.server.stop_accepting)
        site.call(site.server.drain)
        assert ended(stream(late)(iter([b"x"]), timeout=WAIT))[1] is grpc.StatusCode.UNAVAILABLE
        sends(b"2")
        site.expect("message", "message")
        assert site.server.connections == 1
        site.call(site.held[0].stream.send, b"bye")
        site.call(site.held[0].stream.end)
        assert ended(call) == ([b"bye"], grpc.StatusCode.OK, "")
        site.until(lambda: site.server.connections == 0)


def test_an_abort_cuts_open_streams_and_closes_their_handlers(site: Site) -> None:
    with opened(site) as (call, _):
        site.call(site.server.drain)
        site.call(site.server.abort)
        assert ended(call)[1] in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        site.expect("message", "closed")


# The port.


def test_several_workers_serve_one_port_and_both_get_connections() -> None:
    with Site() as first, Site(beside=first) as second:
        assert first.port == second.port
        for _ in range(40):
            with first.channel() as channel:
                assert ended(stream(channel)(iter([b"x"]), timeout=WAIT))[0] == [b"x"]
        assert sorted((first.streams > 0, second.streams > 0)) == [True, True]


def test_a_held_port_accepts_no_connections_and_cannot_be_bound_without_sharing() -> None:
    with hold(0, "--grpc-port") as held:
        port = held.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), WAIT)
        for bind in (hold, listen):
            with pytest.raises(StartError, match=rf"port {port} \(--grpc-port\) is in use"):
                bind(port, "--grpc-port")


@pytest.mark.parametrize("share", [False, True])
def test_a_port_where_another_process_listens_is_not_held(share: bool) -> None:
    with socket.create_server(("127.0.0.1", 0), reuse_port=share) as other, pytest.raises(StartError, match="in use"):
        hold(other.getsockname()[1], "--grpc-port")


def test_the_error_for_a_port_in_use_names_the_address(site: Site) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        server = grpcio.Server(site.loop)
        with pytest.raises(OSError, match=f"grpc cannot bind .*:{other.getsockname()[1]}"):
            site.call(server.serve, other, application)
        site.call(server.abort)


def test_the_parent_does_not_import_grpc() -> None:
    script = (
        "import sys, workers.cli.serve, workers.process.parent, workers.supervisor.main, workers.worker.main\n"
        "assert not [name for name in sys.modules if name.partition('.')[0] == 'grpc']"
    )
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, check=True, timeout=50)


# TLS.


class Certificates:
    """Stands for `workers.process.certificates`."""

    def __init__(self, material: Material) -> None:
        self.material = material


def shown(site: Site) -> str:
    """The certificate that a new connection gets."""
    context = client_context()
    plain = socket.create_connection(("127.0.0.1", site.port), WAIT)
    with context.wrap_socket(plain, server_hostname="localhost") as secure:
        assert secure.selected_alpn_protocol() == "h2"
        return ssl.DER_cert_to_PEM_cert(secure.getpeercert(binary_form=True) or b"")


def test_new_connections_see_a_replaced_certificate() -> None:
    first, second = Material(*self_signed()), Material(*self_signed())
    certificates = Certificates(first)
    with Site(certificates=certificates) as site:
        credentials = grpc.ssl_channel_credentials(first.chain)
        with site.channel(credentials=credentials) as channel, site.channel() as plain:
            assert ended(stream(channel)(iter([b"x"]), timeout=WAIT))[0] == [b"x"]
            assert ended(stream(plain)(iter([b"x"]), timeout=WAIT))[1] is grpc.StatusCode.UNAVAILABLE
            assert shown(site).encode() == first.chain
            certificates.material = second
            assert shown(site).encode() == second.chain
            assert ended(stream(channel)(iter([b"x"]), timeout=WAIT))[0] == [b"x"]


def test_a_client_without_a_certificate_of_the_ca_is_refused() -> None:
    client = self_signed()
    server = Material(*self_signed(), client_ca=client[0])
    with Site(certificates=Certificates(server)) as site:
        stranger = grpc.ssl_channel_credentials(server.chain)
        with site.channel(credentials=stranger) as channel:
            assert ended(stream(channel)(iter([b"x"]), timeout=WAIT))[1] is grpc.StatusCode.UNAVAILABLE
        known = grpc.ssl_channel_credentials(server.chain, private_key=client[1], certificate_chain=client[0])
        with site.channel(credentials=known) as channel:
            assert ended(stream(channel)(iter([b"x"]), timeout=WAIT))[0] == [b"x"]


def test_bytes_that_handlers_keep_count_until_they_release_them_or_end() -> None:
    budget = Budget(100)
    with Site(budget=budget) as site, site.channel() as channel:
        calls = [stream(channel, "/test/Hold")(iter([b"x"]), timeout=WAIT) for _ in range(2)]
        site.until(lambda: len(site.held) == 2)
        first, second = (held.stream for held in site.held)
        assert site.call(first.hold, 60)
        assert not site.call(second.hold, 60)
        site.call(first.release)
        assert budget.used == 60
        for held in (first, second):
            site.call(held.end)
        for call in calls:
            list(call)
        site.until(lambda: budget.used == 0)
        assert not site.call(first.hold, 1)
