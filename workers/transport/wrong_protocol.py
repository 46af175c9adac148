"""Answers peers that speak the wrong protocol: a short text describes this port, and the log says what to change.

A user with a browser or curl may send HTTP/1, or plaintext to a port with TLS. The answer is constant, so it costs little.
"""

import re
from typing import Final

from workers.transport.frames import PREFACE

WHAT: Final = "a gRPC port of an endpoint picker (ext_proc for gateways, or health checks): it speaks HTTP/2"
PEEK_BYTES: Final = 8
TLS_RECORD: Final = b"\x16"  # the first byte of a TLS handshake
PLAINTEXT_PEER: Final = (
    "handshake failed: a peer speaks plaintext: use --secure-serving=false, or TLS in the gateway "
    "(deploy/envoy.yaml has a transport_socket for it)"
)
TLS_PEER: Final = (
    "handshake failed: a peer speaks TLS, but this port is plaintext: remove --secure-serving=false, "
    "or the TLS of the gateway (the transport_socket in deploy/envoy.yaml)"
)

_HTTP1: Final = re.compile(rb"(?:GET|HEAD|POST|PUT|DELETE|OPTIONS|PATCH|CONNECT|TRACE) ")


def speaks_http1(begin: bytes | bytearray) -> bool:
    """Returns whether a connection that begins with these bytes is an HTTP/1 request."""
    return _HTTP1.match(begin) is not None


def speaks_plaintext(begin: bytes | bytearray) -> bool:
    """Returns whether a connection to a TLS port begins like HTTP/2 or HTTP/1 without TLS."""
    return begin.startswith(PREFACE[:PEEK_BYTES]) or speaks_http1(begin)


def http1_answer(begin: bytes | bytearray, *, secure: bool = False) -> bytes:
    """Returns the whole answer to an HTTP/1 request. `secure`: whether the port requires TLS and the request came without TLS."""
    text = f"This is {WHAT}{' within TLS' if secure else ''}. Pages are on the metrics port (default 9090).\n".encode()
    head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\ncontent-length: {len(text)}\r\nconnection: close\r\n\r\n"
    return head.encode() + (b"" if begin.startswith(b"HEAD ") else text)
