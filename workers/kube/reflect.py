"""Follows one resource in one namespace: lists it, watches it, and lists it again if the server cannot continue the watch.

    list (in pages) ─▶ Known.listed ─▶ Change        replaces all known objects at once
    watch           ─▶ Known.event  ─▶ Change        one object was added, changed or deleted; a bookmark only brings a newer version

- A known object stays known until the server deletes it: no failure of any kind removes an object.
- A list that is suddenly empty does not count at once. The known objects stay for `HOLD_S`, while deletes in the watch still count.
  Then the resource is listed again, and that list counts. The same holds for a first list if a predecessor knew objects (`expects`).
- After 410 Gone, or after a version that went back (a restored etcd), the resource is listed again. After a broken connection, the
  watch continues from the last version.
- An object of another namespace, kind or API version, or with an impossible name, is reported once an hour and changes nothing.
- A watch without any event for `IDLE_S` is dropped, because a bookmark is due every minute. The server ends each watch within 10 min.
- A watch whose events take too much of the process's time is read more slowly (`pace`).
- Between two tries there is a bounded pause with jitter. After its first break, a watch restarts at once and nothing is reported.
- A resource that the server does not know (its definition is not installed) has no objects, and is tried again every few seconds.
  If its objects were known, "not found" counts only if the server lists its API groups: a load balancer may also answer "not found".
- `Known` does no I/O. `Reflector` sends the requests and waits.
"""

import asyncio
import contextlib
import math
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from functools import partial
from http import HTTPStatus
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from workers.endpoints.empty_list import HOLD_S, EmptyList
from workers.kube.api import EMPTY, Resource
from workers.kube.errors import ApiError, Unreachable
from workers.kube.outage import Outage, is_away
from workers.kube.pace import Pace

__all__ = ["Change", "Outage", "Reflector", "Resource", "WatchApi"]

EVERYTHING: Final[Mapping[str, str]] = {}
PAGE: Final = 500
PAGE_MIN: Final = 16  # failures reduce the page size: a page of large objects may be too large or take too long
PAGES_MAX: Final = 1000
LIST_S: Final = 30.0
WATCH_S: Final = (300.0, 600.0)  # the server ends a watch after a random time in this range
IDLE_S: Final = 85.0
ABSENT_S: Final = 3.0  # the pause between two tries for a resource that is not installed
STEADY_S: Final = 1.0  # a watch that lasts longer counts as working
BACK_OFF_S: Final = 0.2
BACK_OFF_S_MAX: Final = 5.0
AT_ONCE_S: Final = 0.05
RETRY_AFTER_S_MAX: Final = 30.0
LIST_ANEW_AFTER: Final = 5  # failures in a row
OBJECTS_MAX: Final = 65_536
NAME_CHARS_MAX: Final = 253
VERSION_CHARS_MAX: Final = 128  # the longest resource version; those of etcd have up to 19 digits
SHOWN_CHARS: Final = 128  # how much of a text from the server appears in a report
JITTER: Final = (0.5, 1.0)
REPORTED_MAX: Final = 20  # reports of one event about objects within REPORTED_S
REPORTED_S: Final = 3600.0

T = TypeVar("T")


class WatchApi(Protocol):
    """The part of `workers.kube.api.Api` that a reflector uses."""

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
    """A change, with objects by name. `known` has all objects after the change. `listed` is true after a complete list."""

    known: Mapping[str, T]
    upserted: Mapping[str, T]
    deleted: Mapping[str, T]
    listed: bool = False


class Unreadable(Exception):
    """Raised for an answer that no API server gives."""


class Expired(Exception):
    """Raised if the server's history no longer has the version from which the watch continues. The resource must be listed again."""


class _Meta(msgspec.Struct):
    name: str = ""
    namespace: str = ""
    resource_version: str = msgspec.field(default="", name="resourceVersion")
    continue_: str = msgspec.field(default="", name="continue")


