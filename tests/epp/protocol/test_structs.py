"""Structs of metadata against the generated classes of protobuf."""

import contextlib
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from google.protobuf.struct_pb2 import Struct
from hypothesis import given
from hypothesis import strategies as st

from epp.errors import ProtocolViolation
from epp.protocol import codec
from epp.protocol.codec import structs
from epp.protocol.codec.fields import field
from loadtest.load.proto import ext_proc_pb2 as pb

VALUES = st.recursive(
    st.none() | st.booleans() | st.floats(-1e9, 1e9) | st.text(max_size=200),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
STRUCTS = st.dictionaries(st.text(max_size=6), VALUES, max_size=5)
NAMES = st.sampled_from(["envoy.lb", "envoy.lb.subset_hint", "other", ""])


def message(metadata: dict[str, dict[str, Any]]) -> bytes:
    """A message with this metadata between a body and an unknown field."""
    request = pb.ProcessingRequest()
    request.request_body.body = b"abc"
    for name, values in metadata.items():
        request.metadata_context.filter_metadata[name].update(values)
    return request.SerializeToString() + b"\xf8\x7f\x01"


@given(st.dictionaries(NAMES, STRUCTS, max_size=4), NAMES)
def test_metadata_read_as_they_were_written(metadata: dict[str, dict[str, Any]], name: str) -> None:
    data = message(metadata)
    found = structs.filter_metadata(data, name.encode())
    assert (found is None) == (name not in metadata)
    if found is not None:
        assert {key: structs.value(data, place) for key, place in found.items()} == metadata[name]


def at(values: Any, path: list[str]) -> str:
    """What `codec.metadata_text` returns, by the values that protobuf has."""
    for name in path:
        values = values.get(name) if isinstance(values, dict) else None
    if isinstance(values, float) and values.is_integer():
        return str(int(values))
    return values if isinstance(values, str) else ""


@given(st.dictionaries(NAMES, STRUCTS, max_size=3), NAMES.filter(bool), st.data())
def test_the_text_at_a_path_is_found_and_no_other_value(metadata: dict[str, dict[str, Any]], name: str, data: st.DataObject) -> None:
    path, values = [], metadata.get(name)
    while isinstance(values, dict) and values and len(path) < 4:
        path.append(data.draw(st.sampled_from(sorted(values))))
        values = values[path[-1]]
    path += data.draw(st.lists(st.text(max_size=3), min_size=0 if path else 1, max_size=2))
    found = codec.metadata_text(message(metadata), name.encode(), [part.encode() for part in path])
    assert found == at(metadata.get(name), path)


@given(STRUCTS)
def test_protobuf_reads_an_encoded_struct(fields: dict[str, Any]) -> None:
    assert MessageToDict(Struct.FromString(structs.encoded(fields))) == fields


def test_whole_numbers_and_tuples_are_encoded_and_other_values_are_refused() -> None:
    assert dict(Struct.FromString(structs.encoded({"a": 3}))) == {"a": 3.0}
    assert list(Struct.FromString(structs.encoded({"a": (1, "b")}))["a"]) == [1.0, "b"]  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="metadata cannot hold set"):
        structs.encoded({"a": {1}})


@given(st.data(), st.dictionaries(NAMES, STRUCTS, min_size=1, max_size=2))
def test_damaged_metadata_are_read_or_refused(data: st.DataObject, metadata: dict[str, dict[str, Any]]) -> None:
    whole = message(metadata)
    at = data.draw(st.integers(0, len(whole) - 1))
    damaged = data.draw(st.sampled_from([whole[:at], whole[:at] + bytes([data.draw(st.integers(0, 255))]) + whole[at + 1 :]]))
    for read in (codec.subset, codec.gateway_metadata):
        with contextlib.suppress(ProtocolViolation):
            read(damaged)


def test_values_nested_too_deep_are_refused() -> None:
    inner = b"\x08\x00"
    for _ in range(structs.DEPTH_MAX + 2):
        inner = field(6, field(1, inner))
    with pytest.raises(ProtocolViolation, match="nested more than 32 deep"):
        structs.value(inner, (0, len(inner)))


@pytest.mark.parametrize("items", [b"\x0a", b"\x0a\x80", b"\x0a\x7f", b"\x12\x00"])
def test_a_list_that_is_cut_off_or_has_something_else_is_refused(items: bytes) -> None:
    inner = field(6, items)
    with pytest.raises(ProtocolViolation, match="malformed"):
        structs.texts(inner, (0, len(inner)), 9)


def test_the_last_of_several_values_counts() -> None:
    entry = field(1, b"a") + field(2, field(3, b"one")) + field(2, field(3, b"two") + field(3, b"three"))
    data = field(8, field(1, field(1, b"other") + field(2, b""))) + field(8, field(1, field(1, b"m") + field(2, field(1, entry))))
    found = structs.filter_metadata(data, b"m")
    assert found is not None
    assert structs.value(data, found["a"]) == "three"
