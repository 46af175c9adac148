"""Turn priority: the session with the most turns goes first, but a long wait raises the score, too.

A *session* is a program, that is, all requests with one fairness id; a *turn* is one of its requests. A session that has taken many turns
probably still has its prefix in a KV cache, so its next turn costs least. The flow with the highest score goes next. Among equal scores,
the flow whose head (first waiting request) has waited longest goes next:

    score = turns already dispatched + 1 + time weight x seconds that the head has waited

If a session was inactive for longer than the inactivity time before the head arrived, the head is taken as the session's first turn. The
head of the flow of requests without a fairness id is always taken as a first turn, because this flow is no session.

All heads age at the same rate, so `turn - weight x arrival` has the same order as the score, and changes only when the flow changes. The
negative of this value is the claim that workers compare. The ledger tells all workers how many turns a session has taken: a position
encodes the time of the session's last activity in whole seconds, and the session's number of turns. Formula and defaults are those of
the reference picker's `program-aware-fairness`.
"""

from typing import Protocol

import numpy as np

from epp.candidates import Floats
from epp.plugin import Ledger
from epp.request import DEFAULT_FLOW
from epp.request.flows import FlowKey, FlowView, Queued

TURNS_END = 1 << 20  # a position is seconds x TURNS_END + turns; exact in a float64 while the seconds are below 2**33


class Session(Protocol):
    """Holds what turn priority knows of a session. `last`: when the first request arrived, or a request last got its turn or ended."""

    turns: int
    last: float
    in_flight: int


class Sessions(Protocol):
    """The policy, which owns the sessions of this worker."""

    def program(self, fairness_id: str, now: float) -> Session: ...
    def waits(self, session: Session, share: "Depths", key: FlowKey) -> None: ...
    def dispatched(self, session: Session, now: float) -> None: ...
    def waited_as(self, fairness_id: str, item: Queued) -> None: ...
    def waited(self, fairness_id: str, seconds: float) -> None: ...
    def no_longer_waits(self, fairness_id: str, share: "Depths") -> None: ...
    def met(self, priority: int, share: "Depths") -> None: ...


class Depths:
    """Orders the flows of one band that have waiting requests. Each of these flows has a row of the arrays. When a flow leaves, the last
    row takes its place.
    """

    def __init__(self, policy: Sessions, time_weight: float, inactivity_s: float) -> None:
        self._policy = policy
        self._weight = time_weight
        self._inactivity_s = inactivity_s
        self._row: dict[FlowKey, int] = {}
        self._flows: list[FlowView] = []
        self._score: Floats = np.zeros(16)
        self._arrival: Floats = np.zeros(16)
        self._ledger: Ledger | None = None  # None if there are no other workers

    def meet(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def changed(self, flow: FlowView) -> None:
        head, key = flow.head, flow.key
        row = self._row.get(key)
        if head is None:
            if row is not None:
                self._leave(row, key)
            return
        session = self._policy.program(key.fairness_id, head.arrival)
        if row is None:
            row = self._enter(flow)
            self._policy.met(key.priority, self)
            self._policy.waits(session, self, key)
        else:
            self._flows[row] = flow
        self._hear(session, key)
        self._arrival[row] = head.arrival
        self._rescore(row, key, session)

    def pick(self, now: float) -> FlowView | None:
        size = len(self._flows)
        if size < 2:
            return self._flows[0] if size else None
        scores = self._score[:size]
        best = int(scores.argmax())
        tied = np.flatnonzero(scores == scores[best])
        return self._flows[best if len(tied) == 1 else tied[self._arrival[tied].argmin()]]

    def claim(self, flow: FlowView) -> float:
        """Returns time weight x arrival - turn, so the flow with the highest score has the smallest claim."""
        return -float(self._score[self._row[flow.key]])

    def dispatched(self, flow: FlowView, item: Queued, now: float) -> None:
        key = flow.key
        self._policy.waited_as(key.fairness_id, item)
        self._policy.waited(key.fairness_id, now - item.arrival)
        session = self._policy.program(key.fairness_id, now)
        self._hear(session, key)
        session.turns = min(session.turns + 1, TURNS_END - 1)
        session.last = max(session.last, now)
        self._tell(session, key, now)
        self._policy.dispatched(session, now)

    def forget(self, key: FlowKey) -> None:
        """Does nothing: the policy keeps the programs, and drops them by its own rules."""

    def served(self, key: FlowKey, session: Session, now: float) -> None:
        """Computes the score anew for a session with waiting requests in this band, after one of its turns began or ended."""
        row = self._row.get(key)
        if row is not None:
            self._rescore(row, key, session)

    def ended(self, key: FlowKey, session: Session, now: float) -> None:
        """Tells other workers, after a request of the session has ended, that the session was active now."""
        self._tell(session, key, now)

    def _hear(self, session: Session, key: FlowKey) -> None:
        """Updates `session` with what other workers have published about this session."""
        if self._ledger is None:
            return
        position = self._ledger.position(self._ledger.flow_hash(key))
        if position > 0.0:
            second, turns = divmod(int(position), TURNS_END)
            session.last = max(session.last, float(second)) if session.turns else float(second)
            session.turns = max(session.turns, turns)

    def _tell(self, session: Session, key: FlowKey, now: float) -> None:
        if self._ledger is not None:
            self._ledger.move(self._ledger.flow_hash(key), float(int(now) * TURNS_END + session.turns))

    def _rescore(self, row: int, key: FlowKey, session: Session) -> None:
        arrival = self._arrival[row]
        idle = not session.in_flight and 0.0 < self._inactivity_s < arrival - session.last
        turn = 1 if idle or key.fairness_id == DEFAULT_FLOW else session.turns + 1
        self._score[row] = turn - self._weight * arrival

    def _enter(self, flow: FlowView) -> int:
        row = len(self._flows)
        if row == len(self._score):
            self._score, self._arrival = (np.concatenate((old, np.zeros(row))) for old in (self._score, self._arrival))
        self._row[flow.key] = row
        self._flows.append(flow)
        return row

    def _leave(self, row: int, key: FlowKey) -> None:
        del self._row[key]
        last = self._flows.pop()
        if row < len(self._flows):
            end = len(self._flows)
            self._flows[row] = last
            self._row[last.key] = row
            self._score[row], self._arrival[row] = self._score[end], self._arrival[end]
        self._policy.no_longer_waits(key.fairness_id, self)
