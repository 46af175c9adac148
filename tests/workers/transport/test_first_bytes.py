"""Peers that leave before their TLS handshake is complete: gateways that give it up, and probes that never began one."""

import socket
import struct

import pytest

from tests.tls_client import client_hello
from tests.workers.transport.native_site import WAIT, Site
from workers.transport.tls import server_context
from workers.worker.serving import GIVEN_UP


def leave(peer, *, reset):
    if reset:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("part", [50, None])
def test_a_gateway_that_leaves_during_the_handshake_gives_it_up(part, reset):
    """Envoy does so at its connect_timeout."""
    site = Site(server_context(None))
    try:
        peer = socket.create_connection(("127.0.0.1", site.port), WAIT)
        peer.sendall(client_hello("picker")[:part])
        site.until(lambda: site.server.connections == 1)
        leave(peer, reset=reset)
        site.until(lambda: site.server.connections == 0)
        (abuse,) = site.abuses
        assert abuse.startswith(f"{GIVEN_UP}: the peer left")
    finally:
        site.close()


@pytest.mark.parametrize("reset", [False, True])
def test_a_probe_that_leaves_without_a_word_is_no_fault(reset):
    site = Site(server_context(None))
    try:
        peer = socket.create_connection(("127.0.0.1", site.port), WAIT)
        site.until(lambda: site.server.connections == 1)
        leave(peer, reset=reset)
        site.until(lambda: site.server.connections == 0)
        assert site.abuses == []
    finally:
        site.close()
