"""Program-aware fairness has two strategies. This module has the policy and the strategy `las`; `_turn_priority` has `turn-priority`.

`las` means least attained service: the program that recently got the fewest tokens goes first, but a long wait raises the score, too.

A *program* is all requests with one fairness id, in all bands. Its attained service S grows by input + 2 x output tokens when an
answer ends, and halves every half-life. The head of a flow is its first waiting request. The flow with the highest score goes next:

    score = service weight x (1 - S, min-max normalised) + head-wait weight x (age of the head, min-max normalised)

S and ages are normalised over the flows with waiting requests. If all values are equal, each becomes 0.5. If servers report no usage, all S
are 0 and the oldest head goes first.

All S fade at the same rate, and all heads age at the same rate. So normalised values stay constant while nothing happens. The code
therefore stores S on a scale that grows as S fades, and the head's arrival instead of its age. A pick looks at one array of scores.
After a change the scores are recomputed: at the next pick if there are up to EXACT_MAX flows, else at most every REFRESH_S. With more than
EXACT_MAX flows, a flow that changes between two such computations gets a new score with the old minima and maxima.

Each worker keeps the programs that it has seen, at most PROGRAMS_MAX. It drops programs that were idle for longer than the TTL.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np

from epp.candidates import Floats
from epp.data import Datum
from epp.decision.decision import Decision, Response
from epp.metrics import gauge
from epp.plugin import FairnessPolicy, Gauge, PreRequest, ResponseComplete, Services, plugin
from epp.plugins.fairness._turn_priority import Depths, Session
from epp.request import Request
from epp.request.flows import FlowKey, FlowView, Queued, original

INPUT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0
TOKENS_MAX = 1e7  # an answer counts at most this many tokens; servers may report anything
PROGRAMS_MAX = 20_000
SWEPT_MAX = 4_096  # programs that one sweep looks at; a sweep runs between requests
TRIED_MAX = 8  # when there are too many programs, this many are checked for one that can be removed
EXACT_MAX = 64
REFRESH_S = 0.01
TURN_PRIORITY = "turn-priority"
HALVINGS_MAX = 32.0  # the scale restarts after this many half-lives, so that its numbers stay in range
ROUNDING = 1e-9  # two services are equal if they differ by less than this share

AVERAGE_WAIT = gauge(
    "program_aware_avg_wait_time_milliseconds",
    "Mean time that the requests of a program have waited in flow control.",
    "program_id",
    over_workers="mean",
)
SERVICE = gauge(
    "program_aware_attained_service_tokens",
    "Tokens that a program recently received: input + 2 x output, fading with the half-life.",
    "program_id",
)
FAIRNESS = gauge(
    "program_aware_jains_fairness_index",
    "Jain's index of the mean waits of all programs: 1 if all are equal, 1/n if one of n has all.",
    over_workers="mean",
)
SHOW_EVERY_S = 5.0
SHOWN_MAX = 256  # programs on the metrics page: those that were active most recently
WEIGHT_MAX = 100_000.0

NotNegative = Annotated[float, msgspec.Meta(ge=0)]


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """The weights of the score, and how long a program is remembered. 0 as half-life, inactivity or TTL means for ever.

    strategy: How programs are compared: by service received, or by turns.
    las_weight_service: `las`: the weight of the service that a program received.
    las_weight_head_wait: `las`: the weight of how long the first request of a flow waits.
    las_half_life_seconds: `las`: the time after which service has half its weight.
    turn_priority_time_weight: `turn-priority`: the weight of how long the first request of a flow waits.
    turn_priority_inactivity_seconds: `turn-priority`: after this time without requests, a program begins anew.
    eviction_ttl_seconds: How long an inactive program is remembered.
    eviction_sweep_seconds: The time between two searches for inactive programs.
    """

    strategy: Literal["las", "turn-priority", ""] = "las"
    las_weight_service: NotNegative = 0.8
    las_weight_head_wait: NotNegative = 0.2
    las_half_life_seconds: NotNegative = 60.0
    turn_priority_time_weight: NotNegative = 0.05
    turn_priority_inactivity_seconds: NotNegative = 120.0
    eviction_ttl_seconds: NotNegative = 3600.0
    eviction_sweep_seconds: Annotated[float, msgspec.Meta(gt=0)] = 300.0


COUNTS_WITH: Final = {
    field.encode_name: ("strategy", ("las", "") if field.name.startswith("las_") else (TURN_PRIORITY,))
    for field in msgspec.structs.fields(Parameters)
    if field.name.startswith(("las_", "turn_priority_"))
}


class _Program:
    """Holds the state of one program. `service`: the attained service at the time `at`. `bands`: the bands in which requests wait.

    `turns`: how many requests of the program were dispatched; counted for turn priority only.
    """

    __slots__ = ("at", "bands", "in_flight", "last", "service", "turns", "wait_ms", "waits")

    def __init__(self, now: float) -> None:
        self.service = 0.0
        self.at = now
        self.last = now  # time of the program's last completion, or of its first request if none is complete
        self.in_flight = 0
        self.turns = 0
        self.waits = 0  # how many requests got their turn; `wait_ms` is their mean wait
        self.wait_ms = 0.0
        self.bands: dict[Scores | Depths, FlowKey] = {}

    def waited(self, milliseconds: float) -> None:
        self.waits += 1
        self.wait_ms += (milliseconds - self.wait_ms) / self.waits


@plugin("program-aware-fairness")
class ProgramAware(FairnessPolicy, PreRequest, ResponseComplete):
    """Picks the flow of the program (fairness id) with the highest score; waiting raises the score.

    The head of a flow is its first waiting request. Strategy `las`: the score is service weight x (1 - normalised service) + head-wait
    weight x normalised age of the head. Service is input + 2 x output tokens, and halves every half-life. Strategy `turn-priority`: the
    score is the number of the program's turn + time weight x age of the head in seconds. Each session needs a fairness id of its own.
    """

    Params = Parameters
    counts_with = COUNTS_WITH
    metrics = (AVERAGE_WAIT, SERVICE, FAIRNESS)

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        self._programs: OrderedDict[str, _Program] = OrderedDict()  # the least recently used program first
        self._now = 0.0
        self._shown: tuple[Gauge, ...] = ()
        self._on_page: set[str] = set()
        self.half_life_s: float = params.las_half_life_seconds
        self.ranks = self._by_turn = params.strategy == TURN_PRIORITY
        self.isolates = not self._by_turn
        self._shares: dict[int, Depths] = {}  # for turn priority: priority of a band -> the order of its flows
        self._counted_as = Datum(f"flow_program/{name}", str)
        self._waited = Datum(f"flow_waited/{name}", bool)
        self.keeps = (self._counted_as, self._waited)

    def start(self, services: Services) -> None:
        if self.params.eviction_ttl_seconds > 0:
            services.every(self.params.eviction_sweep_seconds, self.sweep)
        self._shown = tuple(services.gauge(self, metric) for metric in self.metrics)
        services.every(SHOW_EVERY_S, self._show)

    def share(self, key: Callable[[Queued], Any]) -> "Scores | Depths":
        if self._by_turn:
            params = self.params
            return Depths(self, params.turn_priority_time_weight, params.turn_priority_inactivity_seconds)
        return Scores(self)

    def __len__(self) -> int:
        return len(self._programs)

    def before_send(self, request: Request, decision: Decision) -> None:
        program = self.program(request[self._counted_as] or request.fairness_id, request.now)
        program.in_flight += 1
        if not request[self._waited]:
            program.waited(0.0)

    def response_complete(self, request: Request, decision: Decision, response: Response) -> None:
        now = request.now
        fairness_id = request[self._counted_as] or request.fairness_id
        program = self.program(fairness_id, now)
        program.in_flight = max(0, program.in_flight - 1)
        program.last = now
        usage = response.usage
        if self._by_turn:
            share = self._shares.get(request.priority)
            if share is not None:
                share.ended(FlowKey(fairness_id, request.priority), program, now)
        elif usage is None:
            return
        else:
            tokens = INPUT_WEIGHT * (usage.prompt or 0) + OUTPUT_WEIGHT * (usage.completion or 0)
            program.service = self.faded(program, now) + min(max(0.0, tokens), TOKENS_MAX)
            program.at = now
        self._tell_bands(program, now)

    def waited_as(self, fairness_id: str, item: Queued) -> None:
        """Records that an item waited, and the fairness id of its flow if it differs from the item's own id.

        If there are too many flows, requests with several fairness ids share one flow.
        """
        request = original(item)
        if isinstance(request, Request):
            request[self._waited] = True
            if request.fairness_id != fairness_id:
                request[self._counted_as] = fairness_id

    def waits(self, session: Session, share: Depths, key: FlowKey) -> None:
        """Notes that the session has waiting requests in the band of `share`. For turn priority."""
        assert isinstance(session, _Program)
        session.bands[share] = key

    def met(self, priority: int, share: Depths) -> None:
        """Keeps `share`, which orders the flows of the band with this priority. For turn priority."""
        self._shares[priority] = share

    def dispatched(self, session: Session, now: float) -> None:
        """Tells the session's bands that a request of the session was dispatched. For turn priority."""
        assert isinstance(session, _Program)
        self._tell_bands(session, now)

    def _tell_bands(self, program: _Program, now: float) -> None:
        for share, key in tuple(program.bands.items()):
            share.served(key, program, now)

    def no_longer_waits(self, fairness_id: str, scores: "Scores | Depths") -> None:
        """Notes that the program has no more waiting requests in the band of `scores`."""
        program = self._programs.get(fairness_id)
        if program is not None:
            program.bands.pop(scores, None)

    def program(self, fairness_id: str, now: float) -> _Program:
        """Returns the state of a program. A new program starts without attained service."""
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
        """Returns the attained service at time `now`."""
        passed, half_life = now - program.at, self.half_life_s
        return program.service * math.exp2(-passed / half_life) if half_life > 0 and passed > 0 else program.service

    def sweep(self) -> None:
        """Drops programs that, at the time of the last request, had been idle for longer than the TTL."""
        oldest = self._now - self.params.eviction_ttl_seconds
        for fairness_id, program in list(islice(self._programs.items(), SWEPT_MAX)):
            if program.last < oldest and not program.in_flight and not program.bands:
                del self._programs[fairness_id]

    def waited(self, fairness_id: str, seconds: float) -> None:
        """Records that a request of the program got its turn after it had waited for `seconds`."""
        program = self._programs.get(fairness_id)
        if program is not None:
            program.waited(max(0.0, seconds) * 1000.0)

    def _show(self) -> None:
        """Sets the gauges. Programs that are no longer among the last SHOWN_MAX leave the page."""
        average, service, fairness = self._shown
        found = dict(islice(reversed(self._programs.items()), SHOWN_MAX))
        for gone in self._on_page - found.keys():
            average.set(0.0, gone, weight=0.0)
            service.set(0.0, gone)
        for fairness_id, program in found.items():
            average.set(program.wait_ms, fairness_id, weight=min(float(program.waits), WEIGHT_MAX))
            if not self._by_turn:
                service.set(self.faded(program, self._now), fairness_id)
        self._on_page = set(found)
        waits = [program.wait_ms for program in self._programs.values() if program.waits]
        fairness.set(jain(waits), weight=float(len(waits)))

    def _make_room(self) -> None:
        """Drops the least recently used program without waiting requests.

        The limit of flows bounds the number of programs with waiting requests.
        """
        for fairness_id, program in islice(self._programs.items(), TRIED_MAX):
            if not program.bands:
                del self._programs[fairness_id]
                return


