"""The kernel that carries the loads of endpoints on, in NumPy. It defines what `loads.c` computes, and runs where that is not built.

`workers.worker.extproc.account` says what is computed, and why.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Slots = NDArray[np.intp]

# Columns of what is known of the last page of each slot: the generation of its endpoint, when the page came, when the requests in flight
# were counted and how many there were, the batch, whether that was seen with waiting requests (1), and the KV usage of a running request.
GENERATION, PAGE_AT, AT, COUNTED, BATCH, FULL, HELD = range(7)
KNOWN: Final = 7


def carry(
    known: Floats,
    slots: Slots,
    generation: NDArray[np.uint64],
    page_at: Floats,
    running: Floats,
    waiting: Floats,
    kv: Floats,
    counted: Floats,
    inflight: NDArray[Any],
    now: float,
    step_s: float,
) -> tuple[Floats, Floats, Floats, Floats] | None:
    """Takes new pages, and returns running, waiting, KV usage and counted requests as they are `now`; None if nothing has moved.

    `known`: shape (all slots, KNOWN). `slots`: the slots of the endpoints. The other arrays have a number for each endpoint: the
    generation, when the page came (0: never), what the page shows (NaN: not reported), and the requests in flight that it includes.
    `inflight`: the requests in flight now, which count if the earlier number was taken more than `step_s` ago.
    """
    runs_there, waits_there = np.nan_to_num(running), np.nan_to_num(waiting)
    rows = _with_pages(known[slots], generation.astype(np.float64), page_at, runs_there, waits_there, np.nan_to_num(kv), counted)
    old = (now - rows[:, AT] > step_s) & (page_at > 0.0)
    rows[:, COUNTED] = np.where(old, inflight, rows[:, COUNTED])
    rows[:, AT] = np.where(old, now, rows[:, AT])
    known[slots] = rows
    more = rows[:, COUNTED] - counted
    if not more.any():
        return None
    batch = np.where(rows[:, FULL] != 0.0, rows[:, BATCH], rows[:, BATCH].max(initial=0.0))
    total = np.maximum(runs_there + waits_there + more, 0.0)
    runs = np.minimum(total, batch)
    used = np.clip(kv + (runs - runs_there) * rows[:, HELD], 0.0, 1.0)
    unknown = np.isnan(running), np.isnan(waiting)
    return np.where(unknown[0], np.nan, runs), np.where(unknown[1], np.nan, total - runs), used, rows[:, COUNTED].copy()


def _with_pages(rows: Floats, generation: Floats, page_at: Floats, running: Floats, waiting: Floats, kv: Floats, counted: Floats) -> Floats:
    """Returns the rows after they have taken the pages that are new."""
    another = rows[:, GENERATION] != generation
    new = another | (rows[:, PAGE_AT] != page_at)
    full, batch = waiting > 0.0, np.where(another, 0.0, rows[:, BATCH])
    held = np.where(running > 0.0, kv / np.maximum(running, 1.0), np.where(another, 0.0, rows[:, HELD]))
    taken = np.empty_like(rows)
    taken[:, GENERATION], taken[:, PAGE_AT], taken[:, AT], taken[:, COUNTED] = generation, page_at, page_at, counted
    taken[:, BATCH] = np.where(full, running, np.maximum(batch, running))
    taken[:, FULL] = full | ((rows[:, FULL] != 0.0) & ~another & (running <= batch))
    taken[:, HELD] = held
    return np.where(new[:, None], taken, rows)
