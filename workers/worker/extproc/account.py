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

from typing import Any, Final, NamedTuple

import numpy as np

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
    """Keeps what has to be known of the last page of each slot. Arrays have the shape (slots,)."""

    def __init__(self, slots: int) -> None:
        self._generation = np.zeros(slots, dtype=np.uint64)
        self._page_at = np.zeros(slots)  # when the last page came
        self._at = np.zeros(slots)  # when `_counted` was counted
        self._counted = np.zeros(slots)
        self._batch = np.zeros(slots)
        self._full = np.zeros(slots, dtype=bool)  # whether `_batch` was seen with waiting requests
        self._held = np.zeros(slots)  # KV usage per running request

    def carry(self, slots: Any, generation: Words, page_at: Floats, page: Load, inflight: Floats, now: float) -> Load:
        """Returns the loads as they are `now`. `slots`: index of the endpoints' slots. `page_at`: 0 before the first page."""
        running, waiting = np.nan_to_num(page.running), np.nan_to_num(page.waiting)
        self._take(slots, generation, page_at, page, running, waiting)
        counted, at = np.array(self._counted[slots]), self._at[slots]
        old = (now - at > STEP_S) & (page_at > 0.0)
        if old.any():
            self._counted[slots] = counted = np.where(old, inflight, counted)
            self._at[slots] = np.where(old, now, at)
        more = counted - page.counted
        if not more.any():
            return page
        batch = self._batch[slots]
        batch = np.where(self._full[slots], batch, batch.max(initial=0.0))
        total = np.maximum(running + waiting + more, 0.0)
        runs = np.minimum(total, batch)
        kv = np.clip(page.kv + (runs - running) * self._held[slots], 0.0, 1.0)
        return Load(np.where(np.isnan(page.running), np.nan, runs), np.where(np.isnan(page.waiting), np.nan, total - runs), kv, counted)

    def _take(self, slots: Any, generation: Words, page_at: Floats, page: Load, running: Floats, waiting: Floats) -> None:
        """Takes the pages that have come since the last call."""
        another = self._generation[slots] != generation
        new = another | (self._page_at[slots] != page_at)
        if not new.any():
            return
        self._generation[slots] = generation
        self._page_at[slots] = page_at
        self._at[slots] = np.where(new, page_at, self._at[slots])
        self._counted[slots] = np.where(new, page.counted, self._counted[slots])
        full, batch = new & (waiting > 0.0), np.where(another, 0.0, self._batch[slots])
        self._batch[slots] = np.where(full, running, np.maximum(batch, np.where(new, running, 0.0)))
        self._full[slots] = full | (self._full[slots] & ~another & (running <= batch))
        held = np.where(another, 0.0, self._held[slots])
        runs = new & (running > 0.0)
        self._held[slots] = np.where(runs, np.nan_to_num(page.kv) / np.maximum(running, 1.0), held)
