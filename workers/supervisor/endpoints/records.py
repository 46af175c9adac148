"""Writes the documents about endpoints that workers read. Drops some records if not all fit."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from shm.documents import DocumentWriter
from workers.shared.documents import ENDPOINTS, NAMES, EndpointRecord, Identity, NamesRecord, encode
from workers.supervisor.endpoints.discovery import EndpointSpec
from workers.supervisor.endpoints.member import Member

REPORT_EVERY_S = 60.0
REPORTED_MAX = 8

R = TypeVar("R", EndpointRecord, NamesRecord)


class Published:
    """Writes the documents of endpoints and of names. Reports the endpoints that do not fit."""

    def __init__(self, documents: DocumentWriter, report: Callable[..., None]) -> None:
        self._documents = documents
        self._report = report
        self._reported_at: dict[int, float] = {}  # document -> when its last report was made

    def endpoints(self, inherited: Iterable[EndpointRecord], members: Iterable[Member], now: float) -> None:
        """Writes the records of all endpoints, ordered by slot. Drops the longest records if not all fit."""
        records = sorted([*inherited, *map(_record_of, members)], key=lambda record: record.slot)
        left = self._write(ENDPOINTS, records)
        if left and self._may_report(ENDPOINTS, now):
            self._report(
                "endpoints get no requests",
                count=len(left),
                endpoints=[record.name for record in left[:REPORTED_MAX]],
                reason=f"all labels together do not fit into {self._room(ENDPOINTS)} bytes, and theirs are the longest; "
                "give them fewer labels, or raise --max-endpoints",
            )

    def names(self, members: Iterable[Member], now: float) -> None:
        """Writes the names that endpoints report, such as those of adapters. Drops those of the endpoints with the most if not all fit."""
        known = {member.handle.slot: member for member in members if any(member.names.values())}
        left = self._write(NAMES, [_names_of(member) for member in known.values()])
        if left and self._may_report(NAMES, now):
            self._report(
                "adapters of endpoints are not known",
                count=len(left),
                endpoints=[known[record.slot].spec.name for record in left[:REPORTED_MAX]],
                reason=f"the names of all adapters together do not fit into {self._room(NAMES)} bytes, and these endpoints have the most; "
                "load fewer adapters, or raise --max-endpoints",
            )

    def _write(self, document: int, records: Sequence[R]) -> list[R]:
        """Writes the records that fit. Returns the longest records, which were dropped."""
        left: list[R] = []
        blob = encode(records)
        if (excess := len(blob) - self._room(document)) > 0:
            left = longest(records, excess)
            slots = {record.slot for record in left}
            blob = encode([record for record in records if record.slot not in slots])
        self._documents.write(document, blob)
        return left

    def _room(self, document: int) -> int:
        return self._documents.schema.capacities[document]

    def _may_report(self, document: int, now: float) -> bool:
        if now < self._reported_at.get(document, 0.0):
            return False
        self._reported_at[document] = now + REPORT_EVERY_S
        return True


def longest(records: Sequence[R], excess: int) -> list[R]:
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
