"""One resource of one namespace, followed: list, watch, list again when the watch's history is gone.

    list (in pages) ─▶ Known.listed ─▶ Change        what is known is replaced as a whole, at once
    watch           ─▶ Known.event  ─▶ Change        one object came, changed or went; bookmarks move the version on

- What is known stays known until the server says otherwise: no failure of any kind removes an object.
- A list that is empty though objects were known is not believed at once: they are held for `HOLD_S`, deletes of the watch
  count meanwhile, then it is asked for again. A predecessor's objects (`expects`) are held likewise.
- 410 Gone, or a version that went back (a restored etcd): listed again. Anything else: watched again from where it broke off.
- A watch over which nothing came for `IDLE_S` is given up: a bookmark is due every minute. The server ends each watch within ten.
- Tries are spaced by a back-off with jitter, bounded. A watch that breaks is begun again at once, once, and nothing is said.
- A resource that the server does not know (its definition is not installed) has no objects; it is looked for every few seconds.
  Who knew objects of it believes that only of a server that can tell its API groups: load balancers say "not found" too.

`Known` is pure; `Reflector` waits. `Outage` says once that the API is away, and once that it answers again, for all that share it.
"""

import asyncio
import contextlib
import math
import random
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from workers.kube.api import EMPTY, ApiError, Resource, Unreachable

__all__ = ["Api", "Change", "Outage", "Reflector", "Resource"]

PAGE: Final = 500
PAGE_MIN: Final = 16  # after failures: pages of large objects may be too large, or too long on their way
PAGES_MAX: Final = 1000
LIST_S: Final = 30.0
WATCH_S: Final = (300.0, 600.0)  # how long the server is to let a watch live
IDLE_S: Final = 85.0
HOLD_S: Final = 10.0
ABSENT_S: Final = 3.0  # between looks for a resource that is not installed
STEADY_S: Final = 1.0  # a watch that lives for longer works
BACK_OFF_S: Final = 0.2
BACK_OFF_S_MAX: Final = 5.0
AT_ONCE_S: Final = 0.05
RETRY_AFTER_S_MAX: Final = 30.0
LIST_ANEW_AFTER: Final = 5  # watches in a row that were refused
OBJECTS_MAX: Final = 65_536
JITTER: Final = (0.5, 1.0)

T = TypeVar("T")


class Api(Protocol):
    """What is needed of `workers.kube.api.Api`."""

    async def request(
        self,
        verb: str,
        path: str,
        *,
        query: Mapping[str, str] = EMPTY,
        body: bytes | None = None,
        content_type: str = "application/json",
        timeout_s: float = 10.0,
    ) -> bytes: ...

    def lines(self, path: str, *, query: Mapping[str, str], idle_s: float) -> AsyncGenerator[bytes, None]: ...


class Change(NamedTuple, Generic[T]):
    """What has become different, by name; `known` is all there is now. `listed`: this is the outcome of a whole list."""

    known: Mapping[str, T]
    upserted: Mapping[str, T]
    deleted: Mapping[str, T]
    listed: bool = False


class Unreadable(Exception):
    """What came is not what an API server says."""


class Expired(Exception):
    """The history that the watch needs is gone, or is another one: list again."""


class _Meta(msgspec.Struct):
    name: str = ""
    resource_version: str = msgspec.field(default="", name="resourceVersion")
    continue_: str = msgspec.field(default="", name="continue")


class _Object(msgspec.Struct):
    metadata: _Meta = msgspec.field(default_factory=_Meta)


class _Page(msgspec.Struct):
    metadata: _Meta = msgspec.field(default_factory=_Meta)
    items: list[msgspec.Raw] | None = None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Kind(msgspec.Struct):
    kind: str = ""


class _Status(msgspec.Struct):
    code: int = 0
    reason: str = ""
    message: str = ""


_object = msgspec.json.Decoder(_Object)
_page = msgspec.json.Decoder(_Page)
_event = msgspec.json.Decoder(_Event)
_status = msgspec.json.Decoder(_Status)
_kind = msgspec.json.Decoder(_Kind)


