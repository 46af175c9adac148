"""What discovery and scrapes say -> shared memory. The only user of the table's writer.

    discovery ─ apply ─▶ slots and index owners claimed, released      endpoints document
    scraper ─ scraped, failed, sweep ─▶ rows                           names document
    what changes ─▶ EndpointLog

- An endpoint keeps its slot and owner as long as its identity, address and UID stay. A new address
  behind an old name, or a new UID, is another server: it gets a slot and an owner of its own.
- All changes of one turn of the loop become visible together, by one `publish`.
- A successor finds its predecessor's endpoints in the documents and goes on with their slots; what
  discovery does not name again is let go once discovery is complete.
- An endpoint that a snapshot of the prefix index knows goes on with the owner it had (`remembered`); the others that it knew are
  let go likewise.
- With a full table an endpoint waits, named in a report, until a slot is free. Where all records together do not fit their document,
  the longest are left out, named likewise: whoever may label one pod must not hide the others from workers.
- An endpoint that left with requests in flight is watched until they have ended, to say so.

What this does not do: find endpoints, or decide what stale means (`scrape.Freshness` does).
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from epp.data import Column
from epp.plugins.extractors.core_metrics import Extracted
from shm.documents import DocumentTooLarge, DocumentWriter
from shm.prefix_index import OwnersExhausted
from shm.table import DOWN, Handle, State, TableCopy, TableWriter
from workers.discovery import EndpointSpec, diff
from workers.documents import ENDPOINTS, NAMES, EndpointRecord, Identity, NamesRecord, encode
from workers.endpoint_log import Change, Condition, EndpointLog, Kind, shown
from workers.index_limits import IndexLimits
from workers.scrape import Failure, Freshness, Health, PageReader, Scraper, Target

NAMES_EVERY_S = 0.05
RETRY_EVERY_S = 1.0
DRAINED_EVERY_S = 0.25
REPORT_EVERY_S = 60.0
REPORTED_MAX = 8
FAILURES_TO_TELL = 20  # a server that starts may have no page yet


class Owners(Protocol):
    """Ids under which the prefix index knows endpoints."""

    def new_owner(self) -> int: ...
    def retire(self, owner: int) -> None: ...
    def owners(self) -> list[int]: ...


class Extractions(Protocol):
    """Makes page readers for endpoints with these labels."""

    def extraction(self, labels: Mapping[str, str], wanted: Sequence[Column[Any]]) -> PageReader: ...


class Member:
    """An endpoint that has a slot."""

    __slots__ = (
        "cause",
        "condition",
        "failures",
        "handle",
        "health",
        "names",
        "owner",
        "since",
        "spec",
        "target",
        "why",
    )

    def __init__(self, spec: EndpointSpec, handle: Handle, owner: int) -> None:
        self.spec = spec
        self.handle = handle
        self.owner = owner
        self.names: Mapping[str, frozenset[str]] = {}
        self.condition = Condition.UNKNOWN
        self.since: float | None = None  # its condition began when a predecessor watched
        self.failures = 0  # scrapes since the last good one
        self.cause = self.why = ""  # of the last failed scrape, in a word and in full
        self.health: Health
        self.target: Target

    def change(self, now: float, *, in_flight: int = 0) -> Change:
        """What ends now."""
        lasted_s = None if self.since is None else max(now - self.since, 0.0)
        cause = self.cause if self.failures else ""
        return Change(*shown(self.spec), self.condition, lasted_s, cause, in_flight)

    def trouble(self, now: float) -> Change:
        """The same, with the cause in full."""
        return self.change(now)._replace(why=self.why if self.failures else "")


class EndpointTable:
    """Members, their rows and the documents about them. `start` first, then `apply`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        table: TableWriter,
        documents: DocumentWriter,
        owners: Owners,
        slot_inflight: Callable[[int], int],
        extractor: Extractions,
        wanted: Sequence[Column[Any]],
        fresh_for_s: float,
        report: Callable[[str], None],
        log: EndpointLog,
        limits: IndexLimits | None = None,
        remembered: Mapping[Identity, int] | None = None,
    ) -> None:
        numeric = tuple(column.name for column in wanted if column.type is not frozenset)
        assert numeric == table.schema.columns, (numeric, table.schema.columns)
        self._loop = loop
        self._table = table
        self._documents = documents
        self._owners = owners
        self._slot_inflight = slot_inflight
        self._extractor = extractor
        self._wanted = tuple(wanted)
        self._report = report
        self._log = log
        self._limits = limits
        self._remembered = dict(remembered or {})
        self._members: dict[tuple[str, str], Member] = {}
        self._inherited: dict[Identity, tuple[EndpointRecord, State, bool]] = {}
        self._waiting: dict[tuple[str, str], EndpointSpec] = {}
        self._draining: dict[int, tuple[Change, float]] = {}  # by slot: who left it with requests in flight, and when
        self._freshness: Freshness[Member] = Freshness(fresh_for_s)
        self._scraper: Scraper
        self._now = 0.0
        self._full = ""
        self._retry_at = self._report_at = self._names_at = self._drained_at = self._left_out_at = 0.0
        self._names_moved = self._endpoints_moved = self._flush_due = False

    def __len__(self) -> int:
        return len(self._members)

    def start(
        self,
        scraper: Scraper,
        *,
        predecessor: Sequence[EndpointRecord] = (),
        copy: TableCopy | None = None,
        now: float,
    ) -> None:
        """Before anything else; with what a predecessor left, if there was one."""
        self._scraper = scraper
        self._now = now
        claimed = set(self._table.claimed())
        for record in predecessor:
            handle = Handle(record.slot, record.generation)
            if copy is not None and handle in claimed and record.slot < len(copy.rows):
                state = State(int(copy.state[record.slot]))
                down = bool(int(copy.flags[record.slot]) & DOWN)
                self._inherited[_identity(record)] = record, state, down
                claimed.discard(handle)
        for handle in claimed:  # claimed, but the predecessor died before it wrote so
            self._table.release(handle)
        known = {*(record.owner for record, _, _ in self._inherited.values()), *self._remembered.values()}
        for owner in set(self._owners.owners()) - known:
            self._owners.retire(owner)
        self._moved(endpoints=True)

    def inherited(self) -> list[EndpointSpec]:
        """What a predecessor knew and nobody has named since."""
        return [spec_of(record) for record, _, _ in self._inherited.values()]

    def resume(self) -> None:
        """Go on with all that a predecessor knew, scrapes included, until discovery says what there is."""
        self.apply(self.inherited(), complete=False)

    def apply(self, specs: Iterable[EndpointSpec], *, complete: bool = True) -> None:
        """The endpoints are these from now on; `complete` = no more are expected to follow."""
        changes = diff((member.spec for member in self._members.values()), sorted(specs))
        for spec in changes.gone:
            self._leave(self._members[spec.identity])
        for old, new in changes.changed:
            member = self._members[old.identity]
            if (old.host, old.port, old.uid) == (new.host, new.port, new.uid):
                self._change(member, new)
            else:
                self._leave(member)
                changes.appeared.append(new)
        self._waiting = {spec.identity: spec for spec in changes.appeared}
        self._admit()
        if complete:
            self._let_go()
        self._moved(endpoints=True)

    def scraped(self, tag: object, extracted: Extracted, inflight_at_scrape: int, now: float) -> None:
        """A page was taken: the row gets all its values at once."""
        assert isinstance(tag, Member)
        self._freshness.good(tag, now)
        if self._limits is not None:
            self._limits.scraped(tag.owner, extracted)
        if tag.condition is not Condition.FRESH or tag.failures:
            self._good_again(tag, now)
        self._table.write(
            tag.handle,
            state=State.FRESH,
            flags=0,
            updated_at=now,
            inflight_at_scrape=inflight_at_scrape,
            values=extracted.values,
            present=extracted.present,
        )
        if extracted.names is not tag.names:
            self._names_moved |= extracted.names != tag.names
            tag.names = extracted.names
        if not self._flush_due:
            self._moved()

    def failed(self, tag: object, failure: Failure, now: float) -> None:
        """A scrape brought nothing: the row's values stay."""
        assert isinstance(tag, Member)
        if self._limits is not None:
            self._limits.appeared(tag.owner)
        tag.failures += 1
        tag.cause, tag.why = failure.cause, failure.text
        if self._freshness.failed(tag, refused=failure.refused):
            self._table.mark(tag.handle, flags=DOWN)
            self._moved()
            self._became(Condition.DOWN, tag, now)
        elif tag.failures == FAILURES_TO_TELL and tag.condition is Condition.UNKNOWN:
            self._log.tell(Kind.UNREADABLE, tag.trouble(now))
        if self._log.debug:
            self._log.scrape_failed(
                *shown(tag.spec),
                failure.cause,
                failure.text,
                failures=tag.failures,
                next_try_s=0.0 if failure.again else self._scraper.next_try_s(tag.target, now),
            )

    def sweep(self, now: float) -> None:
        """What time alone changes: freshness, the names document, room for those that wait."""
        self._now = now
        for member in self._freshness.newly_stale(now):
            self._table.mark(member.handle, state=State.STALE)
            self._moved()
            if not member.health.down:
                self._became(Condition.STALE, member, now)
        if self._names_moved and now >= self._names_at:
            self._names_at = now + NAMES_EVERY_S
            self._names_moved = False
            self._write(NAMES, encode(self._names()))
            self._moved()
        if self._waiting and now >= self._retry_at:
            if self._admit():
                self._moved(endpoints=True)
            self._retry_at = now + RETRY_EVERY_S
        if self._draining and now >= self._drained_at:
            self._drained_at = now + DRAINED_EVERY_S
            for slot in [slot for slot in self._draining if not self._slot_inflight(slot)]:
                self._drained(slot)
        self._log.flush(now)

    def owners(self) -> dict[Identity, int]:
        """Under which ids the prefix index knows the endpoints."""
        return {_identity(member.spec): member.owner for member in self._members.values()}

    def counts(self) -> dict[State, int]:
        """How many endpoints are in which state."""
        found = dict.fromkeys((State.UNKNOWN, State.FRESH, State.STALE), 0)
        for member in self._members.values():
            found[member.health.state] += 1
        return found

    def down(self) -> int:
        """How many endpoints refuse connections."""
        return sum(member.health.down for member in self._members.values())

    def scrape_seconds(self) -> dict[str, float]:
        """By endpoint's name, how long its last scrape took, whether it brought a page or not; none before the first."""
        members = self._members.values()
        return {member.spec.name: member.target.seconds for member in members if member.target.seconds >= 0.0}

    def _admit(self) -> bool:
        """Give slots to those that wait; True when one got its slot."""
        before = len(self._members)
        for spec in list(self._waiting.values()):
            member = self._adopted(spec) or self._claimed(spec)
            if member is None:
                break
            del self._waiting[spec.identity]
            self._members[spec.identity] = member
            address, reader = self._scrape_of(spec)
            member.target = self._scraper.add(member, member.handle.slot, address, reader)
        if self._waiting and self._now >= self._report_at:
            self._report_at = self._now + REPORT_EVERY_S
            named = ", ".join(spec.name for spec in list(self._waiting.values())[:REPORTED_MAX])
            self._report(f"{len(self._waiting)} endpoints wait ({named}): {self._full}")
        return len(self._members) > before

    def _adopted(self, spec: EndpointSpec) -> Member | None:
        inherited = self._inherited.pop(_identity(spec), None)
        if inherited is None:
            return None
        record, state, down = inherited
        member = Member(spec, Handle(record.slot, record.generation), record.owner)
        scraped = state in (State.FRESH, State.STALE)
        member.health = self._freshness.adopt(member, scraped=scraped, down=down, now=self._now)
        member.condition = Condition.DOWN if down else Condition.FRESH if scraped else Condition.UNKNOWN
        self._log.tell(Kind.TAKEN_OVER, Change(*shown(spec), member.condition))
        return member

    def _claimed(self, spec: EndpointSpec) -> Member | None:
        slots = self._table.schema.slots
        self._full = f"all {slots} slots of the table are taken; raise --max-endpoints"
        if len(self._members) + len(self._inherited) >= slots:
            return None
        remembered = self._remembered.get(_identity(spec))
        try:
            owner = self._owners.new_owner() if remembered is None else remembered
        except OwnersExhausted as failure:
            self._full = str(failure)
            return None
        handle = self._table.claim(owner, lambda slot: self._slot_inflight(slot) == 0)
        if handle is None:
            if remembered is None:
                self._owners.retire(owner)
            self._full = "every free slot still has requests in flight; it is taken when they end"
            return None
        if remembered is not None:
            del self._remembered[_identity(spec)]
        elif self._limits is not None:
            self._limits.appeared(owner)
        member = Member(spec, handle, owner)
        member.health = self._freshness.add(member)
        member.since = self._now
        self._drained(handle.slot)
        self._log.tell(Kind.APPEARED, Change(*shown(spec)))
        return member

    def _change(self, member: Member, spec: EndpointSpec) -> None:
        """Labels are other ones; the server is the same."""
        member.spec = spec
        self._scraper.change(member.target, *self._scrape_of(spec))

    def _leave(self, member: Member) -> None:
        self._scraper.remove(member.target)
        self._freshness.forget(member)
        self._names_moved |= bool(member.names)
        del self._members[member.spec.identity]
        self._table.release(member.handle)
        self._owners.retire(member.owner)
        if self._limits is not None:
            self._limits.left(member.owner)
        change = member.change(self._now, in_flight=self._slot_inflight(member.handle.slot))
        self._log.tell(Kind.LEFT, change)
        if change.in_flight:
            self._draining[member.handle.slot] = change, self._now

    def _let_go(self) -> None:
        """Discovery is complete: what only the predecessor knew has left."""
        for record, _, _ in self._inherited.values():
            self._table.release(Handle(record.slot, record.generation))
            self._owners.retire(record.owner)
            self._log.tell(Kind.LEFT, Change(*shown(record)))
        self._inherited.clear()
        self._admit()
        waiting = {_identity(spec) for spec in self._waiting.values()}
        for identity in [identity for identity in self._remembered if identity not in waiting]:
            self._owners.retire(self._remembered.pop(identity))

    def _good_again(self, member: Member, now: float) -> None:
        if member.condition is not Condition.FRESH:
            self._became(Condition.FRESH, member, now)
        member.failures = 0

    def _became(self, condition: Condition, member: Member, now: float) -> None:
        kind = Kind.UP if member.condition is Condition.DOWN else Kind(condition.value)
        self._log.tell(kind, member.trouble(now) if kind is Kind.STALE else member.change(now))
        member.condition, member.since = condition, now

    def _drained(self, slot: int) -> None:
        """The last request to whom left has ended, if somebody did."""
        left = self._draining.pop(slot, None)
        if left is not None:
            change, since = left
            self._log.tell(Kind.DRAINED, Change(change.endpoint, change.address, lasted_s=self._now - since))

    def _scrape_of(self, spec: EndpointSpec) -> tuple[tuple[str, int], PageReader]:
        return (spec.host, spec.port), self._extractor.extraction(dict(spec.labels), self._wanted)

    def _moved(self, *, endpoints: bool = False) -> None:
        self._endpoints_moved |= endpoints
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        if self._endpoints_moved:
            self._endpoints_moved = False
            self._write(ENDPOINTS, self._endpoints())
        self._table.publish()

    def _endpoints(self) -> bytes:
        """The records of all endpoints that have room together."""
        records, room = self._records(), self._documents.schema.capacities[ENDPOINTS]
        blob = encode(records)
        if len(blob) <= room:
            return blob
        left = longest(records, len(blob) - room)
        if self._now >= self._left_out_at:
            self._left_out_at = self._now + REPORT_EVERY_S
            named = ", ".join(record.name for record in left[:REPORTED_MAX])
            self._report(
                f"{len(left)} endpoints get no requests ({named}): all labels together have no room in {room} bytes, and theirs are "
                "the longest; give them fewer labels, or raise --max-endpoints"
            )
        slots = {record.slot for record in left}
        return encode([record for record in records if record.slot not in slots])

    def _records(self) -> list[EndpointRecord]:
        records = [record for record, _, _ in self._inherited.values()]
        for member in self._members.values():
            spec, handle = member.spec, member.handle
            place = (handle.slot, handle.generation, member.owner)
            address = (spec.namespace, spec.name, spec.host, spec.port)
            records.append(EndpointRecord(*address, dict(spec.labels), *place, spec.uid))
        return sorted(records, key=lambda record: record.slot)

    def _names(self) -> list[NamesRecord]:
        return [
            NamesRecord(*member.handle, {column: sorted(names) for column, names in found.items()})
            for member in self._members.values()
            if any((found := member.names).values())
        ]

    def _write(self, document: int, blob: bytes) -> None:
        try:
            self._documents.write(document, blob)
        except DocumentTooLarge as failure:
            self._report(f"workers keep the last {('endpoints', 'names')[document]}: {failure}")


def longest(records: Sequence[EndpointRecord], excess: int) -> list[EndpointRecord]:
    """Those with that many bytes, as few as possible; the same ones each time."""
    sizes = {record.slot: len(encode((record,))) - 1 for record in records}
    left = []
    for record in sorted(records, key=lambda record: (-sizes[record.slot], record.slot)):
        if excess <= 0:
            break
        left.append(record)
        excess -= sizes[record.slot]
    return left


def spec_of(record: EndpointRecord) -> EndpointSpec:
    """As discovery knew it."""
    place = (record.namespace, record.name, record.host, record.port)
    return EndpointSpec(*place, tuple(sorted(record.labels.items())), record.uid)


def _identity(server: EndpointSpec | EndpointRecord) -> Identity:
    return server.namespace, server.name, server.host, server.port, server.uid
