"""The documents that the supervisor publishes: their records, and views that decode each version once.

endpoints, names    of all pools
objectives,         of each pool (`workers.shared.objectives`, `workers.worker.rewrites`)
model rewrites
models              the models and adapters that the endpoints of several pools have listed. The size is bounded: if the document has
                    too little room, it has all models of small pools, but only some models of large pools
names of pools      which InferencePool has which place, if the picker finds its pools while it runs
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
from numpy.typing import NDArray

from epp.candidates import Endpoint
from epp.protocol.models import Model
from shm.documents import DocumentReader, DocumentView

ENDPOINTS = 0
NAMES = 1
# The documents of the first pool. The same documents of each further pool follow these (`objectives_of`, `rewrites_of`).
OBJECTIVES = 2
REWRITES = 3
DOCUMENT_NAMES = ("endpoints", "names", "objectives", "model rewrites")

Identity = tuple[str, str, str, int, str]  # namespace, name, host, port, uid: together they identify a server
Known = tuple[str, Identity]  # the pool ("" if the picker has one pool) and a server, as known over restarts of the picker


class EndpointRecord(msgspec.Struct, array_like=True, frozen=True):
    """The record of one endpoint, as the supervisor publishes it."""

    namespace: str
    name: str
    host: str
    port: int
    labels: dict[str, str]
    slot: int
    generation: int
    owner: int
    uid: str = ""  # by this id, a later supervisor recognises the server; see EndpointSpec
    pool: int = 0


def objectives_of(pool: int | None) -> int:
    """Returns the number of the document with the objectives of a pool. `pool`: None if the picker has one pool."""
    return OBJECTIVES + 2 * (pool or 0)


def rewrites_of(pool: int | None) -> int:
    """Returns the number of the document with the model rewrites of a pool. `pool`: None if the picker has one pool."""
    return REWRITES + 2 * (pool or 0)


def models_of(pools: int) -> int:
    """Returns the number of the document with the models of several pools. `pools`: the number of pools."""
    return objectives_of(pools)


def assigned_of(pools: int) -> int:
    """Returns the number of the document that says which pools have the places of a picker. `pools`: the number of places."""
    return models_of(pools) + 1


def document_name(index: int, pools: int) -> str:
    """Returns the content of a document in words. `pools`: the number of pools, or 0 if the picker has one pool."""
    if pools and index >= models_of(pools):
        return "models" if index == models_of(pools) else "names of pools"
    return DOCUMENT_NAMES[index] if index <= REWRITES else f"{DOCUMENT_NAMES[2 + index % 2]} of pool {(index - OBJECTIVES) // 2}"


class NamesRecord(msgspec.Struct, array_like=True, frozen=True):
    """The names that an endpoint reports, by column: its active and its waiting LoRA adapters."""

    slot: int
    generation: int
    columns: dict[str, list[str]]


encode = msgspec.msgpack.Encoder().encode
decode_endpoints = msgspec.msgpack.Decoder(list[EndpointRecord]).decode
_decode_names = msgspec.msgpack.Decoder(list[NamesRecord]).decode


class EndpointsView:
    """Reads the endpoints document. Keeps the last version if the current one cannot be read."""

    def __init__(self, reader: DocumentReader, pool: int | None = None) -> None:
        """`pool`: the number of the endpoints' pool; None for the endpoints of all pools."""
        self._reader = reader
        self.pool = pool
        self.version = -1
        self._endpoints: tuple[Endpoint, ...] = ()
        self._records: list[EndpointRecord] = []
        self.slots: NDArray[np.intp] = np.zeros(0, np.intp)
        self.generations: NDArray[np.uint64] = np.zeros(0, np.uint64)

    @property
    def outdated(self) -> bool:
        """Whether the document has changed since the last call of `current`."""
        return self._reader.version(ENDPOINTS) != self.version

    def span(self) -> tuple[int, int]:
        """Returns the first slot of the endpoints of `current`, and the slot after the last one."""
        return (int(self.slots.min()), int(self.slots.max()) + 1) if len(self.slots) else (0, 0)

    def identities(self) -> list[Identity]:
        """Returns the identity of each server over restarts of the picker, in the order of `current`."""
        return [(r.namespace, r.name, r.host, r.port, r.uid) for r in self._records]

    def pools(self) -> list[int]:
        """Returns the number of the pool of each server, in the order of `current`."""
        return [r.pool for r in self._records]

    def current(self) -> Sequence[Endpoint]:
        """Returns the endpoints in the document's order. `slots` and `generations` have the same order and length."""
        if self._reader.version(ENDPOINTS) == self.version:
            return self._endpoints
        found = self._read()
        if found is not None and found[0] != self.version:
            self.version, records = found
            self._records = records
            self._endpoints = tuple(_endpoint(r) for r in records)
            self.slots = np.array([r.slot for r in records], dtype=np.intp)
            self.generations = np.array([r.generation for r in records], dtype=np.uint64)
        return self._endpoints

    def _read(self) -> tuple[int, list[EndpointRecord]] | None:
        """Returns the version of the document and the records, or None if the document cannot be read."""
        if self.pool is not None:
            found = _by_pool(self._reader)
            return None if found is None else (found[0], found[1].get(self.pool, []))
        document = self._reader.read(ENDPOINTS)
        return None if document is None else (document[0], decode_endpoints(document[1]) if document[1] else [])


