"""Sizes, offsets and hashes of shared records.

A record is a run of 8-byte words, so every word can be stored and loaded in one piece. A layout hash covers everything that two processes
must agree on: names, order and counts. A process that expects another hash cannot attach. All sizes are multiples of a cache line, so no
cache line has words of two parts.

    segment   +--------------------+------------------------------+---------------------------+
              | header  64 B       | description (JSON, padded)   | payload                   |
              +--------------------+------------------------------+---------------------------+
    header    | magic | layout hash | payload bytes | generation | payload at | description B |
              | check | 0 |                                        each cell is one u64
    payload   | part | part | ...     placed by `Plan`, each on its own cache lines

This module computes; it never touches shared memory.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Final, Protocol

WORD: Final = 8
CACHE_LINE: Final = 64
ROW_ALIGNMENT: Final = 2 * CACHE_LINE  # CPUs fetch cache lines in pairs

MAGIC: Final = int.from_bytes(b"EPPSHM01", "little")
H_MAGIC: Final = 0
H_LAYOUT: Final = 1
H_SIZE: Final = 2
H_GENERATION: Final = 3
H_PAYLOAD: Final = 4
H_DESCRIPTION: Final = 5
H_CHECK: Final = 6
HEADER_BYTES: Final = 64
DESCRIPTION_BYTES_MAX: Final = 1 << 20

assert (H_CHECK + 1) * WORD <= HEADER_BYTES == CACHE_LINE


def aligned(size: int, to: int = CACHE_LINE) -> int:
    """Returns the smallest multiple of `to` that is at least `size` (same unit for both)."""
    return -(-size // to) * to


def layout_hash(*parts: object) -> int:
    """Returns a 64-bit hash of the printed form of `parts`. Layouts with equal hashes are taken as the same layout."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


class Schema(Protocol):
    """The layout of a structure: its size, its hash, and a description for JSON: the kind, and the arguments of the constructor."""

    bytes: int
    layout_hash: int
    description: Mapping[str, object]


class Layout:
    """The base class of schemas in compiled modules."""

    bytes: int

    def __init__(self, kind: str, layout: str, *more: object, **arguments: object) -> None:
        """`layout`: name and version. `arguments`: the arguments of the subclass's constructor. `more`: other values that determine the
        layout.
        """
        self.layout_hash = layout_hash(layout, *arguments.values(), *more)
        self.description: Mapping[str, object] = {"kind": kind, **arguments}


class Plan:
    """Places the parts of a segment: computes their offsets and sizes in bytes. Gives the segment's size, hash and description."""

    def __init__(self, parts: Mapping[str, Schema]) -> None:
        self.offsets: dict[str, int] = {}
        self.sizes: dict[str, int] = {}
        end = 0
        for name, schema in parts.items():
            self.offsets[name] = end
            self.sizes[name] = schema.bytes
            end = aligned(end + schema.bytes)
        self.bytes = end
        self.layout_hash = layout_hash(*((n, s.layout_hash) for n, s in parts.items()))
        self._described = {
            name: {"at": self.offsets[name], "size": self.sizes[name], **schema.description} for name, schema in parts.items()
        }

    @property
    def description(self) -> bytes:
        return json.dumps(self._described, separators=(",", ":")).encode()
