"""Follows one resource in one namespace: lists it, watches it, and lists it again if the server cannot continue the watch.

    list (in pages) ─▶ Known.listed ─▶ Change        replaces all known objects at once
    watch           ─▶ Known.event  ─▶ Change        one object was added, changed or deleted; a bookmark only brings a newer version

- After 410 Gone, or after a version that went back (a restored etcd), the resource is listed again. After a broken connection, the
  watch continues from the last version.
- A watch without any event for `IDLE_S` is dropped, because a bookmark is due every minute. The server ends each watch within 10 min.
- A watch whose events take too much of the process's time is read more slowly (`pace`).
- Between two tries there is a bounded pause with jitter. After its first break, a watch restarts at once and nothing is reported.
- A resource that the server does not know (its definition is not installed) has no objects, and is tried again every few seconds. If its
  objects were known, "not found" is believed only if the server lists its API groups, because a load balancer may also answer "not found".
- `Known` does no I/O (`workers.supervisor.kube.known`). `Reflector` sends the requests and waits.
"""

import asyncio
import contextlib
import math
import random
import time
from collections.abc import Callable, Mapping
from functools import partial
from http import HTTPStatus
from typing import Final, Generic

import msgspec

from epp.errors import UNREADABLE
from workers.supervisor.kube.api import Api, Resource
from workers.supervisor.kube.errors import ApiError, Unreachable
from workers.supervisor.kube.known import Expired, Known, ObjectChange, T, UnreadableAnswer, decode_page, history_gone
from workers.supervisor.pages.turns import Share

EVERYTHING: Final[Mapping[str, str]] = {}
PAGE: Final = 500
PAGE_MIN: Final = 16  # failures reduce the page size: a page of large objects may be too large or take too long
PAGES_MAX: Final = 1000
LIST_S: Final = 30.0
WATCH_S: Final = (300.0, 600.0)  # the server ends a watch after a random time in this range
IDLE_S: Final = 85.0
ABSENT_S: Final = 3.0  # the pause between two tries for a resource that is not installed
STEADY_S: Final = 1.0  # a watch that lasts longer is taken as working
BACK_OFF_S: Final = 0.2
BACK_OFF_S_MAX: Final = 5.0
AT_ONCE_S: Final = 0.05
RETRY_AFTER_S_MAX: Final = 30.0
LIST_ANEW_AFTER: Final = 5  # failures in a row
JITTER: Final = (0.5, 1.0)
# Of the pace of a watch:
SHARE: Final = 1 / 8
BURST_S: Final = 0.1
SLOWED_S: Final = 1.0
QUIET_S: Final = 60.0  # after this time without a wait, earlier waits are forgotten
AGAIN_S: Final = 60.0  # between two reports


class Outage:
    """Reports once that the API server is away or refuses a resource, and once that this is over, for all reflectors that share it."""

    def __init__(self, report: Callable[..., None]) -> None:
        self._report = report
        self._away: set[Resource] = set()
        self._refused: dict[Resource, tuple[object, str]] = {}  # with kind and text of the last failure
        self._since = 0.0
        self._tell: list[Callable[[], None]] = []

    def on_refusal(self, tell: Callable[[], None]) -> None:
        """Sets the function to call when the server has begun to refuse a resource."""
        self._tell.append(tell)

    def refuses(self, resource: Resource) -> bool:
        """Returns whether the server answers, and refuses to let the picker follow `resource`."""
        return resource in self._refused

    def lost(self, resource: Resource, failure: Exception, now: float) -> None:
        """Records that a try to follow `resource` has failed. `now`: seconds on a monotonic clock."""
        if is_away(failure):
            if not self._away:
                self._since = now
                self._report("the Kubernetes API is away: what is known stays, and the picker tries again", reason=str(failure))
            self._away.add(resource)
            return
        before, kind, text = self._refused.get(resource), _kind_of(failure), str(failure)
        self._refused[resource] = kind, text
        if before is None or before[0] != kind:
            self._report("a resource cannot be followed: the picker tries again", **_fields(resource), reason=text)
        if before is None:
            for tell in self._tell:
                tell()

    def found(self, resource: Resource, now: float) -> None:
        """Records that `resource` can be followed."""
        if self._refused.pop(resource, None) is not None:
            self._report("a resource can be followed again", **_fields(resource))
        if resource in self._away:
            self._away.discard(resource)
            if not self._away:
                self._report("the Kubernetes API answers again", away_s=round(now - self._since, 1))

    def refusals(self) -> dict[str, str]:
        """Returns resource -> why it cannot be followed, although the API server answers."""
        return {f"{resource} in namespace {resource.namespace}": why for resource, (_, why) in self._refused.items()}

    def forget(self, resource: Resource) -> None:
        """Records that `resource` is not followed any more."""
        self._refused.pop(resource, None)
        self._away.discard(resource)


