"""The documents that the supervisor publishes: their records, and views that decode each version once."""

from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
from numpy.typing import NDArray

from epp.candidates import Endpoint
from shm.documents import DocumentReader

ENDPOINTS = 0
NAMES = 1
# Of the first pool. Each further one has the same documents behind them (`objectives_of`, `rewrites_of`).
OBJECTIVES = 2
REWRITES = 3
DOCUMENT_NAMES = ("endpoints", "names", "objectives", "model rewrites")

Identity = tuple[str, str, str, int, str]  # namespace, name, host, port, uid: these identify a server
Known = tuple[str, Identity]  # a server of a pool, "" for the only one, as it is known over restarts of the picker


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
    uid: str = ""  # identifies the server for a later supervisor; see EndpointSpec
    pool: int = 0


def objectives_of(pool: int | None) -> int:
    """Returns the number of the document with the objectives of a pool. None: of the only one."""
    return OBJECTIVES + 2 * (pool or 0)


def rewrites_of(pool: int | None) -> int:
    """Returns the number of the document with the model rewrites of a pool. None: of the only one."""
    return REWRITES + 2 * (pool or 0)


def models_of(pools: int) -> int:
    """Returns the number of the document with the models of several pools. `pools`: how many there are."""
    return objectives_of(pools)


def assigned_of(pools: int) -> int:
    """Returns the number of the document that says which pools have the places of a picker. `pools`: the number of places."""
    return models_of(pools) + 1


def document_name(index: int, pools: int) -> str:
    """Returns what a document has, in words. `pools`: how many there are; 0: only one."""
    if pools and index >= models_of(pools):
        return "models" if index == models_of(pools) else "names of pools"
    return DOCUMENT_NAMES[index] if index <= REWRITES else f"{DOCUMENT_NAMES[2 + index % 2]} of pool {(index - OBJECTIVES) // 2}"


class NamesRecord(msgspec.Struct, array_like=True, frozen=True):
    """The names that an endpoint reports, by column: its active and its waiting LoRA adapters."""

    slot: int
    generation: int
    columns: dict[str, list[str]]


_encoder = msgspec.msgpack.Encoder()
_endpoints = msgspec.msgpack.Decoder(list[EndpointRecord])
_names = msgspec.msgpack.Decoder(list[NamesRecord])


def encode(records: Sequence[EndpointRecord] | Sequence[NamesRecord]) -> bytes:
    """Encodes the records as a document."""
    return _encoder.encode(records)


def decode_endpoints(blob: bytes) -> list[EndpointRecord]:
    """Decodes the records of an endpoints document. Raises msgspec.DecodeError."""
    return _endpoints.decode(blob)


class EndpointsView:
    """Reads the endpoints document. Keeps the last version if the current one cannot be read."""

    def __init__(self, reader: DocumentReader, pool: int | None = None) -> None:
        """`pool`: the number of the pool to which the endpoints belong; None: those of all pools."""
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
        """Returns what identifies each server over restarts of the picker, in the order of `current`."""
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
        """Returns the version of the document and the records; None if it cannot be read."""
        if self.pool is not None:
            found = _by_pool(self._reader)
            return None if found is None else (found[0], found[1].get(self.pool, []))
        document = self._reader.read(ENDPOINTS)
        return None if document is None else (document[0], _endpoints.decode(document[1]) if document[1] else [])


# The records of the last version that the views of pools have read, for each reader: a thousand views decode each version once.
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
    for record in _endpoints.decode(document[1]) if document[1] else []:
        pools.setdefault(record.pool, []).append(record)
    found = _grouped[reader] = document[0], pools
    return found


class NamesView:
    """Reads the names document. Keeps the last version if the current one cannot be read."""

    def __init__(self, reader: DocumentReader) -> None:
        self._reader = reader
        self._version = -1
        self._names: dict[tuple[int, int], Mapping[str, frozenset[str]]] = {}

    def current(self) -> Mapping[tuple[int, int], Mapping[str, frozenset[str]]]:
        """Returns the names by (slot, generation) of the endpoint, then by column."""
        if self._reader.version(NAMES) != self._version:
            document = self._reader.read(NAMES)
            if document is not None:
                self._version = document[0]
                records = _names.decode(document[1]) if document[1] else []
                self._names = {(r.slot, r.generation): {c: frozenset(n) for c, n in r.columns.items()} for r in records}
        return self._names


def _endpoint(r: EndpointRecord) -> Endpoint:
    return Endpoint(
        name=r.name, namespace=r.namespace, host=r.host, port=r.port, labels=r.labels, slot=r.slot, generation=r.generation, owner=r.owner
    )
