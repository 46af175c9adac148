"""Least attained service: the program that has got the fewest tokens of late goes first, and who waits long is not forgotten.

A *program* is what requests of one fairness id belong to, in all bands. Its attained service S grows by input + 2 x output tokens
when an answer ends, and halves every half-life. The flow with the highest score goes next:

    score = service weight x (1 - S, min-max normalised) + head-wait weight x (age of the head, min-max normalised)

normalised over the flows that have something waiting; equal values count 0.5. Where servers report no usage all S are 0, and the
oldest head goes first.

All S fade at the same rate, and all heads grow older at the same rate, so normalised values stand still while nothing happens: S is
kept on a scale that grows as S would fade, and the arrival of the head stands for its age. Each pick looks at one array of scores.
When something has changed they are made anew: for up to EXACT_MAX flows at once, beyond that every REFRESH_S, and between, what
changes gets a new score by the old extremes.

Kept per worker: programs it has seen, at most PROGRAMS_MAX, without those that were idle for longer than the TTL.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from itertools import islice
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from epp.candidates import Floats
from epp.data import Datum
from epp.decision import Decision, Response
from epp.flows import FlowKey, FlowView, Queued, original
from epp.plugin import FairnessPolicy, PreRequest, ResponseComplete, Services, plugin
from epp.request import Request

INPUT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0
TOKENS_MAX = 1e7  # of one answer: whatever a server reports
PROGRAMS_MAX = 20_000
SWEPT_MAX = 4_096  # programs looked at by one sweep: it runs between requests
LOOKED_AT = 8  # when there are too many programs: how many of the oldest are tried
EXACT_MAX = 64
REFRESH_S = 0.01
HALVINGS_MAX = 32.0  # after so many half-lives the scale starts anew, so that figures stay in range

NotNegative = Annotated[float, msgspec.Meta(ge=0)]


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """The weights of the score, and how long is remembered; a half-life or TTL of 0 is for ever. There is one strategy."""

    strategy: Literal["las", ""] = "las"
    las_weight_service: NotNegative = 0.8
    las_weight_head_wait: NotNegative = 0.2
    las_half_life_seconds: NotNegative = 60.0
    eviction_ttl_seconds: NotNegative = 3600.0
    eviction_sweep_seconds: Annotated[float, msgspec.Meta(gt=0)] = 300.0


class _Program:
    """`service` is that of the moment `at`. `places`: the bands in which something of it waits."""

    __slots__ = ("at", "in_flight", "last", "places", "service")

    def __init__(self, now: float) -> None:
        self.service = 0.0
        self.at = now
        self.last = now  # of its completions; of its first request while there is none
        self.in_flight = 0
        self.places: dict[Scores, FlowKey] = {}


@plugin("program-aware-fairness")
class ProgramAware(FairnessPolicy, PreRequest, ResponseComplete):
    """Least attained service: score = service weight x (1 - normalised service) + head-wait weight x normalised age of the head.

    Service is the input + 2 x output tokens that a program (fairness id) got, fading by half every half-life.
    """

    Params = Parameters

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        self._programs: OrderedDict[str, _Program] = OrderedDict()  # the least recently used first
        self._now = 0.0
        self.half_life_s: float = params.las_half_life_seconds
        self._as = Datum(f"flow_program/{name}", str)
        self.keeps = (self._as,)

    def start(self, services: Services) -> None:
        if self.params.eviction_ttl_seconds > 0:
            services.every(self.params.eviction_sweep_seconds, self.sweep)

    def share(self, key: Callable[[Queued], Any]) -> "Scores":
        return Scores(self)

    def __len__(self) -> int:
        return len(self._programs)

    def before_send(self, request: Request, decision: Decision) -> None:
        self.program(request[self._as] or request.fairness_id, request.now).in_flight += 1

    def response_complete(self, request: Request, decision: Decision, response: Response) -> None:
        now = request.now
        program = self.program(request[self._as] or request.fairness_id, now)
        program.in_flight = max(0, program.in_flight - 1)
        program.last = now
        usage = response.usage
        if usage is None:
            return
        tokens = INPUT_WEIGHT * (usage.prompt or 0) + OUTPUT_WEIGHT * (usage.completion or 0)
        program.service = self.faded(program, now) + min(max(0.0, tokens), TOKENS_MAX)
        program.at = now
        for scores, key in program.places.items():
            scores.served(key, program, now)

    def went_as(self, fairness_id: str, item: Queued) -> None:
        """Under which id an item waited, where that is not its own: many that are not told apart wait as one."""
        request = original(item)
        if isinstance(request, Request) and request.fairness_id != fairness_id:
            request[self._as] = fairness_id

    def left(self, fairness_id: str, scores: "Scores") -> None:
        """Nothing of a program waits in that band any more."""
        program = self._programs.get(fairness_id)
        if program is not None:
            program.places.pop(scores, None)

    def program(self, fairness_id: str, now: float) -> _Program:
        """What is known of a program; a new one has got nothing yet."""
        self._now = max(self._now, now)
        programs = self._programs
        program = programs.get(fairness_id)
        if program is None:
            program = programs[fairness_id] = _Program(now)
            if len(programs) > PROGRAMS_MAX:
                self._make_room()
        else:
            programs.move_to_end(fairness_id)
        return program

    def faded(self, program: _Program, now: float) -> float:
        """Attained service at this moment."""
        passed, half_life = now - program.at, self.half_life_s
        return program.service * math.exp2(-passed / half_life) if half_life > 0 and passed > 0 else program.service

    def sweep(self) -> None:
        """Drops programs that have been idle for longer than the TTL. Time is that of the last request."""
        oldest = self._now - self.params.eviction_ttl_seconds
        for fairness_id, program in list(islice(self._programs.items(), SWEPT_MAX)):
            if program.last < oldest and not program.in_flight and not program.places:
                del self._programs[fairness_id]

    def _make_room(self) -> None:
        """The least recently used leaves that has nothing waiting; those that have are bounded by the flows of a worker."""
        for fairness_id, program in islice(self._programs.items(), LOOKED_AT):
            if not program.places:
                del self._programs[fairness_id]
                return


class Scores:
    """The flows of one band that are not empty, in rows 0 to n - 1 of the arrays; the last row fills the gap of one that leaves.

    `_score` is lower for who goes first: service factor x (S - least S) + arrival factor x (arrival - earliest arrival).
    """

    def __init__(self, policy: ProgramAware) -> None:
        self._policy = policy
        self._row: dict[FlowKey, int] = {}
        self._flows: list[FlowView] = []
        self._service: Floats = np.zeros(16)  # on a scale that is exact at `_scale_at`
        self._arrival: Floats = np.zeros(16)
        self._score: Floats = np.zeros(16)
        self._scale_at = 0.0
        self._changed = False
        self._made_at = -math.inf
        self._factors = (0.0, 0.0, 0.0, 0.0)  # service factor, least service, arrival factor, earliest arrival

    def changed(self, flow: FlowView) -> None:
        head, key = flow.head, flow.key
        row = self._row.get(key)
        if head is None:
            if row is not None:
                self._leave(row, key)
            return
        if row is None:
            row = self._enter(flow, head.arrival)
        else:
            self._flows[row] = flow
        self._arrival[row] = head.arrival
        self._rescore(row)

    def pick(self, now: float) -> FlowView | None:
        size = len(self._flows)
        if not size:
            return None
        if size == 1:
            return self._flows[0]
        if self._changed and (size <= EXACT_MAX or now - self._made_at >= REFRESH_S):
            self._make(now, size)
        return self._flows[self._score[:size].argmin()]

    def dispatched(self, flow: FlowView, item: Queued, now: float) -> None:
        self._policy.went_as(flow.key.fairness_id, item)

    def forget(self, key: FlowKey) -> None:
        """What is kept of programs is the policy's, and ends by its own rules."""

    def served(self, key: FlowKey, program: _Program, now: float) -> None:
        """A program with something waiting here has got tokens."""
        row = self._row[key]
        self._service[row] = self._on_scale(program, now)
        self._rescore(row)

    def _enter(self, flow: FlowView, now: float) -> int:
        key, row = flow.key, len(self._flows)
        if row == len(self._score):
            self._service, self._arrival, self._score = (
                np.concatenate((old, np.zeros(row))) for old in (self._service, self._arrival, self._score)
            )
        if not row:
            self._scale_at = now
        self._row[key] = row
        self._flows.append(flow)
        if row == EXACT_MAX:  # until now scores were not kept
            self._made_at = -math.inf
        program = self._policy.program(key.fairness_id, now)
        program.places[self] = key
        self._service[row] = self._on_scale(program, now)
        return row

    def _leave(self, row: int, key: FlowKey) -> None:
        del self._row[key]
        last = self._flows.pop()
        if row < len(self._flows):
            end = len(self._flows)
            self._flows[row] = last
            self._row[last.key] = row
            for values in (self._service, self._arrival, self._score):
                values[row] = values[end]
        self._policy.left(key.fairness_id, self)
        self._changed = True

    def _on_scale(self, program: _Program, now: float) -> float:
        """Its service as if it had been attained at the time at which the scale is exact."""
        half_life = self._policy.half_life_s
        if half_life <= 0:
            return program.service
        if abs(now - self._scale_at) > HALVINGS_MAX * half_life:
            halvings = (now - self._scale_at) / half_life
            self._service[: len(self._flows)] *= math.exp2(-min(max(halvings, -1000.0), 1000.0))
            self._scale_at = now
            self._made_at = -math.inf
        return self._policy.faded(program, now) * math.exp2((now - self._scale_at) / half_life)

    def _rescore(self, row: int) -> None:
        self._changed = True
        if len(self._flows) <= EXACT_MAX:
            return  # the next pick makes them all
        by_service, least, by_arrival, earliest = self._factors
        self._score[row] = by_service * (self._service[row] - least) + by_arrival * (self._arrival[row] - earliest)

    def _make(self, now: float, size: int) -> None:
        """All scores anew, by what the extremes are now."""
        params = self._policy.params
        service, arrival = self._service[:size], self._arrival[:size]
        least, earliest = float(np.minimum.reduce(service)), float(np.minimum.reduce(arrival))
        services, arrivals = float(np.maximum.reduce(service)) - least, float(np.maximum.reduce(arrival)) - earliest
        by_service = params.las_weight_service / services if services > 0 else 0.0
        by_arrival = params.las_weight_head_wait / arrivals if arrivals > 0 else 0.0
        self._factors = (by_service, least, by_arrival, earliest)
        score = self._score[:size]
        np.subtract(service, least, out=score)
        score *= by_service
        score += (arrival - earliest) * by_arrival
        self._made_at, self._changed = now, False
