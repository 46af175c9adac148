"""Joins the endpoints of this replica with their names in messages, and finds out what this replica has in flight."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from shm.lanes import Lanes
from workers.endpoints.replicas.wire import ROWS_MAX, endpoint_key, packed
from workers.shared.documents import EndpointsView

Ints = NDArray[np.int64]


class Places:
    """The endpoints of this replica by their keys in messages. `refresh` follows the endpoints document."""

    def __init__(self, endpoints: EndpointsView) -> None:
        self._endpoints = endpoints
        self._version = -1
        self.slots: Mapping[int, int] = {}
        self.owners: Mapping[int, int] = {}
        self.keys: Mapping[int, int] = {}  # owner -> key
        self.slot_array: Ints = np.zeros(0, np.int64)
        self.key_array: NDArray[np.uint64] = np.zeros(0, np.uint64)
        self.used = 1  # slots up to the last one of an endpoint

    def refresh(self) -> bool:
        """Reads the endpoints again if they changed. Returns whether they did."""
        current = self._endpoints.current()
        if self._endpoints.version == self._version:
            return False
        self._version = self._endpoints.version
        uids = [identity[-1] for identity in self._endpoints.identities()]
        keys = [endpoint_key(f"{uid}@{e.address}") for uid, e in zip(uids, current, strict=True)]
        self.slots = {key: e.slot for key, e in zip(keys, current, strict=True)}
        self.owners = {key: e.owner for key, e in zip(keys, current, strict=True)}
        self.keys = {owner: key for key, owner in self.owners.items()}
        self.slot_array = np.array([e.slot for e in current], np.int64)
        self.key_array = np.array(keys, np.uint64)
        self.used = max((e.slot for e in current), default=0) + 1
        return True


class OwnLoad:
    """What the workers of this replica have in flight. `rows` returns what is new since the last call.

    `left_out`: how many endpoints the last whole message did not name, because it has at most ROWS_MAX.
    """

    def __init__(self, lanes: Lanes, places: Places) -> None:
        self._lanes = lanes
        self._places = places
        self._keys = places.key_array
        self._requests = self._tokens = np.zeros(0, np.int64)
        self.left_out = 0

    def rows(self, *, whole: bool) -> bytes:
        """Returns the packed rows of all endpoints with load if `whole`, else of those whose load changed since the last call.

        Beyond ROWS_MAX, returns those with the most requests.
        """
        places = self._places
        slots, used = places.slot_array, places.used
        requests, tokens = self._lanes.inflight(used)[slots], self._lanes.tokens(used)[slots]
        if whole or self._keys is not places.key_array:
            changed = (requests > 0) | (tokens > 0)
        else:
            changed = (requests != self._requests) | (tokens != self._tokens)
        self._keys, self._requests, self._tokens = places.key_array, requests, tokens
        (at,) = changed.nonzero()
        if whole:
            self.left_out = max(len(at) - ROWS_MAX, 0)
        if len(at) > ROWS_MAX:
            at = at[np.argpartition(requests[at], -ROWS_MAX)[-ROWS_MAX:]]
        return packed(places.key_array[at], requests[at], tokens[at]) if len(at) else b""
