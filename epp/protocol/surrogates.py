"""Replaces half surrogate pairs in JSON text: escapes such as `\\ud83d` without their other half.

JavaScript clients send half pairs after they have cut a text within an emoji. RFC 8259 (section 8.2) leaves open what a JSON reader does.
msgspec refuses half pairs; Go's reader and Python's accept them, so the model server may, too. For routing, each half is read as U+FFFD.
"""

import re
from typing import Final

HALVES_MAX: Final = 1000  # half pairs that are replaced; a client that cuts texts sends one per text
_HALF: Final = re.compile(  # the expression begins with a literal, so that the search is fast
    rb"\\u[dD](?:"
    rb"[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|"
    rb"[c-fC-F][0-9a-fA-F]{2}(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}))"
)
_REPLACEMENT: Final = rb"\ufffd"


def replaced(body: bytes | memoryview) -> bytes | None:
    """Returns a JSON text with the escape of U+FFFD in place of each half pair. Returns None if the text has no half pairs, or too many."""
    found: list[int] = []
    for match in _HALF.finditer(body):
        at = match.start()
        if not _escaped(body, at):
            found.append(at)
            if len(found) > HALVES_MAX:
                return None
    if not found:
        return None
    text = bytearray(body)
    for at in found:
        text[at : at + len(_REPLACEMENT)] = _REPLACEMENT
    return bytes(text)


def _escaped(body: bytes | memoryview, at: int) -> bool:
    """Returns whether the backslash at this place is the second one of an escaped backslash."""
    first = at
    while first and body[first - 1] == 0x5C:
        first -= 1
    return bool((at - first) & 1)
