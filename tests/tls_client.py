"""The client's side of TLS, for tests of the picker's ports."""

import contextlib
import ssl
from collections.abc import Sequence


def client_context(protocols: Sequence[str] = ("h2",)) -> ssl.SSLContext:
    """Returns the TLS context of a client that does not verify the picker's certificate. `protocols`: what it offers by ALPN.

    It does not load the system's authorities, which would take 10 ms.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(protocols)
    return context


def client_hello(server_name: str | None = None) -> bytes:
    """Returns the first message of a TLS handshake, which names this server."""
    out = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        client_context().wrap_bio(ssl.MemoryBIO(), out, server_hostname=server_name).do_handshake()
    return out.read()
