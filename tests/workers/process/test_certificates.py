"""Tests of certificates that are replaced while they are in use, with real files, real handshakes and a test clock."""

import asyncio
import contextlib
import os
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import uvloop

from tests.waiting import turns
from tests.workers.authority import CLIENT, Authority, Pair, Volume, write, write_pair
from tests.workers.instances import options
from tests.workers.transport.test_tls import handshake
from workers.process import certificates as module
from workers.process.certificates import DAY_S, RETRY_POLLS, Certificates, of_ext_proc, of_metrics
from workers.transport.interface import Application, Handler, Stream
from workers.transport.native import Server
from workers.transport.tls import Settings
from workers.worker.extproc.health import CHECK, SERVING, Health

ROTATIONS = 200
Logged = list[tuple[str, str, dict[str, Any]]]


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Logged:
    """The log lines: level, event, fields."""
    lines: Logged = []

    class Log:
        def __getattr__(self, level: str) -> Callable[..., None]:
            return lambda event, **fields: lines.append((level, event, fields))

    monkeypatch.setattr(module, "log", Log())
    return lines


def shown(certificates: Certificates) -> bytes | None:
    """The certificate that a new connection gets, in DER."""
    return handshake(certificates.context).getpeercert(binary_form=True)


def look(certificates: Certificates, times: int = 2, now: float | None = None) -> None:
    for _ in range(times):
        certificates.poll(time.time() if now is None else now)


def followed(directory: Path, pair: Pair, **more: Any) -> Certificates:
    return Certificates(Settings(write_pair(directory, pair), **more), reload=True)


def test_a_new_pair_is_used_after_it_stayed_the_same_for_one_check(tmp_path: Path, logged: Logged) -> None:
    authority = Authority()
    old, new = authority.pair(), authority.pair(days=90.0)
    certificates = followed(tmp_path, old)
    look(certificates)
    write_pair(tmp_path, new)
    look(certificates, 1)
    assert shown(certificates) == old.der
    look(certificates, 1)
    assert shown(certificates) == new.der
    ((level, event, fields),) = logged
    assert (level, event) == ("info", "certificate replaced")
    assert fields["not_after"].endswith("Z")


def test_a_swap_of_a_volumes_folder_is_noticed(tmp_path: Path) -> None:
    authority = Authority()
    volume = Volume(tmp_path / "volume", authority.pair())
    certificates = Certificates(Settings(volume.directory), reload=True)
    for _ in range(3):
        new = authority.pair()
        volume.swap(new)
        look(certificates)
        assert shown(certificates) == new.der


def test_files_that_change_while_they_are_read_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority()
    between, last = authority.pair(), authority.pair()
    certificates = followed(tmp_path, authority.pair())
    read = module.tls.read

    def overtaken(settings: Settings) -> Any:
        found = read(settings)
        write_pair(tmp_path, last)
        return found

    write_pair(tmp_path, between)
    with monkeypatch.context() as patch:
        patch.setattr(module.tls, "read", overtaken)
        look(certificates)
    assert shown(certificates) not in (between.der, last.der)
    look(certificates)
    assert shown(certificates) == last.der


def test_another_kind_of_key_replaces_the_old_one_for_all_clients(tmp_path: Path) -> None:
    authority = Authority()
    certificates = followed(tmp_path, authority.pair(rsa_key=True))
    new = authority.pair()
    write_pair(tmp_path, new)
    look(certificates)
    only_rsa = authority.client()
    only_rsa.maximum_version = ssl.TLSVersion.TLSv1_2
    only_rsa.set_ciphers("ECDHE-RSA-AES128-GCM-SHA256")
    assert shown(certificates) == new.der
    with pytest.raises(ssl.SSLError):
        handshake(certificates.context, only_rsa)


