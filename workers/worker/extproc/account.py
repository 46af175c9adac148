"""Estimates loads between two pages: the load of the last page, plus requests sent, minus requests ended.

    page                  running, waiting, KV usage, and the requests in flight when it was asked for
    total now             running + waiting + in flight now - in flight then
    running               the total, up to the batch; waiting: the rest
    KV usage              that of the page, plus (or minus) the usage of one running request for each request that runs more (or fewer)

The batch is the number of requests that the endpoint ran at the last page with waiting requests. Before such a page, the batch is the
largest number that any endpoint has run.

Pages and carried values younger than STEP_S are used unchanged: `Candidates` adds the requests sent since then to the waiting requests.
"""

from typing import Final, NamedTuple

import numpy as np

from compiled.calls import carry
from compiled.kernels.loads_reference import KNOWN, Slots
from epp.candidates import Floats
from shm.table import Words

STEP_S: Final = 0.1


class Load(NamedTuple):
    """Loads of endpoints, float64, shape (endpoints,). NaN: not reported. `counted`: the requests in flight that the others include."""

    running: Floats
    waiting: Floats
    kv: Floats
    counted: Floats


class Account:
    """Keeps the values of each slot's last page that later calls need."""

    def __init__(self, slots: int) -> None:
        self._known = np.zeros((slots, KNOWN))

    def carry(self, slots: Slots, generation: Words, page_at: Floats, page: Load, inflight: Floats, now: float) -> Load:
        """Returns the loads at `now`. `slots`: the slots of the endpoints. `page_at`: the times of the pages, 0 before the first page."""
        running, waiting, kv, counted = page
        carried = carry(self._known, slots, generation, page_at, running, waiting, kv, counted, inflight, now, STEP_S)
        return page if carried is None else Load(*carried)
