"""Reads the body modes of the gateway's ext_proc filter, and writes the answers that differ with them.

Envoy names its modes in the first message of a stream: `ProcessingRequest.protocol_config` (field 11, since Envoy 1.33). If a gateway
names no modes, the picker assumes the mode FULL_DUPLEX_STREAMED, which the endpoint picker protocol demands.

    mode of request bodies     headers are answered       bodies
    FULL_DUPLEX_STREAMED       when the body is complete  pass through the picker
    BUFFERED                   at once                    the answer to the body has the target; it may replace the body
    BUFFERED_PARTIAL           at once                    the same, for a body within the gateway's buffer limit
    NONE, STREAMED             cannot work: the gateway sends the headers on before it sends the picker the body

Source: envoy/service/ext_proc/v3/external_processor.proto, envoy/extensions/filters/http/ext_proc/v3/processing_mode.proto.
"""

import enum
from typing import Final

from epp.protocol.codec.fields import field, framed, walk


class BodyMode(enum.IntEnum):
    """Names the values of ProcessingMode.BodySendMode."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX_STREAMED = 4


DUPLEX: Final = int(BodyMode.FULL_DUPLEX_STREAMED)
BUFFERED: Final = int(BodyMode.BUFFERED)
BUFFERED_PARTIAL: Final = int(BodyMode.BUFFERED_PARTIAL)
ALL_DUPLEX: Final = b"\x5a\x04\x08\x04\x10\x04"  # the end of a message whose gateway has mode DUPLEX in both directions
_CONFIG: Final = 0x5A  # the tag of protocol_config


def body_modes(message: bytes) -> tuple[int, int] | None:
    """Returns the modes of request and response bodies; None if the message names no modes. Raises ProtocolViolation."""
    found: tuple[int, int] | None = None
    for tag, start, end in walk(message, 0, len(message)):
        if tag == _CONFIG:
            modes = {which: message[at] for which, at, _ in walk(message, start, end) if which in (0x08, 0x10)}
            found = modes.get(0x08, 0), modes.get(0x10, 0)
    return found


def mode_name(mode: int) -> str:
    """Returns the name of a mode, or its number as text if it is unknown."""
    return BodyMode(mode).name if mode < len(BodyMode) else str(mode)


def headers_passed(request_mode: int, response_mode: int) -> bytes:
    """Returns the framed answer to request headers whose body the gateway buffers. The answer tells the gateway to go on.

    If the gateway also buffers response bodies, the answer asks for the mode STREAMED: in a buffering mode, a client gets a streamed
    response all at once. A gateway without `allow_mode_override` ignores that request.
    """
    answer = field(1, field(1, b""))
    # An override names all modes; the modes of headers and trailers stay SEND.
    if response_mode in (BUFFERED, BUFFERED_PARTIAL):
        answer += field(9, bytes((0x10, 1, 0x18, request_mode, 0x20, BodyMode.STREAMED, 0x28, 1, 0x30, 1)))
    return framed(answer)


def response_body_passed(body: bytes | None, metadata: bytes) -> bytes:
    """Returns the framed answer to a piece of a response body in a mode other than FULL_DUPLEX_STREAMED.

    `body` replaces the piece, if not None. `metadata`: encoded dynamic metadata, maybe empty.
    """
    if body is None and not metadata:
        return RESPONSE_BODY_UNCHANGED
    # to replace the piece by no bytes, set clear_body
    changed = b"" if body is None else field(3, field(1, body) if body else b"\x10\x01")
    return framed(field(4, field(1, changed)) + metadata)


RESPONSE_BODY_UNCHANGED: Final = framed(field(4, field(1, b"")))
