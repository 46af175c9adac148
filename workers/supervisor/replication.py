"""Connects the supervisor with other replicas, if there is a replica store."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from epp.data import COUNT_MAX, KV_USAGE
from shm.budgets import BudgetRow, BudgetSums
from shm.documents import DocumentReader
from shm.prefix_writer import IndexWriter
from workers.process.instance import Instance
from workers.replicas.address import secret_of
from workers.replicas.budgets import ReplicaBudgets
from workers.replicas.endpoint_places import OwnLoad, Places, PoolPlace
from workers.replicas.exchange import Exchange, ExchangeParts
from workers.replicas.pages import Pages
from workers.replicas.store import opened
from workers.replicas.taught import Taught
from workers.replicas.waiting import Waiting, WaitingInPools
from workers.replicas.wire import ONLY, columns_key, pool_key, secret_key
from workers.shared.bus import AGE_TICKS
from workers.shared.documents import EndpointsView
from workers.shared.objectives import ObjectivesView, static_bands
from workers.supervisor.endpoints.endpoints import EndpointTable
from workers.supervisor.endpoints.scrape import Sink
from workers.supervisor.latency_keeper import LatencyKeeper, LatencyKeepers
from workers.supervisor.shared_pages import SharedPages


def exchange_of(present: Callable[[], Instance], index: IndexWriter, report: Callable[..., None]) -> Exchange:
    """Returns the exchange of this replica, which the caller runs. `present` returns the instance, which must have a replica store."""
    instance = present()
    options, areas = instance.options, instance.memory.areas
    assert areas.remote is not None
    documents = DocumentReader(instance.layout.documents, instance.memory.documents)
    places = Places(EndpointsView(documents), place_of(present) if instance.pools else None)
    budgets, serving = instance.layout.budgets, areas.serving_words[1:]
    return Exchange(
        ExchangeParts(
            partial(opened, options.store),
            areas.remote,
            places,
            OwnLoad(areas, places),
            Taught(index, places),
            index,
            WaitingInPools(waiting_of(instance)),
            Pages(places),
            ReplicaBudgets(
                BudgetSums(budgets, instance.memory.budgets, serving), BudgetRow(budgets, instance.memory.budgets, budgets.workers, serving)
            ),
        ),
        name=options.replica_name or instance.identity,
        most=options.replicas_max,
        secret=secret_key(instance.credentials.prefix_seed),
        kept=b"" if options.prefix_secret_file else secret_of(instance.credentials.prefix_seed),
        now=time.monotonic,
        ticks=lambda: int(time.monotonic() * AGE_TICKS),
        report=report,
        pools=max(1, len(instance.pools)),
    )


def waiting_of(instance: Instance) -> Mapping[int, Waiting]:
    """Returns the waiting requests of each pool, by the key of the pool. A place without a pool has no key.

    Includes pools without flow control, because a later configuration may switch it on.
    """
    if not instance.pools:
        return {ONLY: _waiting(instance)}
    views = (view for view in instance.pools if view.options.pool_name)
    return {pool_key(view.options.pool_name): _waiting(view) for view in views}


def _waiting(instance: Instance) -> Waiting:
    documents, remote = DocumentReader(instance.layout.documents, instance.memory.documents), instance.memory.remote
    assert remote is not None
    return Waiting(instance.memory.flow, ObjectivesView(documents, static_bands(instance.config.flow), instance.pool), remote)


def place_of(present: Callable[[], Instance]) -> Callable[[int], PoolPlace]:
    """Returns the keys of several pools in messages, by the present number of the pool."""
    known: dict[int, tuple[Instance, PoolPlace]] = {}

    def place(number: int) -> PoolPlace:
        pool = present().pools[number]
        if number not in known or known[number][0] is not pool:
            known[number] = pool, PoolPlace(pool.options.pool_name, _columns(pool))
        return known[number][1]

    return place


class ModelsOfPools:
    """The latency models of all pools by the key of the pool, for replicas that join."""

    def __init__(self, keepers: LatencyKeepers, present: Callable[[], Instance]) -> None:
        self._keepers = keepers
        self._present = present

    def all(self) -> Iterator[tuple[int, LatencyKeeper]]:
        """Yields the keepers of the pools that have learned something."""
        for number, keeper in list(self._keepers.keepers().items()):
            key = _key(self._present().every[number])
            if key is not None and self._keepers.keepers().get(number) is keeper:
                yield key, keeper

    def of(self, pool: int) -> LatencyKeeper | None:
        """Returns the keeper of a pool, or None if this replica does not have the pool."""
        found = (number for number, view in enumerate(self._present().every) if _key(view) == pool)
        number = next(found, None)
        return None if number is None else self._keepers.keeper(number)


def _key(view: Instance) -> int | None:
    """Returns the key of a pool in messages, or None for a place without a pool."""
    if view.pool is None:
        return ONLY
    return pool_key(view.options.pool_name) if view.options.pool_name else None


def sink_of(instance: Instance, table: EndpointTable, pages: Pages) -> Callable[[Instance], Sink]:
    """Returns a function that returns the sink of a pool's first data source. The sink shares pages if there is a budget, which makes pages
    rare.

    Names, such as those of adapters, are not shared: if a plugin reads names, each replica reads all pages itself.
    """
    sharing = [pool for pool in instance.every if _shares(pool)]
    if not sharing:
        pages.share(0, 0)
        return lambda _pool: table
    shared = SharedPages(table, pages, instance.memory.areas.slot_load, limits_of(sharing))
    # With several pools, the keys of pages depend on the columns that are read.
    columns = columns_key(repr(instance.layout.table.columns)) if instance.pools else _columns(instance)
    pages.share(columns, len(instance.layout.table.columns), shared.told)
    return lambda pool: shared if _shares(pool) else table


def _shares(pool: Instance) -> bool:
    return pool.sources.pacing.budget is not None and not any(column.type is frozenset for column in pool.layout.table_columns)


def limits_of(pools: Sequence[Instance]) -> Mapping[int, float]:
    """Returns the places of the values of a page that cannot be below 0, and the most that each can be: counts, and the usage of the KV
    cache.
    """
    numeric = [[column for column in pool.layout.table_columns if column.type is not frozenset] for pool in pools]
    limits = {at: COUNT_MAX for columns in numeric for at, column in enumerate(columns) if column.type is int}
    return limits | {at: 1.0 for columns in numeric for at, column in enumerate(columns) if column == KV_USAGE}


def _columns(pool: Instance) -> int:
    """Returns a fingerprint of the columns that are read from the pages of a pool."""
    source, extractor = pool.sources.scraped
    columns = [column.name for column in pool.layout.table_columns]
    return columns_key(repr((columns, source.params, type(extractor).__name__, extractor.params)))
