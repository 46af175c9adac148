"""Ejection in the routing benchmark: the picker's rules and counts, in virtual time.

Workers count what `workers.worker.extproc.response_phase` counts, and the supervisor's sweep runs every SWEEP_S.
"""

from collections.abc import Sequence

import numpy as np

from epp.candidates import Floats, Mask
from epp.decision.decision import ERRORS_FROM, SERVER_ERRORS_FROM
from epp.request import Request
from shm.answers import AnswersReader, AnswersSchema, AnswersWriter
from shm.segment import Region
from shm.table import AREA_MASK, EJECTED, FAILING_AT, FAILING_MASK, TRIAL_AREA_AT, TRIAL_NUMBER_AT
from workers.shared.ejection import CONNECTION_POINTS, Ejections
from workers.shared.outliers import EMPTY, KINDS, OUTCOMES, Outliers
from workers.worker.extproc.answer_counts import NOT_COUNTED, AnswerCounts, outcome_of

SWEEP_S = 0.005
OK = 200
DOWN_REFUSALS = 2  # refused scrapes in a row after which an endpoint gets no requests


class Scrapes:
    """The part of an endpoint's state that comes from scrapes. All endpoints are of one pool."""

    pool = 0

    def __init__(self) -> None:
        self.refusals = 0

    @property
    def refuses(self) -> bool:
        return self.refusals > 0

    @property
    def is_down(self) -> bool:
        return self.refusals >= DOWN_REFUSALS


class SharedEjection:
    """Ejects the endpoints of all workers of a picker. `version` grows when an endpoint is to be used in another way."""

    def __init__(self, inflight: Floats, workers: int) -> None:
        """`inflight`: the requests in flight of each server, which its owner changes."""
        self._now = self._due = 0.0
        servers = len(inflight)
        schema = AnswersSchema(servers, workers, KINDS, len(OUTCOMES))
        region = Region(memoryview(bytearray(schema.bytes)))
        self._workers = [AnswerCounts(AnswersWriter(schema, region, index), lambda: self._now) for index in range(workers)]
        self._served, self._failed = np.zeros(servers, dtype=np.int64), np.zeros(servers, dtype=np.int64)
        self._ejections = Ejections(
            lambda: (self._served.copy(), self._failed.copy()),
            lambda: range(1, workers + 1),
            lambda slot: int(inflight[slot]),
            Outliers(AnswersReader(schema, region)),
        )
        self.scrapes = {server: Scrapes() for server in range(servers)}
        self._listed: Sequence[int] = range(servers)
        self._counted: dict[str, int] = {}  # id of a request in flight -> how it was counted
        self._tried: dict[int, int] = {}  # server -> the last trial that was used
        self.version = 0

    def listed(self, servers: Sequence[int]) -> None:
        """Takes the servers that discovery lists now."""
        for server in set(self._listed) - set(servers):
            self._ejections.forget(server)
        self._listed = servers
        self.version += 1

    def passed(self, now: float) -> None:
        """Sweeps as often as the supervisor does."""
        self._now = now
        if now >= self._due:
            self._due = now - now % SWEEP_S + SWEEP_S
            for _ in self._ejections.sweep(now, {server: self.scrapes[server] for server in self._listed}):
                self.version += 1

    def down(self, worker: int) -> Mask:
        """Returns which servers get no requests of this worker."""
        found = []
        for server in range(len(self.scrapes)):
            flags = self._ejections.flags(server)
            mine = flags >> TRIAL_AREA_AT & AREA_MASK == worker + 1 and self._tried.get(server) != flags >> TRIAL_NUMBER_AT
            found.append(self.scrapes[server].is_down or (flags & EJECTED != 0 and not mine))
        return np.array(found)

    def failing(self) -> Floats | None:
        """Returns which share of its requests each server fails beyond the others; None if none does."""
        steps = [self._ejections.flags(server) >> FAILING_AT & FAILING_MASK for server in range(len(self.scrapes))]
        return np.array(steps) / FAILING_MASK if any(steps) else None

    def sent(self, worker: int, request: Request, server: int) -> None:
        """Takes that a request is on its way."""
        flags = self._ejections.flags(server)
        if flags & EJECTED:
            self._tried[server] = flags >> TRIAL_NUMBER_AT
            self.version += 1
        counts = self._workers[worker]
        if counts.watched[0]:
            self._counted[request.id] = counts.sent(request, (server,))

    def answered(self, worker: int, request: Request, server: int, status: int, *, empty: bool = False) -> None:
        """Takes an answer. `status`: 0 if there was none. `empty`: whether it is complete and has no body."""
        counts, counted = self._workers[worker], self._counted.pop(request.id, NOT_COUNTED)
        if status >= ERRORS_FROM or empty:
            outcome = EMPTY if empty else outcome_of(status)
            counts.failed(request, (server,), outcome, hash(request.id), counted)
        if 0 < status < SERVER_ERRORS_FROM:
            self._served[server] += 1
        else:
            self._failed[server] += 1 if status else CONNECTION_POINTS
