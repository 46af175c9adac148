"""Encodes prompts that are no conversations as canonical bytes, like `_canonical`.

A text is encoded as its JSON string in shortest form, without the quotes, and token ids as 32-bit words in little-endian order. The
picker decodes at most the first IDS_MAX token ids of a list. It keeps the JSON text of the other ids.
"""

from array import array
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from xxhash import xxh3_128_digest

from epp.plugins.parsers._canonical import COMMA, MEDIUM, SURE_BYTES, Shortener, has_long_escape, inside
from epp.plugins.parsers._structs import Raw
from epp.request import BYTES_PER_TOKEN

TEXTS_MAX: Final = 2048  # commas in a list of prompts; a list with more is encoded as its JSON text
IDS_MAX: Final = 1 << 15
ID_BYTES: Final = 12  # enough for one token id with its comma and some blanks


def texts(strings: Sequence[Any]) -> list[bytes]:
    """Encodes prompts that are texts: each is a JSON string, as `Raw`, bytes or a view."""
    encoded = [text[1:-1] if isinstance(text, bytes) else bytes(inside(text)) for text in strings]
    if any(map(has_long_escape, encoded)):
        shorten = Shortener()
        encoded = [bytes(inside(shorten(text))) for text in strings]
    return encoded


def many_texts(raw: Raw) -> bytes | None:
    """Returns the JSON text of a list with too many prompts, from its first to its last string; None if the list is short enough."""
    text = bytes(raw)
    if len(text) <= SURE_BYTES or text.count(b",") <= TEXTS_MAX:
        return None
    return text[text.index(b'"') + 1 : -1].rstrip(b" \t\r\n").removesuffix(b'"')


def embeddings(raw: Raw) -> bytes:
    """Encodes embeddings in place of a prompt, which take kilobytes for each of its tokens, as a hash."""
    return MEDIUM + b"e" + xxh3_128_digest(bytes(raw))


def token_ids(prompts: Sequence[Sequence[int]]) -> list[bytes]:
    """Encodes prompts of token ids. Raises OverflowError if a number is not an unsigned 32-bit number."""
    return [_words(ids) for ids in prompts]


def first_ids(raw: Raw) -> tuple[bytes, bytes]:
    """Returns the first IDS_MAX numbers of a JSON list, as a JSON list, and the JSON text of the remaining numbers."""
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
