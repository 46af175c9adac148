"""Copies for a replica that joins: the latency model, and slices of the prefix index, as messages on its own channel.

    slice   | "slice" | form | secret | buckets | first bucket | owners | keys | tick | entries, compressed | ages, compressed | last |
    model   | "model" | form | slots | keys | state | pool |    what the sender has learned of latencies (`epp.learning.state`)

A copy is sent one slice per tick, so that neither the store nor the event loop is busy for long (`joining` decides which replica sends it).
The hash alone determines the buckets, so a slice fits every index of the same size. A replica with another size ignores slices, and its
index fills as usual. The keys of endpoints name the owners; the joining replica skips entries of unknown endpoints. It converts ages to its
own clock.
"""

import zlib
from collections.abc import Iterator, Mapping
from typing import Annotated, Final, Protocol

import msgspec
import numpy as np
from msgspec import Meta

from epp.errors import UNREADABLE
from epp.learning.state import UnusableModel
from shm.prefix_index import FAR_MARK, OWNER_WORD_MASK, WAYS
from shm.prefix_writer import IndexWriter
from workers.replicas.endpoint_places import Places
from workers.replicas.wire import FORM, MESSAGE_BYTES_MAX, ONLY, Count, NotUsable

SLICE_BUCKETS: Final = 2048
LOOK_BUCKETS: Final = 8 * SLICE_BUCKETS  # the number of buckets without entries that are skipped at once
ENTRY_BYTES, AGE_BYTES = 8, 4
OWNERS_MAX: Final = 1 << 16


class Slice(msgspec.Struct, array_like=True, frozen=True, tag="slice"):
    """Some buckets of the sender's index.

    `owners` lists the owner numbers that occur in the entries, and `keys` the key of each owner's endpoint, in the same order. `tick` is
    the sender's clock; the receiver uses it to convert the ages.
    """

    form: int
    secret: Count
    buckets: Count
    first: Count
    owners: Annotated[list[int], Meta(max_length=OWNERS_MAX)]
    keys: Annotated[list[Count], Meta(max_length=OWNERS_MAX)]
    tick: Count
    entries: bytes
    ages: bytes
    last: bool = False  # of its copy


class Model(msgspec.Struct, array_like=True, frozen=True, tag="model"):
    """A latency model. `slots` lists the sender's slots, and `keys` the keys of their endpoints. `pool`: the key of the pool."""

    form: int
    slots: Annotated[list[int], Meta(max_length=OWNERS_MAX)]
    keys: Annotated[list[Count], Meta(max_length=OWNERS_MAX)]
    state: bytes
    pool: Count = ONLY


class Learned(Protocol):
    """The latency model of one pool at this replica."""

    def learned(self) -> bytes:
        """Returns the model as bytes (`epp.learning.state`), or b"" if it has learned nothing."""

    def adopt(self, data: bytes, slots: Mapping[int, int]) -> bool:
        """Takes over a model if this replica has learned less. `slots`: the sender's slot -> this replica's slot. Returns whether the model
        was taken over.

        Raises UnusableModel.
        """


class Models(Protocol):
    """The latency models of this replica, by the key of the pool."""

    def all(self) -> Iterator[tuple[int, Learned]]:
        """Yields the models that have learned something."""

    def of(self, pool: int) -> Learned | None:
        """Returns the model of a pool, even if it has learned nothing. Returns None if the replica does not have the pool."""


_decoder: msgspec.msgpack.Decoder[Slice | Model] = msgspec.msgpack.Decoder(Slice | Model)
_encode = msgspec.msgpack.Encoder().encode


