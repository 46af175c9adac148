"""Writes the results of discovery and scrapes to shared memory. No other module uses the table's writer.

    discovery ─ apply ─▶ takes and releases slots and index owners     endpoints document
    scraper ─ scraped, failed, sweep ─▶ rows                            names document
    changes ─▶ EndpointLog

- An endpoint keeps its slot and owner as long as its identity, address and UID stay the same. A new address or UID with an old name is
  another server: it gets another slot and another owner.
- All changes of one turn of the event loop become visible at once, by one `publish`.
- After a restart, the supervisor reads its predecessor's endpoints from the documents and keeps their slots. Once discovery is complete, it
  releases the slots of endpoints that discovery has not named again.
- An endpoint that is in the snapshot of the prefix index keeps its owner id from there (`slots`). Once discovery is complete, the ids
  that no endpoint has taken are retired.
- If the table is full, an endpoint waits for a free slot, and a report names it. If the records of all endpoints do not fit into their
  document, the longest records are dropped, and a report names them. So the labels of one pod cannot hide other pods from workers.
- If an endpoint leaves while it has requests in flight, a log line says when the last of them has ended.

This module does not find endpoints, and does not decide when values are stale (`freshness` does).
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from epp.data import RUNNING, WAITING, Column
from epp.plugins.extractors._pages import Extracted, PageExtractor, Reader
from shm.documents import DocumentWriter
from shm.table import DOWN, Handle, State, TableCopy, TableWriter
from workers.shared.documents import EndpointRecord, Known
from workers.shared.ejection import Ejections, Step
from workers.shared.freshness import Freshness
from workers.shared.index_limits import IndexLimits
from workers.supervisor.endpoints.discovery import EndpointSpec, Name, diff
from workers.supervisor.endpoints.endpoint_log import Change, Condition, Draining, EndpointLog, Kind, shown
from workers.supervisor.endpoints.further_pages import FurtherPages, pod_of
from workers.supervisor.endpoints.member import Member
from workers.supervisor.endpoints.records import REPORT_EVERY_S, REPORTED_MAX, Published, spec_of
from workers.supervisor.endpoints.scrape import Failure, Scraper
from workers.supervisor.endpoints.slots import IndexOwners, Slots

NAMES_EVERY_S = 0.05
RETRY_EVERY_S = 1.0
LOGGED = (Step.EJECTED, Step.RETURNED, Step.FAILING)
LOAD = frozenset((RUNNING.name, WAITING.name))
FAILURES_TO_LOG = 20  # failed scrapes before the first log line: a server may have no metrics page while it starts


class Reading(NamedTuple):
    """Says how to read the pages of a pool's endpoints.

    `wanted`: the columns to read. `fresh_for_s`: for how long values are fresh. `address(spec)` returns host and port of an endpoint's
    metrics page. `further`: the data sources besides the first source. `limits`: the limits of the prefix index from the pages, or None.
    """

    extractor: PageExtractor
    wanted: Sequence[Column[Any]]
    fresh_for_s: float
    address: Callable[[EndpointSpec], tuple[str, int]] = lambda spec: (spec.host, spec.port)
    further: Sequence[FurtherPages] = ()
    limits: IndexLimits | None = None

    def scrape_of(self, spec: EndpointSpec) -> tuple[tuple[str, int], Reader, str, tuple[str, int]]:
        """Returns the address of an endpoint's page, its reader, the name in the server's certificate, and the endpoint's own address."""
        reader = self.extractor.extraction(dict(spec.labels), self.wanted, pod_of(spec))
        return self.address(spec), reader, spec.server, (spec.host, spec.port)


