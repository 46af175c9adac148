"""The one table from cause to what the client sees: status, code name, text and drop reason."""

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from epp.errors import Cause, Refused

DROP_REASON = "x-llm-d-request-dropped-reason"
CONTENT_TYPE = "content-type"


class Answer(NamedTuple):
    """An error answer to a client; `code` names it in metrics."""

    status: int
    code: str
    headers: Mapping[str, str]
    body: bytes


class _Rule(NamedTuple):
    status: int
    code: str
    text: str  # {} stands for the refusal's detail
    drop_reason: str = ""


RULES: Mapping[Cause, _Rule] = {
    Cause.NO_PARSER: _Rule(400, "BadRequest", "no parser registered matching path suffix for: {}"),
    Cause.INVALID_BODY: _Rule(400, "BadRequest", "{}"),
    Cause.MODEL_MISSING: _Rule(400, "BadRequest", "model not found in request body"),
    Cause.BODY_TOO_LARGE: _Rule(413, "PayloadTooLarge", "request body exceeds {} bytes"),
    Cause.NO_CANDIDATES: _Rule(
        503, "ServiceUnavailable", "failed to find endpoint candidates for serving the request", "rejected-no-endpoints"
    ),
    Cause.SCREENED_OUT: _Rule(
        503, "ServiceUnavailable", "screeners eliminated all endpoint candidates", "rejected-no-endpoints"
    ),
    Cause.NOT_ADMITTED: _Rule(429, "ResourceExhausted", "request cannot be admitted: {}", "rejected-saturated"),
    Cause.UNKNOWN_PROFILE: _Rule(400, "BadRequest", "{}"),
    Cause.NO_ENDPOINT_LEFT: _Rule(
        429, "ResourceExhausted", "no endpoints available for the given request", "rejected-saturated"
    ),
    Cause.SHUTTING_DOWN: _Rule(
        503,
        "ServiceUnavailable",
        "flow controller shutting down: {}: flow controller is not running",
        "rejected-shutting-down",
    ),
    Cause.INTERNAL: _Rule(500, "Internal", "{}"),
}


def answer(refused: Refused) -> Answer:
    """The error answer of a refusal; its body is OpenAI's error shape."""
    rule = RULES[refused.cause]
    text = rule.text.replace("{}", refused.detail)
    error = {"message": f"inference error: {rule.code} - {text}", "type": rule.code, "code": rule.status}
    headers = {CONTENT_TYPE: "application/json"}
    if rule.drop_reason:
        headers[DROP_REASON] = rule.drop_reason
    return Answer(rule.status, rule.code, headers, msgspec.json.encode({"error": error}))
