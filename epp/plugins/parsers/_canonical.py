"""Requests -> canonical prompt bytes: what an engine will prefill, in the order in which its template puts it, for hashing.

    front       settings of the template, then tools, as they stand in the body
    message     FF role, then its parts
    part        a text: its JSON string in shortest form, with the quotes
                FE and modality and 16 bytes of XXH3 of a medium's content, as often as its estimated tokens are long
                FD and a name, then a value: what else a message or a part has (a tool's call or result, reasoning)

What stands for what is unambiguous: no byte from F8 on occurs in UTF-8, and a quote ends a string. Nothing follows a message, so a
conversation that grows keeps all its bytes, and two conversations are equal up to where they differ. A text alone in a list of
parts is that text. What engines do not render is left out: cache marks, ids of stored messages, unknown members.

A string's shortest form is what most clients send: only escapes that have a shorter way (`\\u`, `\\/`) cost decoding. Prompts that
are no conversation are the string's inside; token ids are 32-bit words in little-endian order.

Nothing here refuses: the parser has accepted the body, and what has an unexpected shape counts as its JSON.
"""

import re
from array import array
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
from xxhash import xxh3_128_digest

from epp.request import BYTES_PER_TOKEN

Raw = msgspec.Raw
EMPTY: Final = Raw()
MESSAGE: Final = b"\xff"
MEDIUM: Final = b"\xfe"
MEMBER: Final = b"\xfd"
PROMPT: Final = b"\xfc"  # between prompts
FRONT: Final = b"\xfb"
TOKENS_BETWEEN: Final = b"\xff" * BYTES_PER_TOKEN  # between prompts of token ids: no vocabulary is as large
QUOTE, BRACKET, BRACE = 0x22, 0x5B, 0x7B
DIGEST_BYTES: Final = 16
MEDIUM_TOKENS: Final = {"image": 225, "video": 4500, "audio": 250, "file": 250}  # of common sizes
LONG_MEDIA_MAX: Final = 64  # of a request; further ones are their hash once, so that a body does not grow by them
DEPTH_MAX: Final = 3  # lists of parts within parts
SHORT_BYTES: Final = 16384  # below this a regular expression finds escapes faster than NumPy

Text: TypeAlias = Callable[[Raw], bytes]
_long_escape = re.compile(rb"\\[u/]").search
_encode = msgspec.json.Encoder(order="sorted").encode
_decode = msgspec.json.Decoder().decode
UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class Message(msgspec.Struct):
    """A message of a chat, or an item of a response's input."""

    role: Raw = EMPTY
    content: Raw = EMPTY
    tool_calls: Raw = EMPTY
    tool_call_id: Raw = EMPTY
    name: Raw = EMPTY
    reasoning_content: Raw = EMPTY
    reasoning: Raw = EMPTY
    function_call: Raw = EMPTY
    refusal: Raw = EMPTY


class _Part(msgspec.Struct):
    """A part of a message's content, in any of the APIs."""

    type: str | None = None
    text: Raw = EMPTY
    refusal: Raw = EMPTY
    thinking: Raw = EMPTY
    data: Raw = EMPTY
    image_url: Raw = EMPTY
    video_url: Raw = EMPTY
    audio_url: Raw = EMPTY
    input_audio: Raw = EMPTY
    source: Raw = EMPTY
    file: Raw = EMPTY
    uuid: Raw = EMPTY
    id: Raw = EMPTY
    tool_use_id: Raw = EMPTY
    name: Raw = EMPTY
    input: Raw = EMPTY
    content: Raw = EMPTY
    is_error: Raw = EMPTY


class _Source(msgspec.Struct):
    """Where a medium's content is."""

    url: Raw = EMPTY
    data: Raw = EMPTY
    file_data: Raw = EMPTY
    file_id: Raw = EMPTY
    format: Raw = EMPTY
    media_type: Raw = EMPTY


