"""The supervisor's documents, as workers read them: decoded once per version."""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from epp.candidates import Endpoint
from shm.documents import DocumentReader

ENDPOINTS = 0
NAMES = 1
OBJECTIVES = 2
REWRITES = 3


Identity = tuple[str, str, str, int, str]  # namespace, name, host, port, uid: all that tells a server from another


class EndpointRecord(msgspec.Struct, array_like=True, frozen=True):
    """One endpoint as the supervisor publishes it."""

    namespace: str
    name: str
    host: str
    port: int
    labels: dict[str, str]
    slot: int
    generation: int
    owner: int
    uid: str = ""  # for a successor; see EndpointSpec


class NamesRecord(msgspec.Struct, array_like=True, frozen=True):
    """Names that an endpoint reports, by column (LoRA adapters, active and waiting)."""

    slot: int
    generation: int
    columns: dict[str, list[str]]


_encoder = msgspec.msgpack.Encoder()
_endpoints = msgspec.msgpack.Decoder(list[EndpointRecord])
_names = msgspec.msgpack.Decoder(list[NamesRecord])


def encode(records: Sequence[EndpointRecord] | Sequence[NamesRecord]) -> bytes:
    """A document's bytes."""
    return _encoder.encode(records)


def decode_endpoints(blob: bytes) -> list[EndpointRecord]:
    """What `encode` made of endpoint records."""
    return _endpoints.decode(blob)


class EndpointsView:
    """The endpoints document; keeps the last good version."""

    def __init__(self, reader: DocumentReader) -> None:
        self._reader = reader
        self.version = -1
        self._endpoints: tuple[Endpoint, ...] = ()
        self.slots: NDArray[np.intp] = np.zeros(0, np.intp)
        self.generations: NDArray[np.uint64] = np.zeros(0, np.uint64)

    def current(self) -> Sequence[Endpoint]:
        """Endpoints in the document's order; `slots` and `generations` go with them."""
        if self._reader.version(ENDPOINTS) == self.version:
            return self._endpoints
        found = self._reader.read(ENDPOINTS)
        if found is not None and found[0] != self.version:
            self.version = found[0]
            records = _endpoints.decode(found[1]) if found[1] else []
            self._endpoints = tuple(_endpoint(r) for r in records)
            self.slots = np.array([r.slot for r in records], dtype=np.intp)
            self.generations = np.array([r.generation for r in records], dtype=np.uint64)
        return self._endpoints


class NamesView:
    """The names document; keeps the last good version."""

    def __init__(self, reader: DocumentReader) -> None:
        self._reader = reader
        self._version = -1
        self._names: dict[tuple[int, int], Mapping[str, frozenset[str]]] = {}

    def current(self) -> Mapping[tuple[int, int], Mapping[str, frozenset[str]]]:
        """(slot, generation) -> column -> names."""
        if self._reader.version(NAMES) != self._version:
            found = self._reader.read(NAMES)
            if found is not None:
                self._version = found[0]
                records = _names.decode(found[1]) if found[1] else []
                self._names = {(r.slot, r.generation): {c: frozenset(n) for c, n in r.columns.items()} for r in records}
        return self._names


def _endpoint(r: EndpointRecord) -> Endpoint:
    return Endpoint(
        name=r.name,
        namespace=r.namespace,
        host=r.host,
        port=r.port,
        labels=r.labels,
        slot=r.slot,
        generation=r.generation,
        owner=r.owner,
    )
