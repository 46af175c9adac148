"""Tests of listening sockets: a port is used once, and error texts say what to do."""

import socket
from contextlib import closing
from pathlib import Path

import pytest

from tests.workers.instances import options
from workers.process import StartError
from workers.process.sockets import Sockets, listen


def test_a_port_serves_ipv4_and_ipv6() -> None:
    with listen(0, "--x") as held:
        port = held.getsockname()[1]
        for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
            with socket.socket(family) as client:
                client.connect((address, port))


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")])
def test_the_error_for_a_port_in_use_names_the_flag_and_a_command_to_find_the_holder(family: int, address: str) -> None:
    with socket.socket(family) as holder:
        holder.bind((address, 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(StartError, match=rf"port {port} \(--metrics-port\) is in use: another picker.*ss -ltnp"):
            listen(port, "--metrics-port")


def test_pools_have_ports_of_their_own_which_only_workers_hold(tmp_path: Path) -> None:
    with listen(0, "--x") as one, listen(0, "--y") as two:
        ports = [each.getsockname()[1] for each in (one, two)]
    sockets = Sockets.bind(options(tmp_path), {}, dict(zip(ports, ("a", "b"), strict=True)))
    held = [each.fileno() for each in sockets.pools]
    assert [each.getsockname()[1] for each in sockets.pools] == ports
    assert set(held) <= set(sockets.not_for_supervisor()) and set(held) <= set(sockets.not_for_kv_events())
    assert not set(held) & set(sockets.not_for_worker())
    for each in (sockets.ext_proc, sockets.health, sockets.metrics, *sockets.pools):
        each.close()


def test_the_error_for_a_pool_whose_port_is_in_use_names_the_pool_and_leaves_no_socket_open(tmp_path: Path) -> None:
    with closing(listen(0, "--x")) as free, listen(0, "--y") as taken:
        port, used = (each.getsockname()[1] for each in (free, taken))
        free.close()
        with pytest.raises(StartError, match=rf"port {used} \(pool b\) is in use: .* or give pool b another port"):
            Sockets.bind(options(tmp_path), {}, {port: "a", used: "b"})
    listen(port, "--x").close()
