"""Connects the supervisor with other replicas, if there is a replica store."""

import time
from collections.abc import Callable
from functools import partial

from shm.documents import DocumentReader
from shm.prefix_writer import IndexWriter
from workers.process.instance import Instance
from workers.replicas.address import secret_of
from workers.replicas.exchange import Exchange, Parts
from workers.replicas.places import OwnLoad, Places
from workers.replicas.store import opened
from workers.replicas.taught import Taught
from workers.replicas.waiting import Waiting
from workers.replicas.wire import secret_key
from workers.shared.bus import AGE_TICKS
from workers.shared.documents import EndpointsView
from workers.shared.objectives import ObjectivesView, static_bands


def exchange_of(instance: Instance, index: IndexWriter, report: Callable[..., None]) -> Exchange:
    """Returns the exchange of this replica, which the caller runs. The instance must have a replica store."""
    options, lanes = instance.options, instance.memory.lanes
    assert lanes.remote is not None
    documents = DocumentReader(instance.layout.documents, instance.memory.documents)
    waiting = Waiting(instance.memory.flow, ObjectivesView(documents, static_bands(instance.config.flow)), lanes.remote)
    places = Places(EndpointsView(documents))
    return Exchange(
        Parts(
            partial(opened, options.store),
            lanes.remote,
            places,
            OwnLoad(lanes, places),
            Taught(index, places),
            index,
            waiting,
        ),
        name=options.replica_name or instance.identity,
        most=options.replicas_max,
        secret=secret_key(instance.credentials.prefix_seed),
        kept=b"" if options.prefix_secret_file else secret_of(instance.credentials.prefix_seed),
        now=time.monotonic,
        ticks=lambda: int(time.monotonic() * AGE_TICKS),
        report=report,
    )