# For each reader, the records of the last version that the views of pools have read. So a thousand views decode each version once.
_grouped: WeakKeyDictionary[DocumentReader, tuple[int, dict[int, list[EndpointRecord]]]] = WeakKeyDictionary()


def _by_pool(reader: DocumentReader) -> tuple[int, dict[int, list[EndpointRecord]]] | None:
    """Returns the version of the endpoints document, and the records of each pool; None if the document cannot be read."""
    found = _grouped.get(reader)
    if found is not None and found[0] == reader.version(ENDPOINTS):
        return found
    document = reader.read(ENDPOINTS)
    if document is None:
        return None
    pools: dict[int, list[EndpointRecord]] = {}
    for record in decode_endpoints(document[1]) if document[1] else []:
        pools.setdefault(record.pool, []).append(record)
    found = _grouped[reader] = document[0], pools
    return found


NamesOfEndpoints = Mapping[tuple[int, int], Mapping[str, frozenset[str]]]  # by (slot, generation) of the endpoint, then by column


class NamesView(DocumentView[NamesOfEndpoints]):
    """Reads the names document."""

    def __init__(self, reader: DocumentReader) -> None:
        super().__init__(reader, NAMES, _names_in, {})


def _names_in(blob: bytes) -> NamesOfEndpoints:
    records = _decode_names(blob) if blob else []
    return {(r.slot, r.generation): {c: frozenset(n) for c, n in r.columns.items()} for r in records}


def _endpoint(r: EndpointRecord) -> Endpoint:
    return Endpoint(
        name=r.name, namespace=r.namespace, host=r.host, port=r.port, labels=r.labels, slot=r.slot, generation=r.generation, owner=r.owner
    )


MODELS_BYTES: Final = 128 << 10  # some 2,000 models

Served = Mapping[int, Sequence[Model]]  # the number of a pool -> its models, by their ids
NO_MODELS: Final[Served] = {}
_decode_models = msgspec.msgpack.Decoder(dict[int, list[Model]]).decode


def fitting(served: Served, room: int) -> Served:
    """Returns as many models of each pool as fit into `room` bytes. Each pool gets the same share; large pools share the rest."""
    sizes = {pool: [len(encode(model)) for model in models] for pool, models in served.items()}
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


class ServedView(DocumentView[Served]):
    """Reads the document with the models. `version` grows when the models have changed."""

    def __init__(self, reader: DocumentReader, pools: int) -> None:
        """`pools`: how many there are."""
        super().__init__(reader, models_of(pools), _decode_models, NO_MODELS)


class Placed(NamedTuple):
    """The InferencePool in a place, and the port of the place."""

    name: str
    port: int


EMPTY: Final = Placed("", 0)
PlacedPools = Mapping[int, Placed]  # by the number of the place
NONE_PLACED: Final[PlacedPools] = {}
_decode_placed = msgspec.msgpack.Decoder(dict[int, Placed]).decode


class AssignedView(DocumentView[PlacedPools]):
    """Reads which InferencePools have which places, if the picker finds them."""

    def __init__(self, reader: DocumentReader, places: int) -> None:
        """`places`: the number of places."""
        super().__init__(reader, assigned_of(places), _decode_placed, NONE_PLACED)
        self._found = places > 0

    def names(self) -> PlacedPools | None:
        """Returns all names if any has changed since the last call, else None."""
        return self.content if self._found and self.look() else None


class PoolNames:
    """The present names of several pools, by number: from the start, or if the picker finds its pools, from the document."""

    def __init__(self, reader: DocumentReader, first: Sequence[str]) -> None:
        """`first`: the names at the start, "" for a place without a pool. Empty if the picker has one pool."""
        self.several = bool(first)
        self._names = tuple(first)
        self._assigned = AssignedView(reader, len(first))

    def current(self) -> Sequence[str]:
        """Returns the name of each pool, and "" for a place without a pool. Returns no names if the picker has one pool."""
        if (names := self._assigned.names()) is not None:
            self._names = tuple(names.get(number, EMPTY).name for number in range(len(self._names)))
        return self._names
