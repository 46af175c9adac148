"""Orders the turns of programs in one band. A program that holds room always goes; other programs wait until they fit an endpoint.

A program is one run of an agent: all requests with one fairness id (`_programs`). The head of a flow is its first waiting request. The
first of these rules that finds a head decides which one goes next:

1. a head that has waited for the starvation limit, the oldest first, whether its program fits or not;
2. programs that hold room, the smallest first, because room becomes free only when they finish;
3. programs that lost their room, the smallest first, if the program fits an endpoint;
4. programs that never had room, the smallest first, if the program fits an endpoint.

Among equally large programs, the oldest head goes. If no rule finds a head, all heads wait: `pick` returns None. A smaller program fits
each endpoint that a larger one fits. So only the smallest program of each class is compared with the largest room.
"""

from bisect import bisect_left, insort
from typing import NamedTuple, Protocol

from epp.plugins.fairness._programs import NEW, REASONING, RESUMING, Pod, Program, Programs
from epp.request.flows import FlowKey, FlowView, Queued

Place = tuple[float, float, FlowKey]  # size, arrival, flow


class Head(NamedTuple):
    """Describes the first request of a flow. `kind`: the class of the program when the flow got its place in the order.

    `size`: if the class is NEW, the size of the request in bytes; else the size of the program in tokens.
    """

    flow: FlowView
    program: Program
    kind: int
    size: float
    arrival: float


class Admission(Protocol):
    """The object that knows how much room the endpoints have, and counts events: the policy."""

    programs: Programs

    def tend(self, now: float) -> None:
        """Does the policy's upkeep. Called before each pick."""

    def roomiest(self, now: float) -> tuple[Pod | None, float]:
        """Returns the pod with the most room, and this room in tokens; (None, infinity) if no pod is known yet, (None, 0) without room."""

    def required(self, tokens: float) -> float:
        """Returns the room, in tokens, that a program of `tokens` tokens needs: its tokens, and some room to grow."""

    def starves(self, waited_s: float) -> bool: ...
    def went(self, kind: int, waited_s: float) -> None:
        """Notes that a request of this class got its turn."""


class Turns:
    """Orders the flows of one band that have waiting requests."""

    def __init__(self, policy: Admission) -> None:
        self._policy = policy
        self._heads: dict[FlowKey, Head] = {}
        self._holding: dict[FlowKey, Head] = {}  # flows whose programs have room reserved; they never wait for long
        self._ages: list[tuple[float, FlowKey]] = []  # sorted: (arrival of the head, flow)
        self._fitting: dict[int, list[Place]] = {RESUMING: [], NEW: []}  # per class, sorted

    def changed(self, flow: FlowView) -> None:
        key, head = flow.key, flow.head
        self._remove(key)
        if head is None:
            program = self._policy.programs.find(key.fairness_id)
            if program is not None:
                program.bands.pop(self, None)
            return
        program = self._policy.programs.program(key.fairness_id, head.arrival)
        program.bands[self] = key
        self._place(key, flow, head)

    def pick(self, now: float) -> FlowView | None:
        if not self._heads:
            return None
        policy = self._policy
        policy.tend(now)
        arrival, oldest = self._ages[0]
        if policy.starves(now - arrival):
            return self._heads[oldest].flow
        programs = policy.programs
        if self._holding:
            sizes = [(programs.tokens(h.program, now), h.arrival, key) for key, h in self._holding.items()]
            return self._holding[min(sizes)[2]].flow
        _, room = policy.roomiest(now)
        for kind in (RESUMING, NEW):
            if self._fitting[kind]:
                size, _, key = self._fitting[kind][0]
                if policy.required(self._tokens(kind, size)) <= room:
                    return self._heads[key].flow
        return None

    def dispatched(self, flow: FlowView, item: Queued, now: float) -> None:
        head = self._heads.get(flow.key)
        if head is None:
            return
        policy = self._policy
        if head.kind != REASONING:
            pod, room = policy.roomiest(now)
            required = policy.required(self._tokens(head.kind, head.size))
            if pod is not None and required <= room:
                policy.programs.reserve(flow.key.fairness_id, pod, required, now)
        policy.went(head.kind, now - item.arrival)

    def forget(self, key: FlowKey) -> None:
        """Does nothing: the policy keeps the programs, and drops them by its own rules."""

    def reclassed(self, key: FlowKey) -> None:
        """Moves a waiting flow to its new place, after the class or size of its program has changed."""
        head = self._heads.get(key)
        waits = head.flow.head if head is not None else None
        if head is not None and waits is not None:
            self._remove(key)
            self._place(key, head.flow, waits)

    def _tokens(self, kind: int, size: float) -> float:
        return float(self._policy.programs.estimate(int(size))) if kind == NEW else size

    def _place(self, key: FlowKey, flow: FlowView, first: Queued) -> None:
        programs = self._policy.programs
        program = programs.program(key.fairness_id, first.arrival)
        kind, size = programs.class_of(program), float(first.bytes)
        if kind == RESUMING:
            size = float(program.committed or programs.estimate(first.bytes))
        head = self._heads[key] = Head(flow, program, kind, size, first.arrival)
        insort(self._ages, (head.arrival, key))
        if kind == REASONING:
            self._holding[key] = head
        else:
            insort(self._fitting[kind], (size, head.arrival, key))

    def _remove(self, key: FlowKey) -> None:
        head = self._heads.pop(key, None)
        if head is None:
            return
        del self._ages[bisect_left(self._ages, (head.arrival, key))]
        if head.kind == REASONING:
            del self._holding[key]
        else:
            places = self._fitting[head.kind]
            del places[bisect_left(places, (head.size, head.arrival, key))]
