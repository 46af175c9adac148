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

The loop waits meanwhile, so what costs more than a look at each byte is bounded: a body with very many messages or parts counts as its
JSON (`crowded`), and so does a list of parts with very many values in them (`dense`), of token ids the first IDS_MAX are read and the
others stay text, and only so much is sorted and shortened. Where each bound falls depends on what stands before it alone, so prompts that
begin alike stay alike.
"""

import re
from array import array
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import msgspec
import numpy as np
from xxhash import xxh3_128_digest

from epp.request import BYTES_PER_TOKEN

Raw = msgspec.Raw
EMPTY: Final = Raw()
MESSAGE: Final = b"\xff"
MEDIUM: Final = b"\xfe"
MEMBER: Final = b"\xfd"
CACHE_MARK: Final = b'"cache_control"'
PROMPT: Final = b"\xfc"  # between prompts
FRONT: Final = b"\xfb"
TOKENS_BETWEEN: Final = b"\xff" * BYTES_PER_TOKEN  # between prompts of token ids: no vocabulary is as large
QUOTE, BRACKET, BRACE, CLOSED, COLON, COMMA, BLANK = 0x22, 0x5B, 0x7B, 0x7D, 0x3A, 0x2C, 0x20
DIGEST_BYTES: Final = 16
MEDIUM_TOKENS: Final = {"image": 225, "video": 4500, "audio": 250, "file": 250}  # of common sizes
LONG_MEDIA_MAX: Final = 64  # of a request; further ones are their hash once, so that a body does not grow by them
DEPTH_MAX: Final = 3  # lists of parts within parts
SURE_BYTES: Final = 32768  # what is shorter is never crowded
OBJECTS_MAX: Final = 1000  # messages, parts and the like of a body, and OBJECTS_PER_MIB more
OBJECTS_PER_MIB: Final = 500
STEP: Final = 65536  # of a long text: what was found may end the search, and what is looked at stays in the cache
TEXTS_MAX: Final = 2048  # of a list of prompts; further commas make it count as its JSON
IDS_MAX: Final = 1 << 15
ID_BYTES: Final = 12  # of one with its comma, and some blanks
SORTED_BYTES: Final = 1 << 16  # of a prompt
SHORTENED_BYTES: Final = 1 << 18  # of a prompt
CUT_BYTES: Final = 4096  # how far before that a good place to cut a text is sought
COMMA_EVERY: Final = 8  # bytes on average, or more, in what people and programs say
SHORT_BYTES: Final = 16384  # below this a regular expression finds escapes faster than NumPy

COMPACT: Final = b'[{"type":"text","text":"'
SPACED: Final = b'[{"type": "text", "text": "'
COMPACT_TEXT, SPACED_TEXT = len(COMPACT), len(SPACED)

Piece: TypeAlias = bytes | memoryview
Text: TypeAlias = Callable[[Raw | memoryview], Piece]
_long_escape = re.compile(rb"\\[u/]").search
_escape: Final = re.compile(rb"[^\\](\\u(?![dD][c-fC-F]))")  # that is no second half of a pair
_encode = msgspec.json.Encoder(order="sorted").encode
_decode = msgspec.json.Decoder().decode
UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # what decoders raise on bad JSON


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
_messages_decoder = msgspec.json.Decoder(list[Message])


def conversation(front: Sequence[tuple[bytes, Raw]], messages: Sequence[Message]) -> bytes:
    """Messages behind what stands before them, each with its name."""
    head = _front(front)
    made = b"".join(_Composer(as_it_is).messages(head, messages))
    if has_long_escape(made, len(head)):
        made = b"".join(_Composer(Shortener()).messages(head, messages))
    return made


def crowded(body: bytes | memoryview) -> bool:
    """Whether a JSON text may have more objects in lists than are looked at one by one: at most those with such bytes around a brace."""
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
            opens = (after == QUOTE) | (after == CLOSED) | (after <= BLANK)  # in a string these two would be escaped
            left -= int(np.count_nonzero(opens & ~member))
        else:
            left -= len(at)
        if left < 0:
            return True
    return False


def as_json(front: Sequence[tuple[bytes, Raw]], messages: Raw) -> bytes:
    """Messages of a crowded body."""
    return b"".join((_front(front), MESSAGE, memoryview(messages)[:-1]))


def items(front: Sequence[tuple[bytes, Raw]], instructions: Raw, given: Raw) -> bytes:
    """Items of a response's input or of a conversation: messages, calls, results. A text is a message of the user."""
    front, messages = system(front, instructions)
    if first(given) == BRACKET:
        if crowded(memoryview(given)):
            return conversation(front, messages) + as_json((), given)
        messages += _items(given)
    else:
        messages.append(Message(role=USER, content=given))
    return conversation(front, messages)


