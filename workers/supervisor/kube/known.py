"""Keeps the known objects of one resource, as of one version of the API server's history. Does no I/O.

- A known object stays known until the server deletes it: no failure of any kind removes an object.
- A list that is suddenly empty is not accepted at once. The known objects stay for `HOLD_S`, while deletes in the watch are still applied.
  Then the resource is listed again, and the new list is accepted. The same applies to a first list if a predecessor knew objects
  (`expects`).
- An object of another namespace, kind or API version, or with an impossible name, is reported once an hour and changes nothing.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Final, Generic, NamedTuple, TypeVar

import msgspec

from epp.errors import UNREADABLE
from workers.supervisor.endpoints.discovery import HOLD_S, EmptyList
from workers.supervisor.kube.api import Resource
from workers.supervisor.kube.errors import ApiError, decode_status

OBJECTS_MAX: Final = 65_536
NAME_CHARS_MAX: Final = 253
VERSION_CHARS_MAX: Final = 128  # the longest resource version; versions of etcd have up to 19 digits
SHOWN_CHARS: Final = 128  # how much of a text from the server appears in a report
REPORTED_MAX: Final = 20  # the limit of reports of one event about objects within REPORTED_S
REPORTED_S: Final = 3600.0
T = TypeVar("T")


class ObjectChange(NamedTuple, Generic[T]):
    """A change, with objects by name. `known` has all objects after the change. `listed` is true after a complete list."""

    known: Mapping[str, T]
    upserted: Mapping[str, T]
    deleted: Mapping[str, T]
    listed: bool = False


class UnreadableAnswer(Exception):
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


decode_page = msgspec.json.Decoder(_Page).decode
_object = msgspec.json.Decoder(_Object)
_event = msgspec.json.Decoder(_Event)


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
        self._forget_at = 0.0  # when faults are treated as new again

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

    def listed(self, found: dict[str, T], version: str, now: float) -> ObjectChange[T] | None:
        """Takes over a complete list as of `version`. Returns None if nothing changed, or if the list is empty and not accepted yet.

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
        return ObjectChange(found, upserted, deleted, listed=True) if first or upserted or deleted else None

    def event(self, line: bytes) -> ObjectChange[T] | None:
        """Takes over one line of a watch. Raises Expired, ApiError (an error in the stream), Unreadable, one of UNREADABLE."""
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
            return ObjectChange(self.objects, {}, {name: self.objects.pop(name)})
        if event.type not in ("ADDED", "MODIFIED"):
            return None  # a bookmark
        value = self._decoded(name, event.object)
        if value is None or self.objects.get(name) == value or not self._room(name, self.objects):
            return None
        self.objects[name] = value
        return ObjectChange(self.objects, {name: value}, {})

    @property
    def has_objects(self) -> bool:
        """Whether this process or its predecessor knows objects. If so, an empty list needs a confirmation."""
        return bool(self.objects) or self._expects

    def _decoded(self, name: str, item: bytes | msgspec.Raw) -> T | None:
        try:
            decoded = self._decode(bytes(item))
            self.unread.pop(name, None)
            return decoded
        except (*UNREADABLE, ValueError) as wrong:
            if len(self.unread) < OBJECTS_MAX:
                self.unread[name] = str(wrong)
            self._once("object cannot be read", name=name, reason=str(wrong))
            return self.objects.get(name)

    def _is_foreign(self, given: _Object) -> bool:
        """Returns whether this is an object of another resource, and reports it. Servers may omit kind, API version and namespace."""
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
        status = decode_status(raw)
        if status.code == HTTPStatus.GONE or status.reason in ("Expired", "Gone"):
            raise Expired(history_gone(self._resource, status.message))
        raise ApiError(status.code, status.reason, status.message, "watch", self._resource.path)


def _check_version(version: str) -> None:
    if len(version) > VERSION_CHARS_MAX or not version.isascii():
        raise UnreadableAnswer(f"{version[:SHOWN_CHARS]!r} is not a resource version of an API server")


def history_gone(resource: Resource, why: str) -> str:
    """Returns the text of an `Expired` exception."""
    return f"the history of {resource} in namespace {resource.namespace} is gone: {why}"
