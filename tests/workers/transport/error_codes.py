"""The error codes of HTTP/2, and those that a GOAWAY or an RST_STREAM of the engine carries."""

from tests.workers.transport.helpers import Engine, names

PROTOCOL_ERROR, FLOW_CONTROL_ERROR, STREAM_CLOSED, FRAME_SIZE_ERROR = 1, 3, 5, 6
REFUSED_STREAM, CANCEL, COMPRESSION_ERROR, CALM = 7, 8, 9, 11


def goaway_code(engine: Engine, frames) -> int:
    """The error code of the GOAWAY that has ended the connection."""
    assert engine.connection.closing
    assert names(frames)[-1] == "GoAway"
    return frames[-1].error_code


def reset_code(frames) -> int:
    resets = [f for f in frames if type(f).__name__ == "RstStreamFrame"]
    assert len(resets) == 1
    return resets[0].error_code
