"""Every refusal as a typed cause.

Three kinds of failure, three treatments: the caller's (`Refused`, answered with a status), the peer's (`ProtocolViolation`,
closes the stream) and ours (any other exception: 500 for this stream, counted). What status and text a cause gets stands in
`epp/protocol/refusals.py` and nowhere else.
"""

import enum


class Cause(enum.Enum):
    """Why a request is refused; the value is for logs and metrics."""

    NO_PARSER = "no-parser"
    INVALID_BODY = "invalid-body"
    MODEL_MISSING = "model-missing"
    BODY_TOO_LARGE = "body-too-large"
    BODY_STALLED = "body-stalled"
    BODIES_HELD = "bodies-held"
    NO_CANDIDATES = "no-candidates"
    SCREENED_OUT = "screened-out"
    NOT_ADMITTED = "not-admitted"
    SHED = "shed"
    UNKNOWN_PROFILE = "unknown-profile"
    NO_ENDPOINT_LEFT = "no-endpoint-left"
    NOT_CACHED = "not-cached"
    QUEUE_AT_CAPACITY = "queue-at-capacity"
    QUEUE_WITHOUT_ENDPOINTS = "queue-without-endpoints"
    TTL_EXPIRED = "ttl-expired"
    TTL_EXPIRED_WITHOUT_ENDPOINTS = "ttl-expired-without-endpoints"
    CONTEXT_CANCELLED = "context-cancelled"
    DISPLACED = "displaced"
    FLOW_CONTROL = "flow-control"
    SHUTTING_DOWN = "shutting-down"
    DEADLY = "deadly"
    INTERNAL = "internal"


class Refused(Exception):
    """The request gets an error answer instead of an endpoint. `detail` completes the cause's text.

    `retry_after_s` is told to the client as whole seconds; 0: nothing is known of when it would fare better.
    """

    def __init__(self, cause: Cause, detail: str = "", retry_after_s: int = 0) -> None:
        super().__init__(f"{cause.value}: {detail}" if detail else cause.value)
        self.cause = cause
        self.detail = detail
        self.retry_after_s = retry_after_s


class ProtocolViolation(Exception):
    """The peer sent what the protocol does not allow in this state; the stream is closed with a gRPC status."""


class ProducerFailed(Exception):
    """A data producer could not do its work; scoring goes on with the data's default."""


class PluginFault(Exception):
    """A plugin broke its contract; the message names the plugin and the rule."""
