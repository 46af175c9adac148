"""The names of several pools as the processes of a picker read them, and commands: those of the start, or of the present.

the pools are known from the start     the names are in the instance's file and never change
the picker finds them while it runs    the supervisor publishes a document with the name of the pool in each place
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from shm.documents import DocumentReader
from workers.shared.documents import assigned_of


class Placed(NamedTuple):
    """The InferencePool in a place, and the port of the place."""

    name: str
    port: int


EMPTY: Final = Placed("", 0)
Names = Mapping[int, Placed]  # by the number of the place
NONE: Final[Names] = {}
encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(dict[int, Placed]).decode


class AssignedView:
    """Reads which InferencePools have which places. `names` returns None if this has not changed since its last call."""

    def __init__(self, reader: DocumentReader, places: int) -> None:
        """`places`: how many there are."""
        self._reader = reader
        self._document = assigned_of(places)
        self._version = 0

    def names(self) -> Names | None:
        if self._reader.version(self._document) == self._version:
            return None
        found = self._reader.read(self._document)
        if found is None or found[0] == self._version:
            return None
        self._version = found[0]
        return decode(found[1])


class PoolNames:
    """The present names of several pools, by number."""

    def __init__(self, reader: DocumentReader, first: Sequence[str]) -> None:
        """`first`: the names at the start, "" for a place without a pool; none if the picker has one pool."""
        self.several = bool(first)
        self._names = tuple(first)
        found = self.several and len(reader.schema.capacities) > assigned_of(len(first))
        self._assigned = AssignedView(reader, len(first)) if found else None

    def current(self) -> Sequence[str]:
        """Returns the name of each pool, "" for a place without one; none if the picker has one pool."""
        if self._assigned is not None and (names := self._assigned.names()) is not None:
            self._names = tuple(names.get(number, EMPTY).name for number in range(len(self._names)))
        return self._names
