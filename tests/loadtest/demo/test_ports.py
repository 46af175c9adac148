"""Ports that were found stay with their finder."""

import os
import socket
from collections.abc import Iterator

import pytest

from loadtest.demo import ports


@pytest.fixture(autouse=True)
def six_ports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    first = ports.free_row(6)
    for lease in ports._leases:
        lease.close()
    ports._leases.clear()
    monkeypatch.setattr(ports, "PORTS", (first, first + 6))
    yield
    for lease in ports._leases:
        lease.close()
    ports._leases.clear()


def test_a_port_is_found_once() -> None:
    assert len(set(ports.free_ports(3) + ports.free_ports(3))) == 6
    with pytest.raises(OSError, match="fewer than 1 free ports"):
        ports.free_ports(1)


def test_a_port_of_another_process_is_passed_over_while_that_process_lives() -> None:
    ours, theirs = os.pipe()
    stop, stopping = os.pipe()
    child = os.fork()
    if not child:
        os.close(stopping)
        os.write(theirs, b"".join(port.to_bytes(2, "big") for port in ports.free_ports(5)))
        os.read(stop, 1)
        os._exit(0)
    leased = os.read(ours, 10)
    (left,) = ports.free_ports(1)
    assert left not in {int.from_bytes(leased[at : at + 2], "big") for at in range(0, 10, 2)}
    with pytest.raises(OSError, match="fewer than 1 free ports"):
        ports.free_ports(1)
    for descriptor in (stopping, stop, ours, theirs):
        os.close(descriptor)
    os.waitpid(child, 0)
    assert len(ports.free_ports(5)) == 5


def test_a_port_with_a_listener_is_passed_over() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", ports.PORTS[0]))
        listener.listen()
        assert listener.getsockname()[1] not in ports.free_ports(5)


def test_a_process_ends_its_oldest_lease_when_it_has_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "LEASES_MAX", 4)
    oldest, *later = ports.free_ports(5)
    with socket.socket(socket.AF_UNIX) as name:
        name.bind(f"\0epp-port-{oldest}")
        with pytest.raises(OSError, match="fewer than 2 free ports"):
            monkeypatch.setattr(ports, "LEASES_MAX", 6)
            ports.free_ports(2)
    assert oldest not in later
