"""Writes prompts as canonical bytes for hashing: the content that an engine will prefill, in the order of its chat template.

    front       settings of the template, then tools, as they are in the body
    message     the byte FF and the role, then the parts of the message
    part        a text: its JSON string in shortest form, with the quotes
                a medium: FE, the first letter of its modality, and 16 bytes of XXH3 of its content, repeated until the length is that of
                its estimated tokens
                another member of a message or part (a tool's call or result, reasoning): FD, its name and its value

The encoding is unambiguous: no byte from F8 on occurs in UTF-8, and a quote ends a string. Nothing follows the last message. So a
conversation that grows keeps all its bytes, and two conversations have equal bytes up to the place where they differ. A list of parts
with one text is encoded as that text. The encoding lacks members that engines do not render: cache marks, ids of stored messages, unknown
members.

Most clients already send strings in shortest form. Only escapes with a shorter form (`\\u`, `\\/`) need decoding. `_plain_prompts`
encodes prompts that are no conversations. This module refuses no body, because the parser has accepted it. A value of an unexpected shape
is encoded as its JSON text.

This code blocks the event loop, so all work beyond one look at each byte is bounded. A body with very many messages or parts is encoded
as its JSON text (`crowded`), and so is a list of parts with very many values (`dense`). Only a bounded number of bytes is
sorted and shortened. Each bound depends only on the bytes before the place where it applies, so prompts with equal beginnings keep equal
encodings.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
from xxhash import xxh3_128_digest

from compiled.calls import find
from epp.errors import UNREADABLE
from epp.plugins.parsers._structs import EMPTY, Message, Part, Raw, Source
from epp.request import BYTES_PER_TOKEN

MESSAGE: Final = b"\xff"
MEDIUM: Final = b"\xfe"
MEMBER: Final = b"\xfd"
CACHE_MARK: Final = b'"cache_control"'
PROMPT: Final = b"\xfc"  # separates prompts
FRONT: Final = b"\xfb"
# Separates prompts of token ids; no vocabulary is so large that this number is a token id.
TOKENS_BETWEEN: Final = b"\xff" * BYTES_PER_TOKEN
QUOTE: Final = 34
BRACKET: Final = 91
BRACE: Final = 123
CLOSED: Final = 125
COLON: Final = 58
COMMA: Final = 44
BLANK: Final = 32
DIGEST_BYTES: Final = 16
# Estimated tokens of a medium of a common size.
MEDIUM_TOKENS: Final = {"image": 225, "video": 4500, "audio": 250, "file": 250}
# How many media of a request have repeated hashes; later media have their hash only once, so that they add few bytes.
LONG_MEDIA_MAX: Final = 64
DEPTH_MAX: Final = 3  # lists of parts that are nested deeper are encoded as JSON
SURE_BYTES: Final = 32768  # only longer bodies are checked for crowding
OBJECTS_MAX: Final = 1000  # messages, parts and similar objects of a body, plus OBJECTS_PER_MIB for each of its MiB
OBJECTS_PER_MIB: Final = 500
# Bytes of a long text that are searched at once: they stay in the CPU cache, and a match ends the search.
STEP: Final = 65536
SORTED_BYTES: Final = 1 << 16  # bytes of one prompt that are sorted
SHORTENED_BYTES: Final = 1 << 18  # bytes of one prompt that are brought into shortest form
CUT_BYTES: Final = 4096  # how far back from SHORTENED_BYTES to look for a place to cut a text
COMMA_EVERY: Final = 8  # a list is `dense` if it has more than one comma in this many bytes; texts and code have fewer
SHORT_BYTES: Final = 16384  # for shorter texts a regular expression finds escapes faster than NumPy

COMPACT: Final = b'[{"type":"text","text":"'
SPACED: Final = b'[{"type": "text", "text": "'
COMPACT_TEXT: Final = 24
SPACED_TEXT: Final = 27

Piece: TypeAlias = bytes | memoryview
Text: TypeAlias = Callable[[Raw | memoryview], Piece]
_long_escape: Final = re.compile(rb"\\[u/]").search
_escape: Final = re.compile(rb"[^\\](\\u(?![dD][c-fC-F]))")  # excludes the second half of a surrogate pair
_encode: Final = msgspec.json.Encoder(order="sorted").encode
_decode: Final = msgspec.json.Decoder().decode


_TEXTS: Final = frozenset(("text", "input_text", "output_text"))
_MEDIA: Final = {  # type of a part -> modality, member with the medium
    "image_url": ("image", "image_url"),
    "input_image": ("image", "image_url"),
    "image": ("image", "source"),
    "video_url": ("video", "video_url"),
    "audio_url": ("audio", "audio_url"),
    "input_audio": ("audio", "input_audio"),
    "file": ("file", "file"),
}
_MEMBERS: Final = {  # type of a part -> members that engines render
    "refusal": ("refusal",),
    "thinking": ("thinking",),
    "redacted_thinking": ("data",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id", "is_error", "content"),
}
_parts_decoder: Final = msgspec.json.Decoder(list[Part])
_source_decoder: Final = msgspec.json.Decoder(Source)
_items_decoder: Final = msgspec.json.Decoder(list[Raw])
_messages_decoder: Final = msgspec.json.Decoder(list[Message])


def conversation(front: Sequence[tuple[bytes, Raw]], messages: Sequence[Message]) -> bytes:
    """Encodes a conversation: the front, as (name, value) pairs, and the messages."""
    head = _front(front)
    encoded = b"".join(_Composer(unchanged).messages(head, messages))
    if has_long_escape(encoded, len(head)):
        encoded = b"".join(_Composer(Shortener()).messages(head, messages))
    return encoded


def crowded(body: bytes | memoryview) -> bool:
    """Returns whether a JSON text may have too many objects in lists to decode them one by one.

    Counts braces. Near the limit, counts only braces that may open an object in a list.
    """
    size = len(body)
    if size <= SURE_BYTES:
        return False
    left = OBJECTS_MAX + (size * OBJECTS_PER_MIB >> 20)
    codes = np.frombuffer(body, np.uint8)
    for start in range(0, size, STEP):
        at = np.flatnonzero(codes[start : start + STEP] == BRACE) + start
        if len(at) > left >> 3:
            before, after = codes[at - 1], codes[np.minimum(at + 1, size - 1)]
            member = (before == COLON) | ((before == BLANK) & (codes[at - 2] == COLON))
            # a brace within a string is not followed by a quote, because quotes are escaped there
            opens = (after == QUOTE) | (after == CLOSED) | (after <= BLANK)
            left -= int(np.count_nonzero(opens & ~member))
        else:
            left -= len(at)
        if left < 0:
            return True
    return False


def as_json(front: Sequence[tuple[bytes, Raw]], messages: Raw) -> bytes:
    """Encodes the front and the messages of a crowded body as JSON."""
    return b"".join((_front(front), MESSAGE, memoryview(messages)[:-1]))


def items(front: Sequence[tuple[bytes, Raw]], instructions: Raw, value: Raw) -> bytes:
    """Encodes the items of a response's input or of a conversation: messages, calls, results. A plain text is one message of the user."""
    front, messages = system(front, instructions)
    if first(value) == BRACKET:
        if crowded(memoryview(value)):
            return conversation(front, messages) + as_json((), value)
        messages += _items(value)
    else:
        messages.append(Message(role=USER, content=value))
    return conversation(front, messages)


