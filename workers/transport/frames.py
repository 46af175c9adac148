"""The words of HTTP/2: numbers of frames, flags, errors and settings, and what can be read out of one frame by itself."""

from struct import Struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM = ACK = 1
END_HEADERS, PADDED, PRIORITISED = 4, 8, 32

ENABLE_PUSH, MAX_STREAMS, INITIAL_WINDOW, MAX_FRAME, HEADER_LIST = 2, 3, 4, 5, 6  # settings
FRAME_MAX = 16384  # ours: larger frames are not worth it, Envoy and grpc-go send no larger ones
OVERSIZE = FRAME_MAX << 8 | 255
WINDOW_MAX = (1 << 31) - 1

SETTING = Struct(">HI")
WORD = Struct(">I")


class Error:
    """Error codes, as far as we use them."""

    NONE = 0
    PROTOCOL = 1
    FLOW_CONTROL = 3
    STREAM_CLOSED = 5
    FRAME_SIZE = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION = 9
    CALM = 11  # ENHANCE_YOUR_CALM


class ConnectionFault(Exception):
    """The connection can't go on; args: error code, text."""


def unpadded(data: bytes, start: int, end: int) -> tuple[int, int]:
    """Where the payload of a padded frame begins and ends without its padding."""
    if start == end:
        raise ConnectionFault(Error.FRAME_SIZE, "padded frame without its padding length")
    padding = data[start]
    if padding > end - start - 1:
        raise ConnectionFault(Error.PROTOCOL, "more padding than frame")
    return start + 1, end - padding


def settings(data: bytes) -> dict[int, int]:
    """What a SETTINGS frame says in the end: a setting that it repeats counts once, as its last value."""
    if len(data) % SETTING.size:
        raise ConnectionFault(Error.FRAME_SIZE, "SETTINGS of a wrong size")
    found = {}
    for name, value in SETTING.iter_unpack(data):
        if name == INITIAL_WINDOW and value > WINDOW_MAX:
            raise ConnectionFault(Error.FLOW_CONTROL, f"SETTINGS_INITIAL_WINDOW_SIZE {value}")
        if name == MAX_FRAME and not FRAME_MAX <= value < 1 << 24:
            raise ConnectionFault(Error.PROTOCOL, f"SETTINGS_MAX_FRAME_SIZE {value}")
        if name == ENABLE_PUSH and value > 1:
            raise ConnectionFault(Error.PROTOCOL, f"SETTINGS_ENABLE_PUSH {value}")
        found[name] = value
    return found
