"""Objectives and bands: the priority of a request that names an objective, and the place of its band in the areas.

    supervisor   directory ─ Folder ─▶ priorities by name ─ BandPlaces ─▶ document OBJECTIVES
    worker       document ─ ObjectivesView ─▶ priority of a request; priority -> place of its band

A band's place is a number below `places`. Configured bands and band 0 have fixed places, which all processes compute in the same way.
Another band gets a place when the first objective with its priority appears, and frees it when the last such objective disappears. The
freed place goes to another priority only under two conditions: no request waits at the place in any worker; and the place has been free for
REUSE_AFTER_S, in which every worker learns that it is free. A priority without a place has no band: its requests wait in band 0.

This module does not create bands or move requests.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

import msgspec

from epp.flow.plan import FlowPlan
from shm.documents import DocumentReader, DocumentView
from workers.shared.documents import objectives_of

REUSE_AFTER_S: Final = 5.0


class ObjectivesRecord(msgspec.Struct, array_like=True, frozen=True):
    """The content of the document. `priorities`: objective name -> priority. `places`: priority of a band -> its place."""

    priorities: dict[str, int]
    places: dict[int, int]


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(ObjectivesRecord).decode


def static_bands(plan: FlowPlan | None) -> Collection[int]:
    """Returns the priorities of the bands that exist without any objective. Returns no priorities without flow control."""
    return plan.static() if plan is not None else ()


def first_places(static: Collection[int]) -> dict[int, int]:
    """Returns the fixed places by priority."""
    return {priority: place for place, priority in enumerate(sorted(static))}


class BandPlaces:
    """Assigns places to bands. Only the supervisor has one."""

    def __init__(self, static: Collection[int], places: int, *, empty: Callable[[int], bool], now: float) -> None:
        """`empty(place)`: whether no request waits at the place, in any worker. `now`: monotonic seconds."""
        self._fixed: Mapping[int, int] = first_places(static)
        self._empty = empty
        self._since = now
        self.places = dict(self._fixed)
        # Free place -> the priority that had it before or None, and the time since which the place is free.
        self._free: dict[int, tuple[int | None, float]] = dict.fromkeys(range(len(self._fixed), places), (None, now))
        self.waiting: frozenset[int] = frozenset()  # priorities that have no place yet

    def adopt(self, places: Mapping[int, int]) -> None:
        """Takes over the places that a predecessor assigned."""
        every = (*self._free, *self.places.values())
        kept = {priority: place for priority, place in places.items() if place in every}
        free = sorted(set(every) - set(kept.values()))
        for priority in self._fixed:
            if priority not in kept and free:
                kept[priority] = free.pop(0)
        self.places, self._free = kept, dict.fromkeys(free, (None, self._since))

    def fix(self, static: Collection[int], now: float) -> None:
        """Sets the bands that always exist, and gives a place to each band. Other bands keep their places until the next `want`."""
        self._fixed = dict.fromkeys(static, 0)
        self.want((priority for priority in self.places if priority not in self._fixed), now)

    def want(self, priorities: Iterable[int], now: float) -> bool:
        """Sets the priorities that need a place besides the fixed places. Returns whether a place has changed.

        Call it again while `waiting` is not empty.
        """
        wanted = frozenset(priorities) | self._fixed.keys()
        before = dict(self.places)
        for priority in [p for p in self.places if p not in wanted and p not in self._fixed]:
            self._free[self.places.pop(priority)] = (priority, now)
        waiting = []
        for priority in sorted(wanted - self.places.keys(), reverse=True):
            place = self._place(priority, now)
            if place is None:
                waiting.append(priority)
            else:
                del self._free[place]
                self.places[priority] = place
        self.waiting = frozenset(waiting)
        return self.places != before

    def _place(self, priority: int, now: float) -> int | None:
        """Returns the place that the priority had before, or else the reusable place that has been free longest, or None if no place is
        reusable.
        """
        reusable = None
        for place, (former, since) in self._free.items():
            if former == priority:
                return place
            if reusable is None and (former is None or now - since >= REUSE_AFTER_S) and self._empty(place):
                reusable = place
        return reusable


class ObjectivesView(DocumentView[ObjectivesRecord]):
    """Reads the objectives document in a worker.

    A request that names an objective sees all documents that were published before the request. `changed` is called after each change of
    `content.places`, which a request or the worker's heartbeat notices, so that flow control learns the change.
    """

    def __init__(self, reader: DocumentReader, static: Collection[int], pool: int | None = None) -> None:
        """`pool`: the number of the pool with these objectives; None if the picker has one pool."""
        super().__init__(reader, objectives_of(pool), decode, ObjectivesRecord({}, first_places(static)))
        self.changed: Callable[[], object] = lambda: None

    def priority(self, objective: str) -> int | None:
        """Returns the priority of the objective, or None if the objective is unknown."""
        self.look_once()
        return self.content.priorities.get(objective)

    def look(self) -> bool:
        """Reads the document if it has changed. Returns whether it has changed."""
        if not super().look():
            return False
        self.changed()
        return True


class Priorities:
    """Finds the priority of an objective. Calls `unknown` for an unknown objective."""

    def __init__(self, view: ObjectivesView, unknown: Callable[[], None]) -> None:
        self._priority = view.priority
        self._unknown = unknown

    def of(self, objective: str) -> int:
        """Returns the priority of the objective with this name, or 0 if the objective is unknown."""
        priority = self._priority(objective)
        if priority is None:
            self._unknown()
            return 0
        return priority
