"""A worker that has as many connections as it may: which ones get a place, and which ones give way."""

import socket
import ssl

import pytest

from tests.workers.transport.helpers import SETTINGS
from tests.workers.transport.native_site import WAIT, Site, busy, connect, mirror, raw, read_all
from workers.transport.accept import NO_ROOM, Accepting
from workers.transport.tls import server_context


def test_at_the_limit_of_connections_the_next_one_waits_for_a_place():
    site = Site(connections_max=2)
    try:
        first, second = busy(site), busy(site)
        site.until(lambda: site.server.streams == 2)
        with raw(site) as third:
            third.settimeout(0.2)
            with pytest.raises(TimeoutError):
                third.recv(1)
            first.close()
            third.settimeout(WAIT)
            assert third.recv(9)[3] == SETTINGS
        second.close()
    finally:
        site.close()


def test_a_flood_of_busy_connections_at_one_port_leaves_places_at_the_others():
    said = []
    accepting = Accepting(failed=lambda event, **fields: said.append(fields))
    site = Site(further=1, connections_max=8, accepting=accepting)
    try:
        flood = [busy(site) for _ in range(8)]
        site.until(lambda: site.server.streams >= 4 and said)
        assert {(fields["port"], fields["reason"]) for fields in said} == {(site.port, NO_ROOM)}
        others = [busy(site, site.further_ports[0]) for _ in range(2)]
        site.until(lambda: site.server.streams == 6)
        for peer in flood[:4]:
            peer.close()
        site.until(lambda: sum(held.lost for held in site.held) == 4 and site.server.streams == 5)
        for peer in (*flood, *others):
            peer.close()
    finally:
        site.close()


@pytest.mark.parametrize("greets", [True, False])
def test_at_the_limit_unused_connections_are_closed(greets):
    site = Site(connections_max=2)
    try:
        address = ("127.0.0.1", site.port)
        unused = [raw(site) if greets else socket.create_connection(address, WAIT) for _ in range(2)]
        site.until(lambda: site.server.connections == 2)
        with connect(site) as channel:
            assert list(mirror(channel)(iter([b"x"]), timeout=WAIT)) == [b"x"]
        site.until(lambda: "connections: from 127.0.0.1" in site.abuses)
        for peer in unused:
            peer.close()
    finally:
        site.close()


def test_a_host_that_takes_all_places_keeps_no_connection_of_another_waiting():
    site = Site(connections_max=4)
    address = ("127.0.0.1", site.port)
    try:
        crowd = [socket.create_connection(address, WAIT, ("127.0.0.2", 0)) for _ in range(40)]
        with connect(site) as channel:
            assert list(mirror(channel)(iter([b"x"]), timeout=WAIT)) == [b"x"]
        assert "connections: from 127.0.0.2" in site.abuses
        assert "connections: from 127.0.0.1" not in site.abuses
        for peer in crowd:
            peer.close()
    finally:
        site.close()


def test_at_the_limit_an_idle_connection_is_drained():
    site = Site(connections_max=1)
    try:
        with connect(site) as first, connect(site) as second:
            for channel in (first, second, first):
                assert list(mirror(channel)(iter([b"x"]), timeout=WAIT)) == [b"x"]
        assert not site.abuses
        assert site.server.accepted == 3
    finally:
        site.close()


def test_at_the_limit_slow_handshakes_are_cancelled():
    site = Site(server_context(None), connections_max=2)
    try:
        stuck = [socket.create_connection(("127.0.0.1", site.port), WAIT) for _ in range(2)]
        stuck[1].sendall(b"\x16\x03\x01\x02\x00\x01\x00")  # the beginning of a hello
        served = ssl.get_server_certificate(("127.0.0.1", site.port)).encode()
        assert served
        for peer in stuck:
            read_all(peer)
            peer.close()
        site.until(lambda: site.server.connections == 0)
    finally:
        site.close()
