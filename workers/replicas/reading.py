"""Reads the messages of other replicas, and trusts no value in them."""

import math
import re
from typing import Final

from epp.errors import UNREADABLE
from shm.budgets import FILLS_MAX, KEY_MAX
from workers.replicas.wire import (
    AGE_US_MAX,
    BUDGET,
    FORM,
    MESSAGE_BYTES_MAX,
    NAME_MAX,
    PAGES_MAX,
    ROW,
    USED_MAX,
    Blocks,
    Message,
    NotUsable,
    PageRows,
    decoder,
    page_row,
)

NAME: Final = re.compile(rf"[A-Za-z0-9._-]{{1,{NAME_MAX}}}")  # the rule of --replica-name; the name appears in logs
NAMES_MAX: Final = 64
_names: Final[set[str]] = set()


def decode(data: bytes) -> Message:
    """Reads a message. Raises NotUsable: "long", "form" (of another version) or "malformed"."""
    if len(data) > MESSAGE_BYTES_MAX:
        raise NotUsable("long")
    try:
        message = decoder.decode(data)
    except (*UNREADABLE, MemoryError):
        raise NotUsable("form" if _other_form(data) else "malformed") from None
    if message.form != FORM:
        raise NotUsable("form")
    if len(message.loads) % ROW.size or len(message.budgets) % BUDGET.size or not _is_name(message.name):
        raise NotUsable("malformed")
    for blocks in (message.learned, message.taken_back):
        if blocks is not None and not _consistent(blocks):
            raise NotUsable("malformed")
    if message.pages is not None and not _plausible(message.pages):
        raise NotUsable("malformed")
    if not all(_possible(*row) for row in BUDGET.iter_unpack(message.budgets)):
        raise NotUsable("malformed")
    return message


def sender(data: bytes) -> str:
    """Returns the name in a message without reading the rest, or "" if the message has no name at this place. Costs little."""
    head = data[2] if len(data) > 4 else 0
    if 0xA0 <= head < 0xC0:  # msgpack: a string of less than 32 bytes
        begin, size = 3, head - 0xA0
    elif head == 0xD9:  # msgpack: a string of less than 256 bytes
        begin, size = 4, data[3]
    elif head == 0xDA:  # msgpack: a string of less than 65,536 bytes
        begin, size = 5, int.from_bytes(data[3:5])
    else:
        return ""
    return data[begin : begin + min(size, NAME_MAX + 1)].decode(errors="replace")


def _other_form(data: bytes) -> bool:
    """Returns whether the message is of another version: an array that begins with another number than this version's."""
    return len(data) > 1 and (0x90 <= data[0] <= 0x9F) and data[1] < 0x80 and data[1] != FORM


def _is_name(name: str) -> bool:
    """Returns whether this can be the name of a replica. Remembers some names, because most messages come from a few replicas."""
    if name in _names:
        return True
    if NAME.fullmatch(name) is None:
        return False
    if len(_names) >= NAMES_MAX:
        _names.clear()
    _names.add(name)
    return True


def _consistent(blocks: Blocks) -> bool:
    """Returns whether the three parts fit each other. The number of endpoints is bounded, so their counts are, too, before they are
    summed.
    """
    counts, total = blocks.counts, 0
    if len(counts) % 2 or len(counts) * 4 != len(blocks.endpoints):
        return False
    for at in range(0, len(counts), 2):
        total += counts[at] | counts[at + 1] << 8
    return total * 8 == len(blocks.hashes)


def _possible(key: int, tokens: float, requests: float, _: int, fills_tokens: float, fills_requests: float) -> bool:
    """Returns whether a tenant can have used this much of its budget."""
    return (
        0 < key <= KEY_MAX
        and abs(tokens) < USED_MAX
        and abs(requests) < USED_MAX  # each by itself, because `max` may pass a NaN over
        and 0.0 <= fills_tokens <= FILLS_MAX
        and 0.0 <= fills_requests <= FILLS_MAX
    )


def _plausible(pages: PageRows) -> bool:
    """Returns whether a server can have had such pages: few and recent, with numbers that an extractor may return.

    A custom metric may be negative; `workers.supervisor.shared_pages` knows which values may not.
    """
    row, width = page_row(pages.width), pages.width
    if len(pages.rows) % row.size or len(pages.rows) > PAGES_MAX * row.size:
        return False
    return all(
        age <= AGE_US_MAX and not present >> width and all(map(math.isfinite, values))
        for _, age, _, present, *values in row.iter_unpack(pages.rows)
    )
