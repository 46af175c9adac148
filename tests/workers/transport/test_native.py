"""The engine on real sockets: a synchronous grpcio client, and a server in the thread of its loop."""

import socket
import ssl
import threading

import grpc
import pytest

from tests.tls_client import client_context
from tests.workers.transport.helpers import DATA, HEADERS, PING, SETTINGS, block, frame, framed, parse, setting
from tests.workers.transport.native_site import WAIT, Site, busy, connect, hold, mirror, raw, read_all
from workers.transport.frames import PREFACE
from workers.transport.handshakes import BURST, GAP_S, PER_SECOND, WAIT_S_MAX
from workers.transport.limits import Limits
from workers.transport.tls import server_context
from workers.transport.wrong_protocol import PLAINTEXT_PEER


@pytest.fixture
def site():
    site = Site()
    yield site
    site.close()


MESSAGES = [b"", b"one", bytes(16379), bytes(16380), bytes(100_000), b"x" * 3_000_000]


def test_grpcio_gets_its_messages_back(site):
    with connect(site) as channel:
        assert list(mirror(channel)(iter(MESSAGES), timeout=WAIT)) == MESSAGES


def test_grpcio_gets_its_messages_back_over_tls():
    site = Site(server_context(None))
    try:
        served = ssl.get_server_certificate(("127.0.0.1", site.port)).encode()
        options = [("grpc.ssl_target_name_override", "localhost"), ("grpc.max_receive_message_length", -1)]
        with grpc.secure_channel(f"127.0.0.1:{site.port}", grpc.ssl_channel_credentials(served), options) as channel:
            assert list(mirror(channel)(iter(MESSAGES), timeout=WAIT)) == MESSAGES
    finally:
        site.close()


@pytest.mark.parametrize("hello", [bytes(16), b"PRI * HTTP/2.0\r\n\r\n"])
def test_a_peer_that_speaks_no_tls_does_not_disturb_others(hello):
    site = Site(server_context(None))
    try:
        with socket.create_connection(("127.0.0.1", site.port), WAIT) as peer:
            peer.sendall(hello)
            read_all(peer)
        site.until(lambda: site.server.connections == 0)
        (abuse,) = site.abuses
        assert abuse.startswith("handshake failed: ")
        assert (abuse == f"{PLAINTEXT_PEER}, from 127.0.0.1") == hello.startswith(b"PRI")
    finally:
        site.close()


def test_plain_http_gets_an_answer_that_the_port_speaks_tls():
    site = Site(server_context(None))
    try:
        with socket.create_connection(("127.0.0.1", site.port), WAIT) as peer:
            peer.sendall(b"GET / HTTP/1.1\r\nhost: picker\r\n\r\n")
            answer = read_all(peer)
        assert answer.startswith(b"HTTP/1.1 400 ") and b"HTTP/2 within TLS" in answer
        site.until(lambda: site.server.connections == 0)
        assert site.abuses == [f"{PLAINTEXT_PEER}, from 127.0.0.1"]
    finally:
        site.close()


def test_http1_within_tls_gets_an_answer_too():
    site = Site(server_context(None))
    context = client_context(())
    try:
        plain = socket.create_connection(("127.0.0.1", site.port), WAIT)
        with context.wrap_socket(plain, suppress_ragged_eofs=True) as peer:
            peer.sendall(b"GET / HTTP/1.1\r\nhost: picker\r\n\r\n")
            assert read_all(peer).startswith(b"HTTP/1.1 400 ")
    finally:
        site.close()


def test_a_handler_knows_the_address_of_its_peer(site):
    with busy(site):
        site.until(lambda: site.held)
        assert site.held[0].stream.peer() == "127.0.0.1"


def test_a_handler_knows_the_port_and_the_authority_that_its_peer_has_called():
    site = Site(further=2)
    try:
        for port in (site.port, *site.further_ports):
            with raw(site, port) as peer:
                for number, authority in ((1, f"pool-{port}.svc:9002"), (3, None)):
                    peer.sendall(frame(HEADERS, 4, number, block(path="/test/Hold", authority=authority)))
                site.until(lambda port=port: sum(held.stream.port() == port for held in site.held) == 2)
        assert [held.stream.authority for held in site.held] == [
            authority for port in (site.port, *site.further_ports) for authority in (f"pool-{port}.svc:9002", "")
        ]
        site.call(site.server.stop_accepting)
        with raw(site, site.further_ports[0]) as peer, raw(site) as other:
            site.until(lambda: site.server.connections == 0)
            assert site.server.accepted == 3
            assert peer.fileno() > 0 and other.fileno() > 0  # they wait in the kernel
    finally:
        site.close()