Front: TypeAlias = Sequence[tuple[bytes, Raw]]
SYSTEM: Final = Raw(b'"system"')
USER: Final = Raw(b'"user"')


def system(front: Front, content: Raw) -> tuple[Front, list[Message]]:
    """What stands before the messages, and the first of them: what the system says, unless it has too many parts."""
    if not present(content):
        return front, []
    if first(content) == BRACKET and crowded(memoryview(content)):
        return (*front, (b"system", content)), []
    return front, [Message(role=SYSTEM, content=content)]


def _items(given: Raw) -> list[Message]:
    """An item without a role is its JSON, and so is a list that holds something else than items."""
    try:
        messages = _messages_decoder.decode(given)
    except UNREADABLE:
        return [Message(function_call=given)]
    if all(message.role is not EMPTY for message in messages):
        return messages
    entries = zip(messages, _items_decoder.decode(given), strict=True)
    return [message if message.role is not EMPTY else Message(function_call=entry) for message, entry in entries]


def texts(given: Sequence[Raw]) -> list[bytes]:
    """Prompts that are texts."""
    made = [bytes(inside(text)) for text in given]
    if any(map(has_long_escape, made)):
        shorten = Shortener()
        made = [bytes(inside(shorten(text))) for text in given]
    return made


def dense(raw: Raw) -> bool:
    """Whether a long JSON text is mostly commas and what little stands between them: as parts, each level of it is read again."""
    text = memoryview(raw)
    if len(text) <= SURE_BYTES:
        return False
    return int(np.count_nonzero(np.frombuffer(text, np.uint8) == COMMA)) * COMMA_EVERY > len(text)


def many_texts(raw: Raw) -> bytes | None:
    """A list of more prompts than are looked at one by one, as its JSON; None: it is not that long."""
    text = bytes(raw)
    if len(text) <= SURE_BYTES or text.count(b",") <= TEXTS_MAX:
        return None
    return text[text.index(b'"') + 1 : -1].rstrip(b" \t\r\n").removesuffix(b'"')


def token_ids(prompts: Sequence[Sequence[int]]) -> list[bytes]:
    """Prompts of token ids. Raises OverflowError for what is no unsigned 32-bit number."""
    return [_words(ids) for ids in prompts]


def first_ids(raw: Raw) -> tuple[bytes, bytes]:
    """The first IDS_MAX of a JSON list of numbers, as a list, and the text of those behind them."""
    text = bytes(raw)
    if len(text) <= 2 * IDS_MAX:
        return text, b""
    reach = IDS_MAX * ID_BYTES
    commas = np.flatnonzero(np.frombuffer(text, np.uint8, min(len(text), reach)) == COMMA)
    if (len(commas) < IDS_MAX and len(text) <= reach) or not len(commas):
        return text, b""
    at = int(commas[min(len(commas), IDS_MAX) - 1])
    return text[:at] + b"]", text[at + 1 : -1]


def _words(ids: Sequence[int]) -> bytes:
    words = array("I", ids)
    assert words.itemsize == BYTES_PER_TOKEN
    return words.tobytes()


def inside(text: Raw | Piece) -> memoryview:
    """A JSON string without its quotes."""
    return memoryview(text)[1:-1]


def as_it_is(raw: Raw | memoryview) -> Piece:
    return raw


def shortest(raw: Raw | memoryview | bytes) -> bytes:
    """A JSON string in its shortest form; what is no string, as it is."""
    text = bytes(raw)
    if text[0] != QUOTE or not _long_escape(text):
        return text
    try:
        return msgspec.json.encode(_decode(text))
    except (*UNREADABLE, UnicodeEncodeError):  # half a surrogate pair
        return text


