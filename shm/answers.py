"""Answers: how many requests each endpoint got, and how many of their answers failed, by kind of request and by outcome.

    head     | watch |                                         the supervisor's: whether workers count requests
    worker 0 | changes | kind 0 | ... | kind k-1 |             what the kinds are; 0 for a free place
             | requests, one per slot | ... |                  for each kind
             | failed answers, one per slot | ... |            for each kind
             | requests, one per slot |                        of all kinds
             | failed answers, one per slot | ... |            for each cause
    worker 1 | ...

Each cell is one 8-byte word. Each worker writes its own row, and the supervisor reads all. `changes` grows with each count, so a reader
that finds it unchanged need not read further. Counts only grow, until a worker gives a place to another kind: it first frees the place,
then clears the counts of the place. A kind is a number that is the same in all workers. This module does not know what kinds and outcomes
stand for.
"""

from typing import NamedTuple

import numpy as np

from shm.layout import CACHE_LINE, ROW_ALIGNMENT, WORD, Layout, aligned
from shm.segment import Ints, Region

SENT, FAILED = 0, 1


class AnswersSchema(Layout):
    """Lays out the rows for a number of slots, workers, kinds and outcomes."""

    def __init__(self, slots: int, workers: int, kinds: int, outcomes: int) -> None:
        if min(slots, workers, kinds, outcomes) < 1:
            raise ValueError(f"answers need at least a slot, a worker, a kind and an outcome, not {slots}, {workers}, {kinds}, {outcomes}")
        self.slots, self.workers, self.kinds, self.outcomes = slots, workers, kinds, outcomes
        self.counts_at = aligned((1 + kinds) * WORD, CACHE_LINE) // WORD
        self.outcomes_at = self.counts_at + 2 * kinds * slots
        self.row_bytes = aligned((self.outcomes_at + outcomes * slots) * WORD, ROW_ALIGNMENT)
        self.bytes = ROW_ALIGNMENT + workers * self.row_bytes
        super().__init__("answers", "answers 1", slots=slots, workers=workers, kinds=kinds, outcomes=outcomes)


class AnswersWriter:
    """Writes the row of one worker. `watched`: one word that says whether requests are to be counted."""

    def __init__(self, schema: AnswersSchema, region: Region, index: int) -> None:
        self.schema = schema
        self.watched: memoryview = region.bytes[:WORD].cast("q").toreadonly()
        start = ROW_ALIGNMENT + index * schema.row_bytes
        self._words: memoryview = region.bytes[start : start + schema.row_bytes].cast("q")

    def take_over(self) -> None:
        """Frees all places, because the predecessor knew which kinds they had."""
        for place in range(self.schema.kinds):
            self.give(place, 0)

    def give(self, place: int, kind: int) -> None:
        """Gives a place to another kind. The counts of the place begin at 0."""
        schema, words = self.schema, self._words
        words[1 + place] = 0
        for which in (SENT, FAILED):
            at = schema.counts_at + (which * schema.kinds + place) * schema.slots
            words[at : at + schema.slots] = memoryview(bytes(schema.slots * WORD)).cast("q")
        words[1 + place] = kind

    def count(self, place: int, slot: int, which: int) -> None:
        """Counts a request of a kind, SENT or FAILED. Call `count_outcome` afterwards."""
        schema, words = self.schema, self._words
        words[schema.counts_at + (which * schema.kinds + place) * schema.slots + slot] += 1

    def count_outcome(self, outcome: int, slot: int) -> None:
        """Counts a request of any kind: outcome 0 when it is sent, and its cause when its answer has failed."""
        self._words[self.schema.outcomes_at + outcome * self.schema.slots + slot] += 1
        self._words[0] += 1


class Counts(NamedTuple):
    """The counts of all workers. `kinds`: shape (workers, kinds). `answers`: shape (workers, 2, kinds, slots), SENT and FAILED.

    `outcomes`: shape (outcomes, slots), over all workers.
    """

    kinds: Ints
    answers: Ints
    outcomes: Ints


class AnswersReader:
    """Reads all rows, and writes the head. Only the supervisor uses this class."""

    def __init__(self, schema: AnswersSchema, region: Region) -> None:
        self.schema = schema
        self._watch: memoryview = region.bytes[:WORD].cast("q")
        shape = (schema.workers, schema.row_bytes // WORD)
        self._rows: Ints = region.array(np.int64, ROW_ALIGNMENT, shape)

    def watch(self, on: bool) -> None:
        """Tells the workers whether to count requests from now on."""
        self._watch[0] = int(on)

    def changes(self) -> list[int]:
        """Returns a number per worker, which grows with each count of that worker."""
        found: list[int] = self._rows[:, 0].tolist()
        return found

    def counts(self) -> Counts:
        """Returns copies of all counts."""
        schema, rows = self.schema, self._rows
        shape = (schema.workers, 2, schema.kinds, schema.slots)
        outcomes = rows[:, schema.outcomes_at : schema.outcomes_at + schema.outcomes * schema.slots].sum(axis=0)
        return Counts(
            rows[:, 1 : 1 + schema.kinds].copy(),
            rows[:, schema.counts_at : schema.outcomes_at].reshape(shape).copy(),
            outcomes.reshape(schema.outcomes, schema.slots),
        )