_TEXTS: Final = frozenset(("text", "input_text", "output_text"))
_MEDIA: Final = {  # type of a part -> modality, member that has it
    "image_url": ("image", "image_url"),
    "input_image": ("image", "image_url"),
    "image": ("image", "source"),
    "video_url": ("video", "video_url"),
    "audio_url": ("audio", "audio_url"),
    "input_audio": ("audio", "input_audio"),
    "file": ("file", "file"),
}
_MEMBERS: Final = {  # type of a part -> members that are rendered
    "refusal": ("refusal",),
    "thinking": ("thinking",),
    "redacted_thinking": ("data",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id", "is_error", "content"),
}
_parts_decoder = msgspec.json.Decoder(list[_Part])
_source_decoder = msgspec.json.Decoder(_Source)
_items_decoder = msgspec.json.Decoder(list[Raw])
_message_decoder = msgspec.json.Decoder(Message)


def conversation(front: Sequence[tuple[bytes, Raw]], messages: Sequence[Message]) -> bytes:
    """Messages behind what stands before them, each with its name."""
    head = _front(front)
    made = b"".join(_Composer(as_it_is).messages(head, messages))
    if has_long_escape(made, len(head)):
        made = b"".join(_Composer(shortest).messages(head, messages))
    return made


def items(front: Sequence[tuple[bytes, Raw]], instructions: Raw, given: Raw) -> bytes:
    """Items of a response's input or of a conversation: messages, calls, results. A text is a message of the user."""
    messages = [Message(role=SYSTEM, content=instructions)] if present(instructions) else []
    if first(given) == BRACKET:
        try:
            entries = _items_decoder.decode(given)
        except UNREADABLE:
            entries = [given]
        messages += [_item(entry) for entry in entries]
    else:
        messages.append(Message(role=USER, content=given))
    return conversation(front, messages)


SYSTEM: Final = Raw(b'"system"')
USER: Final = Raw(b'"user"')


def _item(entry: Raw) -> Message:
    """An item without a role is its JSON."""
    try:
        message = _message_decoder.decode(entry)
    except UNREADABLE:
        return Message(function_call=entry)
    return message if message.role is not EMPTY else Message(function_call=entry)


def texts(given: Sequence[Raw]) -> bytes:
    """One text, or several prompts."""
    made = PROMPT.join([inside(as_it_is(text)) for text in given])
    if has_long_escape(made):
        made = PROMPT.join([inside(shortest(text)) for text in given])
    return made


def token_ids(prompts: Sequence[Sequence[int]]) -> bytes:
    """One list of token ids, or several. Raises OverflowError for what is no unsigned 32-bit number."""
    return TOKENS_BETWEEN.join([_words(ids) for ids in prompts])


def _words(ids: Sequence[int]) -> bytes:
    words = array("I", ids)
    assert words.itemsize == BYTES_PER_TOKEN
    return words.tobytes()


def inside(text: bytes) -> memoryview:
    """A JSON string without its quotes."""
    return memoryview(text)[1:-1]


def as_it_is(raw: Raw) -> bytes:
    return raw


def shortest(raw: Raw) -> bytes:
    """A JSON string in its shortest form."""
    text = bytes(raw)
    if not _long_escape(text):
        return text
    try:
        return msgspec.json.encode(_decode(text))
    except (*UNREADABLE, UnicodeEncodeError):  # half a surrogate pair
        return text


def has_long_escape(data: bytes, start: int = 0) -> bool:
    """Whether some escape in `data` may have a shorter form; an escaped backslash before such a letter counts too."""
    if data.find(b"\\", start) < 0:
        return False
    if len(data) - start < SHORT_BYTES:
        return _long_escape(data[start:] if start else data) is not None
    codes = np.frombuffer(data, np.uint8)[start:]
    after = codes[np.flatnonzero(codes[:-1] == 0x5C) + 1]
    return bool(((after == 0x75) | (after == 0x2F)).any())


def first(raw: Raw) -> int:
    """The first byte of a JSON value; 0: there is none."""
    return 0 if raw is EMPTY else memoryview(raw)[0]


def present(raw: Raw) -> bool:
    """Neither missing nor null."""
    return first(raw) not in (0, 0x6E)


def _front(front: Sequence[tuple[bytes, Raw]]) -> bytes:
    found = [
        (name, raw) for name, raw in front if raw is not EMPTY and present(raw) and bytes(raw) not in (b"[]", b"{}")
    ]
    return b"".join([bytes(piece) for name, raw in found for piece in (FRONT, name, raw)])


def _sorted(raw: Raw) -> bytes:
    """Any JSON with sorted keys and without blanks."""
    try:
        return _encode(_decode(raw))
    except (*UNREADABLE, UnicodeEncodeError):
        return bytes(raw)


class _Composer:
    """Gathers the pieces of one prompt; `text` says how a JSON string is written."""

    __slots__ = ("_media", "_text", "pieces")

    def __init__(self, text: Text) -> None:
        self.pieces: list[bytes] = []
        self._text = text
        self._media = 0

    def messages(self, head: bytes, messages: Sequence[Message]) -> list[bytes]:
        pieces, text = self.pieces, self._text
        pieces.append(head)
        for message in messages:
            content = message.content
            pieces += (MESSAGE, message.role)
            if content is not EMPTY:
                if memoryview(content)[0] == QUOTE:
                    pieces.append(text(content))
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
            self.pieces += (MEMBER, name, _sorted(raw))

    def _content(self, raw: Raw, depth: int) -> None:
        """A text, a list of parts, or something else."""
        kind = first(raw)
        if kind == QUOTE:
            self.pieces.append(self._text(raw))
        elif kind == BRACKET and depth <= DEPTH_MAX:
            try:
                parts = _parts_decoder.decode(raw)
            except UNREADABLE:
                self.pieces.append(_sorted(raw))
                return
            foreign: list[Any] | None = None
            for index, part in enumerate(parts):
                text = part.text
                if text is not EMPTY and part.type in _TEXTS and memoryview(text)[0] == QUOTE:
                    self.pieces.append(self._text(text))
                elif not self._part(part, depth):
                    foreign = foreign or _foreign(raw, len(parts))
                    self.pieces += (MEMBER, foreign[index])
        elif present(raw):
            self.pieces.append(_sorted(raw))

    def _part(self, part: _Part, depth: int) -> bool:
        """A part that is not text; False: of a type that is not known here."""
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

    def _medium(self, modality: str, given: Raw, uuid: Raw) -> None:
        """By its content, or by the name that a client gives to it."""
        source = given
        if present(uuid):
            content = b"uuid" + bytes(shortest(uuid))
        elif first(source) == BRACE:
            content = _source_bytes(source)
        else:
            content = bytes(shortest(source))
        self._media += 1
        tokens = MEDIUM_TOKENS[modality] if self._media <= LONG_MEDIA_MAX else 0
        repeated = max(1, tokens * BYTES_PER_TOKEN // DIGEST_BYTES)
        self.pieces += (MEDIUM, modality[:1].encode(), xxh3_128_digest(content) * repeated)


def _source_bytes(raw: Raw) -> bytes:
    try:
        source = _source_decoder.decode(raw)
    except UNREADABLE:
        return _sorted(raw)
    found = (source.url, source.data, source.file_data, source.file_id, source.format, source.media_type)
    if not any(present(value) for value in found[:4]):
        return _sorted(raw)
    return MEMBER.join([bytes(shortest(value)) if present(value) else b"" for value in found])


def _foreign(raw: Raw, count: int) -> list[bytes]:
    """Each of a list of parts as JSON, without the mark where a client wants a cache to begin."""
    try:
        parts = _decode(raw)
        for part in parts:
            part.pop("cache_control", None)
        return [_encode(part) for part in parts]
    except (*UNREADABLE, UnicodeEncodeError):
        return [bytes(raw)] * count
