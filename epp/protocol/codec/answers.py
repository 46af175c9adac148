"""Writes ProcessingResponse: answers to headers and trailers, and immediate answers, framed for gRPC."""

import struct
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from epp.decision.decision import SERVED
from epp.protocol.codec.envelope import METADATA_NAMESPACE, SUBSET_KEY
from epp.protocol.codec.fields import field, framed, varint
from epp.protocol.codec.structs import encoded

DESTINATION: Final = "x-gateway-destination-endpoint"
SCORES: Final = "x-gateway-destination-endpoint-scores"
# Gateway and picker exchange these values as metadata. Headers with these names can only come from a client, so every answer to request
# headers removes them, whatever their case and number. The header with the destination is overwritten.
NEVER_PASSED: Final = (SUBSET_KEY, SERVED, SCORES)


def _set_header(name: str, value: bytes) -> bytes:
    """Encodes HeaderMutation.set_headers with one HeaderValueOption{header{key, raw_value}}."""
    return field(1, field(1, field(1, name.encode()) + field(3, value)))


def _set_headers(values: Mapping[str, str]) -> bytes:
    return b"".join([_set_header(name, value.encode("latin-1")) for name, value in values.items()])


AROUND_MAX: Final = 64  # texts around the content length that are kept for one list of targets
_CONTENT_LENGTH: Final = field(1, b"content-length")
_CLEAR_ROUTE_CACHE: Final = b"\x28\x01"


@lru_cache(maxsize=64)  # the configuration determines the names
def _remove_headers(names: tuple[str, ...]) -> bytes:
    """Encodes HeaderMutation.remove_headers."""
    return b"".join([field(2, name.encode()) for name in names])


_NEVER_PASSED: Final = _remove_headers(NEVER_PASSED)


class Destination:
    """Writes the answer to request headers for one list of targets. In most answers only the content length varies, so the bytes around it
    are cached.
    """

    __slots__ = ("_around", "_entry", "metadata", "option")

    def __init__(self, addresses: str) -> None:
        target = addresses.encode()
        self.option = _set_header(DESTINATION, target)
        self._entry = _entry(DESTINATION, field(3, target))  # google.protobuf.Value.string_value
        self.metadata = _dynamic_metadata(self._entry)
        # (number of digits, headers to remove) -> before, after
        self._around: dict[tuple[int, tuple[str, ...]], tuple[bytes, bytes]] = {}

    def answer(self, content_length: int, removed: tuple[str, ...] = ()) -> bytes:
        """Returns the whole framed answer. It sets the header content-length, unless `content_length` is 0."""
        if not content_length:
            return self.compose(_remove_headers(removed))
        digits = b"%d" % content_length
        key = len(digits), removed
        around = self._around.get(key)
        if around is None:
            if len(self._around) >= AROUND_MAX:
                self._around.clear()
            length = _content_length(b"#" * len(digits))
            before, _, after = self.compose(length + _remove_headers(removed)).partition(b"#" * len(digits))
            around = self._around[key] = (before, after)
        return around[0] + digits + around[1]

    def with_scores(self, scores: Mapping[str, float]) -> bytes:
        """Returns the dynamic metadata, extended by the score of each address."""
        numbers = b"".join([_entry(address, b"\x11" + struct.pack("<d", score)) for address, score in scores.items()])
        return _dynamic_metadata(self._entry + _entry(SCORES, field(5, numbers)))

    def compose(self, more: bytes, metadata: bytes | None = None) -> bytes:
        """Encodes ProcessingResponse{request_headers{response{header_mutation}}, dynamic_metadata}, framed.

        `more`: further encoded options of the mutation. `metadata`: encoded metadata; None for the destination only.
        """
        return framed(field(1, self._response(more, b"")) + (metadata or self.metadata))

    def with_body(self, more: bytes, metadata: bytes | None, body: bytes | None) -> bytes:
        """Does what `compose` does, but as ProcessingResponse{request_body{…}}: for a gateway that buffers bodies.

        `body` replaces the body, if not None.
        """
        changed = b"" if body is None else field(3, field(1, body))
        return framed(field(3, self._response(more, changed)) + (metadata or self.metadata))

    def _response(self, more: bytes, changed: bytes) -> bytes:
        """Encodes CommonResponse{header_mutation, body_mutation, clear_route_cache} as field 1."""
        options = self.option + more + _NEVER_PASSED
        return field(1, field(2, options) + changed + _CLEAR_ROUTE_CACHE)


