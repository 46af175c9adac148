"""Peers that speak something else than this port does: they get a short answer that says what the port is, not silence.

Somebody with a browser or curl sends HTTP/1, or no TLS where TLS is spoken. What is sent back is constant, so it costs nothing.
"""

import re
from typing import Final

WHAT: Final = "a gRPC port of an endpoint picker (ext_proc for gateways, or health checks): it speaks HTTP/2"
PEEK_BYTES: Final = 8
TLS_RECORD: Final = b"\x16"  # how a handshake begins

_HTTP1 = re.compile(rb"(?:GET|HEAD|POST|PUT|DELETE|OPTIONS|PATCH|CONNECT|TRACE) ")


def speaks_http1(begin: bytes | bytearray) -> bool:
    """Whether these first bytes are those of an HTTP/1 request."""
    return _HTTP1.match(begin) is not None


def http1_answer(begin: bytes | bytearray, *, secure: bool = False) -> bytes:
    """The whole answer to such a request. `secure`: it came without TLS to a port that speaks nothing else."""
    text = f"This is {WHAT}{' within TLS' if secure else ''}.\n".encode()
    head = (
        "HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\n"
        f"content-length: {len(text)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + (b"" if begin.startswith(b"HEAD ") else text)
