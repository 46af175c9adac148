"""Prompts that come as token ids: what is hashed, and what who tokenises is told.

The ids are 32-bit words in little-endian order. Where a medium's placeholders stand, they are all the same id, whatever the
picture: there the words of its hash stand instead.
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_digest

from epp.request import Parts, Prompt

MEDIA_MAX = 4096  # of a prompt


class Medium(NamedTuple):
    """`length` tokens from `offset` on stand for a medium whose content has this hash."""

    hash: str
    offset: int
    length: int


def words(ids: Sequence[int]) -> NDArray[np.uint32]:
    """Token ids as an array. Raises OverflowError for what is no unsigned 32-bit number."""
    return np.frombuffer(array("I", ids), np.uint32)  # a third of what np.array takes


def prompt(ids: NDArray[np.uint32], media: Sequence[Medium] = ()) -> Prompt:
    """A prompt of these tokens."""
    given = ids.astype("<u4", copy=False)
    if media:
        given = given.copy()
        for medium in media[:MEDIA_MAX]:
            _stamp(given[medium.offset : medium.offset + medium.length], medium.hash)
    made = Prompt(given.tobytes)
    made.read = lambda _: Parts(token_ids=(given.tolist(),))
    return made


def _stamp(place: NDArray[np.uint32], hash_: str) -> None:
    digest = np.frombuffer(xxh3_128_digest(hash_.encode("utf-8", "surrogatepass")), "<u4")
    place[:] = np.resize(digest, len(place))