def _kind_of(failure: Exception) -> tuple[object, ...]:
    """Returns what stays the same in repetitions of a failure. Its text may name another version or time in each answer."""
    return (failure.status, failure.reason, failure.verb) if isinstance(failure, ApiError) else (type(failure),)


def _fields(resource: Resource) -> dict[str, str]:
    return {"resource": str(resource), "namespace": resource.namespace}


def is_away(failure: Exception) -> bool:
    """Returns whether a failure concerns the whole API server, not one request."""
    if isinstance(failure, ApiError):
        return failure.status >= 500 or failure.status == HTTPStatus.TOO_MANY_REQUESTS
    return isinstance(failure, Unreachable)


class WatchPace:
    """Limits the share of the process's time that the events of one watch take.

    A server may send events faster than the supervisor can use them: bookmarks without end, or thousands of pods that flap. A watch that
    has used up its share is not read for a while, so the server has to wait. It is reported when its waits add up to SLOWED_S; after
    QUIET_S without a wait, the sum begins anew. Call `begin` before the use of each event, and `wait_s` afterwards.
    """

    def __init__(
        self, report: Callable[..., None], cpu: Callable[[], float] = time.thread_time, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`report` is called with an event and a reason.

        `cpu`: CPU seconds of this thread. Time in which the machine stalls is not included.
        """
        self._report = report
        self._cpu = cpu
        self._share = Share(SHARE, BURST_S, clock)
        self._begun = 0.0
        self._slowed_s = self._again_at = self._quiet_at = 0.0

    def begin(self) -> None:
        self._begun = self._cpu()

    def wait_s(self, now: float) -> float:
        """Returns for how many seconds the watch may not be read, mostly 0. `now`: the time of the event loop, in seconds."""
        self._share.spend(self._cpu() - self._begun)
        wait_s = self._share.wait_s()
        if wait_s == 0.0:
            return 0.0
        if now >= self._quiet_at:
            self._slowed_s = 0.0
        self._slowed_s += wait_s
        self._quiet_at = now + wait_s + QUIET_S
        if self._slowed_s >= SLOWED_S and now >= self._again_at:
            self._slowed_s, self._again_at = 0.0, now + AGAIN_S
            reason = f"its events may take {SHARE:.1%} of the supervisor's time; look for objects that change all the time"
            self._report("a watch sends events faster than they are processed: changes arrive late", reason=reason)
        return wait_s


class _Kind(msgspec.Struct):
    kind: str = ""


_kind = msgspec.json.Decoder(_Kind)


class Reflector(Generic[T]):
    """Follows one resource: lists it and watches it. `run` runs until it is cancelled."""

    def __init__(
        self,
        api: Api,
        resource: Resource,
        *,
        selectors: Mapping[str, str] = EVERYTHING,
        decode: Callable[[bytes], T],
        changed: Callable[[ObjectChange[T]], None],
        report: Callable[..., None],
        outage: Outage,
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
        self.problem = ""  # why the last try failed, or "" after a success
        self._api = api
        self._selectors = {key: text for key, text in selectors.items() if text}
        self._known = Known(resource, decode, report, expects=expects, now=_now)
        self._changed = changed
        self._outage = outage
        self._rng = rng if rng is not None else random.Random()
        names = {"resource": str(resource), "namespace": resource.namespace}
        self._pace = WatchPace(partial(report, **names), cpu)
        self._list_next = True
        self._failures = self._expired = 0
        self._begun = False

    @property
    def known(self) -> Mapping[str, T]:
        """The known objects by name."""
        return self._known.objects

    def unread(self, name: str) -> str:
        """Returns why the latest state of the object `name` could not be decoded; "" if it was decoded, or without such an object."""
        return self._known.unread.get(name, "")

    @property
    def synced(self) -> bool:
        """Returns whether at least one complete list was accepted."""
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
                except UNREADABLE as failure:
                    await self._failed(UnreadableAnswer(self._invalid(str(failure))))
                except (Expired, Unreachable, UnreadableAnswer) as failure:
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
        """Lists all pages. Returns False if the server has no such resource."""
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
            page = decode_page(answer)
            if not page.metadata.resource_version:
                raise UnreadableAnswer(self._invalid("a list without a version"))
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
        except (ApiError, *UNREADABLE):
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
        """Watches the resource until either side ends the watch. A watch is taken as working only after `STEADY_S`, not after an event."""
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

    def _notify(self, change: ObjectChange[T] | None) -> None:
        if change is not None:
            self._changed(change)

    def _succeeded(self) -> None:
        self._failures = self._expired = 0
        self.problem = ""
        self._outage.found(self.resource, _now())

    async def _failed(self, failure: Exception) -> None:
        """Waits before the next try. Reports the failure, unless it is the first failure in a row and usual for a watch."""
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
