"""The constants of HTTP/2 frames (RFC 9113), and functions that read a single frame."""

from struct import Struct
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

# Frame types.
DATA: Final = 0
HEADERS: Final = 1
PRIORITY: Final = 2
RST_STREAM: Final = 3
SETTINGS: Final = 4
PUSH_PROMISE: Final = 5
PING: Final = 6
GOAWAY: Final = 7
WINDOW_UPDATE: Final = 8
CONTINUATION: Final = 9

# Flags.
END_STREAM: Final = 1
ACK: Final = 1
END_HEADERS: Final = 4
PADDED: Final = 8
PRIORITISED: Final = 32

# Settings.
ENABLE_PUSH: Final = 2
MAX_STREAMS: Final = 3
INITIAL_WINDOW: Final = 4
MAX_FRAME: Final = 5
HEADER_LIST: Final = 6

FRAME_MAX: Final = 16384  # bytes of payload that we accept: HTTP/2's default, and Envoy and grpc-go send no more
# The first word of a frame's header is above this if the frame is longer than FRAME_MAX.
OVERSIZE: Final = FRAME_MAX << 8 | 255
WINDOW_FIRST: Final = 65535  # bytes of every window, until SETTINGS or WINDOW_UPDATE change it
WINDOW_MAX: Final = (1 << 31) - 1

FRAME: Final = Struct(">IBI")  # a frame's header: length and type in one word, flags, stream
SETTING: Final = Struct(">HI")
WORD: Final = Struct(">I")


class Error:
    """The error codes that we send."""

    NONE: Final = 0
    PROTOCOL: Final = 1
    FLOW_CONTROL: Final = 3
    STREAM_CLOSED: Final = 5
    FRAME_SIZE: Final = 6
    REFUSED_STREAM: Final = 7
    CANCEL: Final = 8
    COMPRESSION: Final = 9
    CALM: Final = 11  # the RFC's name is ENHANCE_YOUR_CALM


class ConnectionFault(Exception):
    """Ends the connection. `args`: the error code and a text for the peer."""


def unpadded(data: bytes, start: int, end: int) -> tuple[int, int]:
    """Returns the start and the end of a padded frame's payload without the padding. Raises ConnectionFault."""
    if start == end:
        raise ConnectionFault(Error.FRAME_SIZE, "padded frame without its padding length")
    padding = data[start]
    if padding > end - start - 1:
        raise ConnectionFault(Error.PROTOCOL, "more padding than frame")
    return start + 1, end - padding


def read_settings(data: bytes) -> dict[int, int]:
    """Returns the settings in a SETTINGS frame's payload. If a setting occurs twice, its last value applies. Raises ConnectionFault."""
    if len(data) % SETTING.size:
        raise ConnectionFault(Error.FRAME_SIZE, "SETTINGS of a wrong size")
    settings: dict[int, int] = {}
    for name, value in SETTING.iter_unpack(data):
        if name == INITIAL_WINDOW and value > WINDOW_MAX:
            raise ConnectionFault(Error.FLOW_CONTROL, f"SETTINGS_INITIAL_WINDOW_SIZE {value}")
        if name == MAX_FRAME and not FRAME_MAX <= value < 1 << 24:
            raise ConnectionFault(Error.PROTOCOL, f"SETTINGS_MAX_FRAME_SIZE {value}")
        if name == ENABLE_PUSH and value > 1:
            raise ConnectionFault(Error.PROTOCOL, f"SETTINGS_ENABLE_PUSH {value}")
        settings[name] = value
    return settings
