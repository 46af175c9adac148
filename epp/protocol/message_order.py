"""Defines the legal order of messages on one ext_proc stream, as a table.

    AWAIT_HEADERS ─headers─▶ AWAIT_BODY ─last piece or trailers─▶ DECIDING ─answered─▶ ROUTED ─response headers─▶ RESPONDING ─end─▶ DONE
          └─headers without body─────────────────────────────────────────────────────────▲

- Envoy repeats the last piece of a large body. The repeated piece is legal and has no effect after the decision.
- A local reply of the gateway (for example after a time-out) starts the response phase while the request still waits. Such a reply is legal
  and cancels the decision.
- If a filter before the gateway's ext_proc answers by itself, the stream has only a response phase and begins with its headers.
- `ENDED`: the picker has sent its last answer. Messages that arrive later are ignored.
"""

import enum
from typing import Final

from epp.errors import ProtocolViolation
from epp.protocol.codec import Kind


class State(enum.IntEnum):
    """Names the state of a stream."""

    AWAIT_HEADERS = 0
    AWAIT_BODY = 1
    DECIDING = 2
    ROUTED = 3
    RESPONDING = 4
    DONE = 5
    ENDED = 6


# Plain numbers for the hot path, which are faster to read than enum members: see `epp.protocol.codec.envelope`.
AWAIT_HEADERS: Final = 0
AWAIT_BODY: Final = 1
DECIDING: Final = 2
ROUTED: Final = 3
RESPONDING: Final = 4
DONE: Final = 5
ENDED: Final = 6
ILLEGAL: Final = -1
_LEGAL: Final[dict[State, dict[int, State]]] = {
    State.AWAIT_HEADERS: {Kind.REQUEST_HEADERS: State.AWAIT_BODY, Kind.RESPONSE_HEADERS: State.RESPONDING},
    State.AWAIT_BODY: {Kind.REQUEST_BODY: State.AWAIT_BODY, Kind.REQUEST_TRAILERS: State.DECIDING, Kind.RESPONSE_HEADERS: State.RESPONDING},
    State.DECIDING: {Kind.REQUEST_BODY: State.DECIDING, Kind.REQUEST_TRAILERS: State.DECIDING, Kind.RESPONSE_HEADERS: State.RESPONDING},
    State.ROUTED: {Kind.REQUEST_BODY: State.ROUTED, Kind.REQUEST_TRAILERS: State.ROUTED, Kind.RESPONSE_HEADERS: State.RESPONDING},
    State.RESPONDING: {
        Kind.REQUEST_BODY: State.RESPONDING,
        Kind.REQUEST_TRAILERS: State.RESPONDING,
        Kind.RESPONSE_BODY: State.RESPONDING,
        Kind.RESPONSE_TRAILERS: State.DONE,
    },
    State.DONE: {
        Kind.RESPONSE_BODY: State.DONE,
        Kind.RESPONSE_TRAILERS: State.DONE,
        Kind.REQUEST_TRAILERS: State.DONE,
        Kind.REQUEST_BODY: State.DONE,
    },
    State.ENDED: dict.fromkeys(Kind, State.ENDED),
}
# NEXT[state][kind]: the next state, or ILLEGAL.
NEXT: Final = tuple(tuple(int(_LEGAL[state].get(kind, ILLEGAL)) for kind in range(8)) for state in State)


def violation(state: int, kind: int) -> ProtocolViolation:
    """Returns the error for a message of this kind that is illegal in this state."""
    legal = ", ".join(sorted(Kind(k).name.lower() for k in _LEGAL[State(state)])) or "nothing"
    return ProtocolViolation(f"{Kind(kind).name.lower()} in state {State(state).name.lower()}: expected {legal}")