class _Object(msgspec.Struct):
    kind: str = ""
    api_version: str = msgspec.field(default="", name="apiVersion")
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
    """Holds the objects of one resource by name, as of one version of the server's history."""

    def __init__(
        self,
        resource: Resource,
        decode: Callable[[bytes], T],
        report: Callable[..., None],
        *,
        expects: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`expects`: whether a predecessor knew objects of this resource."""
        self.objects: dict[str, T] = {}
        self.version = ""
        self.synced = False
        self.empty = EmptyList()
        self.unread: dict[str, str] = {}  # by name: why the latest state of an object could not be decoded
        self._resource = resource
        self._decode = decode
        self._report = report
        self._expects = expects
        self._reported: set[tuple[str, ...]] = set()
        self._reports: Counter[str] = Counter()
        self._now = now
        self._forget_at = 0.0  # when faults count as new again

    def add(self, items: Iterable[msgspec.Raw], found: dict[str, T]) -> None:
        """Adds the objects of one page of a list to `found`, as far as they can be decoded."""
        for item in items:
            listed = _object.decode(item)
            if self._is_foreign(listed):
                continue
            name = listed.metadata.name
            decoded = self._decoded(name, item)
            if decoded is not None and self._room(name, found):
                found[name] = decoded

    def listed(self, found: dict[str, T], version: str, now: float) -> Change[T] | None:
        """Takes over a complete list as of `version`. Returns None if nothing changed, or if the list is empty and does not count yet.

        Raises Unreadable for an impossible version.
        """
        _check_version(version)
        self.version = version
        begins = self.empty.until is None
        if not self.empty.counts(now, empty=not found, something_known=self.has_objects):
            if begins:
                what = {"resource": str(self._resource), "namespace": self._resource.namespace}
                self._report("a list is suddenly empty: what is known stays for a while", **what, kept_s=HOLD_S)
            return None
        self._expects = False
        first, self.synced = not self.synced, True
        upserted = {name: value for name, value in found.items() if self.objects.get(name) != value}
        deleted = {name: value for name, value in self.objects.items() if name not in found}
        self.objects = found
        return Change(found, upserted, deleted, listed=True) if first or upserted or deleted else None

    def event(self, line: bytes) -> Change[T] | None:
        """Takes over one line of a watch. Raises Expired, ApiError (an error in the stream), Unreadable, msgspec.MsgspecError."""
        event = _event.decode(line)
        if event.type == "ERROR":
            self._raise_error(event.object)
        changed = _object.decode(event.object)
        if event.type in ("ADDED", "MODIFIED", "DELETED") and self._is_foreign(changed):
            return None  # a foreign object's resource version belongs to another history
        self._advance(changed.metadata.resource_version)
        name = changed.metadata.name
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
    def has_objects(self) -> bool:
        """Whether objects are known, to this process or to its predecessor. If so, an empty list needs a confirmation."""
        return bool(self.objects) or self._expects

    def _decoded(self, name: str, item: bytes | msgspec.Raw) -> T | None:
        try:
            decoded = self._decode(bytes(item))
            self.unread.pop(name, None)
            return decoded
        except (msgspec.MsgspecError, ValueError) as wrong:
            if len(self.unread) < OBJECTS_MAX:
                self.unread[name] = str(wrong)
            self._once("object cannot be read", name=name, reason=str(wrong))
            return self.objects.get(name)

    def _is_foreign(self, given: _Object) -> bool:
        """Returns whether this object does not belong to the resource, and reports it. Servers may omit kind, API version and namespace."""
        resource, metadata = self._resource, given.metadata
        version = f"{resource.group}/{resource.version}".removeprefix("/")
        if metadata.namespace not in ("", resource.namespace):
            why = f"is in namespace {metadata.namespace[:SHOWN_CHARS]!r}"
        elif given.api_version not in ("", version):
            why = f"has API version {given.api_version[:SHOWN_CHARS]!r}, not {version}"
        elif not resource.plural.startswith(given.kind.lower()):
            why = f"has kind {given.kind[:SHOWN_CHARS]!r}"
        elif not 0 < len(metadata.name) <= NAME_CHARS_MAX:
            why = f"has a name of {len(metadata.name)} characters"
        else:
            return False
        event = "the API server sent an object of another resource, which is ignored"
        self._once(event, name=metadata.name[:SHOWN_CHARS], reason=why)
        return True

    def _room(self, name: str, objects: Mapping[str, T]) -> bool:
        if len(objects) < OBJECTS_MAX or name in objects:
            return True
        self._once("too many objects, the others are left out", limit=str(OBJECTS_MAX))
        return False

    def _once(self, event: str, **fields: str) -> None:
        """Reports an event once within REPORTED_S, and at most REPORTED_MAX events of its kind."""
        if (now := self._now()) >= self._forget_at:
            self._forget_at = now + REPORTED_S
            self._reported.clear()
            self._reports.clear()
        key = event, *fields.values()
        if key in self._reported or self._reports[event] > REPORTED_MAX:
            return
        self._reports[event] += 1
        if self._reports[event] > REPORTED_MAX:
            fields = {"reason": f"{REPORTED_MAX} were named within an hour, further ones are not: repair these first"}
        self._reported.add(key)
        self._report(event, resource=str(self._resource), namespace=self._resource.namespace, **fields)

    def _advance(self, version: str) -> None:
        if not version:
            return
        _check_version(version)
        if version.isdecimal() and self.version.isdecimal() and int(version) < int(self.version):
            raise Expired(history_gone(self._resource, f"version {version} after {self.version}"))
        self.version = version

    def _raise_error(self, raw: msgspec.Raw) -> None:
        status = _status.decode(raw)
        if status.code == HTTPStatus.GONE or status.reason in ("Expired", "Gone"):
            raise Expired(history_gone(self._resource, status.message))
        raise ApiError(status.code, status.reason, status.message, "watch", self._resource.path)


def _check_version(version: str) -> None:
    if len(version) > VERSION_CHARS_MAX or not version.isascii():
        raise Unreadable(f"{version[:SHOWN_CHARS]!r} is not a resource version of an API server")


def history_gone(resource: Resource, why: str) -> str:
    """Returns the text of an `Expired` exception."""
    return f"the history of {resource} in namespace {resource.namespace} is gone: {why}"


class Reflector(Generic[T]):
    """Follows one resource: lists it and watches it. `run` runs until it is cancelled."""

    def __init__(
        self,
        api: WatchApi,
        resource: Resource,
        *,
        selectors: Mapping[str, str] = EVERYTHING,
        decode: Callable[[bytes], T],
        changed: Callable[[Change[T]], None],
        report: Callable[..., None],
        outage: Outage | None = None,
        expects: bool = False,
        rng: random.Random | None = None,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        """`selectors` select objects, as parameters of a request. `decode` turns JSON into a T; it raises ValueError or MsgspecError.

        `changed` gets every change, after `known` has it. `expects`: whether a predecessor knew objects of this resource. `cpu` measures
        the work for each event (`pace`).
        """
        self.resource = resource
        self.absent = False  # whether the server does not know this resource
        self.problem = ""  # why the last try failed; "" after a success
        self._api = api
        self._selectors = {key: text for key, text in selectors.items() if text}
        self._known = Known(resource, decode, report, expects=expects, now=_now)
        self._changed = changed
        self._outage = outage if outage is not None else Outage(report)
        self._rng = rng if rng is not None else random.Random()
        names = {"resource": str(resource), "namespace": resource.namespace}
        self._pace = Pace(partial(report, **names), cpu)
        self._list_next = True
        self._failures = self._expired = 0
        self._begun = False

    @property
    def known(self) -> Mapping[str, T]:
        """The known objects by name."""
        return self._known.objects

    def unread(self, name: str) -> str:
        """Returns why the latest state of the object `name` could not be decoded; "" if it could be, or if there is no such object."""
        return self._known.unread.get(name, "")

    @property
    def synced(self) -> bool:
        """Whether at least one complete list has counted."""
        return self._known.synced

    async def run(self) -> None:
        """Follows the resource until it is cancelled."""
        try:
            while True:
                try:
                    await self._list_and_watch()
                except ApiError as failure:
                    is_gone = failure.status == HTTPStatus.GONE
                    await self._failed(Expired(history_gone(self.resource, failure.message)) if is_gone else failure)
                except msgspec.MsgspecError as failure:
                    await self._failed(Unreadable(self._invalid(str(failure))))
                except (Expired, Unreachable, Unreadable) as failure:
                    await self._failed(failure)
        finally:
            self._outage.forget(self.resource)

    async def _list_and_watch(self) -> None:
        """Lists the resource if that is due, and watches it until the watch ends."""
        if self._list_next:
            self._begun = False
            if not await self._list():
                await asyncio.sleep(ABSENT_S * self._rng.uniform(0.8, 1.2))
                return
        await self._watch()

    async def _list(self) -> bool:
        """Lists all pages. Returns False if there is no such resource."""
        found: dict[str, T] = {}
        self._known.unread.clear()
        query = {"limit": str(max(PAGE >> self._failures, PAGE_MIN)), **self._selectors}
        for _ in range(PAGES_MAX):
            try:
                answer = await self._api.request("GET", self.resource.path, query=query, timeout_s=LIST_S)
            except ApiError as refused:
                if refused.status != HTTPStatus.NOT_FOUND or not self.resource.group:
                    raise
                if self._known.has_objects:
                    await self._check_groups(refused)
                self._set_absent()
                return False
            # Decode page by page: the bytes of all pages take ten times the memory of the decoded objects.
            page = _page.decode(answer)
            if not page.metadata.resource_version:
                raise Unreadable(self._invalid("a list without a version"))
            self._known.add(page.items or (), found)
            if not page.metadata.continue_:
                self.absent = self._list_next = False
                self.problem = ""
                self._notify(self._known.listed(found, page.metadata.resource_version, _now()))
                return True
            query["continue"] = page.metadata.continue_
        raise Unreachable(f"the list of {self.resource} has no end after {PAGES_MAX} pages")

    async def _check_groups(self, refused: ApiError) -> None:
        """Raises Unreachable if the server does not list its API groups. Then the answer "not found" did not come from an API server."""
        try:
            if _kind.decode(await self._api.request("GET", "/apis")).kind == "APIGroupList":
                return
        except (ApiError, msgspec.MsgspecError):
            pass  # any other answer means the same
        raise Unreachable(f"{refused}; this answer is not from the API server: /apis is not found either") from refused

    def _invalid(self, what: str) -> str:
        resource = self.resource
        return f"the answer for {resource} in namespace {resource.namespace} is not an API server's: {what}"

    def _set_absent(self) -> None:
        self.absent = True
        self._succeeded()
        self._notify(self._known.listed({}, "", _now()))

    async def _watch(self) -> None:
        """Watches the resource until either side ends the watch. A watch counts as working only after `STEADY_S`, not after an event."""
        began, seconds, idle_s = _now(), self._rng.uniform(*WATCH_S), IDLE_S
        if (until := self._known.empty.until) is not None:
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
                        steady = asyncio.get_running_loop().call_later(STEADY_S, self._succeeded)
                        continue
                    self._pace.begin()
                    self._notify(self._known.event(line))
                    if wait_s := self._pace.wait_s(_now()):
                        await asyncio.sleep(wait_s)
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

    def _notify(self, change: Change[T] | None) -> None:
        if change is not None:
            self._changed(change)

    def _succeeded(self) -> None:
        self._failures = self._expired = 0
        self.problem = ""
        self._outage.found(self.resource, _now())

    async def _failed(self, failure: Exception) -> None:
        """Waits before the next try. Reports the failure, unless it is the first one in a row and of a kind that is usual for a watch."""
        if not is_away(failure) or _version_unreachable(failure) or (self._failures + 1) % LIST_ANEW_AFTER == 0:
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
        retry_after_s = failure.retry_after_s if isinstance(failure, ApiError) else 0.0
        await asyncio.sleep(max(wait, min(retry_after_s, RETRY_AFTER_S_MAX)))


def _version_unreachable(failure: Exception) -> bool:
    """Returns whether the server will never reach the version of this watch, because the server was restored from an older state."""
    return isinstance(failure, ApiError) and failure.status == HTTPStatus.GATEWAY_TIMEOUT


def _now() -> float:
    return asyncio.get_running_loop().time()
