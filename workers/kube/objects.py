"""Objectives and model rewrites of an API server: followed in both API groups, for whoever brings sources together.

    four Reflectors (two kinds, two groups) ─▶ objects of this pool ─ by_name ─▶ Found ─ told ─▶ ObjectsWatch

- An object says the same as in a file (`object_kinds`), by the same code: what the API server gives is read as a file's nodes are.
- Only objects whose `poolRef` equals the pool's name and group count; others are nobody's business here, and not mentioned.
- A bad object is reported once, by the reflector that decodes it, and what was last good of it stays. One that is being deleted
  is gone.
- A kind that is not installed has no objects; installed later it is seen. Which of two groups counts is decided name by name, so
  that installing the newer one takes nothing away; the use of the older one is mentioned once per kind.
- All is told again after each change, `TELL_S` later, together with what else has changed until then. What is told is complete once
  every list has arrived, or was refused while the server answered (a role that lacks it does not hold up the others).
- A picker that is new waits for that before it is ready, so that no request goes by the wrong name; for `WAIT_S`, since a kind
  whose lists fail for ever must not keep the others' requests away.

What this does not do: list or watch (`reflect` does), or publish anything.
"""

import asyncio
from collections.abc import Callable, Collection, Iterator
from functools import partial
from itertools import product
from typing import Any, Final

import msgspec

from workers.kube.reflect import HOLD_S, Api, Outage, Reflector, Resource, is_away
from workers.object_kinds import (
    API_VERSIONS,
    GROUPS,
    KINDS,
    OBJECTIVE,
    REWRITE,
    VERSION,
    Found,
    Object,
    Once,
    PoolName,
    by_name,
    read,
)
from workers.yaml_files import Fault, Node

PLURALS: Final = {OBJECTIVE: "inferenceobjectives", REWRITE: "inferencemodelrewrites"}
TELL_S: Final = 0.02
WAIT_S: Final = 30.0
DEPTH_MAX: Final = 32
NEWEST: Final = 0  # of GROUPS

Seen = tuple[Object, ...]  # one, or none where the object is being deleted


class _Metadata(msgspec.Struct):
    name: str = ""
    namespace: str = ""
    created: str | None = msgspec.field(default=None, name="creationTimestamp")
    deleted: str | None = msgspec.field(default=None, name="deletionTimestamp")


class _Item(msgspec.Struct):
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    spec: Any = None


_item = msgspec.json.Decoder(_Item)


def decode(kind: str, version: str, item: bytes) -> Seen:
    """An object as the API server gives it. Raises ValueError, msgspec.MsgspecError."""
    given = _item.decode(item)
    metadata = given.metadata
    if metadata.deleted is not None:
        return ()
    try:
        node = _node({"metadata": {"name": metadata.name, "creationTimestamp": metadata.created}, "spec": given.spec})
        return (read(node, kind, version, f"{metadata.namespace}/{metadata.name}"),)
    except Fault as fault:
        raise ValueError(f"{fault}; what was last good of it stays") from None


def _node(value: Any, depth: int = 0) -> Node:
    """As if it stood in a file."""
    if depth > DEPTH_MAX:
        raise Fault(0, f"nested deeper than {DEPTH_MAX}")
    match value:
        case dict():
            return Node(0, {key: _node(each, depth + 1) for key, each in value.items()})
        case list():
            return Node(0, [_node(each, depth + 1) for each in value])
        case None:
            return Node(0, "", is_null=True)
        case bool():
            return Node(0, str(value).lower())
        case _:
            return Node(0, str(value))


class Heard(Outage):
    """Passes all on to the outage that others share, and remembers which resources the server refused."""

    def __init__(self, shared: Outage, changed: Callable[[], None]) -> None:
        self._shared = shared
        self._changed = changed
        self.refused: set[Resource] = set()

    def lost(self, resource: Resource, failure: Exception, now: float) -> None:
        self._shared.lost(resource, failure, now)
        if not is_away(failure) and resource not in self.refused:
            self.refused.add(resource)
            self._changed()

    def found(self, resource: Resource, now: float) -> None:
        self.refused.discard(resource)
        self._shared.found(resource, now)

    def forget(self, resource: Resource) -> None:
        self._shared.forget(resource)


