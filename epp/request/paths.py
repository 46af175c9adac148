"""Chooses the parser by the request's path: the longest matching suffix wins. A parser without `paths` reads all other requests.

Some gateways do not name the path: NGINX Gateway Fabric shows the picker the client's header fields only
(`cmd/gateway/endpoint_picker.go` in its sources). The fields of the body then determine the path.
"""

from typing import Final

import msgspec

from compiled import calls
from epp.decision.pipeline import Pipeline
from epp.errors import UNREADABLE, Cause, Refused
from epp.plugin import Parser

DEFAULT_PATH: Final = "/v1/completions"  # used if neither the gateway nor the body says the path
KNOWN_MAX: Final = 1024
PATHS: Final = (  # (path, fields): clients send a body with one of these fields to this path; the first match is used
    ("/v1/messages", ("anthropic_version", "stop_sequences", "thinking", "system")),
    ("/v1/chat/completions", ("messages",)),
    (DEFAULT_PATH, ("prompt",)),
    ("/v1/embeddings", ("encoding_format", "dimensions")),
    ("/v1/responses", ("input",)),
    ("/v1/conversations", ("items",)),
)
_NAMES: Final = tuple(dict.fromkeys(name for _, names in PATHS for name in names))
_MEMBERS: Final = tuple(name.encode() for name in _NAMES)
_MISSING: Final = msgspec.Raw()
# Made by `defstruct`, because msgspec cannot read annotations of compiled classes.
_fields: Final = msgspec.json.Decoder(msgspec.defstruct("_Fields", [(name, msgspec.Raw, _MISSING) for name in _NAMES]))


class Parsers:
    """Finds the parser for a path among the parsers of a pipeline."""

    def __init__(self, pipeline: Pipeline) -> None:
        parsers = [(parser, place) for place, parser in enumerate(pipeline.wiring.parsers)]
        self._suffixes = sorted(
            ((suffix.strip("/"), p) for p in reversed(parsers) for suffix in p[0].paths), key=lambda entry: len(entry[0]), reverse=True
        )
        # Length of the longest suffix, and one more for a trailing slash.
        self._reach = 1 + max((len(suffix) for suffix, _ in self._suffixes), default=0)
        self._fallback = next((p for p in parsers if not p[0].paths), None)
        self._known: dict[str, tuple[Parser, int]] = {}

    def find(self, path: str) -> tuple[Parser, int]:
        """Returns the parser for a path, and the index of its call in `Pipeline.parses`. `path` has no query string. Raises Refused."""
        end = path[-self._reach :]  # the end is enough, and the cache keeps only this part, because paths may be long
        parser = self._known.get(end)
        if parser is None:
            trimmed = end.removesuffix("/")
            parser = next((p for suffix, p in self._suffixes if trimmed.endswith(suffix)), self._fallback)
            if parser is None:
                raise Refused(Cause.NO_PARSER, path)
            if len(self._known) >= KNOWN_MAX:  # the cache is bounded, because clients choose paths
                self._known.clear()
            self._known[end] = parser
        return parser


def inferred_path(body: bytes | memoryview) -> str:
    """Returns the path to which clients send a body with these fields; the path of completions if no field decides.

    Only these fields are read, because a client may send millions of others.
    """
    found = calls.members(body, _MEMBERS, _MISSING)
    if found is None:
        try:
            found = msgspec.structs.astuple(_fields.decode(body))
        # A broken body has no fields; the parser says later what is wrong with the body.
        except UNREADABLE:
            return DEFAULT_PATH
    present = {name for name, raw in zip(_NAMES, found, strict=True) if raw is not _MISSING}
    return next((path for path, names in PATHS if not present.isdisjoint(names)), DEFAULT_PATH)
