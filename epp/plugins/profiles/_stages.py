"""What the handlers of disaggregated serving share: stages, the headers to the routing sidecar, counters and the policy.

A request that is disaggregated is sent to one server, the decode target. The sidecar in front of it reads from headers who is to
compute the prompt (PREFILLER) and who is to encode images and the like (ENCODERS), and asks those first. These headers are ours, as
are all by which a sidecar is told whom to call (STEERING): a client that sends one would make it call whom the client wants,
so each is set or removed, never passed on.

A stage that is wanted and finds no endpoint is never dropped silently: it is counted and logged, and for prefill a parameter says
whether the decode server computes the prompt itself or the request is refused.
"""

from collections.abc import Mapping
from typing import Any, Literal

from epp.candidates import Endpoint
from epp.data import Datum
from epp.decision import Decision, ProfileRun
from epp.errors import Cause, Refused
from epp.metrics import Metric
from epp.plugin import Count, ProfileHandler, Services
from epp.plugins.profiles._ranks import RANK_HEADER
from epp.request import Request

DECODE, PREFILL, ENCODE = "decode", "prefill", "encode"
PREFILLER = "x-prefiller-host-port"
ENCODERS = "x-encoder-hosts-ports"
KV_SOURCE = "x-kv-cache-source-host-port"  # from whose cache it takes the prompt's
STEERING = (PREFILLER, ENCODERS, RANK_HEADER, KV_SOURCE)
UNKNOWN_MODEL = "unknown"

OnNoPrefill = Literal["decode-only", "refuse"]

# The target of the stage that ran before, for filters and scorers of the one that runs now; None in the first.
PEER = Datum("peer-endpoint", Endpoint, per_profile=True)

DECISION_TYPES = {  # (encode ran, prefill ran) -> the label's value
    (False, False): "decode-only",
    (False, True): "prefill-decode",
    (True, False): "encode-decode",
    (True, True): "encode-prefill-decode",
}
UNSERVED = Metric(
    "disagg_stage_unserved_total",
    "counter",
    "Requests of which a wanted stage found no endpoint, by what was done: the stage was skipped, or the request refused.",
    labels=("stage", "outcome"),
)


def decisions(name: str) -> Metric:
    """The counter of decisions, under the name that the field gives it for this handler."""
    return Metric(name, "counter", "Requests by the stages that serve them.", labels=("model_name", "decision_type"))


def target(run: ProfileRun) -> Endpoint:
    """Who was picked first."""
    return run.candidates.endpoint(run.picked[0])


def address_stages(decision: Decision, prefill: str, encode: str) -> None:
    """Sets the headers of stages that found endpoints, removes all others that steer a sidecar."""
    runs, headers = decision.runs, decision.headers
    if (run := runs.get(prefill)) is not None:
        headers[PREFILLER] = target(run).address
    if (run := runs.get(encode)) is not None:
        headers[ENCODERS] = ",".join([endpoint.address for endpoint in run.targets])
    decision.removed_headers += tuple(name for name in STEERING if name not in headers)


class Staged(ProfileHandler):
    """The part of both handlers that makes one decision of the stages' runs."""

    decided: Metric

    def __init__(
        self, name: str, params: Any, *, decode: str, prefill: str, encode: str, on_no_prefill: OnNoPrefill
    ) -> None:
        super().__init__(name, params)
        self.decode, self.prefill, self.encode = decode, prefill, encode
        self.refuses = on_no_prefill == "refuse"
        self._services: Services
        self._decisions: Count
        self._unserved: Count

    def start(self, services: Services) -> None:
        self._services = services
        self._decisions = services.count(self, self.decided)
        self._unserved = services.count(self, UNSERVED)

    def result(self, request: Request, runs: Mapping[str, ProfileRun | None]) -> Decision:
        if len(runs) > 1 or self.decode not in runs:
            self._look_for_unserved(runs)
        decode = runs.get(self.decode)
        if decode is None:
            raise Refused(Cause.NO_ENDPOINT_LEFT, f"profile {self.decode}")
        served = (runs.get(self.encode) is not None, runs.get(self.prefill) is not None)
        self._decisions.add(request.target_model or UNKNOWN_MODEL, DECISION_TYPES[served])
        decision = Decision(decode.targets, runs, primary=self.decode)
        decision.prefill = self.prefill
        return decision

    def _look_for_unserved(self, runs: Mapping[str, ProfileRun | None]) -> None:
        """Counts and logs; raises where the policy is to refuse."""
        if self.encode in runs and runs[self.encode] is None:
            self._unserved.add(ENCODE, "skipped")
            self._services.warn(
                self, f"profile '{self.encode}' found no endpoint: requests go on without an encode stage"
            )
        if self.prefill in runs and runs[self.prefill] is None:
            self._unserved.add(PREFILL, "refused" if self.refuses else "skipped")
            done = "requests are refused" if self.refuses else "decode servers compute prompts themselves"
            self._services.warn(self, f"profile '{self.prefill}' found no endpoint: {done} (onNoPrefill)")
            if self.refuses:
                raise Refused(Cause.NO_ENDPOINT_LEFT, f"profile {self.prefill}")