class EndpointTable:
    """Keeps all endpoints, their rows in the table, and the documents about them. Call `start` first, then `apply`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        table: TableWriter,
        documents: DocumentWriter,
        index: IndexOwners,
        readings: Sequence[Reading],
        slot_inflight: Callable[[int], int],
        report: Callable[..., None],
        log: EndpointLog,
        ejections: Ejections,
    ) -> None:
        """`readings`: what to read from the pages, for each pool. `slot_inflight(slot)` returns the requests in flight at a slot."""
        numeric = tuple(column.name for column in readings[0].wanted if column.type is not frozenset)
        assert len(numeric) == len(table.schema.columns), (numeric, table.schema.columns)
        self._loop = loop
        self._table = table
        self._documents = Published(documents, report)
        self.index = index
        self._slots = Slots(table, index, slot_inflight)
        self._slot_inflight = slot_inflight
        self._readings = readings
        self._load_at = [index for index, name in enumerate(numeric) if name in LOAD]
        self._report = report
        self._log = log
        self._ejections = ejections
        self.by_slot: dict[int, Member] = {}
        self._members: dict[Name, Member] = {}
        self._waiting: dict[Name, EndpointSpec] = {}
        self._draining = Draining(log, slot_inflight)
        self._freshness: Freshness[Member] = Freshness(max(reading.fresh_for_s for reading in readings))
        self._scrapers: Sequence[Scraper]
        for pages in (pages for reading in readings for pages in reading.further):
            pages.changed = self._overlaid
        self._now = self._retry_at = self._report_at = self._names_at = 0.0
        self._names_moved = self._endpoints_moved = self._flush_due = False

    def __len__(self) -> int:
        return len(self._members)

    def start(
        self, scrapers: Sequence[Scraper], *, predecessor: Sequence[EndpointRecord] = (), copy: TableCopy | None = None, now: float
    ) -> None:
        """Takes over the records of a predecessor and a copy of its table. Call it before all other methods.

        `scrapers`: the scraper of each pool.
        """
        self._scrapers = scrapers
        self._now = now
        self._slots.take_over(predecessor, copy)
        self._moved(endpoints=True)

    def inherited(self, pool: int = 0) -> list[EndpointSpec]:
        """Returns the endpoints of a predecessor that discovery has not named yet."""
        return [spec_of(record) for record in self._slots.inherited() if record.pool == pool]

    def resume(self, pool: int = 0) -> None:
        """Uses and scrapes all endpoints of a predecessor until discovery gives a new set."""
        self.apply(self.inherited(pool), complete=False, pool=pool)

    def apply(self, specs: Iterable[EndpointSpec], *, complete: bool = True, pool: int = 0) -> None:
        """Uses `specs` as the endpoints of `pool` from now on.

        `complete`: whether `specs` has all endpoints. If not, the predecessor's other endpoints stay.
        """
        changes = diff((member.spec for member in self._members.values() if member.spec.pool == pool), sorted(specs))
        for spec in changes.gone:
            self._leave(self._members[spec.identity])
        for old, new in changes.changed:
            member = self._members[old.identity]
            if (old.host, old.port, old.uid) == (new.host, new.port, new.uid):
                member.spec = new  # the server stays the same; its labels or its metrics page change
                self._scrapers[new.pool].change(member.target, *self._readings[new.pool].scrape_of(new))
                for pages in self._readings[new.pool].further:
                    pages.change(member, new)
            else:
                self._leave(member)
                changes.appeared.append(new)
        others = {identity: spec for identity, spec in self._waiting.items() if spec.pool != pool}
        self._waiting = others | {spec.identity: spec for spec in changes.appeared}
        self._admit()
        if complete:
            self._release_unnamed(pool)
        self._moved(endpoints=True)

    def scraped(self, tag: object, extracted: Extracted, inflight_at_scrape: int, now: float) -> float | None:
        """Writes all values of a good page to the endpoint's row at once. Returns the requests that the page shows, running or waiting."""
        assert isinstance(tag, Member)
        self._freshness.good(tag, now)
        if (limits := self._readings[tag.pool].limits) is not None:
            limits.scraped(tag.owner, extracted)
        if tag.condition is not Condition.FRESH:
            self._became(Condition.FRESH, tag, now)
        tag.failures = 0
        if (extracted.problems or tag.problems) and (unread := tag.read(extracted.problems)) is not None:
            self._log.add(Kind.UNREAD, unread)
        tag.page = extracted, inflight_at_scrape, now
        self._store(tag, *tag.page)
        return _requests(extracted, self._load_at)

    def _overlaid(self, tag: object) -> None:
        """Writes the row again after the values of a further source have changed. Does nothing before the first source had a good page."""
        if isinstance(tag, Member) and tag.page is not None:
            self._store(tag, *tag.page)

    def _store(self, member: Member, extracted: Extracted, inflight_at_scrape: int, at: float) -> None:
        """Writes the values of a page, overlaid with the values of further sources, and the present state to the row."""
        for pages in self._readings[member.pool].further:
            extracted = pages.overlay(member, extracted)
        self._table.write(
            member.handle,
            state=member.health.state,
            flags=self._ejections.flags(member.handle.slot) | (DOWN if member.health.down else 0),
            updated_at=at,
            inflight_at_scrape=inflight_at_scrape,
            values=extracted.values,
            present=extracted.present,
        )
        if extracted.names is not member.names:
            self._names_moved |= extracted.names != member.names
            member.names = extracted.names
        if not self._flush_due:
            self._moved()

    def failed(self, tag: object, failure: Failure, now: float) -> None:
        """Records a failed scrape. The values in the row stay."""
        assert isinstance(tag, Member)
        if (limits := self._readings[tag.pool].limits) is not None:
            limits.appeared(tag.owner)
        tag.failures, tag.cause, tag.why = tag.failures + 1, failure.cause, failure.text
        if self._freshness.failed(tag, refused=failure.refused, serves=failure.serves):
            self._table.mark(tag.handle, flags=(DOWN if tag.is_down else 0) | self._ejections.flags(tag.handle.slot))
            self._moved()
            self._became(Condition.DOWN if tag.is_down else Condition(tag.health.state.name.lower()), tag, now)
        elif tag.failures == FAILURES_TO_LOG and tag.condition is Condition.UNKNOWN:
            self._log.add(Kind.UNREADABLE, tag.trouble(now))
        if self._log.debug:
            next_try_s = 0.0 if failure.again else self._scrapers[tag.pool].next_try_s(tag.target, now)
            self._log.scrape_failed(*shown(tag.spec), failure.cause, failure.text, failures=tag.failures, next_try_s=next_try_s)

    def sweep(self, now: float) -> None:
        """Does the work that depends on time alone: marks stale endpoints, ejects, writes names, gives slots to waiting endpoints, and
        logs.
        """
        self._now = now
        for member in self._freshness.newly_stale(now, lambda member: member.renewing(now)):
            self._table.mark(member.handle, state=State.STALE)
            self._moved()
            if not member.health.down:
                self._became(Condition.STALE, member, now)
        self._eject(now)
        if self._names_moved and now >= self._names_at:
            self._names_at = now + NAMES_EVERY_S
            self._names_moved = False
            self._documents.names(self._members.values(), now)
            self._moved()
        if self._waiting and now >= self._retry_at:
            if self._admit():
                self._moved(endpoints=True)
            self._retry_at = now + RETRY_EVERY_S
        self._draining.sweep(now)
        self._log.flush(now, self._members.values())

    def _eject(self, now: float) -> None:
        """Marks the endpoints that are ejected, on trial, or in use again since the last sweep."""
        for slot, step in self._ejections.sweep(now, self.by_slot):
            member = self.by_slot[slot]
            self._table.mark(member.handle, flags=(DOWN if member.is_down else 0) | self._ejections.flags(slot))
            self._moved()
            if step in LOGGED:
                member.target.pace.hasten(now)
                cause, why = self._ejections.reason(slot)
                self._log.add(Kind(step.value), member.change(now)._replace(cause=cause, why=why))

    def hasten(self, slot: int) -> None:
        """Asks for a page of the endpoint in this slot at once, because its known values seem to be wrong."""
        if (member := self.by_slot.get(slot)) is not None:
            member.target.pace.hasten(self._now)

    def pool_of(self, slot: int) -> int | None:
        """Returns the pool of the endpoint in this slot, or None without an endpoint."""
        return member.pool if (member := self.by_slot.get(slot)) is not None else None

    def handles(self) -> list[Handle]:
        """Returns the handles of all endpoints that have a row."""
        return [member.handle for member in self._members.values()]

    def specs(self) -> list[EndpointSpec]:
        """Returns all endpoints that have a row."""
        return [member.spec for member in self._members.values()]

    def owners(self) -> dict[Known, int]:
        """Returns the owner id of each endpoint in the prefix index."""
        return {self.index.known(member.spec): member.owner for member in self._members.values()}

    def troubles(self) -> dict[str, str]:
        """Returns id of an endpoint (`namespace/name address`) -> why its requests or its last scrape failed, for endpoints in trouble."""
        failing = {self.by_slot[slot].id: why for slot, (_, why, _) in self._ejections.failing().items()}
        return {member.id: failure for member in self._members.values() if (failure := member.failure)} | failing

    def failing(self) -> dict[tuple[int, str, str], float]:
        """Returns (pool, endpoint name, cause) -> share of its requests that it fails beyond the others; 1 for an ejected endpoint."""
        found = self._ejections.failing()
        return {(self.by_slot[slot].pool, self.by_slot[slot].spec.name, cause): share for slot, (cause, _, share) in found.items()}

    def scrape_seconds(self) -> dict[tuple[int, str], float]:
        """Returns (pool, endpoint name) -> duration of its last scrape in seconds, good or failed. Skips endpoints without a scrape."""
        return {(m.pool, m.spec.name): m.target.seconds for m in self._members.values() if m.target.seconds >= 0.0}

    def _admit(self) -> bool:
        """Gives slots to waiting endpoints. Returns whether at least one got a slot."""
        before = len(self._members)
        for spec in list(self._waiting.values()):
            member = self._adopted(spec) or self._taken(spec)
            if member is None:
                break
            del self._waiting[spec.identity]
            self._members[spec.identity] = self.by_slot[member.handle.slot] = member
            member.target = self._scrapers[spec.pool].add(member, member.handle.slot, *self._readings[spec.pool].scrape_of(spec))
            for pages in self._readings[spec.pool].further:
                pages.add(member, member.handle.slot, spec)
        if self._waiting and self._now >= self._report_at:
            self._report_at = self._now + REPORT_EVERY_S
            named = [spec.name for spec in list(self._waiting.values())[:REPORTED_MAX]]
            self._report("endpoints wait for a slot", count=len(self._waiting), endpoints=named, reason=self._slots.full)
        return len(self._members) > before

    def _adopted(self, spec: EndpointSpec) -> Member | None:
        if (inherited := self._slots.inherit(spec)) is None:
            return None
        record, state, down = inherited
        member = Member(spec, Handle(record.slot, record.generation), record.owner)
        scraped = state in (State.FRESH, State.STALE)
        member.health = self._freshness.adopt(member, scraped=scraped, down=down, now=self._now)
        member.condition = Condition.DOWN if down else Condition.FRESH if scraped else Condition.UNKNOWN
        self._ejections.adopt(record.slot)
        self._log.add(Kind.TAKEN_OVER, Change(*shown(spec), member.condition))
        return member

    def _taken(self, spec: EndpointSpec) -> Member | None:
        if (taken := self._slots.take(spec, len(self._members))) is None:
            return None
        handle, owner, is_new = taken
        if is_new and (limits := self._readings[spec.pool].limits) is not None:
            limits.appeared(owner)
        member = Member(spec, handle, owner)
        member.health, member.since = self._freshness.add(member), self._now
        self._draining.ended(handle.slot, self._now)
        self._ejections.forget(handle.slot)
        self._log.add(Kind.APPEARED, Change(*shown(spec)))
        return member

    def _leave(self, member: Member) -> None:
        self._scrapers[member.pool].remove(member.target)
        for pages in self._readings[member.pool].further:
            pages.remove(member)
        self._freshness.forget(member)
        self._names_moved |= bool(member.names)
        del self._members[member.spec.identity], self.by_slot[member.handle.slot]
        self._ejections.forget(member.handle.slot)
        self._slots.release(member.handle, member.owner)
        if (limits := self._readings[member.pool].limits) is not None:
            limits.left(member.owner)
        change = member.change(self._now, in_flight=self._slot_inflight(member.handle.slot))
        self._log.add(Kind.LEFT, change)
        if change.in_flight:
            self._draining.left(member.handle.slot, change, self._now)

    def _release_unnamed(self, pool: int) -> None:
        """Releases the endpoints that only the predecessor or the snapshot of the index knew. Called once discovery is complete."""
        for record in self._slots.release_inherited(pool):
            self._log.add(Kind.LEFT, Change(*shown(record)))
        self._admit()
        self.index.retire_remembered(pool, len(self._readings), self._waiting.values())

    def _became(self, condition: Condition, member: Member, now: float) -> None:
        kind = Kind.UP if member.condition is Condition.DOWN else Kind(condition.value)
        self._log.add(kind, member.trouble(now) if kind is Kind.STALE else member.change(now))
        member.condition, member.since = condition, now

    def _moved(self, *, endpoints: bool = False) -> None:
        self._endpoints_moved |= endpoints
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        if self._endpoints_moved:
            self._endpoints_moved = False
            self._documents.endpoints(self._slots.inherited(), self._members.values(), self._now)
        self._table.publish()


def _requests(extracted: Extracted, load_at: Sequence[int]) -> float | None:
    """Returns the requests that a page shows, in the columns `load_at`, or None if the page has none of them."""
    shown = [extracted.values[at] for at in load_at if extracted.present >> at & 1]
    return sum(shown) if shown else None
