"""The ports of places: fixed, or opened when an InferencePool names them, for all processes that share the sockets."""

import os
import socket
from collections.abc import Iterator

import pytest

from loadtest.demo.ports import free_ports
from tests.reports import Reports
from tests.workers.instances import options
from tests.workers.supervisor.kube.test_placing import pool
from workers.process.places import Places
from workers.process.sockets import Sockets, listens
from workers.supervisor.kube.placing import Placing, Ports


@pytest.fixture
def later(tmp_path: object) -> Iterator[list[socket.socket]]:
    sockets = Sockets.bind(options(tmp_path), {}, later=2)  # type: ignore[arg-type]
    yield list(sockets.later)
    for each in (sockets.ext_proc, sockets.health, sockets.metrics, *sockets.later):
        each.close()


def accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except ConnectionRefusedError:
        return False
    return True


def test_a_port_is_opened_once_when_it_is_named(later: list[socket.socket]) -> None:
    one, two, three = free_ports(3)
    ports = Ports((0, 0), later)
    assert ports.of(one) is None and not accepts(one)
    assert ports.opened(one) == (0, "") == ports.opened(one)
    assert accepts(one) and [listens(each) for each in later] == [True, False]
    assert ports.opened(two) == (1, "")
    number, why = ports.opened(three)
    assert number is None and f"port {three}, and all 2 places" in why and "--pool-ports" in why


def test_the_other_processes_that_share_the_sockets_accept_there_too(later: list[socket.socket]) -> None:
    (port,) = free_ports(1)
    if (child := os.fork()) == 0:
        os._exit(Ports((0, 0), later).opened(port)[0] or 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert listens(later[0]) and later[0].getsockname()[1] == port
    with socket.create_connection(("127.0.0.1", port), 1.0) as client:
        later[0].setblocking(True)
        accepted, _ = later[0].accept()
        assert accepted.getpeername()[1] == client.getsockname()[1]
        accepted.close()
    assert Ports((0, 0), later).of(port) == 0, "a successor of the supervisor knows it"


def test_a_port_that_is_taken_is_no_reason_to_lose_a_place(later: list[socket.socket]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        number, why = Ports((0, 0), later).opened(port)
        assert number is None and f"port {port} (of the InferencePool) is in use" in why and "give the InferencePool another port" in why
    assert Ports((0, 0), later).opened(port) == (0, "")


def test_the_port_at_which_the_picker_listens_anyway_needs_no_socket(later: list[socket.socket]) -> None:
    ports = Ports((0, 0), later, served=9002)
    assert ports.opened(9002) == (0, "") and not listens(later[0])
    successor = Ports((0, 0), later, served=9002)
    successor.take(9002, 0)
    (port,) = free_ports(1)
    assert successor.opened(port) == (1, "")


def test_pools_keep_the_places_of_their_ports_and_a_pool_that_is_gone_leaves_its_port_to_others(later: list[socket.socket]) -> None:
    one, two, three = free_ports(3)
    found = Placing(Places({}, (0, 0), "epp"), {}, reports := Reports(), Ports((0, 0), later))
    assert found.place({"a": pool(one), "b": pool(two)})
    assert found.names == {0: ("a", one), 1: ("b", two)}
    assert found.place({"b": pool(two)}) and found.place({"b": pool(two), "c": pool(one)})
    assert found.names == {0: ("c", one), 1: ("b", two)} and reports == []
    found.place({"b": pool(three), "c": pool(one)})
    assert found.names == {0: ("c", one)} and "all 2 places" in found.unserved["b"]
