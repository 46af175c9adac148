"""Infers the path of a request from the fields of its body, for gateways that do not name the path.

NGINX Gateway Fabric shows the picker the client's header fields, but not its path (`cmd/gateway/endpoint_picker.go` in its sources).
"""

from typing import Final

import msgspec

from epp.paths import DEFAULT_PATH

PATHS: Final = (  # (path, fields): a body with one of these fields belongs to that path; the first match counts
    ("/v1/messages", ("anthropic_version", "stop_sequences", "thinking", "system")),
    ("/v1/chat/completions", ("messages",)),
    (DEFAULT_PATH, ("prompt",)),
    ("/v1/embeddings", ("encoding_format", "dimensions")),
    ("/v1/responses", ("input",)),
    ("/v1/conversations", ("items",)),
)
_fields: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


def inferred_path(body: bytes | memoryview) -> str:
    """Returns the path to which clients send a body with these fields; the path of completions if no field decides."""
    try:
        fields = _fields.decode(body)
    # A broken body has no path here; the parser says later what is wrong with it.
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return DEFAULT_PATH
    return next((path for path, names in PATHS if any(name in fields for name in names)), DEFAULT_PATH)