def jain(values: Sequence[float]) -> float:
    """Returns Jain's fairness index: (sum of x)^2 / (n x sum of x^2); 1 for fewer than two values, or if all are 0."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if len(values) > 1 and squares > 0.0 else 1.0


class Scores:
    """Orders the flows of one band that have waiting requests. Each of these flows has a row of the arrays. When a flow leaves, the last
    row takes its place.

    `_score`: service factor x (S - least S) + arrival factor x (arrival - earliest arrival). The flow with the lowest `_score` goes first.
    """

    def __init__(self, policy: ProgramAware) -> None:
        self._policy = policy
        self._row: dict[FlowKey, int] = {}
        self._flows: list[FlowView] = []
        self._service: Floats = np.zeros(16)  # the values of S, on the scale that equals S at the time `_scale_at`
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
        self._policy.waited_as(flow.key.fairness_id, item)
        self._policy.waited(flow.key.fairness_id, now - item.arrival)

    def forget(self, key: FlowKey) -> None:
        """Does nothing: the policy keeps the programs, and drops them by its own rules."""

    def served(self, key: FlowKey, program: _Program, now: float) -> None:
        """Notes that a program with waiting requests in this band has got tokens."""
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
        if row == EXACT_MAX:  # up to this number of flows, the scores were not kept up to date
            self._made_at = -math.inf
        program = self._policy.program(key.fairness_id, now)
        program.bands[self] = key
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
        self._policy.no_longer_waits(key.fairness_id, self)
        self._changed = True

    def _on_scale(self, program: _Program, now: float) -> float:
        """Returns the program's service on the scale that equals S at `_scale_at`. Restarts the scale if that time is long past."""
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
            return  # the next pick computes all scores
        by_service, least, by_arrival, earliest = self._factors
        self._score[row] = by_service * (self._service[row] - least) + by_arrival * (self._arrival[row] - earliest)

    def _make(self, now: float, size: int) -> None:
        """Computes all scores with the current minima and maxima of S and arrival."""
        params = self._policy.params
        service, arrival = self._service[:size], self._arrival[:size]
        least, earliest = float(np.minimum.reduce(service)), float(np.minimum.reduce(arrival))
        services, arrivals = float(np.maximum.reduce(service)) - least, float(np.maximum.reduce(arrival)) - earliest
        by_service = params.las_weight_service / services if services > ROUNDING * (least + services) else 0.0
        by_arrival = params.las_weight_head_wait / arrivals if arrivals > 0 else 0.0
        self._factors = (by_service, least, by_arrival, earliest)
        score = self._score[:size]
        np.subtract(service, least, out=score)
        score *= by_service
        score += (arrival - earliest) * by_arrival
        self._made_at, self._changed = now, False
