"""Maps each cause of a refusal to what the client sees: status, code name, text and drop reason."""

from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec

from epp.errors import Cause, Refused

DROP_REASON: Final = "x-llm-d-request-dropped-reason"
CONTENT_TYPE: Final = "content-type"
RETRY_AFTER: Final = "retry-after"
CHALLENGE: Final = "www-authenticate"  # an answer 401 must have it
UNAUTHORIZED: Final = 401


class ErrorAnswer(NamedTuple):
    """Describes an error answer to a client. `code` is its name in metrics."""

    status: int
    code: str
    headers: Mapping[str, str]
    body: bytes


class _Rule(NamedTuple):
    status: int
    code: str
    text: str  # {} stands for the detail of the refusal
    drop_reason: str = ""


RULES: Mapping[Cause, _Rule] = {
    Cause.NO_PARSER: _Rule(400, "BadRequest", "no parser registered matching path suffix for: {}"),
    Cause.INVALID_BODY: _Rule(400, "BadRequest", "{}"),
    Cause.MODEL_MISSING: _Rule(400, "BadRequest", "model not found in request body"),
    Cause.BODY_TOO_LARGE: _Rule(413, "PayloadTooLarge", "request body exceeds {} bytes"),
    Cause.BODY_MODE: _Rule(
        500,
        "Internal",
        "the gateway's ext_proc filter has request_body_mode {}: the endpoint picker needs FULL_DUPLEX_STREAMED, or BUFFERED",
    ),
    Cause.BODY_CUT_OFF: _Rule(
        413,
        "PayloadTooLarge",
        "the gateway cut the request body off after {} bytes, because its ext_proc filter has request_body_mode BUFFERED_PARTIAL: "
        "the endpoint picker needs FULL_DUPLEX_STREAMED, or BUFFERED",
    ),
    Cause.BODY_STALLED: _Rule(408, "RequestTimeout", "too little of the request body came for {} seconds"),
    Cause.BODIES_HELD: _Rule(
        429, "ResourceExhausted", "too many bytes of unfinished request bodies are held already{}", "rejected-saturated"
    ),
    Cause.NO_CANDIDATES: _Rule(
        503, "ServiceUnavailable", "failed to find endpoint candidates for serving the request", "rejected-no-endpoints"
    ),
    Cause.SCREENED_OUT: _Rule(503, "ServiceUnavailable", "screeners eliminated all endpoint candidates", "rejected-no-endpoints"),
    Cause.NOT_ADMITTED: _Rule(429, "ResourceExhausted", "request cannot be admitted: {}", "rejected-saturated"),
    Cause.SHED: _Rule(429, "ResourceExhausted", "system saturated, sheddable request dropped", "rejected-saturated"),
    Cause.UNKNOWN_PROFILE: _Rule(400, "BadRequest", "{}"),
    Cause.NO_ENDPOINT_LEFT: _Rule(429, "ResourceExhausted", "no endpoints available for the given request", "rejected-saturated"),
    Cause.NOT_CACHED: _Rule(412, "PreconditionFailed", "no decode worker has the requested KV cache"),
    Cause.QUEUE_AT_CAPACITY: _Rule(429, "ResourceExhausted", "{}", "rejected-saturated"),
    Cause.QUEUE_WITHOUT_ENDPOINTS: _Rule(503, "ServiceUnavailable", "no endpoints available: {}", "rejected-no-endpoints"),
    Cause.TTL_EXPIRED: _Rule(429, "ResourceExhausted", "request timed out in queue: {}", "rejected-ttl-expired"),
    Cause.TTL_EXPIRED_WITHOUT_ENDPOINTS: _Rule(
        503, "ServiceUnavailable", "request timed out in queue and no endpoints are available: {}", "rejected-no-endpoints"
    ),
    Cause.CONTEXT_CANCELLED: _Rule(503, "ServiceUnavailable", "client disconnected: {}", "rejected-context-cancelled"),
    Cause.DISPLACED: _Rule(429, "ResourceExhausted", "{}", "evicted-priority"),
    Cause.FLOW_CONTROL: _Rule(500, "Internal", "internal flow control error: {}"),
    Cause.SHUTTING_DOWN: _Rule(
        503, "ServiceUnavailable", "flow controller shutting down: {}: flow controller is not running", "rejected-shutting-down"
    ),
    Cause.QUERY_OF_DEATH: _Rule(
        400, "BadRequest", "two processes of the endpoint picker ended while they read this request: it is refused for {} seconds"
    ),
    Cause.UNKNOWN_TENANT: _Rule(401, "Unauthorized", "this request has no valid credentials of a tenant"),
    Cause.NO_POOL: _Rule(404, "NotFound", "{}"),
    Cause.POOL_OUT: _Rule(
        503,
        "ServiceUnavailable",
        "pool '{}' is out of service, because its plugins have ended two workers of the endpoint picker: change its configuration",
    ),
    Cause.OVER_BUDGET: _Rule(429, "ResourceExhausted", "the budget of this tenant is used up: {}", "rejected-over-budget"),
    Cause.INTERNAL: _Rule(500, "Internal", "{}"),
}

# The answer to a request that is evicted while a model server serves it. The body is plain text, not JSON in OpenAI's error shape.
EVICTED: Final = ErrorAnswer(429, "ResourceExhausted", {DROP_REASON: "evicted"}, b"request evicted by flow control")


def answer(refused: Refused) -> ErrorAnswer:
    """Returns the error answer to a refusal. Its body has OpenAI's error shape."""
    rule = RULES[refused.cause]
    text = rule.text.replace("{}", refused.detail)
    error = {"message": f"inference error: {rule.code} - {text}", "type": rule.code, "code": rule.status}
    headers = {CONTENT_TYPE: "application/json", **refused.headers}
    if rule.drop_reason:
        headers[DROP_REASON] = rule.drop_reason
    if rule.status == UNAUTHORIZED:
        headers[CHALLENGE] = "Bearer"
    if refused.retry_after_s:
        headers[RETRY_AFTER] = str(refused.retry_after_s)
    return ErrorAnswer(rule.status, rule.code, headers, msgspec.json.encode({"error": error}))
