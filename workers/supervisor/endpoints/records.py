"""Writes the documents about endpoints that workers read. Drops some records if not all fit."""

from collections.abc import Callable, Iterable, Sequence

from shm.documents import DocumentTooLarge, DocumentWriter
from workers.shared.documents import ENDPOINTS, NAMES, EndpointRecord, Identity, NamesRecord, encode
from workers.supervisor.endpoints.discovery import EndpointSpec
from workers.supervisor.endpoints.member import Member

REPORT_EVERY_S = 60.0
REPORTED_MAX = 8


class Published:
    """Writes the documents of endpoints and of names. Reports the endpoints that do not fit."""

    def __init__(self, documents: DocumentWriter, report: Callable[..., None]) -> None:
        self._documents = documents
        self._report = report
        self._left_out_at = 0.0

    def endpoints(self, inherited: Iterable[EndpointRecord], members: Iterable[Member], now: float) -> None:
        """Writes the records of all endpoints, ordered by slot. Drops the longest records if not all fit."""
        records = sorted([*inherited, *map(_record_of, members)], key=lambda record: record.slot)
        room = self._documents.schema.capacities[ENDPOINTS]
        blob = encode(records)
        if len(blob) > room:
            left = longest(records, len(blob) - room)
            if now >= self._left_out_at:
                self._left_out_at = now + REPORT_EVERY_S
                self._report(
                    "endpoints get no requests",
                    count=len(left),
                    endpoints=[record.name for record in left[:REPORTED_MAX]],
                    reason=f"all labels together do not fit into {room} bytes, and theirs are the longest; "
                    "give them fewer labels, or raise --max-endpoints",
                )
            slots = {record.slot for record in left}
            blob = encode([record for record in records if record.slot not in slots])
        self._write(ENDPOINTS, blob)

    def names(self, members: Iterable[Member]) -> None:
        """Writes the names that endpoints report, such as those of adapters. If they do not fit, workers keep the previous document."""
        self._write(NAMES, encode([_names_of(member) for member in members if any(member.names.values())]))

    def _write(self, document: int, blob: bytes) -> None:
        try:
            self._documents.write(document, blob)
        except DocumentTooLarge as failure:
            self._report("workers keep the last document", document=("endpoints", "names")[document], reason=str(failure))


def longest(records: Sequence[EndpointRecord], excess: int) -> list[EndpointRecord]:
    """Returns the fewest, longest records that together have at least `excess` bytes. Equal arguments give an equal result."""
    sizes = {record.slot: len(encode((record,))) - 1 for record in records}
    left = []
    for record in sorted(records, key=lambda record: (-sizes[record.slot], record.slot)):
        if excess <= 0:
            break
        left.append(record)
        excess -= sizes[record.slot]
    return left


def _record_of(member: Member) -> EndpointRecord:
    spec, handle = member.spec, member.handle
    address = (spec.namespace, spec.name, spec.host, spec.port)
    return EndpointRecord(*address, dict(spec.labels), handle.slot, handle.generation, member.owner, spec.uid, spec.pool)


def _names_of(member: Member) -> NamesRecord:
    return NamesRecord(*member.handle, {column: sorted(found) for column, found in member.names.items()})


def spec_of(record: EndpointRecord) -> EndpointSpec:
    """Returns the endpoint of a record, as discovery gave it."""
    place = (record.namespace, record.name, record.host, record.port)
    return EndpointSpec(*place, tuple(sorted(record.labels.items())), record.uid, pool=record.pool)


def identity_of(server: EndpointSpec | EndpointRecord) -> Identity:
    """Returns the identity of one server, which changes when another server takes the address."""
    return server.namespace, server.name, server.host, server.port, server.uid
