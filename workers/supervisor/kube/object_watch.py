"""Follows the objectives and model rewrites of an API server, in both API groups.

    four Reflectors (two kinds, two groups) ─▶ objects of each pool ─ by_name ─▶ Found ─ changed ─▶ ObjectsWatch of the pool

- An object has the same meaning as in a file (`object_kinds`): the same code reads it, as a tree of nodes.
- For a pool, only objects with a `poolRef` that equals name and group of the pool are used. Objects of other pools are ignored without a
  report.
- A bad object is reported once, by the reflector that decodes it, and its last good state stays. An object that is being deleted is treated
  as gone.
- A kind that is not installed has no objects; if it is installed later, it is followed. If both groups have an object of one name, the
  object of the newer group is used. Other objects of the older group stay. The use of the older group is reported once per kind.
- `changed` gets all objects `NOTIFY_S` after a change, so that changes in this time come together. The objects are complete when every
  list has arrived or was refused by a server that answers (a missing role for one kind does not delay the others).
- A new picker is not ready before the objects are complete, so that no request goes to a server under the wrong model name. It waits for
  `WAIT_S` at most, because one kind that can never be listed must not stop all requests.

This module does not list or watch (`reflect` does), and does not publish.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, Final

import msgspec

from workers.host.yaml_files import Fault, Node
from workers.supervisor.endpoints.discovery import HOLD_S
from workers.supervisor.kube.api import Api, Resource
from workers.supervisor.kube.object_kinds import (
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
    Remark,
    by_name,
    read,
)
from workers.supervisor.kube.reflect import Outage, Reflector

PLURALS: Final = {OBJECTIVE: "inferenceobjectives", REWRITE: "inferencemodelrewrites"}
NOTIFY_S: Final = 0.02
WAIT_S: Final = 30.0
DEPTH_MAX: Final = 32
NEWEST: Final = 0  # the index of the newest group in GROUPS

Seen = tuple[Object, ...]  # one object, or empty if the object is being deleted


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
    """Decodes an object as the API server sends it (JSON). Raises ValueError, msgspec.MsgspecError."""
    given = _item.decode(item)
    metadata = given.metadata
    if metadata.deleted is not None:
        return ()
    try:
        node = _node({"metadata": {"name": metadata.name, "creationTimestamp": metadata.created}, "spec": given.spec})
        return (read(node, kind, version, f"{metadata.namespace}/{metadata.name}"),)
    except Fault as fault:
        raise ValueError(f"{fault}; its last good state stays") from None


def _node(value: Any, depth: int = 0) -> Node:
    """Turns a JSON value into the node that a file with this value would have."""
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


class KubeObjects:
    """The objects of the pools of one namespace. `run` follows them until it is cancelled."""

    def __init__(
        self,
        api: Api,
        namespace: str,
        changed: Mapping[PoolName, Sequence[Callable[[Found, bool], None]]],
        *,
        report: Callable[..., None],
        outage: Outage,
        expects: Collection[str] = (),
    ) -> None:
        """`changed`: the function to call for each pool, with all its objects, and with whether they are complete.

        `expects`: the kinds of which a predecessor knew objects. An empty list of such a kind is accepted only after HOLD_S.
        """
        self._expects = expects
        self._changed = changed
        self._report = report
        self._once = Once(report)
        self._outage = outage
        outage.on_refusal(self.notify_soon)
        self._notifying: asyncio.TimerHandle | None = None
        self._accepting: asyncio.TimerHandle | None = None
        self._begun_at: float | None = None
        self._delivered = False  # whether `changed` was called with the objects of all first lists
        self._reflectors: list[Reflector[Seen]] = [
            Reflector(
                api,
                Resource(group, VERSION, PLURALS[kind], namespace),
                decode=partial(decode, kind, version),
                changed=lambda _: self.notify_soon(),
                report=report,
                outage=outage,
            )
            for kind, (group, version) in product(KINDS, zip(GROUPS, API_VERSIONS, strict=True))
        ]

    def missing(self) -> str:
        """Returns what a new picker should wait for, or "", also after it has waited for WAIT_S."""
        if self._begun_at is None or asyncio.get_running_loop().time() < self._begun_at + WAIT_S:
            for reflector in self._unlisted():
                return f"{reflector.resource} were not listed yet: {reflector.problem or 'no answer yet'}"
            return "" if self._delivered else "objectives and rewrites were listed, and take effect in a moment"
        return ""

    def _unlisted(self) -> list[Reflector[Seen]]:
        return [r for r in self._reflectors if not (r.synced or self._outage.refuses(r.resource))]

    async def run(self) -> None:
        """Follows the objects until it is cancelled."""
        self._begun_at = asyncio.get_running_loop().time()
        try:
            async with asyncio.TaskGroup() as group:
                for reflector in self._reflectors:
                    group.create_task(reflector.run())
        finally:
            for timer in (self._notifying, self._accepting):
                if timer is not None:
                    timer.cancel()

    def notify_soon(self) -> None:
        """Calls `changed` for all pools after NOTIFY_S."""
        if self._notifying is None:
            self._notifying = asyncio.get_running_loop().call_later(NOTIFY_S, self._notify)

    def _notify(self) -> None:
        self._notifying = None
        faults: list[Remark] = []
        unlisted = bool(self._unlisted())
        complete = not (unlisted or self._suspicious())
        objects = self._by_pool()
        for pool, changed in self._changed.items():
            found = by_name(objects.get(pool, ()), pool, once=self._once, faults=faults)
            for each in changed:
                each(found, complete)
        for fault in faults:
            self._once(fault)
        self._delivered = self._delivered or not unlisted

    def _suspicious(self) -> bool:
        """Returns whether a kind that had objects seems to have none. If so, sets a timer: after HOLD_S, the empty list is accepted, unless
        the server refuses to list the kind.
        """
        known = {reflector.resource.plural for reflector in self._reflectors if reflector.known}
        suspicious = any(PLURALS[kind] not in known for kind in self._expects)
        if suspicious and self._accepting is None and not self._refused():
            self._accepting = asyncio.get_running_loop().call_later(HOLD_S, self._accept)
        return suspicious

    def _refused(self) -> bool:
        """Returns whether the server refuses to list, in both groups, a kind that had objects."""
        answered = {r.resource.plural for r in self._reflectors if r.synced or not self._outage.refuses(r.resource)}
        return any(PLURALS[kind] not in answered for kind in self._expects)

    def _accept(self) -> None:
        self._accepting = None
        if not self._refused():
            self._expects = ()
        self.notify_soon()

    def _by_pool(self) -> Mapping[PoolName, Sequence[Object]]:
        """Returns the objects of each pool, with objects of the newer group first."""
        found: dict[PoolName, list[Object]] = {pool: [] for pool in self._changed}
        for reflector in self._reflectors:
            for name in sorted(reflector.known):
                for each in reflector.known[name]:
                    for pool in each.pools:
                        if pool not in found:
                            continue
                        if each.group != NEWEST:
                            self._deprecated(each)
                        found[pool].append(each)
        return found

    def _deprecated(self, old: Object) -> None:
        newer, older = API_VERSIONS[NEWEST], API_VERSIONS[old.group]
        text = f"{older} of {old.kind} is deprecated, here and in other objects; use {newer}"
        self._once(Remark(old.place, text))