class KubeObjects:
    """`run` follows them until it is cancelled; `told` hears what there is now, and whether that is all."""

    def __init__(
        self,
        api: Api,
        namespace: str,
        pool: PoolName,
        *,
        told: Callable[[Found, bool], None],
        report: Callable[[str], None],
        outage: Outage | None = None,
        expects: Collection[str] = (),
    ) -> None:
        """`expects`: kinds of which a predecessor knew objects: that there are none is not believed at once."""
        self._pool = pool
        self._expects = expects
        self._told = told
        self._report = report
        self._once = Once(report)
        self._heard = Heard(outage if outage is not None else Outage(report), self._tell_soon)
        self._telling: asyncio.TimerHandle | None = None
        self._believing: asyncio.TimerHandle | None = None
        self._begun_at: float | None = None
        self._reflectors: list[Reflector[Seen]] = [
            Reflector(
                api,
                Resource(group, VERSION, PLURALS[kind], namespace),
                decode=partial(decode, kind, version),
                changed=lambda _: self._tell_soon(),
                report=report,
                outage=self._heard,
            )
            for kind, (group, version) in product(KINDS, zip(GROUPS, API_VERSIONS, strict=True))
        ]

    def missing(self) -> str:
        """What a picker that is new should wait for; "" if there is nothing, or nothing to wait for any longer."""
        if self._begun_at is None or asyncio.get_running_loop().time() < self._begun_at + WAIT_S:
            return next(
                (f"{r.resource} were not listed yet: {r.problem or 'no answer yet'}" for r in self._unheard()), ""
            )
        return ""

    def _unheard(self) -> list[Reflector[Seen]]:
        refused = self._heard.refused
        return [r for r in self._reflectors if not (r.synced or r.resource in refused)]

    async def run(self) -> None:
        """Follow them; ends when cancelled."""
        self._begun_at = asyncio.get_running_loop().time()
        try:
            async with asyncio.TaskGroup() as group:
                for reflector in self._reflectors:
                    group.create_task(reflector.run())
        finally:
            for timer in (self._telling, self._believing):
                if timer is not None:
                    timer.cancel()

    def _tell_soon(self) -> None:
        if self._telling is None:
            self._telling = asyncio.get_running_loop().call_later(TELL_S, self._tell)

    def _tell(self) -> None:
        self._telling = None
        faults: list[str] = []
        found = by_name(self._own(), self._pool, once=self._once, faults=faults)
        for fault in faults:
            self._once(fault, fault)
        self._told(found, not (self._unheard() or self._doubted()))

    def _doubted(self) -> bool:
        """Whether a kind seems to have no objects, and had some; for `HOLD_S`, and for as long as it may not be listed."""
        known = {reflector.resource.plural for reflector in self._reflectors if reflector.known}
        doubted = any(PLURALS[kind] not in known for kind in self._expects)
        if doubted and self._believing is None and not self._refused():
            self._believing = asyncio.get_running_loop().call_later(HOLD_S, self._believe)
        return doubted

    def _refused(self) -> bool:
        """Whether there is a kind that had objects, and of which the server says nothing, in no group."""
        refused = self._heard.refused
        answered = {r.resource.plural for r in self._reflectors if r.synced or r.resource not in refused}
        return any(PLURALS[kind] not in answered for kind in self._expects)

    def _believe(self) -> None:
        self._believing = None
        if not self._refused():
            self._expects = ()
        self._tell_soon()

    def _own(self) -> Iterator[Object]:
        """Those of this pool, the newer group's first."""
        for reflector in self._reflectors:
            for name in sorted(reflector.known):
                for each in reflector.known[name]:
                    if each.pool == self._pool:
                        if each.group != NEWEST:
                            self._deprecated(each)
                        yield each

    def _deprecated(self, old: Object) -> None:
        newer, older = API_VERSIONS[NEWEST], API_VERSIONS[old.group]
        self._once(
            f"{old.place}: {older} of {old.kind} is deprecated, as of others; use {newer}", f"{old.kind} {older}"
        )