class Known(Generic[T]):
    """The objects of one resource by name, and up to which version of the server's history."""

    def __init__(
        self, resource: Resource, decode: Callable[[bytes], T], report: Callable[[str], None], *, expects: bool = False
    ) -> None:
        self.objects: dict[str, T] = {}
        self.version = ""
        self.synced = False
        self.held_until: float | None = None  # an empty list is not believed before
        self.unread: dict[str, str] = {}  # why, by name, objects could not be decoded when they were seen last
        self._resource = resource
        self._decode = decode
        self._report = report
        self._expects = expects
        self._told: set[str] = set()

    def add(self, items: Iterable[msgspec.Raw], found: dict[str, T]) -> None:
        """A page of a list; `found` grows by what can be read of it."""
        for item in items:
            name = _object.decode(item).metadata.name
            decoded = self._decoded(name, item)
            if decoded is not None and self._room(name, found):
                found[name] = decoded

    def listed(self, found: dict[str, T], version: str, now: float) -> Change[T] | None:
        """All objects there are, as of `version`. None: it is not believed yet, or nothing has changed."""
        self.version = version
        if not found and self.doubts and not self._waited(now):
            return None
        self.held_until = None
        self._expects = False
        first, self.synced = not self.synced, True
        upserted = {name: value for name, value in found.items() if self.objects.get(name) != value}
        deleted = {name: value for name, value in self.objects.items() if name not in found}
        self.objects = found
        return Change(found, upserted, deleted, listed=True) if first or upserted or deleted else None

    def event(self, line: bytes) -> Change[T] | None:
        """One line of a watch. Raises Expired, ApiError (the server's own words), msgspec.MsgspecError."""
        event = _event.decode(line)
        if event.type == "ERROR":
            self._refused(event.object)
        metadata = _object.decode(event.object).metadata
        self._move(metadata.resource_version)
        name = metadata.name
        if event.type == "DELETED":
            self.unread.pop(name, None)
            if name not in self.objects:
                return None
            return Change(self.objects, {}, {name: self.objects.pop(name)})
        if event.type not in ("ADDED", "MODIFIED"):
            return None  # a bookmark
        value = self._decoded(name, event.object)
        if value is None or self.objects.get(name) == value or not self._room(name, self.objects):
            return None
        self.objects[name] = value
        return Change(self.objects, {name: value}, {})

    @property
    def doubts(self) -> bool:
        """Whether it would be news that there is nothing."""
        return bool(self.objects) or self._expects

    def _waited(self, now: float) -> bool:
        """Whether an empty list has been said for long enough."""
        if self.held_until is None:
            self.held_until = now + HOLD_S
        return now >= self.held_until

    def _decoded(self, name: str, item: bytes | msgspec.Raw) -> T | None:
        try:
            decoded = self._decode(bytes(item))
            self.unread.pop(name, None)
            return decoded
        except (msgspec.MsgspecError, ValueError) as wrong:
            if len(self.unread) < OBJECTS_MAX:
                self.unread[name] = str(wrong)
            self._once(name, f"{self._resource} '{name}' in namespace {self._resource.namespace}: {wrong}")
            return self.objects.get(name)

    def _room(self, name: str, objects: Mapping[str, T]) -> bool:
        if len(objects) < OBJECTS_MAX or name in objects:
            return True
        self._once("", f"there are more than {OBJECTS_MAX} {self._resource}: those beyond are left out")
        return False

    def _once(self, key: str, text: str) -> None:
        if text not in self._told and len(self._told) < OBJECTS_MAX:
            self._told.add(text)
            self._report(text)

    def _move(self, version: str) -> None:
        if not version:
            return
        if version.isdigit() and self.version.isdigit() and int(version) < int(self.version):
            raise Expired(gone(self._resource, f"version {version} after {self.version}"))
        self.version = version

    def _refused(self, status: msgspec.Raw) -> None:
        said = _status.decode(status)
        if said.code == HTTPStatus.GONE or said.reason in ("Expired", "Gone"):
            raise Expired(gone(self._resource, said.message))
        raise ApiError(said.code, said.reason, said.message, "watch", self._resource.path)


def gone(resource: Resource, why: str) -> str:
    """Of a history."""
    return f"the history of {resource} in namespace {resource.namespace} is gone: {why}"


