"""The document with the models and adapters that the endpoints of several pools have listed. The supervisor writes it, workers read it.

Its size is bounded: if there are more models than it has room for, large pools are listed only in part, and small ones as a whole.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from epp.plugins.extractors.models import Model
from shm.documents import DocumentReader
from workers.shared.documents import models_of

MODELS_BYTES: Final = 128 << 10  # some 2,000 models

Served = Mapping[int, Sequence[Model]]  # the number of a pool -> its models, by their ids
NONE: Final[Served] = {}
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(dict[int, list[Model]])


def encode(served: Served) -> bytes:
    """Encodes the document."""
    return _encoder.encode(served)


def fitting(served: Served, room: int) -> Served:
    """Returns as many models of each pool as fit into `room` bytes: each pool has the same share, and what small ones leave is shared."""
    sizes = {pool: [len(_encoder.encode(model)) for model in models] for pool, models in served.items()}
    room -= 16 * (1 + len(served))  # the numbers of pools, and the lengths of their lists
    found: dict[int, Sequence[Model]] = {}
    for left, pool in zip(range(len(sizes), 0, -1), sorted(sizes, key=lambda pool: sum(sizes[pool])), strict=True):
        share, count = room // left, 0
        for size in sizes[pool]:
            if size > share:
                break
            share, room, count = share - size, room - size, count + 1
        found[pool] = served[pool][:count]
    return found


class ServedView:
    """Reads the document. Keeps the last version if the present one cannot be read."""

    def __init__(self, reader: DocumentReader, pools: int) -> None:
        """`pools`: how many there are."""
        self._reader = reader
        self._document = models_of(pools)
        self.version = 0
        self._served: Served = NONE

    def current(self) -> Served:
        """Returns the models. `version` grows when they have changed."""
        if self._reader.version(self._document) != self.version:
            found = self._reader.read(self._document)
            if found is not None and found[0] != self.version:
                self.version, self._served = found[0], _decoder.decode(found[1])
        return self._served
