"""Counts requests and failed answers by endpoint and kind of request, so that the supervisor can compare endpoints.

A kind is a pool, a model, a path and a flow. A kind gets one of this worker's places when one of its answers fails. It keeps the place
until no answer has failed for IDLE_S and another kind needs the place. While all places are taken, all further kinds are counted as one
kind. `workers.shared.outliers` says what the counts are for. Without evidence of failures, requests cost nothing: the counting begins when
the supervisor watches.

A client that repeats a request which no server can serve, always at the same server, would make that server look faulty. So a failed answer
to a request that the endpoint has failed before is not counted, unless the same request has succeeded meanwhile, anywhere.
"""

from collections.abc import Callable, Sequence
from math import inf
from typing import Final

from epp.decision.decision import SERVER_ERRORS_FROM
from epp.request import Request
from shm.answers import FAILED, SENT, AnswersWriter
from workers.shared.outliers import CLIENT_ERROR, OTHERS, OUTCOMES, SERVER_ERROR

# how a request was counted when it was sent: not at all, in the sum of all kinds, or also in its own kind
NOT_COUNTED: Final = 0
NOTED: Final = 1
BY_KIND: Final = 2
IDLE_S: Final = 60.0
REMEMBERED_MAX: Final = 1024  # remembered failed requests
KIND_MASK: Final = (1 << 63) - 1


class AnswerCounts:
    """Writes the counts of one worker. `watched`: one word, which is 0 while the supervisor has no evidence, so that requests need not be
    counted.
    """

    def __init__(self, writer: AnswersWriter, now: Callable[[], float]) -> None:
        """`now`: returns the time in monotonic seconds."""
        writer.take_over()
        self.watched = writer.watched
        self._writer = writer
        self._now = now
        self._places: dict[int, int] = {}  # kind -> its place
        self._others = -1  # the place of all kinds without their own place, or -1 before the first such kind
        self._failed_at = [-inf] * writer.schema.kinds  # per place, when the last answer of its kind has failed
        # Requests that have failed, by their fingerprints: the slots that have failed them, or None after one has served them.
        self._failed: dict[int, set[int] | None] = {}

    def sent(self, request: Request, slots: Sequence[int], pool: int = 0) -> int:
        """Counts a request to the endpoints at `slots`. Returns NOTED, or BY_KIND if its kind has a place."""
        place = self._places.get(kind_of(request, pool), self._others)
        for slot in slots:
            if place >= 0:
                self._writer.count(place, slot, SENT)
            self._writer.count_outcome(0, slot)
        return BY_KIND if place >= 0 else NOTED

    def served(self, fingerprint: int) -> None:
        """Notes that an answer has not failed."""
        if fingerprint in self._failed:
            self._failed[fingerprint] = None

    def failed(self, request: Request, slots: Sequence[int], outcome: int, fingerprint: int, counted: int, pool: int = 0) -> None:
        """Counts a failed answer. `outcome`: an index of OUTCOMES. `counted`: the result of `sent`, or NOT_COUNTED if `sent` was not
        called.
        """
        place = self._place(kind_of(request, pool))
        for slot in slots:
            if counted < BY_KIND:
                self._writer.count(place, slot, SENT)
            if counted < NOTED:
                self._writer.count_outcome(0, slot)
            if self._says(fingerprint, slot):
                self._writer.count(place, slot, FAILED)
            self._writer.count_outcome(outcome, slot)

    def _says(self, fingerprint: int, slot: int) -> bool:
        """Returns whether a failed answer is evidence against the endpoint, and not only against the request."""
        failed = self._failed
        if len(failed) >= REMEMBERED_MAX and fingerprint not in failed:
            failed.clear()
        slots = failed.setdefault(fingerprint, set())
        if slots is None:
            return True
        known = slot in slots
        slots.add(slot)
        return not known

    def _place(self, kind: int) -> int:
        """Returns the place of a kind with a failed answer. Gives the kind a place if it has none."""
        now, last = self._now(), len(self._failed_at) - 1
        place = self._places.get(kind, -1)
        if place < 0:
            place = next((each for each in range(last) if now - self._failed_at[each] > IDLE_S), last)
            if place < last:
                self._places = {known: at for known, at in self._places.items() if at != place}
                self._places[kind] = place
                self._writer.give(place, kind)
            elif self._others < 0:
                self._others = last
                self._writer.give(last, OTHERS)
        self._failed_at[place] = now
        return place


def kind_of(request: Request, pool: int) -> int:
    """Returns a number that stands for the kind of a request. The number is the same in all workers, because one parent has forked them."""
    number = hash((pool, request.target_model, request.path, request.fairness_id)) & KIND_MASK
    return number if number > OTHERS else number + 2


def outcome_of(status: int) -> int:
    """Returns the index in OUTCOMES of an answer with an error status."""
    text = str(status)
    return OUTCOMES.index(text) if text in OUTCOMES else CLIENT_ERROR if status < SERVER_ERRORS_FROM else SERVER_ERROR