def test_a_handler_knows_the_port_under_tls_too():
    site = Site(server_context(None), further=1)
    context = client_context()
    try:
        with socket.create_connection(("127.0.0.1", site.further_ports[0]), WAIT) as plain, context.wrap_socket(plain) as peer:
            peer.sendall(PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, 4, 1, block(path="/test/Hold", authority="pool.svc")))
            site.until(lambda: site.held)
        assert (site.held[0].stream.port(), site.held[0].stream.authority) == (site.further_ports[0], "pool.svc")
    finally:
        site.close()


def test_grpcio_may_compress(site):
    with connect(site) as channel:
        answers = mirror(channel)(iter([b"a" * 10_000]), timeout=WAIT, compression=grpc.Compression.Gzip)
        assert list(answers) == [b"a" * 10_000]


def test_grpcio_sees_status_and_text_of_refusals(site):
    with connect(site) as channel:
        with pytest.raises(grpc.RpcError) as failure:
            channel.unary_unary("/test/Nothing")(b"x", timeout=WAIT)
        assert failure.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert failure.value.details() == "unknown method /test/Nothing"
        with pytest.raises(grpc.RpcError) as failure:
            list(mirror(channel)(iter([bytes(5 << 20)]), timeout=WAIT))
        assert failure.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_200_streams_held_open_over_one_connection_are_all_answered(site):
    with connect(site) as channel:
        calls = [hold(channel).future(iter([b"x"]), timeout=WAIT) for _ in range(200)]
        site.until(lambda: len(site.held) == 200)
        assert site.call(lambda: (site.server.streams, site.server.connections)) == (200, 1)

        def answer():
            for held in site.held:
                held.stream.send(b"answer")
                held.stream.end()

        site.call(answer)
        assert [call.result(WAIT) for call in calls] == [b"answer"] * 200
        site.until(lambda: site.server.streams == 0)


def test_handlers_are_closed_once_when_a_client_cancels_or_leaves(site):
    channel = connect(site)
    calls = [hold(channel).future(iter([b"x"]), timeout=WAIT) for _ in range(4)]
    site.until(lambda: len(site.held) == 4)
    calls[0].cancel()
    site.until(lambda: sum(h.lost for h in site.held) == 1)
    channel.close()
    site.until(lambda: site.server.connections == 0)
    assert [h.lost for h in site.held] == [1, 1, 1, 1]


def test_drain_lets_open_streams_end_and_closes_idle_connections(site):
    with connect(site) as busy, connect(site) as idle:
        assert list(mirror(idle)(iter([b"x"]), timeout=WAIT)) == [b"x"]
        call = hold(busy).future(iter([b"x"]), timeout=WAIT)
        site.until(lambda: len(site.held) == 1 and len(site.held[0].got) == 1)
        site.call(site.server.stop_accepting)
        site.call(site.server.drain)
        site.until(lambda: site.server.connections == 1)

        def answer():
            site.held[0].stream.send(b"late")
            site.held[0].stream.end()

        site.call(answer)
        assert call.result(WAIT) == b"late"
        site.until(lambda: site.server.connections == 0)


def test_a_wrong_preface_is_answered_and_closed(site):
    with socket.create_connection(("127.0.0.1", site.port), WAIT) as peer:
        peer.sendall(b"EHLO picker\r\n\r\n" + bytes(100_000))
        assert parse(read_all(peer))[-1].error_code == 1


def test_a_plain_get_is_answered_and_closed(site):
    with socket.create_connection(("127.0.0.1", site.port), WAIT) as peer:
        peer.sendall(b"GET / HTTP/1.1\r\nhost: picker\r\n\r\n" + bytes(100_000))
        assert read_all(peer).startswith(b"HTTP/1.1 400 ")


def test_a_call_ends_at_its_deadline_even_if_its_client_sends_nothing(site):
    with raw(site) as peer:
        fields = [*HEADERS_OF_MIRROR, ("grpc-timeout", "100m")]
        peer.sendall(frame(HEADERS, 4, 1, block([(n, "/test/Hold" if n == ":path" else v) for n, v in fields])))
        data = b""
        while b"grpc-status" not in data:
            data += peer.recv(1000)
        assert b"deadline" in data
        assert [held.lost for held in site.held] == [1]
        site.until(lambda: site.server._expiry is None)


def test_a_peer_that_does_not_read_costs_bounded_memory(site):
    """At last the writes of the peer stall, because the server stops reading from a peer that doesn't read."""
    with raw(site) as peer:
        peer.sendall(frame(SETTINGS, 0, 0, setting(4, (1 << 31) - 1)) + frame(8, 0, 0, b"\x7f\xff\x00\x00"))
        peer.sendall(frame(HEADERS, 4, 1, block([*HEADERS_OF_MIRROR])))
        peer.settimeout(1.0)
        chunk = frame(DATA, 0, 1, framed(bytes(16000))) * 16
        with pytest.raises(TimeoutError):
            for _ in range(400):  # 100 MB, less than the windows
                peer.sendall(chunk)
        (protocol,) = site.server._protocols
        assert protocol._transport.get_write_buffer_size() < 4 << 20
        assert site.server.budget.used < 4 << 20
        with connect(site) as channel:
            assert list(mirror(channel)(iter([b"x"]), timeout=WAIT)) == [b"x"]


