"""A fake API server in memory.

The server keeps a history and can forget it. It pages lists, selects by label and name, sends bookmarks, and fails in the ways in which
servers and networks fail.
"""

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any, NamedTuple

from epp.endpoints.label_selectors import parse
from workers.host.options import POOL_GROUP
from workers.supervisor.kube.api import EMPTY, Resource
from workers.supervisor.kube.errors import ApiError, Unreachable

BOOKMARK_S = 60.0
Object = dict[str, Any]
POOLS = Resource(POOL_GROUP, "v1", "inferencepools", "space")
PODS = Resource("", "v1", "pods", "space")


class Moment(NamedTuple):
    """One step of the history: an object before and after a change."""

    version: int
    name: str
    before: Object | None
    after: Object | None


class Collection:
    """The objects of one resource."""

    def __init__(self) -> None:
        self.objects: dict[str, Object] = {}
        self.history: list[Moment] = []


class FakeApi:
    """A server with `request` and `lines` as in `workers.supervisor.kube.api.Api`."""

    def __init__(self) -> None:
        self.version = 10
        self.forgotten = 0  # a watch from an earlier version gets 410
        self.failure: Exception | None = None  # raised by every request
        self.forbidden: set[str] = set()  # verbs
        self.empty_lists = False  # lists are wrongly empty
        self.silent = False  # watches send nothing, not even bookmarks
        self.closes_at_once = False
        self.answer: bytes | None = None  # to every list
        self.misrouted = False  # a load balancer answers every request with "not found"
        self.gone_in_stream = False
        self.page = 0  # items in a page; 0: as many as the request asks for
        self.requests: list[tuple[str, str]] = []  # the verb and the selector
        self.watching = 0
        self._collections: dict[str, Collection] = {}
        self._moved: list[asyncio.Event] = []
        self._broken = 0
        self._uids = itertools.count(1)

    # What happens in the cluster.

    def install(self, resource: Resource) -> Collection:
        return self._collections.setdefault(resource.path, Collection())

    def remove(self, resource: Resource) -> None:
        del self._collections[resource.path]

    def put(self, resource: Resource, name: str, thing: Object | None = None) -> None:
        """Creates or changes an object. A new object gets a new UID."""
        collection = self.install(resource)
        before = collection.objects.get(name)
        uid = before["metadata"]["uid"] if before else f"uid-{next(self._uids)}"
        fields = thing or {}
        metadata = {"namespace": resource.namespace, **fields.get("metadata", {}), "name": name, "uid": uid}
        self._step(collection, name, {**fields, "metadata": metadata})

    def delete(self, resource: Resource, name: str) -> None:
        self._step(self.install(resource), name, None)

    def forget(self) -> None:
        """Compacts the history: no watch can begin at an earlier version."""
        self.forgotten = self.version
        for collection in self._collections.values():
            collection.history.clear()

    def restore(self, version: int) -> None:
        """Replaces the server's history by an older one."""
        self.version = version
        self.forget()
        self.forgotten = 0
        self.break_watches()

    def break_watches(self) -> None:
        self._broken += 1
        self._wake()

    # What a client does.

    async def request(
        self,
        verb: str,
        path: str,
        *,
        query: Mapping[str, str] = EMPTY,
        body: bytes | None = None,
        content_type: str = "application/json",
        timeout_s: float = 10.0,
    ) -> bytes:
        assert (verb, body, content_type) == ("GET", None, "application/json")
        if path == "/apis" and not self.misrouted:
            return b'{"kind":"APIGroupList","groups":[]}'
        self.requests.append(("list", query.get("labelSelector", query.get("fieldSelector", ""))))
        await self._sent()
        collection = self._found(path, "list")
        if self.answer is not None:
            return self.answer
        selected = [thing for _, thing in sorted(collection.objects.items()) if _selects(query, thing)]
        if self.empty_lists:
            selected = []
        start, _, version = query.get("continue", "0@").partition("@")
        if version and int(version) < self.forgotten:
            raise ApiError(410, "Expired", "the continue token is too old", "list", path)
        size = self.page or int(query["limit"])
        items, more = selected[int(start) : int(start) + size], int(start) + size < len(selected)
        metadata = {"resourceVersion": version or str(self.version)}
        if more:
            metadata["continue"] = f"{int(start) + size}@{version or self.version}"
        return json.dumps({"metadata": metadata, "items": items}).encode()

    async def lines(self, path: str, *, query: Mapping[str, str], idle_s: float) -> AsyncGenerator[bytes, None]:
        self.requests.append(("watch", query.get("labelSelector", query.get("fieldSelector", ""))))
        await self._sent()
        collection = self._found(path, "watch")
        at = int(query["resourceVersion"])
        if at < self.forgotten and self.gone_in_stream:
            yield b""
            yield _line("ERROR", {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"})
            return
        if at < self.forgotten:
            raise ApiError(410, "Expired", f"too old resource version: {at}", "watch", path)
        loop = asyncio.get_running_loop()
        ends, broken, moved = loop.time() + int(query["timeoutSeconds"]), self._broken, asyncio.Event()
        self._moved.append(moved)
        self.watching += 1
        try:
            yield b""
            if self.closes_at_once:
                return
            idle_at = loop.time() + idle_s
            while True:
                for line, version in list(_events(collection, query, at)):
                    if not self.silent:
                        at, idle_at = version, loop.time() + idle_s
                        yield line
                wait = min(idle_at, ends, loop.time() + BOOKMARK_S) - loop.time()
                moved.clear()
                try:
                    async with asyncio.timeout(wait):
                        await moved.wait()
                except TimeoutError:
                    if loop.time() >= ends and not self.silent:
                        return
                    if loop.time() >= idle_at:
                        raise Unreachable("nothing came") from None
                    if not self.silent:
                        idle_at = loop.time() + idle_s
                        at = max(at, self.version) if not list(_events(collection, query, at)) else at
                        yield _line("BOOKMARK", {"metadata": {"resourceVersion": str(self.version)}})
                if self._broken != broken:
                    raise Unreachable("connection reset")
        finally:
            self._moved.remove(moved)
            self.watching -= 1

    async def _sent(self) -> None:
        # A request takes time, virtual or real.
        await asyncio.sleep(0.001)

    def _found(self, path: str, verb: str) -> Collection:
        if self.failure is not None:
            raise self.failure
        if verb in self.forbidden:
            raise ApiError(403, "Forbidden", "no such rule", verb, path)
        if path not in self._collections or self.misrouted:
            raise ApiError(404, "NotFound", "could not find the requested resource", verb, path)
        return self._collections[path]

    def _step(self, collection: Collection, name: str, after: Object | None) -> None:
        before = collection.objects.pop(name, None)
        if before is None and after is None:
            return
        self.version += 1
        if after is not None:
            after["metadata"]["resourceVersion"] = str(self.version)
            collection.objects[name] = after
        collection.history.append(Moment(self.version, name, before, after))
        self._wake()

    def _wake(self) -> None:
        for moved in self._moved:
            moved.set()


def _events(collection: Collection, query: Mapping[str, str], after: int) -> Iterator[tuple[bytes, int]]:
    for moment in collection.history:
        if moment.version <= after:
            continue
        was = moment.before is not None and _selects(query, moment.before)
        if moment.after is not None and _selects(query, moment.after):
            yield _line("MODIFIED" if was else "ADDED", moment.after), moment.version
        elif was and moment.before is not None:
            metadata = {**moment.before["metadata"], "resourceVersion": str(moment.version)}
            yield _line("DELETED", {**moment.before, "metadata": metadata}), moment.version


def _line(kind: str, thing: Object) -> bytes:
    return json.dumps({"type": kind, "object": thing}).encode()


def _selects(query: Mapping[str, str], thing: Object) -> bool:
    metadata = thing["metadata"]
    name, labels = query.get("fieldSelector", "").removeprefix("metadata.name="), query.get("labelSelector", "")
    return (not name or metadata["name"] == name) and (not labels or parse(labels).matches(metadata.get("labels", {})))


def pod(ip: str = "10.0.0.1", *, app: str = "vllm", ready: bool = True, **metadata: Any) -> Object:
    status = "True" if ready else "False"
    return {"metadata": {"labels": {"app": app}, **metadata}, "status": {"podIP": ip, "conditions": [{"type": "Ready", "status": status}]}}


def pool(*ports: int, app: str = "vllm", protocol: str = "http", **metadata: Any) -> Object:
    spec = {
        "selector": {"matchLabels": {"app": app}},
        "targetPorts": [{"number": port} for port in ports or (8000,)],
        "appProtocol": protocol,
    }
    return {"metadata": metadata, "spec": spec}
