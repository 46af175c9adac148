"""Makes one frame per second for all viewers: the changes of the state since the previous frame.

    whole    the state: plain values, as in /debug/state
    patch    a JSON Merge Patch (RFC 7396) that leads from one state to the next

The first viewer that needs a frame makes it, step by step, and others use it, too; without viewers no frame is made. So the state may be
from the time of an earlier viewer, also if this viewer left during a frame. `at` has its time.

Unknown values are missing, because null in a patch means that a value is gone. Ages are whole seconds, and other numbers have four
significant digits: so an idle endpoint is in no patch.

The last PATCHES_KEPT patches are kept. A viewer that is further behind must begin again with the whole state.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from epp.candidates import Endpoint
from epp.request.pool_choice import no_such_pool
from workers.supervisor.pages.state.figures import ENDPOINTS_AT_ONCE, EndpointFigures, Instance, computing, life
from workers.supervisor.pages.state.findings import findings
from workers.supervisor.pages.state.look import Look
from workers.supervisor.pages.state.source import Source

VERSION: Final = 1
FRAME_S: Final = 1.0
FIRST_S: Final = 0.25  # without a recent look, the first frame is made from two looks this far apart
STALE_S: Final = 5.0  # an older look is of no use for rates
PATCHES_KEPT: Final = 5
WHY_CHARS_MAX: Final = 400

encode = msgspec.json.Encoder().encode
Values = dict[str, Any]


class State(NamedTuple):
    """The state of one moment. `number`: the number of its frame. `values`: all values except the endpoints. `endpoints`: by id.

    `at`: when shared memory was read for it, in monotonic seconds.
    """

    number: int
    at: float
    values: Values
    endpoints: dict[str, Values]


class Further(NamedTuple):
    """Data that are not in shared memory. `values`: parts of the state. `why`: id of an endpoint -> why its last scrape failed."""

    values: Mapping[str, Any]
    why: Mapping[str, str]


class Frames:
    """The current state, and the last patches that led to it."""

    def __init__(
        self, source: Source, further: Callable[[Mapping[str, int]], Further], now: Callable[[], float], wall: Callable[[], float]
    ) -> None:
        """`further(counters)`: returns the data that are not in the source's figures, for the counters of a look.

        `now`: monotonic seconds. `wall`: returns the time in seconds since the epoch.
        """
        self._source = source
        self._further = further
        self._now = now
        self._wall = wall
        self._before: Look | None = None
        self._making: Iterator[None] | None = None
        self._due_at = 0.0
        self._patches: deque[tuple[int, bytes]] = deque(maxlen=PATCHES_KEPT)
        self.state: State | None = None

    @property
    def number(self) -> int:
        """The number of the current frame; 0 before the first one."""
        return 0 if self.state is None else self.state.number

    def of(self, at: float) -> State | None:
        """Returns the current state if it is of the moment `at`, in monotonic seconds, or later; otherwise None."""
        return self.state if self.state is not None and self.state.at >= at else None

    def wait_s(self) -> float:
        """Returns the seconds until the next step."""
        return 0.0 if self._making is not None else max(0.0, self._due_at - self._now())

    def step(self) -> None:
        """Does one short step towards the next frame. Call it after `wait_s` seconds."""
        if self._making is None:
            self._making = self._make()
        if next(self._making, self) is self:
            self._making = None

    def slot(self, wanted: str) -> tuple[int, int] | None:
        """Returns the slot and the generation of the endpoint with this id, or None."""
        known = zip(self._source.known(), self._source.pools_of_known(), strict=True)
        return next(((each.slot, each.generation) for each, pool in known if endpoint_id(each, pool) == wanted), None)

    def pool(self, wanted: str) -> tuple[int | None, str]:
        """Returns the number of the pool with this name, or None and the reason without such a pool."""
        names = self._source.pools()
        why = no_such_pool(wanted, names)
        return (None, why) if why else (list(names).index(wanted), "")

    def patch(self, number: int) -> bytes | None:
        """Returns the patch that led to a frame, or None if the patch is not kept any more."""
        return next((patch for each, patch in self._patches if each == number), None)

    def _make(self) -> Iterator[None]:
        now = self._now()
        look = yield from self._source.looking(now)
        before, self._before = self._before, look
        if before is None or now - before.at > STALE_S:
            self._due_at = now + FIRST_S
            return
        seen = self._source.seen
        up = max(0.0, self._wall() - seen.started_at)
        instance = Instance(name=seen.name, pid=seen.pid, ports=seen.ports, life=life(look), uptime_s=up)
        figures = yield from computing(instance, look, before)
        endpoints: dict[str, Values] = {}
        same: dict[str, list[str]] = {}  # the ids that a server has in several pools
        for number, each in enumerate(figures.endpoints, 1):
            key = endpoint_id(each, each.pool)
            same.setdefault(endpoint_id(each), []).append(key)
            endpoints[key] = plain(msgspec.to_builtins(each))
            if number % ENDPOINTS_AT_ONCE == 0:
                yield
        values = msgspec.to_builtins(msgspec.structs.replace(figures, endpoints=()))
        del values["endpoints"], values["interval_s"]
        yield
        further = self._further(look.counters)
        pools = {each["name"]: {**each, **further.values.get("pools", {}).get(each["name"], {})} for each in values["pools"]}
        yield
        for server, why in further.why.items():
            for key in same.get(server, ()):
                endpoints[key]["why"] = why[:WHY_CHARS_MAX]
        values = {
            "version": VERSION,
            "at": round(self._wall(), 1),
            **plain(values | dict(further.values) | {"pools": pools if self._source.pools() else None}),
        }
        values["instance"]["uptime_s"] = int(up)
        values["findings"] = [msgspec.to_builtins(each) for each in findings(values, endpoints)]
        yield from self._publish(look.at, values, endpoints)
        self._due_at = max(self._due_at + FRAME_S, self._now() + FRAME_S / 2)

    def _publish(self, at: float, values: Values, endpoints: dict[str, Values]) -> Iterator[None]:
        before = self.state
        if before is None:
            self.state = State(1, at, values, endpoints)
            self._due_at = self._now()
            return
        changed: Values = {}
        for number, key in enumerate(before.endpoints.keys() | endpoints.keys(), 1):
            old, new = before.endpoints.get(key), endpoints.get(key)
            if old != new:
                changed[key] = new if old is None or new is None else difference(old, new)
            if number % ENDPOINTS_AT_ONCE == 0:
                yield
        patch = difference(before.values, values)
        if changed:
            patch["endpoints"] = changed
        self.state = State(before.number + 1, at, values, endpoints)
        self._patches.append((self.state.number, encode(patch)))


def endpoint_id(endpoint: Endpoint | EndpointFigures, pool: str | None = None) -> str:
    """Returns the id of an endpoint in the state: its namespace, name and address, and its pool if the picker has several pools."""
    return f"{endpoint.namespace}/{endpoint.name} {endpoint.address}{'' if pool is None else f' {pool}'}"


def difference(old: Values, new: Values) -> Values:
    """Returns the merge patch that leads from `old` to `new`. Neither has a value None."""
    patch: Values = dict.fromkeys(old.keys() - new.keys())
    for key, value in new.items():
        then = old.get(key)
        if then == value:
            continue
        patch[key] = difference(then, value) if isinstance(then, dict) and isinstance(value, dict) else value
    return patch


def plain(values: Values) -> Values:
    """Returns the values that are not None, with ages in whole seconds and other numbers of four significant digits."""
    return {key: _plain(key, value) for key, value in values.items() if value is not None}


def _plain(key: str, value: Any) -> Any:
    if isinstance(value, float):
        if value - value != 0:  # infinite, or not a number
            return 0
        return int(value) if key.endswith("age_s") else float(f"{value:.4g}") if abs(value) < 1e4 else round(value)
    if isinstance(value, dict):
        return plain(value)
    if isinstance(value, (list, tuple)):
        return [_plain(key, each) for each in value if each is not None]
    return value