HEADERS_OF_MIRROR = [(":method", "POST"), (":scheme", "http"), (":path", "/test/Mirror"), ("content-type", "application/grpc")]


def test_many_streams_in_one_write_are_all_answered(site):
    with raw(site) as peer:
        fields = block([*HEADERS_OF_MIRROR])
        numbers = range(1, 1601, 2)
        one = [frame(HEADERS, 4, n, fields) + frame(DATA, 1, n, framed(b"x")) for n in numbers]
        peer.sendall(b"".join(one))
        data = b""
        while data.count(b"grpc-status") < len(numbers):
            data += peer.recv(1 << 16)
        answered = [f.stream_id for f in parse(data) if type(f).__name__ == "DataFrame" and f.data]
        assert answered == [*numbers]


def test_a_slow_reader_gets_everything_in_order(site):
    count = 300
    with raw(site) as peer:
        peer.sendall(frame(SETTINGS, 0, 0, setting(4, (1 << 31) - 1)) + frame(8, 0, 0, b"\x7f\xff\x00\x00"))
        peer.sendall(frame(HEADERS, 4, 1, block([*HEADERS_OF_MIRROR])))

        def write():
            for i in range(count):
                peer.sendall(frame(DATA, int(i == count - 1), 1, framed(i.to_bytes(2, "big") * 8000)))

        writer = threading.Thread(target=write)
        writer.start()
        data = b""
        while b"grpc-status" not in data[-200:]:
            data += peer.recv(30_000)
        writer.join(WAIT)
    payload = b"".join(f.data for f in parse(data) if type(f).__name__ == "DataFrame")
    assert payload == b"".join(framed(i.to_bytes(2, "big") * 8000) for i in range(count))


def test_a_gateway_that_opens_a_connection_for_each_request_is_not_a_flood():
    """NGINX Gateway Fabric does so (`realExtProcClientFactory` in cmd/gateway/endpoint_picker.go of its repository)."""
    time_ = [10.0]
    site = Site(server_context(None), now=lambda: time_[0])
    context = client_context()
    request = PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, 5, 1, block(path="/test/Nothing"))
    connections = BURST + int(PER_SECOND * WAIT_S_MAX)
    try:
        for _ in range(2 * connections):
            time_[0] += GAP_S
            with socket.create_connection(("127.0.0.1", site.port), WAIT) as plain, context.wrap_socket(plain) as gateway:
                gateway.sendall(request + frame(PING, 0, 0, b"all-read"))
                answer = b""
                while b"all-read" not in answer:
                    answer += gateway.recv(1 << 16) or pytest.fail("the connection was closed")
        assert site.abuses == []
    finally:
        site.close()


def test_a_flood_of_handshakes_is_refused_by_name_and_another_host_is_served():
    site = Site(server_context(None), now=lambda: 10.0)  # time stands still: no pace recovers
    flood = []
    try:
        while not site.abuses:
            flood.append(socket.create_connection(("127.0.0.1", site.port), WAIT, source_address=("127.0.0.3", 0)))
        refused, allowed = "handshakes: 127.0.0.3 begins too many TLS connections", BURST + WAIT_S_MAX * PER_SECOND
        assert all(abuse.startswith(refused) for abuse in site.abuses)
        assert allowed <= site.server.accepted <= allowed + 1
        assert ssl.get_server_certificate(("127.0.0.1", site.port))
    finally:
        for peer in flood:
            peer.close()
        site.close()


def test_the_load_counts_a_connection_as_at_least_its_first_stream_limit(site):
    with connect(site) as channel:
        calls = [hold(channel).future(iter([b"x"]), timeout=WAIT) for _ in range(11)]
        site.until(lambda: len(site.held) == 11)
        with raw(site):
            site.until(lambda: site.server.connections == 2)
            assert site.call(site.server.load) == 11 + 8
        for call in calls:
            call.cancel()


def test_a_flood_is_reported_by_name_and_cut():
    site = Site(limits=Limits(burst=10))
    try:
        with raw(site) as peer:
            peer.sendall(frame(6, 0, 0, bytes(8)) * 50)
            assert parse(read_all(peer))[-1].error_code == 11
        assert site.abuses == ["pings: from 127.0.0.1"]
    finally:
        site.close()
