"""Admit, hold or refuse a request with a latency objective, by what the learned latency model predicts."""

import math
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from epp.candidates import Candidates, Floats, Mask
from epp.data import INFLIGHT_REQUESTS, Datum
from epp.decision.decision import Decision, Response
from epp.errors import Cause, ProducerFailed, Refused
from epp.learning.costs import LearnedCosts, learned_costs
from epp.learning.latency import TPOT_HEADERS, TTFT_HEADERS, objective_ms
from epp.learning.margin import Expected, Margin
from epp.metrics import counter, gauge
from epp.plugin import Admitter, Filter, PreRequest, Profile, ResponseComplete, ResponseStreaming, Services, Waiting, plugin
from epp.request import Request

MS = 1000.0
HOLD_PART = 1 / 32  # part of the remaining time of the objective that a hold takes; 64 holds take almost nine tenths of the objective
HOLD_MIN_S = 0.005
RETRY_S_MAX = 60
ADMITTED, HELD, REFUSED, PASSED = "admitted", "held", "refused", "passed"

DECISIONS = counter(
    "objective_admission_total",
    "Requests with a latency objective, by what became of them: admitted (an endpoint is predicted to meet it), held (counted once for "
    "each hold), refused, passed (no endpoint is predicted to meet it, and the parameter `otherwise` lets it pass).",
    "outcome",
)
ANSWERS = counter(
    "objective_first_tokens_total", "First tokens of admitted requests with an objective for them, by whether they met it.", "outcome"
)
MARGIN = gauge(
    "objective_admission_margin_ratio",
    "By how much predictions are multiplied before they are compared with an objective. It is learned from the predictions' errors.",
    over_workers="mean",
)


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """What happens to a request with an objective that no endpoint can meet.

    otherwise: If no endpoint can meet the objective, `refuse` answers with 429, and `pass` routes as if there was no objective.
    learned_latency_producer_name: The producer of the predictions to read.
    """

    otherwise: Literal["refuse", "pass"] = "refuse"
    learned_latency_producer_name: str = ""


class Objectives:
    """Holds the objectives of one request, in seconds; an objective not given is infinite. `expected`: what `Margin.sent` returned."""

    __slots__ = ("expected", "first_s", "token_s")

    def __init__(self, first_s: float, token_s: float) -> None:
        self.first_s = first_s
        self.token_s = token_s
        self.expected: Expected | None = None