class Shortener:
    """`shortest` for the strings of one prompt, until SHORTENED_BYTES of them were read; the rest stays as it is."""

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
    """A place at `at` or shortly before it where a string can be cut: behind a blank, or before an escape; 0: there is none."""
    low = max(1, at - CUT_BYTES)
    blank = text.rfind(b" ", low, at) + 1
    if blank:
        return blank
    found = _escape.search(text, low, at)
    return found.start(1) if found is not None else 0


def lone_text(raw: Raw) -> memoryview | None:
    """The one text of a list of parts, as it stands there; None: the list is not written as most clients write such a one.

    Half of what it takes to decode the list. It is JSON: where the third byte from behind ends the string, two brackets follow.
    """
    listed = bytes(raw)
    start = SPACED_TEXT if listed.startswith(SPACED) else COMPACT_TEXT if listed.startswith(COMPACT) else 0
    return memoryview(raw)[start - 1 : -2] if start and listed.find(b'"', start) == len(listed) - 3 else None


def has_long_escape(data: bytes, start: int = 0) -> bool:
    """Whether some escape in `data` may have a shorter form; an escaped backslash before such a letter counts too."""
    if data.find(b"\\", start) < 0:
        return False
    if len(data) - start < SHORT_BYTES:
        return _long_escape(data[start:] if start else data) is not None
    codes = np.frombuffer(data, np.uint8)
    for begin in range(start, len(codes) - 1, STEP):
        after = codes[np.flatnonzero(codes[begin : min(begin + STEP, len(codes) - 1)] == 0x5C) + (begin + 1)]
        if ((after == 0x75) | (after == 0x2F)).any():
            return True
    return False


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


def _unmarked(raw: Raw) -> bytes:
    """A part without the mark where a client wants a cache to begin."""
    try:
        part = _decode(raw)
        part.pop("cache_control", None)
        return _encode(part)
    except (*UNREADABLE, UnicodeEncodeError):
        return bytes(raw)


class _Composer:
    """Gathers the pieces of one prompt; `text` says how a JSON string is written."""

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
        """In one form, while there is not too much of it."""
        size = len(memoryview(raw))
        self._sortable, left = max(0, self._sortable - size), self._sortable
        return form(raw) if size <= left else bytes(raw)

    def _content(self, raw: Raw, depth: int) -> None:
        """A text, a list of parts, or something else."""
        kind = first(raw)
        if kind == QUOTE:
            self.pieces.append(self._text(raw))
        elif kind == BRACKET and depth <= DEPTH_MAX and not dense(raw):
            try:
                parts = _parts_decoder.decode(raw)
            except UNREADABLE:
                self.pieces.append(self._sorted(raw))
                return
            foreign: list[Raw] | None = None
            for index, part in enumerate(parts):
                text = part.text
                if text is not EMPTY and part.type in _TEXTS and memoryview(text)[0] == QUOTE:
                    self.pieces.append(self._text(text))
                elif not self._part(part, depth):
                    foreign = foreign or _items_decoder.decode(raw)
                    self.pieces += (MEMBER, self._foreign(foreign[index]))
        elif present(raw):
            self.pieces.append(self._sorted(raw))

    def _foreign(self, raw: Raw) -> bytes:
        """A part of a type that is not known here."""
        return self._sorted(raw, _unmarked if CACHE_MARK in bytes(raw) else _sorted)

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
            content = self._source(source)
        else:
            content = bytes(shortest(source))
        self._media += 1
        tokens = MEDIUM_TOKENS[modality] if self._media <= LONG_MEDIA_MAX else 0
        repeated = max(1, tokens * BYTES_PER_TOKEN // DIGEST_BYTES)
        self.pieces += (MEDIUM, modality[:1].encode(), xxh3_128_digest(content) * repeated)

    def _source(self, raw: Raw) -> bytes:
        """Where a medium's content is, or the content."""
        try:
            source = _source_decoder.decode(raw)
        except UNREADABLE:
            return self._sorted(raw)
        found = (source.url, source.data, source.file_data, source.file_id, source.format, source.media_type)
        if not any(present(value) for value in found[:4]):
            return self._sorted(raw)
        return MEMBER.join([bytes(shortest(value)) if present(value) else b"" for value in found])
