"""Converts Envoy's ext_proc messages from and to the values that a stream needs, without generated classes.

Source: envoy/service/ext_proc/v3/external_processor.proto. Request messages are read in place: only header maps are decoded.

    fields       varints, fields, gRPC frames
    envelope     ProcessingRequest: its kind and its metadata
    header_map   HttpHeaders
    bodies       HttpBody and its answer
    modes        body modes of the gateway's filter
    answers      ProcessingResponse: answers to headers and trailers, and immediate answers
    structs      google.protobuf.Struct: metadata of the gateway and of answers
"""

from epp.protocol.codec.answers import (
    DESTINATION,
    NEVER_PASSED,
    REQUEST_TRAILERS_ANSWER,
    RESPONSE_HEADERS_ANSWER,
    Destination,
    buffered_answer,
    dynamic_metadata,
    immediate_answer,
    request_headers_answer,
    response_headers_answer,
    response_trailers_answer,
)
from epp.protocol.codec.bodies import (
    PIECE_BYTES_MAX,
    Chunk,
    as_body,
    body,
    body_pieces,
    chunk_of_size,
    learn_chunk,
    request_body_answer,
    request_body_behind,
    response_body_answer,
)
from epp.protocol.codec.envelope import (
    METADATA_NAMESPACE,
    REQUEST_BODY,
    REQUEST_HEADERS,
    REQUEST_TRAILERS,
    RESPONSE_BODY,
    RESPONSE_HEADERS,
    RESPONSE_TRAILERS,
    SUBSET_KEY,
    SUBSET_NAMESPACE,
    Kind,
    gateway_metadata,
    metadata_text,
    split,
    subset,
)
from epp.protocol.codec.fields import field, varint
from epp.protocol.codec.header_map import Headers, Unseen, end_of_stream, headers, headers_of, needle
from epp.protocol.codec.modes import (
    ALL_DUPLEX,
    BUFFERED,
    BUFFERED_PARTIAL,
    DUPLEX,
    BodyMode,
    body_modes,
    headers_passed,
    mode_name,
    response_body_passed,
)
