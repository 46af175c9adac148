"""Replaces what msgspec refuses in JSON text and model servers accept: half surrogate pairs, and a byte order mark.

Half surrogate pairs are escapes such as `\\ud83d` without their other half.
JavaScript clients send half pairs after they have cut a text within an emoji. RFC 8259 (section 8.2) leaves open what a JSON reader does.
msgspec refuses half pairs; Go's reader and Python's accept them, so the model server may, too. For routing, each half is read as U+FFFD.

Clients on Windows send a byte order mark before the text. RFC 8259 (section 8.1) lets a reader ignore it, and Python's reader does. For
routing, it is read as blanks.
"""

import codecs
import re
from collections.abc import Iterator
from typing import Final

HALVES_MAX: Final = 1000  # half pairs that are replaced; a client that cuts texts sends one per text
LOOKS_MAX: Final = 1 << 14  # escapes of halves, paired or not, in a text that is searched; to look at each takes a microsecond
RUN: Final = 1024  # backslashes before an escape that are counted at once
_RUN: Final = b"\\" * RUN
_BEGINNINGS: Final = (rb"\ud", rb"\uD")
_HALF: Final = re.compile(
    rb"\\u[dD](?:"
    rb"[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|"
    rb"[c-fC-F][0-9a-fA-F]{2}(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}))"
)
_REPLACEMENT: Final = rb"\ufffd"
_MARK: Final = codecs.BOM_UTF8
_BLANKS: Final = b" " * len(_MARK)


def replaced(body: bytes | memoryview) -> bytes | None:
    """Returns a JSON text of the same length, with U+FFFD in place of each half pair, and blanks in place of a byte order mark.

    Returns None if the text has neither, or too many halves to search it: anybody can send such a text, and the event loop waits meanwhile.
    """
    text = bytes(body)
    marked = text.startswith(_MARK)
    if marked:
        text = _BLANKS + text[len(_MARK) :]
    if sum(map(text.count, _BEGINNINGS)) > LOOKS_MAX:
        return None
    found = [at for at in _places(text) if _HALF.match(text, at) is not None and not _escaped(text, at)]
    if len(found) > HALVES_MAX or not (found or marked):
        return None
    readable = bytearray(text)
    for at in found:
        readable[at : at + len(_REPLACEMENT)] = _REPLACEMENT
    return bytes(readable)


def _places(text: bytes) -> Iterator[int]:
    for beginning in _BEGINNINGS:
        at = text.find(beginning)
        while at >= 0:
            yield at
            at = text.find(beginning, at + 1)


def _escaped(text: bytes, at: int) -> bool:
    """Returns whether the backslash at this place is the second one of an escaped backslash."""
    first = at
    while text.endswith(_RUN, 0, first):
        first -= RUN
    before = text[max(0, first - RUN) : first]
    first -= len(before) - len(before.rstrip(b"\\"))
    return bool((at - first) & 1)