def slices(index: IndexWriter, places: Places, secret: int, tick: int) -> Iterator[bytes]:
    """Yields the slices that have entries, and the last slice. Yields b"" after each LOOK_BUCKETS buckets without entries."""
    buckets, passed = index.schema.buckets, 0
    for first in range(0, buckets, SLICE_BUCKETS):
        entries, ages = index.copy(first, SLICE_BUCKETS)
        words, keys = np.frombuffer(entries, np.uint64), places.keys
        held = np.unique(words & OWNER_WORD_MASK).tolist() if words.any() else []
        owners = [owner for owner in held if owner in keys]
        last = first + SLICE_BUCKETS >= buckets
        if owners or last:
            yield _encode(
                Slice(
                    FORM, secret, buckets, first, owners, [keys[owner] for owner in owners], tick,
                    zlib.compress(entries, 1), zlib.compress(ages, 1), last,
                )
            )  # fmt: skip
            passed = 0
            continue
        passed += SLICE_BUCKETS
        if passed >= LOOK_BUCKETS:
            yield b""
            passed = 0


def model_parts(models: Models, places: Places) -> Iterator[bytes]:
    """Yields a message with the latency model of each pool, if the model has learned something and fits."""
    for pool, learned in models.all():
        slots, state = places.of_pool.get(pool, {}), learned.learned()
        if not state:
            continue
        part = _encode(Model(FORM, list(slots.values()), list(slots), state, pool))
        if len(part) <= MESSAGE_BYTES_MAX:
            yield part


def read(data: bytes) -> Slice | Model:
    """Reads one part of a copy. Raises NotUsable: "long", "malformed" or "copy" (of another version)."""
    if len(data) > MESSAGE_BYTES_MAX:
        raise NotUsable("long")
    try:
        part = _decoder.decode(data)
    except (*UNREADABLE, MemoryError):
        raise NotUsable("malformed") from None
    if part.form != FORM:
        raise NotUsable("copy")
    return part


def take_over(part: Model, models: Models, places: Places) -> bool:
    """Takes over the model of another replica, unless this replica has learned more, or does not have the pool. Returns whether it took
    over the model.

    Raises NotUsable: "malformed".
    """
    if (learned := models.of(part.pool)) is None:
        return False
    if len(part.slots) != len(part.keys):
        raise NotUsable("malformed")
    here = places.slots
    try:
        return learned.adopt(part.state, {s: here[key] for s, key in zip(part.slots, part.keys, strict=True) if key in here})
    except UnusableModel:
        raise NotUsable("malformed") from None


def merge(part: Slice, index: IndexWriter, places: Places, secret: int, tick: int) -> tuple[int, bool]:
    """Adds the entries of a slice to the index. Returns the number of added entries, and whether the slice is the last slice of its copy.

    Raises NotUsable: "malformed" or "copy" (the slice does not fit).
    """
    try:
        buckets = min(SLICE_BUCKETS, index.schema.buckets - part.first)
        entries = _unpacked(part.entries, buckets * WAYS * ENTRY_BYTES)
        ages = _unpacked(part.ages, buckets * WAYS * AGE_BYTES)
    except zlib.error:
        raise NotUsable("malformed") from None
    if part.secret != secret or part.buckets != index.schema.buckets:
        raise NotUsable("copy")
    if len(part.owners) != len(part.keys) or not all(FAR_MARK < owner < OWNERS_MAX for owner in part.owners):
        raise NotUsable("malformed")
    ours = np.zeros(OWNERS_MAX, np.uint64)
    ours[FAR_MARK] = FAR_MARK
    for owner, key in zip(part.owners, part.keys, strict=True):
        ours[owner] = places.owners.get(key, 0)
    theirs = np.frombuffer(entries, np.uint64).reshape(buckets, WAYS)
    whose = ours[(theirs & OWNER_WORD_MASK).view(np.int64)]
    mapped = np.where(whose != 0, (theirs & ~OWNER_WORD_MASK) | whose, np.uint64(0))
    shifted = np.frombuffer(ages, np.uint32).reshape(buckets, WAYS) + np.uint32((tick - part.tick) & 0xFFFFFFFF)
    return index.merge(part.first, mapped, shifted), part.last


def _unpacked(data: bytes, size: int) -> bytes:
    """Returns the unpacked bytes. Raises zlib.error if they are not `size` bytes, and never unpacks many more."""
    if size <= 0:
        raise zlib.error("no such bucket")
    content = zlib.decompressobj().decompress(data, size + 1)
    if len(content) != size:
        raise zlib.error("wrong size")
    return content