class Outage:
    """What does not work, over all resources; says when that begins and when it ends."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._away: set[Resource] = set()
        self._refused: dict[Resource, str] = {}
        self._since = 0.0

    def lost(self, resource: Resource, failure: Exception, now: float) -> None:
        """A try has failed."""
        if is_away(failure):
            if not self._away:
                self._since = now
                self._report(f"the Kubernetes API is away ({failure}); what is known stays, and it is tried again")
            self._away.add(resource)
            return
        text = str(failure)
        if self._refused.get(resource) != text:
            self._refused[resource] = text
            self._report(f"{text}; tried again")

    def found(self, resource: Resource, now: float) -> None:
        """It works."""
        if self._refused.pop(resource, None) is not None:
            self._report(f"{resource} in namespace {resource.namespace} can be followed again")
        if resource in self._away:
            self._away.discard(resource)
            if not self._away:
                self._report(f"the Kubernetes API answers again, after {now - self._since:.1f} s")

    def forget(self, resource: Resource) -> None:
        """It is not followed any more."""
        self._refused.pop(resource, None)
        self._away.discard(resource)


def is_away(failure: Exception) -> bool:
    """Whether a failure is of the API as such, not of one request."""
    if isinstance(failure, ApiError):
        return failure.status >= 500 or failure.status == HTTPStatus.TOO_MANY_REQUESTS
    return isinstance(failure, Unreachable)


class Reflector(Generic[T]):
    """`run` follows the resource until it is cancelled; `changed` hears of every change, after `known` has it."""

    def __init__(
        self,
        api: Api,
        resource: Resource,
        *,
        labels: str = "",
        field: str = "",
        decode: Callable[[bytes], T],
        changed: Callable[[Change[T]], None],
        report: Callable[[str], None],
        outage: Outage | None = None,
        expects: bool = False,
        rng: random.Random | None = None,
    ) -> None:
        self.resource = resource
        self.absent = False  # the server does not know this resource
        self.problem = ""  # why the last try failed; "" while all is well
        self._api = api
        self._selectors = {key: text for key, text in (("labelSelector", labels), ("fieldSelector", field)) if text}
        self._known = Known(resource, decode, report, expects=expects)
        self._changed = changed
        self._outage = outage if outage is not None else Outage(report)
        self._rng = rng if rng is not None else random.Random()
        self._list_next = True
        self._failures = self._expired = 0
        self._begun = False

    @property
    def known(self) -> Mapping[str, T]:
        """What there is, by name."""
        return self._known.objects

    def unread(self, name: str) -> str:
        """Why an object of this name could not be decoded when it was seen last; "" if it could, or was not seen."""
        return self._known.unread.get(name, "")

    @property
    def synced(self) -> bool:
        """Whether a list was complete, and believed, at least once."""
        return self._known.synced

    async def run(self) -> None:
        """Follow it; ends when cancelled."""
        try:
            while True:
                try:
                    await self._turn()
                except ApiError as failure:
                    is_gone = failure.status == HTTPStatus.GONE
                    await self._failed(Expired(gone(self.resource, failure.message)) if is_gone else failure)
                except msgspec.MsgspecError as failure:
                    await self._failed(Unreadable(self._nonsense(str(failure))))
                except (Expired, Unreachable, Unreadable) as failure:
                    await self._failed(failure)
        finally:
            self._outage.forget(self.resource)

    async def _turn(self) -> None:
        """A list if one is due, and a watch to its end."""
        if self._list_next:
            self._begun = False
            if not await self._list():
                await asyncio.sleep(ABSENT_S * self._rng.uniform(0.8, 1.2))
                return
        await self._watch()

    async def _list(self) -> bool:
        """All pages; False when there is no such resource."""
        found: dict[str, T] = {}
        self._known.unread.clear()
        query = {"limit": str(max(PAGE >> self._failures, PAGE_MIN)), **self._selectors}
        for _ in range(PAGES_MAX):
            try:
                answer = await self._api.request("GET", self.resource.path, query=query, timeout_s=LIST_S)
            except ApiError as refused:
                if refused.status != HTTPStatus.NOT_FOUND or not self.resource.group:
                    raise
                if self._known.doubts:
                    await self._ask_for_groups(refused)
                self._is_absent()
                return False
            # Page by page: the bytes of all together would be ten times what is kept of them.
            page = _page.decode(answer)
            if not page.metadata.resource_version:
                raise Unreadable(self._nonsense("a list without a version"))
            self._known.add(page.items or (), found)
            if not page.metadata.continue_:
                self.absent = self._list_next = False
                self.problem = ""
                self._take(self._known.listed(found, page.metadata.resource_version, _now()))
                return True
            query["continue"] = page.metadata.continue_
        raise Unreachable(f"the list of {self.resource} has no end after {PAGES_MAX} pages")

    async def _ask_for_groups(self, refused: ApiError) -> None:
        """Raises Unreachable where nobody tells them: it was not the API server who refused."""
        try:
            if _kind.decode(await self._api.request("GET", "/apis")).kind == "APIGroupList":
                return
        except (ApiError, msgspec.MsgspecError):
            pass  # what it says instead does not matter
        raise Unreachable(f"{refused}; it was not the API server who said that, /apis is not found either") from refused

    def _nonsense(self, what: str) -> str:
        resource = self.resource
        return f"what came for {resource} in namespace {resource.namespace} is not an API server's: {what}"

    def _is_absent(self) -> None:
        self.absent = True
        self._well()
        self._take(self._known.listed({}, "", _now()))

    async def _watch(self) -> None:
        """To its end, whoever ends it. Whether it worked is known after `STEADY_S`, or by its first event."""
        began, seconds, idle_s = _now(), self._rng.uniform(*WATCH_S), IDLE_S
        if (until := self._known.held_until) is not None:
            seconds = idle_s = max(until - began, BACK_OFF_S)
        query = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._known.version,
            "timeoutSeconds": str(math.ceil(seconds)),
            **self._selectors,
        }
        steady: asyncio.TimerHandle | None = None
        self._begun = False
        try:
            async with contextlib.aclosing(self._api.lines(self.resource.path, query=query, idle_s=idle_s)) as lines:
                async for line in lines:
                    if not line:
                        self._begun = True
                        steady = asyncio.get_running_loop().call_later(STEADY_S, self._well)
                        continue
                    self._take(self._known.event(line))
                    self._well()
                    if until is not None and _now() >= until:
                        break
        except Unreachable:
            if until is None or _now() < until:
                raise
        finally:
            if steady is not None:
                steady.cancel()
        if until is not None and _now() >= until:
            self._list_next = True
        elif _now() - began < STEADY_S:
            raise Unreachable(f"a watch of {self.resource} ended as soon as it had begun")

    def _take(self, change: Change[T] | None) -> None:
        if change is not None:
            self._changed(change)

    def _well(self) -> None:
        self._failures = self._expired = 0
        self.problem = ""
        self._outage.found(self.resource, _now())

    async def _failed(self, failure: Exception) -> None:
        """Say so, unless it is nothing yet, and wait."""
        if not is_away(failure) or _too_large(failure) or (self._failures + 1) % LIST_ANEW_AFTER == 0:
            self._list_next = True
        if isinstance(failure, Expired):
            self._expired += 1
        else:
            self._failures += 1
        routine = self._expired == 1 if isinstance(failure, Expired) else self._begun and self._failures == 1
        if routine and not isinstance(failure, ApiError):
            await asyncio.sleep(AT_ONCE_S * self._rng.random())
            return
        self.problem = str(failure)
        self._outage.lost(self.resource, failure, _now())
        tries = max(self._failures, self._expired)
        wait = min(BACK_OFF_S * 2.0 ** min(tries - 1, 10), BACK_OFF_S_MAX) * self._rng.uniform(*JITTER)
        asked = failure.retry_after_s if isinstance(failure, ApiError) else 0.0
        await asyncio.sleep(max(wait, min(asked, RETRY_AFTER_S_MAX)))


def _too_large(failure: Exception) -> bool:
    """The server has not come to our version and will not: it was restored from an older state."""
    return isinstance(failure, ApiError) and failure.status == HTTPStatus.GATEWAY_TIMEOUT


def _now() -> float:
    return asyncio.get_running_loop().time()