Front: TypeAlias = Sequence[tuple[bytes, Raw]]
SYSTEM: Final = Raw(b'"system"')
USER: Final = Raw(b'"user"')


def system(front: Front, content: Raw) -> tuple[Front, list[Message]]:
    """Returns the front, and a list with the system message, if any. Content with too many parts goes into the front instead."""
    if not present(content):
        return front, []
    if first(content) == BRACKET and crowded(memoryview(content)):
        return (*front, (b"system", content)), []
    return front, [Message(role=SYSTEM, content=content)]


def _items(value: Raw) -> list[Message]:
    """Decodes a list of items into messages. An item without a role becomes a message with its JSON text.

    A list that contains anything but items becomes one message with the JSON text of the list.
    """
    try:
        messages = _messages_decoder.decode(value)
    except UNREADABLE:
        return [Message(function_call=value)]
    if all(message.role is not EMPTY for message in messages):
        return messages
    entries = zip(messages, _items_decoder.decode(value), strict=True)
    return [message if message.role is not EMPTY else Message(function_call=entry) for message, entry in entries]


def dense(raw: Raw) -> bool:
    """Returns whether a long JSON text is mostly commas and very short values. Such a text is not decoded into parts: that takes long."""
    text = memoryview(raw)
    if len(text) <= SURE_BYTES:
        return False
    return int(np.count_nonzero(np.frombuffer(text, np.uint8) == COMMA)) * COMMA_EVERY > len(text)


def inside(text: Raw | Piece) -> memoryview:
    """Returns a JSON string without its quotes."""
    return memoryview(text)[1:-1]