def _entry(key: str, value: bytes) -> bytes:
    """Encodes Struct.fields{key, Value}."""
    return field(1, field(1, key.encode()) + field(2, value))


def dynamic_metadata(fields: Mapping[str, Mapping[str, object]]) -> bytes:
    """Encodes ProcessingResponse.dynamic_metadata: namespace -> key -> value. Raises ValueError for a value that it cannot hold."""
    return field(8, encoded(fields))


def _dynamic_metadata(entries: bytes) -> bytes:
    """Encodes ProcessingResponse.dynamic_metadata{METADATA_NAMESPACE: entries}."""
    return field(8, _entry(METADATA_NAMESPACE, field(5, entries)))


def _content_length(digits: bytes) -> bytes:
    header = _CONTENT_LENGTH + field(3, digits)
    return field(1, field(1, header))


def request_headers_answer(
    destination: Destination,
    content_length: int,
    extra: Mapping[str, str],
    scores: Mapping[str, float] | None = None,
    removed: tuple[str, ...] = (),
) -> bytes:
    """Returns the framed answer that routes the request. Raises ValueError for a header value that is not Latin-1.

    `extra`: headers to set, `removed`: headers to remove. `scores`: address -> score, sent as metadata.
    """
    if not extra and scores is None:
        return destination.answer(content_length, removed)
    more = _content_length(b"%d" % content_length) if content_length else b""
    metadata = destination.with_scores(scores) if scores is not None else None
    return destination.compose(more + _set_headers(extra) + _remove_headers(removed), metadata)


def buffered_answer(
    destination: Destination,
    body: bytes | None,
    extra: Mapping[str, str],
    scores: Mapping[str, float] | None = None,
    removed: tuple[str, ...] = (),
) -> bytes:
    """Returns the framed answer to a buffered body that routes the request. `body` replaces the body, if not None."""
    metadata = destination.with_scores(scores) if scores is not None else None
    return destination.with_body(_set_headers(extra) + _remove_headers(removed), metadata, body)


def response_headers_answer(set_headers: Mapping[str, str], removed: tuple[str, ...] = (), metadata: bytes = b"") -> bytes:
    """Returns the framed answer to response headers that changes them. Raises ValueError for a value that is not Latin-1.

    `metadata`: encoded dynamic metadata.
    """
    mutation = _set_headers(set_headers) + _remove_headers(removed)
    return framed(field(2, field(1, field(2, mutation))) + metadata)


def response_trailers_answer(metadata: bytes) -> bytes:
    """Returns the framed answer to response trailers. `metadata`: encoded dynamic metadata, maybe empty."""
    return framed(_RESPONSE_TRAILERS + metadata)


RESPONSE_HEADERS_ANSWER: Final = framed(field(2, field(1, b"")))
REQUEST_TRAILERS_ANSWER: Final = framed(field(5, b""))
_RESPONSE_TRAILERS: Final = field(6, b"")


def immediate_answer(status: int, headers_: Mapping[str, str], body_: bytes) -> bytes:
    """Returns the framed ProcessingResponse{immediate_response}; the stream ends after it."""
    mutation = _set_headers(headers_)
    payload = field(1, b"\x08" + varint(status))
    if mutation:
        payload += field(2, mutation)
    payload += field(3, body_)
    return framed(field(7, payload))
