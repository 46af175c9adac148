"""The legal order of messages on one ext_proc stream, as a table.

    AWAIT_HEADERS ─headers─▶ AWAIT_BODY ─last piece or trailers─▶ DECIDING ─answered─▶ ROUTED ─response headers─▶ RESPONDING ─end─▶ DONE
          └─headers without body─────────────────────────────────────────────────────────▲

- Envoy repeats the last body piece on large bodies: harmless once the request is decided.
- A local reply of the gateway (a time-out, say) starts the response phase while the request is still waiting: legal, and the
  decision is given up.
- Where a filter in front of the gateway's ext_proc answers by itself, the response is all that this stream hears of: it begins with
  the response headers.
- `ENDED`: we have answered for good; whatever is still under way is ignored.
"""

import enum
from typing import Final

from epp.errors import ProtocolViolation
from epp.protocol.codec import Kind


class State(enum.IntEnum):
    """Where a stream is."""

    AWAIT_HEADERS = 0
    AWAIT_BODY = 1
    DECIDING = 2
    ROUTED = 3
    RESPONDING = 4
    DONE = 5
    ENDED = 6


# As plain numbers, for who looks at them often: see `epp.protocol.codec`.
AWAIT_HEADERS, AWAIT_BODY, DECIDING, ROUTED, RESPONDING, DONE, ENDED = map(int, State)
ILLEGAL: Final = -1
_LEGAL: Final[dict[State, dict[int, State]]] = {
    State.AWAIT_HEADERS: {Kind.REQUEST_HEADERS: State.AWAIT_BODY, Kind.RESPONSE_HEADERS: State.RESPONDING},
    State.AWAIT_BODY: {
        Kind.REQUEST_BODY: State.AWAIT_BODY,
        Kind.REQUEST_TRAILERS: State.DECIDING,
        Kind.RESPONSE_HEADERS: State.RESPONDING,
    },
    State.DECIDING: {
        Kind.REQUEST_BODY: State.DECIDING,
        Kind.REQUEST_TRAILERS: State.DECIDING,
        Kind.RESPONSE_HEADERS: State.RESPONDING,
    },
    State.ROUTED: {
        Kind.REQUEST_BODY: State.ROUTED,
        Kind.REQUEST_TRAILERS: State.ROUTED,
        Kind.RESPONSE_HEADERS: State.RESPONDING,
    },
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
    """Why this message is illegal now."""
    legal = ", ".join(sorted(Kind(k).name.lower() for k in _LEGAL[State(state)])) or "nothing"
    return ProtocolViolation(f"{Kind(kind).name.lower()} in state {State(state).name.lower()}: expected {legal}")
