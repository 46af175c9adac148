"""Finds out which pool's plugin has ended a worker, and which pools are therefore out of service.

With several pools, a worker publishes in its area for which pool it runs a decision (`RUNNING`), and during a call of a foreign plugin, the
plugin. The worker also publishes which pool it loads (`LOADING`). If the worker crashes, or hangs until the parent kills it, the parent
reads both:

    the first time             the log names the pool, and the plugin if one ran
    again within MEMORY_S      the pool is out of service: its requests get 503, until its configuration changes

Several crashes with the same request are counted once, because this request may be the cause (`workers.shared.query_of_death`).

This module does not notice crashes between two calls of plugins, such as in a thread or a task that a plugin has started, or in policies of
flow control.
"""

import zlib
from collections.abc import Iterable
from typing import Final, NamedTuple

from epp.plugin import Plugin, foreign
from epp.points.instrument import C, Point, Wrap

RUNNING: Final = "running_pool"  # a gauge in a worker's area: `word_of`; it keeps its value after the decision
LOADING: Final = "loading_pool"  # a gauge in a worker's area: the number of the pool + 1, or 0
CRASHES: Final = 2
MEMORY_S: Final = 600.0
PLUGIN_AT: Final = 32  # the lowest bit of the plugin's mark in `word_of`
WHY, NAME = 1, 2  # the words of the first pool in the table
MARK_MAX: Final = (1 << 30) - 1


def mark_of(name: str) -> int:
    """Returns a number that stands for the name of a plugin or a pool. The number is never 0."""
    return zlib.crc32(name.encode()) & MARK_MAX or 1


def named(mark: int, plugins: Iterable[str]) -> str:
    """Returns the name of the plugin that the number stands for, or "" if it is none of `plugins`."""
    return next((name for name in plugins if mark and mark_of(name) == mark), "")


def word_of(pool: int, plugin: str = "") -> int:
    """Returns the word for a running decision of a pool, or for a running call of one of its plugins."""
    return (mark_of(plugin) if plugin else 0) << PLUGIN_AT | (pool + 1)


def marking(running: memoryview, pool: int) -> Wrap:
    """Returns a wrap that publishes each call of a foreign plugin of this pool. `running`: the word `RUNNING` of this worker."""
    own = word_of(pool)

    def wrap(_point: Point, plugin: Plugin, call: C, /) -> C:
        if not foreign(type(plugin)):
            return call
        word = word_of(pool, plugin.name)

        def marked(*arguments: object) -> object:
            running[0] = word
            try:
                return call(*arguments)
            finally:
                running[0] = own

        return marked  # type: ignore[return-value]

    return wrap


class Culprit(NamedTuple):
    """The work of a worker at its end. `pool`: the number of the pool. `mark`: the mark of the running plugin, or 0 if not known."""

    pool: int
    mark: int = 0


def culprit(deciding: int, running: int, loading: int) -> Culprit | None:
    """Returns the work of a worker at its end, from the words of its area. Returns None if the worker did not work for a pool."""
    pool, mark = running & (1 << PLUGIN_AT) - 1, running >> PLUGIN_AT
    if pool and (deciding or mark):
        return Culprit(pool - 1, mark)
    return Culprit(loading - 1) if loading else None


class _Crash(NamedTuple):
    at: float
    number: int
    request: int


class PoolCrashes:
    """The parent's side: counts the crashes of each pool, and says which pools are out of service.

    `table`: a word that grows with each change, then two words per pool: why it is out of service, and the mark of its name. Only this
    object writes the table.
    """

    def __init__(self, table: memoryview) -> None:
        self._table = table
        self._crashes: dict[int, list[_Crash]] = {}
        self.seen: dict[int, str] = {}  # the pools that have ended a worker -> their names at that time

    def crashed(self, found: Culprit, name: str, number: int, request: int, now: float) -> bool:
        """Counts a crash. Returns whether the pool is taken out of service. Times are monotonic seconds.

        `name`: the name of the pool. `number`: the number of its configuration. `request`: the fingerprint of the request, or 0 without a
        request.
        """
        known = self._crashes.get(found.pool, ()) if self.seen.get(found.pool) == name else ()
        before = [
            crash for crash in known if now - crash.at <= MEMORY_S and crash.number == number and not (request and crash.request == request)
        ]
        self.seen[found.pool] = name
        crashes = self._crashes[found.pool] = [*before, _Crash(now, number, request)][-CRASHES:]
        if len(crashes) < CRASHES:
            return False
        self._table[NAME + 2 * found.pool] = mark_of(name)
        self._write(found.pool, number << PLUGIN_AT | found.mark << 1 | 1)
        return True

    def renamed(self, pool: int) -> None:
        """Notes that another pool has this place."""
        del self._crashes[pool], self.seen[pool]
        if self._table[WHY + 2 * pool]:
            self._write(pool, 0)

    def _write(self, pool: int, word: int) -> None:
        self._table[WHY + 2 * pool] = word
        self._table[0] += 1


class OutOfService:
    """The side of workers and supervisor: knows which pools are out of service. `changes` grows with each change."""

    def __init__(self, table: memoryview) -> None:
        self._table = table

    @property
    def changes(self) -> int:
        return int(self._table[0])

    def of(self, pool: int, name: str, number: int) -> Culprit | None:
        """Returns why a pool is out of service, or None if it is in service. `number`: the number of its configuration in force.

        `name`: its name, because the place may have another pool before the parent notices.
        """
        word = self._table[WHY + 2 * pool] if self._table[0] else 0
        if not word or word >> PLUGIN_AT != number or self._table[NAME + 2 * pool] != mark_of(name):
            return None
        return Culprit(pool, word >> 1 & MARK_MAX)