@plugin("learned-latency-admitter")
class LearnedLatency(Admitter, Filter, PreRequest, ResponseStreaming, ResponseComplete):
    """Admits a request with a latency objective if an endpoint is predicted to meet the objective, with a margin for errors.

    The cost is treated as the time to the first token: where requests wait in turn, later requests join and make the wait longer. If an
    endpoint would meet the objective without the margin, the request is held, because the prediction gets more certain as the wait gets
    shorter. Otherwise the request is refused, or passes (parameter `otherwise`). Requests without objectives are always admitted. All
    requests are admitted while the model has seen too few answers. The plugin uses the model even if its predictions are worse than the
    pool's mean time: in an overload with refusals, times stay close to their mean, and the margin covers the error. As a filter, it keeps
    the endpoints that are predicted to meet the objectives. If there is no such endpoint, it keeps all endpoints.
    """

    Params = Parameters
    metrics = (DECISIONS, ANSWERS, MARGIN)
    first_chunk_only = True
    reads_answer = False

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        self._costs = learned_costs(params.learned_latency_producer_name)
        self._objectives = Datum(f"objectives/{name}", Objectives)
        self.consumes = (self._costs, INFLIGHT_REQUESTS)
        self.keeps = (self._objectives,)
        self._margin = Margin()
        self._services: Services

    def start(self, services: Services) -> None:
        self._services = services
        self._decisions = services.count(self, DECISIONS)
        self._answers = services.count(self, ANSWERS)
        self._shown = services.gauge(self, MARGIN)

    def take_over(self, predecessor: "LearnedLatency") -> None:  # type: ignore[override]
        self._margin = predecessor._margin

    def admit(self, request: Request, candidates: Candidates) -> Waiting | None:
        if not request.wishes:
            return None
        first_ms, token_ms = objective_ms(request, TTFT_HEADERS), objective_ms(request, TPOT_HEADERS)
        learned = request[self._costs]
        if not (first_ms or token_ms) or learned is None or not learned.known:
            return None
        asked = request[self._objectives] = Objectives(first_ms / MS or math.inf, token_ms / MS or math.inf)
        self._margin.look(request.now)
        costs = candidates.narrow(learned.seconds)
        fast = self._fast_enough(asked, learned, candidates)
        left = asked.first_s - (request.now - request.arrived_at)
        if (fast & (self._margin.ratio * costs <= left)).any():
            self._decisions.add(ADMITTED)
            return None
        if (fast & (costs <= left)).any():
            try:
                held = self._services.after(max(HOLD_MIN_S, HOLD_PART * left))
            except ProducerFailed:  # too many requests are held, or the worker ends
                pass
            else:
                self._decisions.add(HELD)
                return held
        if self.params.otherwise == "pass":
            self._decisions.add(PASSED)
            return None
        self._decisions.add(REFUSED)
        soonest = float(candidates.narrow(learned.first_token_s)[fast].min()) if fast.any() else math.inf
        raise _refused(soonest, left)

    def keep(self, request: Request, candidates: Candidates, profile: Profile) -> Mask:
        asked, learned = request[self._objectives], request[self._costs]
        if asked is None or learned is None:
            return np.ones(len(candidates), dtype=bool)
        costs = candidates.narrow(learned.seconds)
        left = asked.first_s - (request.now - request.arrived_at)
        meets: Mask = self._fast_enough(asked, learned, candidates) & (self._margin.ratio * costs <= left)
        return meets if meets.any() else ~meets

    def before_send(self, request: Request, decision: Decision) -> None:
        asked, run, learned = request[self._objectives], decision.runs.get(decision.primary), request[self._costs]
        if asked is not None and run is not None and learned is not None:
            left = asked.first_s - (request.now - request.arrived_at)
            asked.expected = self._margin.sent(request.now, float(learned.seconds[run.row]), left)

    def response_streaming(self, request: Request, decision: Decision) -> None:
        asked = request[self._objectives]
        if asked is None or asked.first_s == math.inf:
            return
        self._answers.add("met" if request.now - request.arrived_at <= asked.first_s else "missed")
        if asked.expected is not None:
            self._margin.came(asked.expected, request.now)
        self._shown.set(self._margin.ratio)

    def response_complete(self, request: Request, decision: Decision, response: Response) -> None:
        asked = request[self._objectives]
        if asked is not None and asked.expected is not None:
            asked.expected.over = True  # an answer that failed or was cancelled says nothing

    def _fast_enough(self, asked: Objectives, learned: LearnedCosts, candidates: Candidates) -> Mask:
        """Returns which candidates are predicted to meet the objective for output tokens."""
        if asked.token_s == math.inf:
            return np.ones(len(candidates), dtype=bool)
        load: Sequence[float] = candidates[INFLIGHT_REQUESTS].tolist()
        slots = [endpoint.slot for endpoint in candidates.endpoints]
        each: Floats = np.array([learned.model.per_token_s(slot, n) for slot, n in zip(slots, load, strict=True)])
        return np.asarray(each <= asked.token_s)


def _refused(soonest_s: float, left_s: float) -> Refused:
    if soonest_s == math.inf:
        return Refused(Cause.NOT_ADMITTED, "no endpoint is predicted to meet the objective for the time per output token")
    detail = f"the first token is predicted in {soonest_s:.1f} s, and the objective leaves {max(0.0, left_s):.1f} s"
    return Refused(Cause.NOT_ADMITTED, detail, max(1, min(RETRY_S_MAX, math.ceil(soonest_s - left_s))))
