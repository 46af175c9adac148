"""The codec of Envoy's messages, compared with the protobuf library."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from epp.errors import ProtocolViolation
from epp.protocol import codec
from epp.protocol.codec import NEVER_PASSED, Kind
from epp.protocol.codec.envelope import SUBSET_ENTRIES_MAX
from loadtest.load.proto import ext_proc_pb2 as pb
from tests.examples import examples

DESTINATION = codec.Destination("10.0.0.1:8000")
names = st.text("abcxyzAXZ-", min_size=1, max_size=150)
values = st.binary(max_size=300)


def unframed(data: bytes) -> list[pb.ProcessingResponse]:
    """Decodes all messages of framed bytes."""
    found, at = [], 0
    while at < len(data):
        assert data[at] == 0
        size = int.from_bytes(data[at + 1 : at + 5], "big")
        found.append(pb.ProcessingResponse.FromString(data[at + 5 : at + 5 + size]))
        at += 5 + size
    assert at == len(data)
    return found


@given(st.lists(st.tuples(names, values, st.booleans()), max_size=40), st.booleans(), st.booleans())
def test_headers_are_read_as_the_protobuf_library_reads_them(pairs: list[tuple[str, bytes, bool]], last: bool, metadata: bool) -> None:
    request = pb.ProcessingRequest()
    expected = {}
    request.request_headers.end_of_stream = last
    request.request_headers.headers.SetInParent()
    for name, value, raw in pairs:
        if raw:
            request.request_headers.headers.headers.add(key=name, raw_value=value)
            expected[name.lower()] = value.decode("latin-1")
        else:
            text = value.decode("ascii", "ignore")
            request.request_headers.headers.headers.add(key=name, value=text)
            expected[name.lower()] = text
    if metadata:
        request.metadata_context.filter_metadata["x"].update({"a": 1})
    message = request.SerializeToString()
    kind, start, end = codec.split(message)
    assert kind == Kind.REQUEST_HEADERS
    assert codec.headers(message, start, end) == (expected, last)


@given(st.sampled_from(["x-request-id", "X-Request-Id", "X-REQUEST-ID", "x-rEQUEST-iD"]), st.booleans())
def test_a_header_is_found_and_mentioned_in_any_case_and_its_value_stays(name: str, raw: bool) -> None:
    message = pb.HttpHeaders()
    message.headers.headers.add(key="Accept", raw_value=b"*/*")
    if raw:
        message.headers.headers.add(key=name, raw_value=b"Mixed Case")
    else:
        message.headers.headers.add(key=name, value="Mixed Case")
    encoded = message.SerializeToString()
    found = codec.Headers(encoded, 0, len(encoded))
    assert found.find(codec.needle("x-request-id")) == found["x-request-id"] == "Mixed Case"
    assert found.mentions(b"x-request-id") and found.mentions(b"mixed") and not found.mentions(b"x-llm-d-")
    hidden = codec.Unseen(encoded, 0, len(encoded), frozenset(["x-request-id"]))
    assert hidden.find(codec.needle("x-request-id")) is None and dict(hidden) == {"accept": "*/*"}


HIDDEN = frozenset(["authorization", "x-tenant", "x-llm-d-inference-fairness-id"])
LOOKED_UP = ("authorization", "x-tenant", "x-tenant-id", "accept")
# Also as client headers are spelled, as parts of other names, and within values, as they are encoded.
like_hidden = st.sampled_from([*HIDDEN, *LOOKED_UP, "X-Tenant", "AUTHORIZATION", "proxy-authorization", "x-tenan", ""])
with_needles = st.lists(st.sampled_from([*map(codec.needle, (*HIDDEN, *LOOKED_UP)), b"\x03abc", b"x-tenant", b"\x0a"]), max_size=4).map(
    b"".join
)


@given(
    st.lists(st.tuples(like_hidden, with_needles | st.binary(max_size=150), st.booleans()), max_size=8),
    st.booleans(),
    st.none() | st.tuples(st.integers(0, 400), st.integers(0, 255)),
    st.integers(0, 9),
)
@examples(300)
def test_hidden_headers_are_those_that_the_decoded_headers_have(
    pairs: list[tuple[str, bytes, bool]], last: bool, changed: tuple[int, int] | None, cut: int
) -> None:
    """Some messages are changed in one byte or cut off, so that their headers have another form, or are malformed."""
    message = pb.HttpHeaders(end_of_stream=last)
    for name, value, raw in pairs:
        message.headers.headers.add(key=name, **({"raw_value": value} if raw else {"value": value.decode("ascii", "ignore")}))
    encoded = bytearray(message.SerializeToString())
    if changed is not None and changed[0] < len(encoded):
        encoded[changed[0]] = changed[1]
    data = bytes(encoded[: len(encoded) - cut if changed is not None else None])
    seen = codec.Unseen(b"ab" + data + b"c", 2, 2 + len(data), HIDDEN)
    try:
        expected = codec.headers(data, 0, len(data))[0]
    except ProtocolViolation:
        expected = {}
    hides = not HIDDEN.isdisjoint(expected)
    assert [seen.sent(name) for name in LOOKED_UP] == [expected.get(name) for name in LOOKED_UP]
    assert seen.removed() == (tuple(sorted(HIDDEN)) if hides else ())
    names = [name.lower() for name, _, _ in pairs]
    for name in LOOKED_UP:
        found = seen.find(codec.needle(name))
        assert name not in HIDDEN or found is None
        assert changed is not None or names.count(name) > 1 or found == (None if name in HIDDEN else expected.get(name))
    assert dict(seen) == {name: value for name, value in expected.items() if name not in HIDDEN}


@given(st.binary(max_size=70_000), st.booleans(), st.booleans(), st.sampled_from(["request_body", "response_body"]))
def test_a_body_piece_is_found_and_answered_unchanged(body: bytes, last: bool, metadata: bool, which: str) -> None:
    request = pb.ProcessingRequest()
    piece = getattr(request, which)
    piece.SetInParent()
    piece.body, piece.end_of_stream = body, last
    if metadata:
        request.metadata_context.filter_metadata["x"].update({"a": 1})
    message = request.SerializeToString()
    kind, start, end = codec.split(message)
    begin, stop, ends = codec.body(message, start, end)
    assert (message[begin:stop], ends) == (body, last)
    answer = codec.request_body_answer if kind == Kind.REQUEST_BODY else codec.response_body_answer
    (response,) = unframed(answer(message, start, end))
    streamed = getattr(response, which).response.body_mutation.streamed_response
    assert (streamed.body, streamed.end_of_stream) == (body, last)


@given(st.integers(0, 200_000), st.booleans(), st.booleans(), st.integers(0, 300), st.booleans())
@example(codec.PIECE_BYTES_MAX - 9, True, True, 9, False)
@example(codec.PIECE_BYTES_MAX - 9, True, True, 10, True)
@example(0, True, True, 10, False)
@examples(30)
def test_large_bodies_are_divided_into_pieces_that_envoy_accepts(size: int, last: bool, request: bool, front: int, metadata: bool) -> None:
    body, before = bytes(size), b"x" * front
    which = "request_body" if request else "response_body"
    more = codec.dynamic_metadata({"x": {"a": 1}}) if metadata else b""
    answers = unframed(b"".join(codec.body_pieces(body, last, request=request, front=before, metadata=more)))
    pieces = [getattr(r, which).response.body_mutation.streamed_response for r in answers]
    assert [r.HasField("dynamic_metadata") for r in answers] == [False] * (len(answers) - 1) + [last and metadata]
    assert b"".join(p.body for p in pieces) == before + body
    assert all(len(p.body) <= codec.PIECE_BYTES_MAX for p in pieces)
    assert [p.end_of_stream for p in pieces] == [False] * (len(pieces) - 1) + [last]


@given(st.binary(max_size=40), st.binary(max_size=300), st.integers(0, 300), st.integers(0, 300), st.booleans())
def test_bytes_are_sent_before_a_part_of_a_message(front: bytes, message: bytes, begin: int, stop: int, last: bool) -> None:
    begin = min(begin, len(message))
    stop = max(begin, min(stop, len(message)))
    (answer,) = unframed(codec.request_body_behind(front, message, begin, stop, last))
    streamed = answer.request_body.response.body_mutation.streamed_response
    assert (streamed.body, streamed.end_of_stream) == (front + message[begin:stop], last)


@given(st.integers(0, 99_999), st.lists(st.text("ab#-", min_size=1, max_size=3), max_size=2).map(tuple))
def test_an_answer_removes_headers_whatever_the_length_of_the_body(length: int, removed: tuple[str, ...]) -> None:
    for _ in range(2):  # the second time from its kept texts
        (answer,) = unframed(DESTINATION.answer(length, removed))
        mutation = answer.request_headers.response.header_mutation
        lengths = [option.header.raw_value for option in mutation.set_headers if option.header.key == "content-length"]
        assert lengths == ([b"%d" % length] if length else [])
        assert tuple(mutation.remove_headers) == (*removed, *NEVER_PASSED)


def test_fields_may_stand_in_any_order() -> None:
    headers = pb.ProcessingRequest()
    headers.request_headers.headers.headers.add(key=":path", raw_value=b"/x")
    metadata = pb.ProcessingRequest()
    metadata.metadata_context.filter_metadata["x"].update({"a": 1})
    message = metadata.SerializeToString() + headers.SerializeToString()
    kind, start, end = codec.split(message)
    assert (kind, codec.headers(message, start, end)) == (Kind.REQUEST_HEADERS, ({":path": "/x"}, False))


def hint(value: Any, namespace: str = codec.SUBSET_NAMESPACE) -> bytes:
    request = pb.ProcessingRequest()
    request.request_body.end_of_stream = True
    request.metadata_context.filter_metadata[namespace].update({codec.SUBSET_KEY: value})
    return request.SerializeToString()


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (hint(["10.0.0.1:8000", "10.0.0.2"]), ["10.0.0.1:8000", "10.0.0.2"]),
        (hint([]), []),
        (hint(["10.0.0.1", 7, None]), ["10.0.0.1"]),
        (hint("10.0.0.1"), None),
        (hint(["10.0.0.1"], namespace="other"), None),
        (b"\x22\x02\x10\x01", None),
    ],
)
def test_only_a_list_is_a_subset_hint(message: bytes, expected: list[str] | None) -> None:
    assert codec.subset(message) == expected


def test_a_subset_hint_has_a_limit() -> None:
    most = codec.subset(hint(["a"] * SUBSET_ENTRIES_MAX))
    assert most is not None
    assert len(most) == SUBSET_ENTRIES_MAX
    with pytest.raises(ProtocolViolation, match="subset hint of 8193 endpoints: at most 8192 are read"):
        codec.subset(hint(["a"] * (SUBSET_ENTRIES_MAX + 1)))


@given(st.integers(0, 10**9), st.dictionaries(names, st.text(st.characters(max_codepoint=255), max_size=200), max_size=5))
def test_the_routing_answer_names_the_target_twice(size: int, extra: dict[str, str]) -> None:
    (response,) = unframed(codec.request_headers_answer(codec.Destination("10.0.0.1:8000,[::1]:8000"), size, extra))
    common = response.request_headers.response
    sent = {o.header.key: o.header.raw_value for o in common.header_mutation.set_headers}
    assert sent.pop(codec.DESTINATION) == b"10.0.0.1:8000,[::1]:8000"
    assert sent.pop("content-length", None) == (str(size).encode() if size else None)
    assert sent == {k: v.encode("latin-1") for k, v in extra.items()}
    assert common.clear_route_cache
    assert response.dynamic_metadata["envoy.lb"][codec.DESTINATION] == "10.0.0.1:8000,[::1]:8000"


def test_an_immediate_answer_has_status_headers_and_body() -> None:
    (response,) = unframed(codec.immediate_answer(429, {"content-type": "application/json"}, b"{}"))
    immediate = response.immediate_response
    assert (immediate.status.code, immediate.body) == (429, b"{}")
    assert [(o.header.key, o.header.raw_value) for o in immediate.headers.set_headers] == [("content-type", b"application/json")]


def test_constant_answers_have_the_right_kind() -> None:
    (headers,) = unframed(codec.RESPONSE_HEADERS_ANSWER)
    (request_trailers,) = unframed(codec.REQUEST_TRAILERS_ANSWER)
    (response_trailers,) = unframed(codec.response_trailers_answer(b""))
    assert [m.WhichOneof("response") for m in (headers, request_trailers, response_trailers)] == [
        "response_headers",
        "request_trailers",
        "response_trailers",
    ]


@given(st.binary(max_size=300))
@example(b"(\x00")  # the field number of a body with the wire type of a scalar
@examples(500)
def test_arbitrary_bytes_are_a_violation_or_a_message(data: bytes) -> None:
    try:
        kind, start, end = codec.split(data)
        if kind in (Kind.REQUEST_BODY, Kind.RESPONSE_BODY):
            begin, stop, _ = codec.body(data, start, end)
            assert start <= begin <= stop <= end
        elif kind in (Kind.REQUEST_HEADERS, Kind.RESPONSE_HEADERS):
            codec.headers(data, start, end)
    except ProtocolViolation:
        return


@given(st.integers(0, 70_000))
@examples(400)
def test_the_layout_of_a_lone_body_piece_follows_from_the_size_of_its_message(size: int) -> None:
    body = b"x" * size
    message = pb.ProcessingRequest(response_body=pb.HttpBody(body=body)).SerializeToString()
    codec.learn_chunk(len(message))
    chunk = codec.chunk_of_size(len(message))
    if chunk is None:
        assert size == 0 or size > codec.PIECE_BYTES_MAX - 5
        return
    if not size:
        return
    assert message.startswith(chunk.head) and message[chunk.begin :] == body
    (response,) = unframed(chunk.prefix + message[chunk.start :])
    assert response.response_body.response.body_mutation.streamed_response.body == body
    last = pb.ProcessingRequest(response_body=pb.HttpBody(body=body[2:], end_of_stream=True)).SerializeToString()
    assert len(last) != len(message) or not last.startswith(chunk.head)


@pytest.mark.parametrize("message", [b"\x0a\x08\x0a\x06\x0a\x01a", b"\x0a\x7f", b"\x0a\xff\xff\x01\x18\x01"])
def test_a_header_map_that_is_longer_than_its_message_is_a_violation(message: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        codec.headers(message, 0, len(message))