def broken_pairs(authority: Authority, old: Pair) -> dict[str, tuple[Pair, str]]:
    new = authority.pair()
    return {
        "expired": (authority.pair(days=-1.0), "the certificate expired on"),
        "not yet valid": (authority.pair(since=1.0), "is not valid before"),
        "mismatched": (Pair(new.chain, old.key), "not a usable pair"),
        "half-written certificate": (Pair(new.chain[: len(new.chain) // 2], new.key), "not a usable pair"),
        "half-written key": (Pair(new.chain, new.key[: len(new.key) // 2]), "not a usable pair"),
        "empty": (Pair(new.chain, b""), "tls.key is empty"),
    }


@pytest.mark.parametrize("broken", list(broken_pairs(Authority(), Authority().pair())))
def test_an_unusable_pair_does_not_replace_the_old_one_and_is_logged_once_per_change(tmp_path: Path, logged: Logged, broken: str) -> None:
    authority = Authority()
    old = authority.pair()
    certificates = followed(tmp_path, old)
    pair, why = broken_pairs(authority, old)[broken]
    write_pair(tmp_path, pair)
    look(certificates, 5)
    assert shown(certificates) == old.der
    ((level, event, fields),) = logged
    assert (level, event) == ("error", "certificate not replaced, the old one stays in use")
    assert why in fields["why"]
    assert str(tmp_path) in fields["why"]
    write_pair(tmp_path, pair)
    look(certificates, 5)
    assert len(logged) == 2
    good = authority.pair()
    write_pair(tmp_path, good)
    look(certificates)
    assert shown(certificates) == good.der


def test_files_that_vanish_and_come_back_change_nothing(tmp_path: Path, logged: Logged) -> None:
    pair = Authority().pair()
    certificates = followed(tmp_path, pair)
    (tmp_path / "tls.key").unlink()
    look(certificates, 3)
    assert shown(certificates) == pair.der
    write_pair(tmp_path, pair)
    look(certificates, 3)
    assert [event for _, event, _ in logged] == ["certificate not replaced, the old one stays in use"]


def test_a_pair_that_is_not_valid_yet_is_used_when_it_becomes_valid(tmp_path: Path) -> None:
    authority = Authority()
    certificates = followed(tmp_path, authority.pair())
    new = authority.pair(since=1.0)
    write_pair(tmp_path, new)
    look(certificates)
    assert shown(certificates) != new.der
    look(certificates, RETRY_POLLS, time.time() + 1.1 * DAY_S)
    assert shown(certificates) == new.der


def test_files_that_changed_before_a_child_started_are_used_before_it_serves(tmp_path: Path) -> None:
    async def scenario() -> None:
        authority = Authority()
        certificates = followed(tmp_path, authority.pair())
        new = authority.pair()
        write_pair(tmp_path, new)
        certificates.follow(asyncio.get_running_loop(), speaks=False)
        assert shown(certificates) == new.der
        certificates.close()

    asyncio.run(scenario())


def test_only_one_of_several_processes_logs(tmp_path: Path, logged: Logged) -> None:
    async def scenario() -> None:
        certificates = followed(tmp_path, Authority().pair(days=-1.0))
        certificates.follow(asyncio.get_running_loop(), speaks=False)
        certificates.close()

    asyncio.run(scenario())
    assert logged == []


def test_the_end_of_the_certificate_is_published_at_the_start_and_when_it_is_replaced(tmp_path: Path) -> None:
    said: list[float] = []

    def say(until: float, soon_at: float) -> None:
        assert soon_at == certificates.soon_at
        said.append(until)

    authority = Authority()
    certificates = followed(tmp_path, authority.pair(days=30.0))

    async def run() -> None:
        certificates.follow(asyncio.get_running_loop(), speaks=False, say=say)
        assert said == [certificates.valid_until]
        write_pair(tmp_path, authority.pair(days=90.0))
        look(certificates)
        assert said[1:] == [certificates.valid_until]
        certificates.close()

    asyncio.run(run())
    assert 59 * DAY_S < said[1] - said[0] < 61 * DAY_S


def test_without_reload_files_are_read_once(tmp_path: Path) -> None:
    authority = Authority()
    old = authority.pair()
    certificates = Certificates(Settings(write_pair(tmp_path, old)), reload=False)
    write_pair(tmp_path, authority.pair())
    look(certificates)
    assert shown(certificates) == old.der


def test_the_log_warns_once_a_day_before_and_after_a_certificate_expires(tmp_path: Path, logged: Logged) -> None:
    certificates = Certificates(Settings(write_pair(tmp_path, Authority().pair(since=-60.0, days=8.0))), reload=False)
    start = time.time()
    look(certificates, 3, start)
    assert logged == []
    for hours in range(24 * 10):
        look(certificates, 1, start + hours * 3600.0)
    events = [(level, event) for level, event, _ in logged]
    soon, over = ("warning", "certificate expires soon"), ("error", "certificate has expired")
    assert events == [soon] * 7 + [over] * 2
    assert logged[0][2]["days"] == pytest.approx(7.0, abs=0.1)


def test_a_clock_that_is_set_back_does_not_end_the_warnings(tmp_path: Path, logged: Logged) -> None:
    certificates = Certificates(Settings(write_pair(tmp_path, Authority().pair(since=-60.0, days=8.0))), reload=False)
    start = time.time()
    for now in (3600.0, start + 3650 * 86_400.0, start + 2 * 86_400.0):  # a clock that begins in 1970, runs far ahead, and is then right
        look(certificates, 1, now)
    assert [event for _, event, _ in logged] == ["certificate is not valid yet", "certificate has expired", "certificate expires soon"]


@pytest.mark.parametrize(("days", "left"), [(1.0, 0.4), (5.0, 1.2), (365.0, 7.0)])
def test_a_certificate_that_is_valid_for_a_short_time_expires_soon_late(tmp_path: Path, logged: Logged, days: float, left: float) -> None:
    """One that is valid for a day, and is renewed after two thirds of it, is no reason for a warning. It began a day before."""
    certificates = Certificates(Settings(write_pair(tmp_path, Authority().pair(days=days))), reload=False)
    assert (certificates.valid_until - certificates.soon_at) / DAY_S == pytest.approx(left, abs=0.01)
    look(certificates, 1, certificates.soon_at - 1.0)
    assert logged == []
    look(certificates, 1, certificates.soon_at)
    assert [event for _, event, _ in logged] == ["certificate expires soon"]


def test_a_renewed_certificate_ends_the_warnings(tmp_path: Path, logged: Logged) -> None:
    authority = Authority()
    certificates = followed(tmp_path, authority.pair(since=-60.0, days=2.0))
    look(certificates)
    write_pair(tmp_path, authority.pair(days=90.0))
    look(certificates, 3)
    look(certificates, 1, time.time() + 2 * DAY_S)
    assert [event for _, event, _ in logged] == ["certificate expires soon", "certificate replaced"]


def test_a_new_ca_for_clients_replaces_the_old_one(tmp_path: Path) -> None:
    authority, before, after = Authority(), Authority("before"), Authority("after")
    write(tmp_path / "ca.pem", before.pem)
    certificates = followed(tmp_path / "server", authority.pair(), client_ca=tmp_path / "ca.pem")
    old = authority.client(before.pair(use=CLIENT), tmp_path / "old")
    new = authority.client(after.pair(use=CLIENT), tmp_path / "new")
    handshake(certificates.context, old)
    write(tmp_path / "ca.pem", after.pem)
    look(certificates)
    handshake(certificates.context, new)
    with pytest.raises(ssl.SSLError, match="CERTIFICATE_VERIFY_FAILED"):
        handshake(certificates.context, old)


def test_flags_select_the_certificate_of_each_port(tmp_path: Path) -> None:
    pair, other = Authority().pair(), Authority().pair()
    given = options(
        tmp_path,
        secure_serving=True,
        cert_path=str(write_pair(tmp_path / "grpc", pair)),
        metrics_cert_dir=str(write_pair(tmp_path / "metrics", other)),
    )
    ext_proc, metrics = of_ext_proc(given), of_metrics(given.metrics_cert_dir, given.metrics_client_ca_file)
    assert ext_proc is not None
    assert metrics is not None
    assert [handshake(c.context).selected_alpn_protocol() for c in (ext_proc, metrics)] == ["h2", "http/1.1"]
    assert [shown(c) for c in (ext_proc, metrics)] == [pair.der, other.der]
    assert of_ext_proc(options(tmp_path)) is None
    assert of_metrics("", "") is None


# Over loopback.


class Counted:
    """A health service that counts its streams."""

    def __init__(self) -> None:
        self.opened = 0
        self._health = Health(lambda: True)

    def open(self, path: str, metadata: Sequence[tuple[bytes, bytes]], stream: Stream) -> Handler | None:
        self.opened += 1
        return self._health.open(path, metadata, stream)


def served(application: Application, context: ssl.SSLContext, scenario: Callable[[int], Awaitable[None]]) -> list[str]:
    """Run a scenario against a server. Return what the server reported as abuse."""
    abuses: list[str] = []

    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=256) as listening:
            server = Server(asyncio.get_running_loop(), on_abuse=abuses.append)
            server.serve(listening, application, context)
            try:
                async with asyncio.timeout(50):
                    await scenario(listening.getsockname()[1])
            finally:
                server.abort()
                await server.closed()

    uvloop.run(run())
    return abuses


async def connect(port: int, context: ssl.SSLContext) -> bytes:
    """Open a connection and read its first bytes. Return the server's certificate, in DER."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="localhost")
    try:
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
        assert await reader.readexactly(9)  # the server's SETTINGS: it has accepted the connection
        der: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return der
    finally:
        writer.transport.abort()


def test_no_handshake_fails_while_the_certificate_is_replaced_200_times(tmp_path: Path) -> None:
    authority = Authority()
    pairs = [authority.pair() for _ in range(ROTATIONS + 1)]
    volume = Volume(tmp_path / "volume", pairs[0])
    certificates = Certificates(Settings(volume.directory), reload=True)
    trusting = authority.client()
    seen: list[bytes] = []
    over = False

    async def client(port: int) -> None:
        while not over:
            seen.append(await connect(port, trusting))

    async def scenario(port: int) -> None:
        nonlocal over
        clients = [asyncio.ensure_future(client(port)) for _ in range(8)]
        for pair in pairs[1:]:
            volume.swap(pair)
            look(certificates)
            enough = len(seen) + 2
            while len(seen) < enough and not any(c.done() for c in clients):
                await turns()
        over = True
        await asyncio.gather(*clients)

    assert served(Counted().open, certificates.context, scenario) == []
    shown_ones = set(seen)
    assert shown_ones <= {pair.der for pair in pairs}
    assert len(shown_ones) > ROTATIONS / 2
    assert seen[-1] == pairs[-1].der


def test_a_client_without_a_certificate_of_the_ca_does_not_reach_the_application(tmp_path: Path) -> None:
    authority, clients, strangers = Authority(), Authority("clients"), Authority("strangers")
    write(tmp_path / "ca.pem", clients.pem)
    settings = Settings(write_pair(tmp_path / "server", authority.pair()), client_ca=tmp_path / "ca.pem")
    certificates = Certificates(settings, reload=False)
    application = Counted()
    wrong = [
        authority.client(),
        authority.client(strangers.pair(use=CLIENT), tmp_path / "strange"),
        authority.client(clients.pair(use=CLIENT, days=-1.0), tmp_path / "expired"),
    ]
    right = clients.pair(use=CLIENT)

    async def scenario(port: int) -> None:
        for context in wrong * 5:
            with pytest.raises((ConnectionError, ssl.SSLError, asyncio.IncompleteReadError)):
                await connect(port, context)
        assert application.opened == 0
        credentials = grpc.ssl_channel_credentials(authority.pem, right.key, right.chain)
        named = (("grpc.ssl_target_name_override", "localhost"),)
        async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options=named) as channel:
            assert await channel.unary_unary(CHECK)(b"", timeout=10) == SERVING
        assert application.opened == 1

    abuses = served(application.open, certificates.context, scenario)
    assert [cause.partition(":")[0] for cause in abuses] == ["handshake failed"] * len(wrong) * 5


def test_a_client_without_tls_does_not_reach_the_application(tmp_path: Path) -> None:
    application = Counted()

    async def scenario(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
        with contextlib.suppress(ConnectionError):
            assert not (await reader.read()).startswith(b"\0")
        writer.close()

    certificates = Certificates(Settings(write_pair(tmp_path, Authority().pair())), reload=False)
    (abuse,) = served(application.open, certificates.context, scenario)
    assert abuse.startswith("handshake failed: a peer speaks plaintext: use --secure-serving=false, or TLS")
    assert application.opened == 0


def test_an_unreadable_file_keeps_the_old_pair(tmp_path: Path, logged: Logged) -> None:
    pair = Authority().pair()
    certificates = followed(tmp_path, pair)
    (tmp_path / "tls.crt").unlink()
    os.mkdir(tmp_path / "tls.crt")
    look(certificates, 3)
    assert shown(certificates) == pair.der
    assert "tls.crt: Is a directory" in logged[0][2]["why"]


def test_a_peer_that_leaves_during_its_handshake_is_reported_with_words(tmp_path: Path) -> None:
    application = Counted()

    async def scenario(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"\x16\x03\x01\x02\x00" + bytes(16))  # the beginning of a TLS record
        writer.write_eof()
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()

    certificates = Certificates(Settings(write_pair(tmp_path, Authority().pair())), reload=False)
    (abuse,) = served(application.open, certificates.context, scenario)
    cause, _, reason = abuse.partition(": ")
    assert cause == "handshake given up" and "the peer left" in reason
