"""Objectives and bands: how important a request is that names an objective, and which place in the lanes its band has.

    supervisor   directory ─ Folder ─▶ priorities by name ─ BandPlaces ─▶ document OBJECTIVES
    worker       document ─ ObjectivesView ─▶ priority of a request; priority -> place of its band

A band's place is a number below `places`. Bands that are configured, and band 0, have theirs from the start, the same in all
processes without a word said; others get one when an objective with their priority comes, and give it back when the last such is
gone. A place is given to another priority only when it was given back REUSE_AFTER_S ago, so that every worker knows, and nothing
waits there any more in any worker. A priority without a place has no band: its requests wait in band 0.

What this does not do: make bands, or move requests.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

import msgspec

from epp import client_headers
from epp.flow.plan import FlowPlan
from shm.documents import DocumentReader
from workers.documents import OBJECTIVES

REUSE_AFTER_S: Final = 5.0


class ObjectivesRecord(msgspec.Struct, array_like=True, frozen=True):
    """The document: priorities by the name of their objective, places by the priority of their band."""

    priorities: dict[str, int]
    places: dict[int, int]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ObjectivesRecord).decode


def encode(record: ObjectivesRecord) -> bytes:
    """The document's bytes."""
    return _encode(record)


def decode(blob: bytes) -> ObjectivesRecord:
    """What `encode` made."""
    return _decode(blob)


def static_bands(plan: FlowPlan | None) -> Collection[int]:
    """The priorities whose bands exist whatever objectives say; none without flow control."""
    return plan.static() if plan is not None else ()


def first_places(static: Collection[int]) -> dict[int, int]:
    """The places that are given before anybody says so."""
    return {priority: place for place, priority in enumerate(sorted(static))}


class BandPlaces:
    """Who has which place; one in the supervisor."""

    def __init__(self, static: Collection[int], places: int, *, empty: Callable[[int], bool], now: float) -> None:
        """`empty` says whether nothing waits in a place, in any worker."""
        self._fixed = first_places(static)
        self._empty = empty
        self.places = dict(self._fixed)
        # place -> whose it was, and since when it is nobody's
        self._left: dict[int, tuple[int | None, float]] = dict.fromkeys(range(len(self._fixed), places), (None, now))
        self.waiting: frozenset[int] = frozenset()  # priorities that have no place yet

    def adopt(self, places: Mapping[int, int]) -> None:
        """What a predecessor had given."""
        for priority, place in places.items():
            if place in self._left and priority not in self.places:
                del self._left[place]
                self.places[priority] = place

    def want(self, priorities: Iterable[int], now: float) -> bool:
        """These are to have a band beside the fixed ones; whether anything has changed. Called again while some wait."""
        wanted = frozenset(priorities)
        before = dict(self.places)
        for priority in [p for p in self.places if p not in wanted and p not in self._fixed]:
            self._left[self.places.pop(priority)] = (priority, now)
        waiting = []
        for priority in sorted(wanted - self.places.keys(), reverse=True):
            place = self._place(priority, now)
            if place is None:
                waiting.append(priority)
            else:
                del self._left[place]
                self.places[priority] = place
        self.waiting = frozenset(waiting)
        return self.places != before

    def _place(self, priority: int, now: float) -> int | None:
        """Its old one, or the one that is nobody's for longest."""
        free = None
        for place, (owner, since) in self._left.items():
            if owner == priority:
                return place
            if free is None and (owner is None or now - since >= REUSE_AFTER_S) and self._empty(place):
                free = place
        return free


class ObjectivesView:
    """The document as a worker sees it; keeps the last good version."""

    def __init__(self, reader: DocumentReader, static: Collection[int]) -> None:
        self._reader = reader
        self._version = 0
        self._priorities: Mapping[str, int] = {}
        self.places: Mapping[int, int] = first_places(static)

    def priority(self, objective: str) -> int | None:
        """None: nobody has said how important it is."""
        if self._reader.version(OBJECTIVES) != self._version:
            self.look()
        return self._priorities.get(objective)

    def look(self) -> bool:
        """Whether there is something new."""
        if self._reader.version(OBJECTIVES) == self._version:
            return False
        found = self._reader.read(OBJECTIVES)
        if found is None or found[0] == self._version:
            return False
        self._version, blob = found
        record = _decode(blob)
        self._priorities, self.places = record.priorities, record.places
        return True


class Priorities:
    """How important a request is, by the objective that its headers name. An unknown one counts as none, and is counted."""

    def __init__(self, view: ObjectivesView, unknown: Callable[[], None]) -> None:
        self._priority = view.priority
        self._unknown = unknown

    def of(self, headers: Mapping[str, str]) -> int:
        """Only for requests that have such a header."""
        objective = client_headers.objective(headers)
        if not objective:
            return 0
        priority = self._priority(objective)
        if priority is None:
            self._unknown()
            return 0
        return priority
