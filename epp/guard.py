"""Foreign plugins held to what they declare of a request's data; our own are held to it by the contract tests, and pay nothing.

A `Wrap` for `Pipeline.wrapped`. During a call `request.data` shows a foreign plugin what it declares: it reads `consumes`,
`optional`, `produces` and `keeps`, and writes the latter two. Anything else is refused and counted: a read gives the datum's default,
a write is dropped, and fails a data producer (which fails open). A producer that waits is held to it until its work is done.
What a call returns, or puts into headers, is judged here too, while it is known whose it is (`epp.instrument`).

What this does not do: watch columns of candidates (they are read-only, and there are only those that somebody declares), or a
decider, which its profile handler calls.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, MutableMapping
from typing import Any, Literal

from epp.errors import PluginFault, ProducerFailed
from epp.instrument import JUDGES, C, Point, Wrap
from epp.metrics import Metric
from epp.plugin import Plugin, Services, Waiting, foreign
from epp.request import Request

VIOLATIONS = Metric(
    "plugin_data_scope_violations_total",
    "counter",
    "Reads and writes of request data that a plugin does not declare; they were refused.",
    labels=("extension_point", "access"),
)

Access = Literal["read", "write"]
Violated = Callable[[Point, Plugin, Access], None]
Name = str | tuple[str, str]
Data = MutableMapping[Name, Any]


def declared(plugins: Iterable[Plugin]) -> tuple[Metric, ...]:
    """The counter that is needed beside those that plugins declare themselves: none without a foreign plugin."""
    return (VIOLATIONS,) if any(foreign(type(plugin)) for plugin in plugins) else ()


def counted(services: Services) -> Violated:
    """Counts what is refused, in a worker."""

    def violated(point: Point, plugin: Plugin, access: Access) -> None:
        services.count(plugin, VIOLATIONS).add(point.value, access)

    return violated


def within(inner: Wrap, outer: Wrap) -> Wrap:
    """A wrap that puts `outer` around what `inner` makes of a call."""

    def wrap(point: Point, plugin: Plugin, call: C, /) -> C:
        return outer(point, plugin, inner(point, plugin, call))

    return wrap


def guard(violated: Violated) -> Wrap:
    """A wrap that tells `violated` of every access that is refused."""

    def wrap(point: Point, plugin: Plugin, call: C, /) -> C:
        return _guarded(point, plugin, call, violated) if foreign(type(plugin)) else call  # type: ignore[return-value]

    return wrap


def _guarded(point: Point, instance: Plugin, call: Callable[..., Any], violated: Violated) -> Callable[..., Any]:
    writable = frozenset(key.name for key in (*instance.produces, *instance.keeps))
    readable = writable | {key.name for key in (*instance.consumes, *instance.optional)}
    judge = JUDGES.get(point)

    def refused(name: str, access: Access) -> None:
        violated(point, instance, access)
        if access == "write" and point is Point.PRODUCER:
            raise ProducerFailed(f"'{instance.name}' writes '{name}', which it does not declare")

    def guarded(request: Request, *more: Any) -> Any:
        data = request.data
        request.data = Scope(data, readable, writable, refused)  # type: ignore[assignment]
        waits = False
        try:
            result = call(request, *more)
            if judge is not None:
                judge(instance, result, *more)
            waits = point is Point.PRODUCER and result is not None
        except SystemExit as left:  # above a request it would end the connection that others share
            raise PluginFault(f"'{instance.name}' tried to end the process; raise an exception") from left
        finally:
            if not waits:
                request.data = data
        return _Until(result, request, data) if waits else result

    return guarded


class Scope(MutableMapping[Name, Any]):
    """A request's data as one plugin may see them."""

    __slots__ = ("_data", "_readable", "_refused", "_writable")

    def __init__(
        self,
        data: Data,
        readable: frozenset[str],
        writable: frozenset[str],
        refused: Callable[[str, Access], None],
    ) -> None:
        self._data = data
        self._readable = readable
        self._writable = writable
        self._refused = refused

    def __getitem__(self, key: Name) -> Any:
        name = _name(key)
        if name not in self._readable:
            self._refused(name, "read")
            raise KeyError(key)
        return self._data[key]

    def __setitem__(self, key: Name, value: Any) -> None:
        name = _name(key)
        if name in self._writable:
            self._data[key] = value
        else:
            self._refused(name, "write")

    def __delitem__(self, key: Name) -> None:
        name = _name(key)
        if name in self._writable:
            del self._data[key]
        else:
            self._refused(name, "write")

    def __iter__(self) -> Iterator[Name]:
        return (key for key in self._data if _name(key) in self._readable)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _name(key: Name) -> str:
    return key if isinstance(key, str) else key[0]


class _Until:
    """What a producer waits for; the request gets its data back when that is done, whatever came of it."""

    __slots__ = ("_data", "_request", "_waiting")

    def __init__(self, waiting: Waiting, request: Request, data: Any) -> None:
        self._waiting = waiting
        self._request = request
        self._data = data

    def __await__(self) -> Generator[Any, Any, Any]:
        try:
            return (yield from self._waiting.__await__())
        finally:
            self._request.data = self._data

    def add_done_callback(self, call: Callable[[Any], object], /) -> Any:
        return self._waiting.add_done_callback(call)
