"""Maps the endpoints of this replica to their keys in messages, and reads what this replica has in flight."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from compiled.calls import load_rows
from epp.candidates import Endpoint
from shm.areas import Areas
from shm.prefix_writer import TIERS, in_tier
from workers.replicas.wire import ONLY, REQUESTS_MAX, ROW, ROWS_MAX, TOKENS_MAX, endpoint_key, pool_key
from workers.shared.documents import EndpointsView

Ints = NDArray[np.int64]

ROW_TYPE: Final = np.dtype([("endpoint", "<u8"), ("requests", "<u4"), ("tokens", "<u8")])  # as `wire.ROW`


class PoolPlace(NamedTuple):
    """The keys of one of several pools in messages: `name` stands for the pool, and another key for the columns that are read from its
    pages.
    """

    name: str
    columns: int


class PagePlaces(NamedTuple):
    """The endpoints by the keys of their pages: slots and owners, and the keys by owner."""

    slots: Mapping[int, int]
    owners: Mapping[int, int]
    keys: Mapping[int, int]


class Places:
    """The endpoints of this replica by their keys in messages. `refresh` follows the endpoints document.

    `of_pool`: the slots by key of each pool that has endpoints. `pages`: the same for pages; with several pools, the keys of pages also
    depend on the columns that are read.
    """

    def __init__(self, endpoints: EndpointsView, pool: Callable[[int], PoolPlace] | None = None) -> None:
        """`pool` returns the keys of a pool by its number; None if the picker has one pool."""
        self._endpoints = endpoints
        self._pool = pool
        self._version = -1
        self.slots: Mapping[int, int] = {}
        self.owners: dict[int, int] = {}  # key -> owner; each tier of an endpoint has its own key
        self.keys: Mapping[int, int] = {}  # owner -> key
        self.slot_array: Ints = np.zeros(0, np.int64)
        self.key_array: NDArray[np.uint64] = np.zeros(0, np.uint64)
        self.used = 1  # the number of slots up to the last slot of an endpoint
        self.of_pool: Mapping[int, Mapping[int, int]] = {}
        self.pages = PagePlaces({}, {}, {})

    def renew(self) -> None:
        """Makes the next `refresh` read everything again, because pools have other names."""
        self._version = -1

    def refresh(self) -> bool:
        """Reads the endpoints again if they have changed. Returns whether they have changed."""
        current = self._endpoints.current()
        if self._endpoints.version == self._version:
            return False
        self._version = self._endpoints.version
        uids = [identity[-1] for identity in self._endpoints.identities()]
        names = [f"{uid}@{e.address}" for uid, e in zip(uids, current, strict=True)]
        pools = [self._pool(number) for number in self._endpoints.pools()] if self._pool is not None else []
        if pools:
            names = [f"{pool.name}/{name}" for pool, name in zip(pools, names, strict=True)]
        keys = [endpoint_key(name) for name in names]
        self.slots = {key: e.slot for key, e in zip(keys, current, strict=True)}
        self.owners = {key: e.owner for key, e in zip(keys, current, strict=True)}
        for tier in range(1, TIERS):
            named = zip(names, current, strict=True)
            self.owners |= {endpoint_key(f"{name}#{tier}"): in_tier(e.owner, tier) for name, e in named}
        self.keys = {owner: key for key, owner in self.owners.items()}
        self._divide(current, keys, names, pools)
        self.slot_array = np.array([e.slot for e in current], np.int64)
        self.key_array = np.array(keys, np.uint64)
        self.used = max((e.slot for e in current), default=0) + 1
        return True

    def _divide(self, current: Sequence[Endpoint], keys: Sequence[int], names: Sequence[str], pools: Sequence[PoolPlace]) -> None:
        """Finds the endpoints of each pool, and the keys of pages."""
        if self._pool is None:
            self.of_pool, self.pages = {ONLY: self.slots}, PagePlaces(self.slots, self.owners, self.keys)
            return
        of_pool: dict[int, dict[int, int]] = {}
        for key, e, pool in zip(keys, current, pools, strict=True):
            of_pool.setdefault(pool_key(pool.name), {})[key] = e.slot
        self.of_pool = of_pool
        of_pages = [endpoint_key(f"{name}#{pool.columns}") for name, pool in zip(names, pools, strict=True)]
        self.pages = PagePlaces(
            {key: e.slot for key, e in zip(of_pages, current, strict=True)},
            {key: e.owner for key, e in zip(of_pages, current, strict=True)},
            {e.owner: key for key, e in zip(of_pages, current, strict=True)},
        )


class OwnLoad:
    """The load in flight of this replica's workers. `rows` returns the changes since the last call.

    `left_out`: the number of endpoints that the last whole message did not name, because a message has at most `rows_max` endpoints.
    """

    def __init__(self, areas: Areas, places: Places, rows_max: int = ROWS_MAX) -> None:
        self._areas = areas
        self._places = places
        self._rows_max = rows_max
        self._keys: NDArray[np.uint64] | None = None
        self._words: Ints  # the positions of each endpoint's requests and tokens in an area
        self._said: Ints  # the last published requests and tokens of each endpoint
        self.left_out = 0

    def rows(self, *, whole: bool) -> bytes:
        """Returns the packed rows of all endpoints with load if `whole`, else of endpoints with load changes since the last call.

        If there are more than `rows_max` rows, returns the rows with the most requests.
        """
        places, schema = self._places, self._areas.schema
        if self._keys is not places.key_array:
            self._keys = places.key_array
            slots = places.slot_array
            self._words = np.column_stack((slots + schema.inflight_at, slots + schema.tokens_at))
            self._said = np.zeros_like(self._words)
        workers, serving = self._areas.of_workers()
        told = load_rows(workers, serving, self._words, self._keys, self._said, whole, REQUESTS_MAX, TOKENS_MAX)
        left_out = max(len(told) // ROW.size - self._rows_max, 0)
        if whole:
            self.left_out = left_out
        if not left_out:
            return told
        rows = np.frombuffer(told, ROW_TYPE)
        return rows[np.argpartition(rows["requests"], left_out)[left_out:]].tobytes()
