"""Prompts that come as token ids: what is hashed, and what who tokenises is told.

The ids are 32-bit words in little-endian order; media among them stand by their hashes (`epp.prefix.blocks.with_media`). Of a long
list only the first ids are read at once (`_canonical.first_ids`); what stands behind them is hashed as it is, and read when somebody
asks for all ids.
"""

from array import array
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from epp.prefix.blocks import with_media
from epp.request import Feature, Parts, Prompt


def words(ids: Sequence[int]) -> NDArray[np.uint32]:
    """Token ids as an array. Raises OverflowError for what is no unsigned 32-bit number."""
    return np.frombuffer(array("I", ids), np.uint32)  # a third of what np.array takes


def prompt(
    ids: NDArray[np.uint32],
    media: Sequence[Feature] = (),
    rest: bytes | memoryview = b"",
    everything: Callable[[], Sequence[int]] | None = None,
) -> Prompt:
    """A prompt of these tokens; `rest` stands for those behind them, and `everything` reads all."""
    given = ids.astype("<u4", copy=False)
    made = Prompt(lambda: (with_media(given, media) if media else given).tobytes() + rest)
    made.read = lambda _: Parts(token_ids=(given.tolist() if everything is None else everything(),), features=media)
    return made
