"""Bodies that the kernels read and bodies that msgspec reads have equal fields, and equal errors."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from compiled import kernels
from epp.plugins.parsers._reader import Reader
from epp.plugins.parsers._structs import EMPTY, Chat, Completion, Crowd, Raw, Responses

native_only = pytest.mark.skipif(not kernels.NATIVE, reason="the kernels in C are not built")
READERS = [(Reader(kind), msgspec.json.Decoder(kind)) for kind in (Completion, Chat, Crowd, Responses)]
NAMES = ("model", "stream", "prompt", "messages", "max_tokens", "cache_salt", "tools", "input", "role", "content", "other")
LONG = "a long text, " * 500
TEXT = st.text(max_size=20) | st.sampled_from(["\\", '"', "\ud83d", "😀", LONG, LONG + '"', "\n" * 70])
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES) | TEXT, inner, max_size=4),
    max_leaves=12,
)
MESSAGES = st.lists(st.dictionaries(st.sampled_from(("role", "content", "name", "tool_calls")), VALUE), max_size=4)
BODY = st.dictionaries(st.sampled_from(NAMES), VALUE) | st.fixed_dictionaries({"model": TEXT, "messages": MESSAGES})
PIECES = st.sampled_from(
    [b'"', b"\\", b",", b"{", b"}", b"[", b"]", b":", b"0", b"-", b".", b"e", b" ", b"\0", b"\xff", b"\\u12", b"\\udc00", b'"model":1,']
)  # fmt: skip


@st.composite
def texts(draw: st.DrawFn) -> bytes:
    """A body as JSON in one of its spellings, in many cases with an error."""
    text = json.dumps(draw(BODY), ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 1])))
    encoded = text.encode("utf-8", "surrogatepass")
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(encoded)))
        encoded = encoded[:at] + draw(PIECES | st.just(b"")) + encoded[at + draw(st.integers(0, 2)) :]
    return encoded


def read(decode: Any, text: bytes | memoryview) -> Any:
    """What is read, or the error."""
    try:
        return plain(decode(text))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return type(error), str(error)


def plain(value: Any) -> Any:
    if isinstance(value, (Raw, bytes, memoryview)):
        return bytes(value)
    if isinstance(value, msgspec.Struct):
        return type(value), [plain(getattr(value, name)) for name in value.__struct_fields__]
    return [plain(item) for item in value] if isinstance(value, list) else value


@given(texts(), st.booleans())
@example(b'{"model":"m","model":{}}', False)
@example(b'{"mod\\u0065l":"m"}', False)
@example(b'{"prompt":"\\ud83d\\ude00 \\ud83d"}', True)
@example(b'{"prompt":' + b"[" * 3000 + b"]" * 3000 + b"}", False)
@example(b'{"messages":[{"role":"user"},3]}', False)
def test_a_body_is_read_as_msgspec_reads_it(text: bytes, view: bool) -> None:
    given_ = memoryview(b"##" + text + b"##")[2:-2] if view else text
    for reader, decoder in READERS:
        assert read(reader.decode, given_) == read(decoder.decode, text)


@native_only
def test_the_kernels_read_ordinary_bodies() -> None:
    text = json.dumps({"model": "m", "messages": [{"role": "user", "content": LONG}], "x": [1, {"y": None}]}).encode()
    model, messages, missing = kernels.members(text, (b"model", b"messages", b"stream"), EMPTY) or ()
    assert (bytes(model), missing) == (b'"m"', EMPTY)
    (message,) = kernels.items(messages) or ()
    (content,) = kernels.members(message, (b"content",), EMPTY) or ()
    assert json.loads(bytes(content)) == LONG
    assert isinstance(content, memoryview)  # a long text is not copied


@native_only
@pytest.mark.parametrize("text", [b"", b"{", b"[", b'{"a"}', b'{"a":1}}', b'{"a":1,}', b"[1 2]", b"[01]", b'["\\x"]', b"nul"])
def test_the_kernels_leave_what_they_cannot_read_to_msgspec(text: bytes) -> None:
    assert kernels.members(text, (b"a",), EMPTY) is None
    assert kernels.items(text) is None
