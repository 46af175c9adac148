"""Tests of listening sockets: a port is used once, and error texts say what to do."""

import socket

import pytest

from workers.process import StartError
from workers.process.sockets import listen


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
