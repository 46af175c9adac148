"""A pool under traffic in virtual time: workers count answers, and the supervisor's sweep compares the endpoints."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from epp.request import DEFAULT_FLOW, Request
from shm.answers import AnswersReader, AnswersSchema, AnswersWriter
from shm.segment import Region
from shm.table import EJECTED, FAILING_AT, FAILING_MASK
from workers.shared.ejection import Ejections, Step
from workers.shared.outliers import EMPTY, KINDS, OUTCOMES, Outliers
from workers.worker.extproc.answer_counts import NOT_COUNTED, AnswerCounts, outcome_of

SLOTS = 16
SWEEP_S = 0.005
NOTHING = 0  # the status of an empty answer
OK = 200
Status = int | Callable[[int], int]  # of an answer; or slot -> status


class Server:
    refuses = is_down = False

    def __init__(self, pool: int = 0) -> None:
        self.pool = pool


def no_answers(slots: int) -> Outliers:
    """Returns what finds no outlier, because no answer is counted."""
    schema = AnswersSchema(slots, 1, KINDS, len(OUTCOMES))
    return Outliers(AnswersReader(schema, Region(memoryview(bytearray(schema.bytes)))))


def no_ejections(slots: int) -> Ejections:
    """Returns what never ejects an endpoint."""
    nothing = np.zeros(slots, dtype=np.int64)
    return Ejections(lambda: (nothing, nothing), tuple, lambda slot: 0, no_answers(slots))


class Pool:
    """Endpoints of which each gets random requests, unless a request names one. `events`: (seconds, slot, step) of each change."""

    def __init__(self, size: int = 8, workers: int = 2, seed: int = 1) -> None:
        self.now = self._began = 100.0
        schema = AnswersSchema(SLOTS, workers, KINDS, len(OUTCOMES))
        region = Region(memoryview(bytearray(schema.bytes)))
        self.workers = [AnswerCounts(AnswersWriter(schema, region, index), lambda: self.now) for index in range(workers)]
        self.reader = AnswersReader(schema, region)
        self.served, self.failed = np.zeros(SLOTS, dtype=np.int64), np.zeros(SLOTS, dtype=np.int64)
        self.endpoints: dict[int, Any] = {slot: Server() for slot in range(size)}
        self.inflight = dict.fromkeys(range(SLOTS), 0)
        self.ejections = Ejections(
            lambda: (self.served.copy(), self.failed.copy()),
            lambda: range(1, workers + 1),
            self.inflight.__getitem__,
            Outliers(self.reader),
        )
        self.rng = random.Random(seed)
        self.events: list[tuple[float, int, Step]] = []
        self.reasons: list[tuple[str, str]] = []  # of these changes
        self.requests = 0
        self.out_s = 0.0  # seconds that endpoints were ejected, summed over endpoints
        self._tried: dict[int, int] = {}

    def usable(self) -> list[int]:
        """The endpoints that get requests now, with those on trial for which no request was sent yet."""
        flags = {slot: self.ejections.flags(slot) for slot in self.endpoints}
        return [slot for slot, word in flags.items() if not word & EJECTED or (word != EJECTED and self._tried.get(slot) != word)]

    def send(
        self, status: Status = OK, *, to: int = -1, model: str = "m", flow: str = DEFAULT_FLOW, body: int | None = None, also: int = -1
    ) -> int:
        """Sends one request, which is answered at once. `to`: its endpoint, if that one is usable. `also`: a second one works for it.

        Returns the endpoint.
        """
        self.requests += 1
        usable = self.usable()
        slot = to if to in usable else self.rng.choice(usable)
        if self.ejections.flags(slot) & EJECTED:
            self._tried[slot] = self.ejections.flags(slot)
        request = Request(id="", path="/v1/completions", headers={}, now=self.now, model=model, fairness_id=flow)
        counts = self.rng.choice(self.workers)
        slots = (slot,) if also < 0 else (slot, also)
        body = self.requests if body is None else body
        counted = counts.sent(request, slots) if counts.watched[0] else NOT_COUNTED
        answer = status(slot) if callable(status) else status
        if answer == NOTHING or answer >= 400:
            outcome = outcome_of(answer) if answer else EMPTY
            counts.failed(request, slots, outcome, body, counted)
        else:
            counts.served(body)
        for each in slots:
            if answer < 500:
                self.served[each] += 1
            else:
                self.failed[each] += 1
        return slot

    def run(self, seconds: float, *traffic: tuple[float, Callable[[], object]]) -> None:
        """Lets time pass. `traffic`: (calls per second, call), at random times."""
        end = self.now + seconds
        while self.now < end:
            for rate, send in traffic:
                if self.rng.random() < rate * SWEEP_S:
                    send()
            self.now += SWEEP_S
            for slot, step in self.ejections.sweep(self.now, self.endpoints):
                self.events.append((self.now - self._began, slot, step))
                self.reasons.append(self.ejections.reason(slot))
            self.out_s += SWEEP_S * self.ejections.count()

    def ejected(self) -> list[int]:
        """The endpoints that were ejected so far, in order."""
        return [slot for _, slot, step in self.events if step is Step.EJECTED]

    def why(self, step: Step) -> tuple[str, str]:
        """Cause and evidence of the first change of this kind."""
        return next(reason for reason, (_, _, each) in zip(self.reasons, self.events, strict=True) if each is step)

    def share(self, slot: int) -> float:
        """Which share of its requests the endpoint fails beyond the others, as workers see it."""
        return (self.ejections.flags(slot) >> FAILING_AT & FAILING_MASK) / FAILING_MASK


def failing(*slots: int, status: int = 404) -> Callable[[int], int]:
    """Answers with a status at these endpoints, and serves at the others."""
    return lambda slot: status if slot in slots else OK
