"""The exceptions of the domain core, and the causes for which a request is refused.

failure of     exception              effect
the client     Refused                an error answer; `epp/protocol/refusals.py` maps the cause to status and text
the gateway    ProtocolViolation      closes the stream
the picker     any other exception    500 for this request, counted
"""

import enum
from collections.abc import Mapping
from typing import Final

import msgspec

UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # decoders raise these for bad JSON and msgpack
NO_HEADERS: Final[Mapping[str, str]] = {}


class Cause(enum.Enum):
    """Names why a request is refused. The value appears in logs and metrics."""

    NO_PARSER = "no-parser"
    INVALID_BODY = "invalid-body"
    MODEL_MISSING = "model-missing"
    BODY_TOO_LARGE = "body-too-large"
    BODY_MODE = "body-mode"
    BODY_CUT_OFF = "body-cut-off"
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
    UNKNOWN_TENANT = "unknown-tenant"
    NO_POOL = "no-pool"
    POOL_OUT = "pool-out-of-service"
    OVER_BUDGET = "over-budget"
    QUERY_OF_DEATH = "deadly"
    INTERNAL = "internal"


class Refused(Exception):
    """Makes the client get an error answer instead of an endpoint's response. Plugins may raise it up to PreRequest.

    `cause` determines status and text, `detail` completes the text. `retry_after_s`: whole seconds for the header `retry-after`, or 0
    for no such header. `headers`: further headers of the answer.
    """

    def __init__(self, cause: Cause, detail: str = "", retry_after_s: int = 0, headers: Mapping[str, str] = NO_HEADERS) -> None:
        super().__init__(f"{cause.value}: {detail}" if detail else cause.value)
        self.cause = cause
        self.detail = detail
        self.retry_after_s = retry_after_s
        self.headers = headers


class ProtocolViolation(Exception):
    """Raised if the peer sent a message that the protocol does not allow in this state. The stream is closed with a gRPC status."""


class ProducerFailed(Exception):
    """Raised if a data producer could not do its work. The request goes on, and readers of its data get the datum's default."""


class PluginFault(Exception):
    """Raised if a plugin broke its contract. The message names the plugin and the rule."""


_PLUGIN = "epp_plugin"


def blame(problem: BaseException, plugin: object | None) -> None:
    """Tags an exception with the plugin that raised it.

    Code that calls a plugin must call this for each exception. An exception that has a tag already keeps that tag.
    """
    if plugin is not None and not hasattr(problem, _PLUGIN):
        setattr(problem, _PLUGIN, plugin)


def blamed(problem: BaseException) -> object | None:
    """Returns the plugin with which `blame` tagged this exception, or None if no plugin raised it."""
    return getattr(problem, _PLUGIN, None)
