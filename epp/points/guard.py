"""Guards a request's data: a foreign plugin can read and write only what it declares.

`guard` makes a `Wrap` for `Pipeline.wrapped`. During a call `request.data` is a `Scope`. The plugin may read the data that it declares
in `consumes`, `optional`, `produces` and `keeps`, and write the data in `produces` and `keeps`. Any other access is refused and counted:
a read gives the datum's default, and a write is dropped. In a data producer, such a write also raises ProducerFailed, so the producer
fails open. If a producer waits, its scope stays until the producer's work is done. The same wrap checks results and headers
(`epp.points.instrument`).

Reading a column of the candidates that the plugin does not declare in `consumes` raises PluginFault: a column that no plugin declares
would be 0 for every candidate.

Shipped plugins are not wrapped and cost nothing: contract tests check them. Deciders are not guarded, because a profile handler calls them.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, MutableMapping
from typing import Any, Literal

from epp.candidates import Candidates, Mask
from epp.data import Column
from epp.errors import PluginFault, ProducerFailed, blame
from epp.metrics import Metric, counter
from epp.plugin import Plugin, Services, Waiting, foreign
from epp.points.instrument import CLIPPED, RESULT_CHECKS, C, Point, Wrap
from epp.request import Request

VIOLATIONS = counter(
    "plugin_data_scope_violations_total",
    "Refused reads and writes of request data that the plugin does not declare.",
    "extension_point",
    "access",
)

Access = Literal["read", "write"]
Violated = Callable[[Point, Plugin, Access], None]
Remark = Callable[[Plugin, str], None]
Name = str | tuple[str, str]
Data = MutableMapping[Name, Any]
# the arguments of their calls begin with (request, candidates)
_WITH_CANDIDATES = frozenset((Point.SCREENER, Point.PRODUCER, Point.ADMITTER, Point.FILTER, Point.SCORER, Point.PICKER))


def declared(plugins: Iterable[Plugin]) -> tuple[Metric, ...]:
    """Returns the metrics that the guard needs: one counter if there is a foreign plugin, otherwise no metric."""
    return (VIOLATIONS,) if any(foreign(type(plugin)) for plugin in plugins) else ()


def counted(services: Services) -> Violated:
    """Returns a callback that counts refused accesses in this worker."""

    def violated(point: Point, plugin: Plugin, access: Access) -> None:
        services.count(plugin, VIOLATIONS).add(point.value, access)

    return violated


def within(inner: Wrap, outer: Wrap) -> Wrap:
    """Returns a wrap that applies `inner` to a call, then `outer`."""

    def wrap(point: Point, plugin: Plugin, call: C, /) -> C:
        return outer(point, plugin, inner(point, plugin, call))

    return wrap


def guard(violated: Violated, remark: Remark = lambda _plugin, _text: None) -> Wrap:
    """Returns a wrap for foreign plugins. It calls `violated` for each refused access, and `remark` once per scorer with clipped scores."""

    def wrap(point: Point, plugin: Plugin, call: C, /) -> C:
        return _guarded(point, plugin, call, violated, remark) if foreign(type(plugin)) else call  # type: ignore[return-value]

    return wrap


def _guarded(
    point: Point, instance: Plugin, call: Callable[..., Any], violated: Violated, remark: Remark = lambda _plugin, _text: None
) -> Callable[..., Any]:
    writable = frozenset(key.name for key in (*instance.produces, *instance.keeps))
    readable = writable | {key.name for key in (*instance.consumes, *instance.optional)}
    columns = frozenset(key.name for key in instance.consumes if isinstance(key, Column))
    check = RESULT_CHECKS.get(point)
    with_candidates = point in _WITH_CANDIDATES
    told = False

    def refused(name: str, access: Access) -> None:
        violated(point, instance, access)
        if access == "write" and point is Point.PRODUCER:
            raise ProducerFailed(f"'{instance.name}' writes '{name}', which it does not declare")

    def guarded(request: Request, *more: Any) -> Any:
        nonlocal told
        data = request.data
        request.data = Scope(data, readable, writable, refused)
        if with_candidates and more and isinstance(more[0], Candidates):
            more = (_Declared(more[0], instance.name, columns), *more[1:])
        waits = False
        try:
            result = call(request, *more)
            if check is not None:
                check(instance, result, *more)
            elif not told and hasattr(call, CLIPPED):
                told = True
                remark(instance, "scores outside [0, 1] are clipped, and NaN becomes 0: return scores from 0 to 1")
            waits = point is Point.PRODUCER and result is not None
        except SystemExit as exit_call:  # without this, the exit would end the connection, which other requests share
            fault = PluginFault(f"'{instance.name}' tried to end the process; raise an exception instead")
            blame(fault, instance)
            raise fault from exit_call
        except Exception as problem:
            blame(problem, instance)
            raise
        finally:
            if not waits:
                request.data = data
        return _ScopedWait(result, request, data) if waits else result

    return guarded


class _Declared(Candidates):
    """Shows one plugin the columns of candidates that it declares. Raises PluginFault for any other column."""

    __slots__ = ("_columns", "_reader")

    def __init__(self, whole: Candidates, reader: str, columns: frozenset[str]) -> None:
        super().__init__(whole.snapshot, whole._inflight, whole._tokens, whole.rows)
        self._reader = reader
        self._columns = columns

    def __getitem__(self, column: Column[Any]) -> Any:
        if column.name not in self._columns:
            raise PluginFault(f"'{self._reader}' reads the column '{column.name}', which it does not declare: add it to `consumes`")
        return super().__getitem__(column)

    def keep(self, mask: Mask) -> Candidates:
        kept = super().keep(mask)
        return kept if kept is self else _Declared(kept, self._reader, self._columns)


class Scope(MutableMapping[Name, Any]):
    """Restricts a request's data to the keys that one plugin declares."""

    __slots__ = ("_data", "_readable", "_refused", "_writable")

    def __init__(self, data: Data, readable: frozenset[str], writable: frozenset[str], refused: Callable[[str, Access], None]) -> None:
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


class _ScopedWait:
    """Wraps a producer's `Waiting`, and restores `request.data` when the wait is over, with or without an exception."""

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