def unchanged(raw: Raw | memoryview) -> Piece:
    return raw


def shortest(raw: Raw | memoryview | bytes) -> bytes:
    """Returns a JSON string in its shortest form. Returns any other value unchanged."""
    text = bytes(raw)
    if text[0] != QUOTE or not _long_escape(text):
        return text
    try:
        return msgspec.json.encode(_decode(text))
    except (*UNREADABLE, UnicodeEncodeError):  # half a surrogate pair
        return text


class Shortener:
    """Applies `shortest` to the strings of one prompt, up to SHORTENED_BYTES in total. The rest stays unchanged."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = SHORTENED_BYTES

    def __call__(self, raw: Raw | memoryview) -> bytes:
        text = bytes(raw)
        self._left, left = max(0, self._left - len(text)), self._left
        if len(text) <= left:
            return shortest(text)
        at = _between_escapes(text, left)
        return shortest(text[:at] + b'"')[:-1] + text[at:] if at else text


def _between_escapes(text: bytes, at: int) -> int:
    """Returns a place shortly before `at` at which the string can be cut, after a blank or before an escape; 0 if there is none."""
    low = max(1, at - CUT_BYTES)
    blank = text.rfind(b" ", low, at) + 1
    if blank:
        return blank
    escape = _escape.search(text, low, at)
    return escape.start(1) if escape is not None else 0


def lone_text(raw: Raw) -> memoryview | None:
    """Returns the text of a list of parts with only one text, as a JSON string; None if the list is not in the usual form of such lists.

    This takes half the time of decoding the list. If the third byte from the end closes the string, the list ends with `"}]`.
    """
    listed = bytes(raw)
    start = SPACED_TEXT if listed.startswith(SPACED) else COMPACT_TEXT if listed.startswith(COMPACT) else 0
    return memoryview(raw)[start - 1 : -2] if start and listed.find(b'"', start) == len(listed) - 3 else None


def has_long_escape(data: bytes, start: int = 0) -> bool:
    """Returns whether an escape in `data` may have a shorter form. An escaped backslash before `u` or `/` has the same effect."""
    if find(data, b"\\", start) < 0:
        return False
    if len(data) - start < SHORT_BYTES:
        return _long_escape(data[start:] if start else data) is not None
    codes = np.frombuffer(data, np.uint8)
    for begin in range(start, len(codes) - 1, STEP):
        after = codes[np.flatnonzero(codes[begin : min(begin + STEP, len(codes) - 1)] == 0x5C) + (begin + 1)]
        if ((after == 0x75) | (after == 0x2F)).any():
            return True
    return False


def first(raw: Any) -> int:
    """Returns the first byte of a JSON value; 0 if the value is missing. `raw`: `Raw`, bytes or a view."""
    if isinstance(raw, bytes):  # a bytes object needs no view, which would cost more than the rest
        return raw[0]
    return 0 if raw is EMPTY else memoryview(raw)[0]


def present(raw: Raw) -> bool:
    """Returns whether the value is neither missing nor null."""
    return first(raw) not in (0, 0x6E)


def _front(front: Sequence[tuple[bytes, Raw]]) -> bytes:
    pairs = [(name, raw) for name, raw in front if raw is not EMPTY and present(raw) and bytes(raw) not in (b"[]", b"{}")]
    return b"".join([piece for name, raw in pairs for piece in (FRONT, name, bytes(raw))])


def _sorted(raw: Raw) -> bytes:
    """Returns any JSON value with sorted keys and without blanks; unchanged if it cannot be read."""
    try:
        return _encode(_decode(raw))
    except (*UNREADABLE, UnicodeEncodeError):
        return bytes(raw)


def _unmarked(raw: Raw) -> bytes:
    """Returns a part as JSON without `cache_control`, by which clients mark where a cached prefix should end."""
    try:
        part = _decode(raw)
        part.pop("cache_control", None)
        return _encode(part)
    except (*UNREADABLE, UnicodeEncodeError):
        return bytes(raw)


class _Composer:
    """Collects the pieces of one prompt. `text`: the function that encodes a JSON string."""

    __slots__ = ("_media", "_sortable", "_text", "pieces")

    def __init__(self, text: Text) -> None:
        self.pieces: list[Piece] = []
        self._text = text
        self._media = 0
        self._sortable = SORTED_BYTES

    def messages(self, head: bytes, messages: Sequence[Message]) -> list[Piece]:
        pieces, text = self.pieces, self._text
        pieces.append(head)
        for message in messages:
            content = message.content
            pieces += (MESSAGE, message.role)
            if content is not EMPTY:
                if memoryview(content)[0] == QUOTE:
                    pieces.append(text(content))
                elif alone := lone_text(content):
                    pieces.append(text(alone))
                else:
                    self._content(content, 1)
            if (
                message.tool_calls is not EMPTY
                or message.tool_call_id is not EMPTY
                or message.name is not EMPTY
                or message.reasoning_content is not EMPTY
                or message.reasoning is not EMPTY
                or message.function_call is not EMPTY
                or message.refusal is not EMPTY
            ):
                self._more(message)
        return pieces

    def _more(self, message: Message) -> None:
        self._member(b"reasoning", message.reasoning_content)
        self._member(b"reasoning", message.reasoning)
        self._member(b"calls", message.tool_calls)
        self._member(b"call", message.function_call)
        self._member(b"of", message.tool_call_id)
        self._member(b"name", message.name)
        self._member(b"refusal", message.refusal)

    def _member(self, name: bytes, raw: Raw) -> None:
        kind = first(raw)
        if kind == QUOTE:
            self.pieces += (MEMBER, name, self._text(raw))
        elif present(raw):
            self.pieces += (MEMBER, name, self._sorted(raw))

    def _sorted(self, raw: Raw, form: Callable[[Raw], bytes] = _sorted) -> bytes:
        """Returns the value in its sorted form, or unchanged once the prompt's limit of sorted bytes is used up."""
        size = len(memoryview(raw))
        self._sortable, left = max(0, self._sortable - size), self._sortable
        return form(raw) if size <= left else bytes(raw)

    def _content(self, raw: Raw, depth: int) -> None:
        """Adds a message's content: a text, a list of parts, or any other value."""
        kind = first(raw)
        if kind == QUOTE:
            self.pieces.append(self._text(raw))
        elif kind == BRACKET and depth <= DEPTH_MAX and not dense(raw):
            try:
                parts = _parts_decoder.decode(raw)
            except UNREADABLE:
                self.pieces.append(self._sorted(raw))
                return
            raw_parts: list[Raw] | None = None
            for index, part in enumerate(parts):
                text = part.text
                if text is not EMPTY and part.type in _TEXTS and memoryview(text)[0] == QUOTE:
                    self.pieces.append(self._text(text))
                elif not self._part(part, depth):
                    raw_parts = raw_parts or _items_decoder.decode(raw)
                    self.pieces += (MEMBER, self._unknown(raw_parts[index]))
        elif present(raw):
            self.pieces.append(self._sorted(raw))

    def _unknown(self, raw: Raw) -> bytes:
        """Encodes a part of an unknown type."""
        return self._sorted(raw, _unmarked if CACHE_MARK in bytes(raw) else _sorted)

    def _part(self, part: Part, depth: int) -> bool:
        """Adds a part that is not a text. Returns False if its type is unknown."""
        kind = part.type or ""
        if (medium := _MEDIA.get(kind)) and (present(getattr(part, medium[1])) or present(part.uuid)):
            self._medium(medium[0], getattr(part, medium[1]), part.uuid)
        elif kind in _MEMBERS:
            self.pieces += (MEMBER, kind.encode())
            for name in _MEMBERS[kind]:
                if name == "content":
                    self._content(part.content, depth + 1)
                else:
                    self._member(name.encode(), getattr(part, name))
        else:
            return False
        return True

    def _medium(self, modality: str, source: Raw, uuid: Raw) -> None:
        """Adds a medium as a hash: of the client's name for the medium (`uuid`) or, without a name, of its content."""
        if present(uuid):
            content = b"uuid" + bytes(shortest(uuid))
        elif first(source) == BRACE:
            content = self._source(source)
        else:
            content = bytes(shortest(source))
        self._media += 1
        tokens = MEDIUM_TOKENS[modality] if self._media <= LONG_MEDIA_MAX else 0
        repeated = max(1, tokens * BYTES_PER_TOKEN // DIGEST_BYTES)
        self.pieces += (MEDIUM, modality[:1].encode(), xxh3_128_digest(content) * repeated)

    def _source(self, raw: Raw) -> bytes:
        """Returns the content of a medium, or its URL or file id."""
        try:
            source = _source_decoder.decode(raw)
        except UNREADABLE:
            return self._sorted(raw)
        values = (source.url, source.data, source.file_data, source.file_id, source.format, source.media_type)
        if not any(present(value) for value in values[:4]):
            return self._sorted(raw)
        return MEMBER.join([bytes(shortest(value)) if present(value) else b"" for value in values])
