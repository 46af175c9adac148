"""Finds the endpoints that the kv-events process follows: those of pools with a precise prefix producer."""

import contextlib
from collections.abc import Mapping
from typing import NamedTuple

from epp.candidates import Endpoint
from epp.plugins.producers._precise_params import Settings
from shm.documents import DocumentReader
from workers.process.generations import GenerationLost
from workers.process.instance import Instance
from workers.process.pool_views import assigned, assigned_view, listed_now
from workers.shared.documents import EndpointsView, Identity

Key = tuple[int, int, int]  # slot, generation and owner of an endpoint


class WantedEndpoint(NamedTuple):
    """An endpoint to follow. `settings`: the settings of its pool. `name`: its name in a snapshot."""

    endpoint: Endpoint
    settings: Settings
    name: Identity


class WantedEndpoints:
    """Reads which endpoints the supervisor has published. `version`: the version of the last list, or negative before the first list."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._endpoints = EndpointsView(DocumentReader(instance.layout.documents, instance.memory.documents))
        self._assigned = assigned_view(instance)
        self.version = -1

    def changed(self) -> bool:
        """Returns whether the list has changed since the last reading."""
        self._endpoints.current()
        return self._endpoints.version != self.version

    def read(self) -> Mapping[Key, WantedEndpoint]:
        """Returns the endpoints to follow."""
        endpoints = self._endpoints.current()
        self.version = self._endpoints.version
        if (names := self._assigned.names()) is not None:
            self._instance = assigned(self._instance, names)
        with contextlib.suppress(GenerationLost):  # another list of pools follows
            self._instance = listed_now(self._instance)
        every = self._instance.every
        wanted = {}
        for e, name, number in zip(endpoints, self._endpoints.identities(), self._endpoints.pools(), strict=True):
            pool = every[number]
            if (settings := self._instance.layout.kv_of(pool.options.pool_name)) is not None:
                # In a snapshot of several pools, the namespace begins with the name of the pool.
                known = name if pool.pool is None else (f"{pool.options.pool_name}/{name[0]}", *name[1:])
                wanted[e.slot, e.generation, e.owner] = WantedEndpoint(e, settings, known)
        return wanted
