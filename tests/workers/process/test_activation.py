"""Tests of the sockets of systemd: they are used as they are, and wrong ones are refused before anything is served."""

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from epp.config.load import load
from tests.workers.instances import options
from workers.process import StartError, Unusable
from workers.process.instance import Instance
from workers.process.sockets import VARIABLES, Sockets, listen, received

FIRST = 400  # no other descriptor of the test has such a number


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., dict[str, str]]]:
    """Passes sockets as systemd does. The result is the environment of the picker."""
    monkeypatch.setattr("workers.process.sockets.FIRST_PASSED", FIRST)
    used: list[int] = []

    def give(*sockets: socket.socket, names: str = "grpc") -> dict[str, str]:
        for found in sockets:
            used.append(os.dup2(found.fileno(), FIRST + len(used)))
        return dict(zip(VARIABLES, (str(os.getpid()), str(len(sockets)), names), strict=True))

    yield give
    for descriptor in used:
        if os.path.exists(f"/proc/self/fd/{descriptor}"):
            os.close(descriptor)


def closed(sockets: Sockets) -> None:
    for found in (sockets.ext_proc, sockets.health, sockets.metrics):
        found.close()


def test_a_socket_of_systemd_is_used_and_the_other_ports_are_bound(passed: Callable[..., dict[str, str]], tmp_path: Path) -> None:
    with listen(0, "--x") as held:
        port = held.getsockname()[1]
        environ = passed(held) | {"HOME": "/"}
        given = received(environ)
        assert environ == {"HOME": "/"}, "children must not take the variables for theirs"
        sockets = Sockets.bind(options(tmp_path, grpc_port=port), given)
        assert sockets.activated
        assert sockets.ports()["grpc"] == port
        assert len(set(sockets.ports().values())) == 3
        assert not os.get_inheritable(sockets.ext_proc.fileno())
        with socket.create_connection(("127.0.0.1", port)):
            sockets.ext_proc.accept()[0].close()
        closed(sockets)
        with socket.create_connection(("127.0.0.1", port)):
            held.accept()[0].close()


def test_each_port_can_have_a_socket(passed: Callable[..., dict[str, str]], tmp_path: Path) -> None:
    with listen(0, "--x") as one, listen(0, "--y") as two, listen(0, "--z") as three:
        sockets = Sockets.bind(options(tmp_path), received(passed(one, two, three, names="metrics:grpc:health")))
        assert sockets.ports() == {"metrics": one.getsockname()[1], "grpc": two.getsockname()[1], "health": three.getsockname()[1]}
        closed(sockets)


def test_without_a_socket_for_grpc_nobody_keeps_it_open(passed: Callable[..., dict[str, str]], tmp_path: Path) -> None:
    with listen(0, "--x") as held:
        sockets = Sockets.bind(options(tmp_path), received(passed(held, names="health")))
        assert not sockets.activated
        closed(sockets)


@pytest.mark.parametrize("pid", ["", "1"])
def test_sockets_for_another_process_are_left_alone(pid: str) -> None:
    environ = dict(zip(VARIABLES, (pid, "1", "grpc"), strict=True))
    assert received(environ) == {}


@pytest.mark.parametrize(
    ("names", "why"),
    [
        ("", r"passes 2 sockets \(LISTEN_FDS\) and 0 names"),
        ("grpc", "passes 2 sockets .* and 1 names .*: each socket needs one; set FileDescriptorName="),
        ("grpc:health:metrics", "passes 2 sockets .* and 3 names"),
        ("grpc:endpoint-picker.socket", "the name 'endpoint-picker.socket'; the names are grpc, health, metrics: set FileDes"),
        ("grpc:grpc", "2 sockets with the name 'grpc': leave one in the .socket unit"),
    ],
)
def test_names_that_do_not_fit_are_refused(passed: Callable[..., dict[str, str]], names: str, why: str) -> None:
    with listen(0, "--x") as one, listen(0, "--y") as two, pytest.raises(Unusable, match=why):
        received(passed(one, two, names=names))


@pytest.mark.parametrize(
    ("family", "kind", "why"),
    [
        (socket.AF_INET, socket.SOCK_DGRAM, "the socket 'grpc' of systemd is no TCP socket: give its port to ListenStream="),
        (socket.AF_UNIX, socket.SOCK_STREAM, "is no TCP socket"),
        (socket.AF_INET, socket.SOCK_STREAM, "does not listen: set Accept=no in the .socket unit"),
    ],
)
def test_a_socket_that_accepts_no_connections_is_refused(passed: Callable[..., dict[str, str]], family: int, kind: int, why: str) -> None:
    with socket.socket(family, kind) as wrong, pytest.raises(Unusable, match=why):
        received(passed(wrong))


def test_a_descriptor_that_is_no_socket_or_not_open_is_refused(passed: Callable[..., dict[str, str]]) -> None:
    environ = passed()
    with pytest.raises(Unusable, match=r"descriptor 400 of LISTEN_FDS \('grpc'\) is no socket: Bad file descriptor"):
        received(environ | {"LISTEN_FDS": "1"})


def test_another_port_than_that_of_the_flag_is_refused_and_nothing_stays_open(
    passed: Callable[..., dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with listen(0, "--x") as held:
        for variable, value in passed(held).items():
            monkeypatch.setenv(variable, value)
        port = held.getsockname()[1]
        why = f"listens on port {port}, and --grpc-port is 9002: set ListenStream=9002 .* or give the picker --grpc-port {port}"
        with pytest.raises(Unusable, match=why):
            Instance.create(options(tmp_path, grpc_port=9002), load(None, "test"))
        assert not os.path.exists(f"/proc/self/fd/{FIRST}")
        assert os.listdir(tmp_path) == []


def test_a_port_that_cannot_be_bound_closes_the_sockets_of_systemd(passed: Callable[..., dict[str, str]], tmp_path: Path) -> None:
    with listen(0, "--x") as held, listen(0, "--y") as taken:
        given = received(passed(held))
        with pytest.raises(StartError, match="--metrics-port"):
            Sockets.bind(options(tmp_path, metrics_port=taken.getsockname()[1]), given)
        assert given["grpc"].fileno() == -1


def test_a_transport_that_binds_its_port_itself_refuses_a_socket(passed: Callable[..., dict[str, str]], tmp_path: Path) -> None:
    with listen(0, "--x") as held, pytest.raises(Unusable, match="--transport grpcio binds its port itself"):
        Sockets.bind(options(tmp_path, transport="grpcio"), received(passed(held)))
