"""Connects the supervisor with other replicas, if there is a replica store."""

import time
from collections.abc import Callable
from functools import partial

from shm.budgets import BudgetRow, BudgetSums
from shm.documents import DocumentReader
from shm.prefix_writer import IndexWriter
from workers.process.instance import Instance
from workers.replicas.address import secret_of
from workers.replicas.budgets import Budgets
from workers.replicas.exchange import Exchange, Parts
from workers.replicas.pages import Pages
from workers.replicas.places import OwnLoad, Places
from workers.replicas.store import opened
from workers.replicas.taught import Taught
from workers.replicas.waiting import Waiting
from workers.replicas.wire import columns_key, secret_key
from workers.shared.bus import AGE_TICKS
from workers.shared.documents import EndpointsView
from workers.shared.objectives import ObjectivesView, static_bands
from workers.supervisor.endpoints.endpoints import EndpointTable
from workers.supervisor.endpoints.scrape_results import Sink
from workers.supervisor.shared_pages import SharedPages


def exchange_of(instance: Instance, index: IndexWriter, report: Callable[..., None]) -> Exchange:
    """Returns the exchange of this replica, which the caller runs. The instance must have a replica store."""
    options, lanes = instance.options, instance.memory.lanes
    assert lanes.remote is not None
    documents = DocumentReader(instance.layout.documents, instance.memory.documents)
    waiting = Waiting(instance.memory.flow, ObjectivesView(documents, static_bands(instance.config.flow)), lanes.remote)
    places = Places(EndpointsView(documents))
    budgets, serving = instance.layout.budgets, lanes.serving_words[1:]
    return Exchange(
        Parts(
            partial(opened, options.store),
            lanes.remote,
            places,
            OwnLoad(lanes, places),
            Taught(index, places),
            index,
            waiting,
            Pages(places),
            Budgets(
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
    )


def sink_of(instance: Instance, table: EndpointTable, pages: Pages) -> Sink:
    """Returns the sink of the first data source. It shares pages if there is a budget, which makes pages rare. Names, such as those of
    adapters, are not shared: if a plugin reads any, each replica reads all pages itself.
    """
    columns = instance.layout.table_columns
    if instance.sources.pacing.budget is None or any(column.type is frozenset for column in columns):
        pages.share(0, 0)
        return table
    shared = SharedPages(table, pages, instance.memory.lanes.slot_load)
    source, extractor = instance.sources.scraped
    read = ([column.name for column in columns], source.params, type(extractor).__name__, extractor.params)
    pages.share(columns_key(repr(read)), len(columns), shared.told)
    return shared
