"""Reads prompts that arrive as token ids: their bytes for hashing, and their parts for the token producer.

The ids are hashed as 32-bit words in little-endian order. Ids that stand for media are replaced by hashes of the media
(`epp.prefix.blocks.with_media`). Of a long list only the first ids are decoded at once (`_plain_prompts.first_ids`). The rest of the list
is hashed as its text, and decoded only when a plugin needs all ids.
"""

from array import array
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from epp.prefix.blocks import with_media
from epp.request import Feature, Parts, Prompt

REST_BYTES_MAX: Final = 1 << 23  # more than a million ids; a longer list has no parts, because the event loop waits while it is decoded


def words(ids: Sequence[int]) -> NDArray[np.uint32]:
    """Returns token ids as an array. Raises OverflowError if an id is not an unsigned 32-bit number."""
    return np.frombuffer(array("I", ids), np.uint32)  # this takes a third of the time of np.array


def prompt(
    ids: NDArray[np.uint32],
    media: Sequence[Feature] = (),
    rest: bytes | memoryview = b"",
    everything: Callable[[], Sequence[int]] | None = None,
) -> Prompt:
    """Makes a prompt from token ids. `media`: the media that some of the tokens stand for. `rest`: the text of the ids that are not
    decoded.

    `everything`: decodes and returns all ids; None if `ids` has all ids.
    """
    head = ids.astype("<u4", copy=False)
    made = Prompt(lambda: (with_media(head, media) if media else head).tobytes() + rest)
    if len(rest) > REST_BYTES_MAX:
        made.read = _too_many
    else:
        made.read = lambda _: Parts(token_ids=(head.tolist() if everything is None else everything(),), features=media)
    return made


def _too_many(_body: bytes | memoryview) -> Parts:
    raise ValueError(f"it has more than {REST_BYTES_MAX} bytes of token ids")
