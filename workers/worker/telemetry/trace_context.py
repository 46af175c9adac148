"""The context of a trace (W3C Trace Context) in the headers of requests and in the metadata of streams."""

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from epp.decision.decision import Decision
from epp.protocol import codec

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
MENTION: Final = TRACEPARENT.encode()
_STATE: Final = TRACESTATE.encode()
NEEDLE: Final = codec.needle(TRACEPARENT)
_FORM: Final = re.compile("(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class Parent(NamedTuple):
    """The span that a `traceparent` header names."""

    trace_id: int
    span_id: int
    sampled: bool


def parse_traceparent(text: str) -> Parent | None:
    """Parses a `traceparent` header (W3C Trace Context). Returns None if it is malformed. Ignores fields that later versions add."""
    match = _FORM.fullmatch(text)
    if match is None or (match[1] == "00" and match[5]):
        return None
    return Parent(int(match[2], 16), int(match[3], 16), bool(int(match[4], 16) & 1))


class GatewayContext(NamedTuple):
    """The trace context that a gateway gives in the metadata of a stream. `tracestate`: "" if the gateway gives none."""

    parent: Parent
    traceparent: str
    tracestate: str

    def pass_on(self, headers: codec.Headers, decision: Decision) -> None:
        """Gives the context to the model server, unless the request's headers have a context."""
        if parent_in(headers) is None:
            decision.headers[TRACEPARENT] = self.traceparent
            self.pass_state_on(decision)

    def pass_state_on(self, decision: Decision) -> None:
        """Gives `tracestate` to the model server. A `tracestate` of the request is ignored, because the request has no `traceparent`."""
        if self.tracestate:
            decision.headers[TRACESTATE] = self.tracestate
        else:
            decision.removed_headers += (TRACESTATE,)


def gateway_context(metadata: Sequence[tuple[bytes, bytes]]) -> GatewayContext | None:
    """Returns the trace context in the metadata of a stream, or None without a valid context."""
    traceparent, states = "", []
    for name, value in metadata:
        if name == MENTION:
            traceparent = traceparent or value.decode("latin-1")
        elif name == _STATE:
            states.append(value.decode("latin-1"))
    parent = parse_traceparent(traceparent) if traceparent else None
    return GatewayContext(parent, traceparent, ",".join(states)) if parent is not None else None


def parent_in(headers: codec.Headers) -> Parent | None:
    """Returns the span that the headers of a request name as its parent, or None without a valid parent."""
    return parse_traceparent(headers.find(NEEDLE) or "") if headers.mentions(MENTION) else None
