"""Encodes the header blocks of answers. They use no table, so they are the same on every connection."""

from typing import Final
from urllib.parse import quote

STATUS_TEXT_MAX: Final = 1024


def _literal(name: bytes, value: bytes) -> bytes:
    """Encodes one field with a literal name, without indexing (RFC 7541, section 6.2.2)."""
    return b"\0" + _sized(name) + _sized(value)


def _sized(text: bytes) -> bytes:
    """Encodes a string literal without Huffman code (RFC 7541, section 5.2)."""
    length = len(text)
    if length < 0x7F:
        return bytes((length,)) + text
    length -= 0x7F
    prefix = bytearray(b"\x7f")
    while length > 0x7F:
        prefix.append(length & 0x7F | 0x80)
        length >>= 7
    prefix.append(length)
    return bytes(prefix) + text


RESPONSE_BLOCK: Final = b"\x88" + b"\x0f\x10" + _sized(b"application/grpc")  # the fields :status 200 and content-type
TRAILERS_OK_BLOCK: Final = _literal(b"grpc-status", b"0")


def trailers_block(status: int, text: str) -> bytes:
    """Encodes the trailers: a gRPC status and its percent-encoded text."""
    if not status and not text:
        return TRAILERS_OK_BLOCK
    block = _literal(b"grpc-status", b"%d" % status)
    if text:
        printable = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")
        encoded = quote(text[:STATUS_TEXT_MAX], safe=printable, errors="replace")
        block += _literal(b"grpc-message", encoded.encode())
    return block


def refusal_block(status: int) -> bytes:
    """Encodes the header block of an HTTP answer to a request that is not gRPC."""
    return b"\x08" + _sized(b"%d" % status) + b"\x0f\x10" + _sized(b"text/plain")
