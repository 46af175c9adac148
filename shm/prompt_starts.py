"""Prompt starts: since when each endpoint computes the prompt at the front there. Each worker writes its own row, all workers read all.

    worker 0 | start, one per slot |          monotonic seconds, float64; 0: this worker has seen none
    worker 1 | ...

A row starts on an even cache line, so rows never share a pair of lines. The newest start of a slot counts. So the row of a worker
that has ended does no harm, and nothing is ever cleared.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shm.layout import CACHE_LINE, WORD, aligned, layout_hash
from shm.segment import Region

ROW_ALIGNMENT: Final = 2 * CACHE_LINE  # CPUs fetch cache lines in pairs

Floats = npt.NDArray[np.float64]


class StartsSchema:
    """Lays out the rows for a number of slots and workers."""

    def __init__(self, slots: int, workers: int) -> None:
        if slots < 1 or workers < 1:
            raise ValueError(f"prompt starts need at least one slot and one worker, not {slots}, {workers}")
        self.slots, self.workers = slots, workers
        self.row_bytes = aligned(slots * WORD, ROW_ALIGNMENT)
        self.bytes = workers * self.row_bytes
        self.layout_hash = layout_hash("starts 1", slots, workers)

    def describe(self) -> dict[str, Any]:
        return {"kind": "starts", "slots": self.slots, "workers": self.workers}


class PromptStarts:
    """Writes one row and reads all. `own`: the cells of worker `index`, one per slot. `rows`: all cells, padded to whole cache lines."""

    def __init__(self, schema: StartsSchema, region: Region, index: int) -> None:
        rows: Floats = region.array(np.float64, 0, (schema.workers, schema.row_bytes // WORD))
        self.rows = rows
        self.own: Floats = rows[index, : schema.slots]
