"""Carries scraped loads from one page to the next by what the picker has in flight: the page, plus what was sent, minus what has ended.

    page                  running, waiting, KV usage, and the requests in flight when it was asked for
    total now             running + waiting + in flight now - in flight then
    running               the total, up to the batch; waiting: the rest
    KV usage              that of the page, plus what a running request of the endpoint holds, for each that it runs more (or fewer)

The batch is what the endpoint ran at the last page with waiting requests. Before there was such a page, it is the largest that any endpoint
was seen to run.

A page that is younger than STEP_S counts as it is, and so do carried values of that age: `Candidates` adds what was sent since to the
waiting requests.
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
    """Keeps what has to be known of the last page of each slot."""

    def __init__(self, slots: int) -> None:
        self._known = np.zeros((slots, KNOWN))

    def carry(self, slots: Slots, generation: Words, page_at: Floats, page: Load, inflight: Floats, now: float) -> Load:
        """Returns the loads as they are `now`. `slots`: of the endpoints. `page_at`: 0 before the first page."""
        running, waiting, kv, counted = page
        carried = carry(self._known, slots, generation, page_at, running, waiting, kv, counted, inflight, now, STEP_S)
        return page if carried is None else Load(*carried)
