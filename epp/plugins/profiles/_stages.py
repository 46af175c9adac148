"""Shares code between the handlers for disaggregated serving: stages, headers for the routing sidecar, counters and the refusal policy.

The gateway sends a disaggregated request to one server, the decode target. The sidecar in front of that server reads two headers: the
header PREFILLER names the server that computes the prompt, and ENCODERS names the servers that encode images and other media. The sidecar
calls these servers first. A client that could set one of the headers that steer a sidecar (STEERING) could make the sidecar call any
server. So the picker sets or removes each of these headers, and never passes on what a client sent.

A wanted stage that finds no endpoint is always counted and logged. For prefill, a parameter decides whether the decode server computes
the prompt itself or the request is refused.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal

from compiled.classes import subclassed
from epp.candidates import Endpoint
from epp.data import Datum
from epp.decision.decision import Decision, ProfileRun
from epp.errors import Cause, Refused, blame
from epp.metrics import Metric, counter
from epp.plugin import Count, Decider, ProfileHandler, Services
from epp.request import Request
from epp.request.client_headers import ENCODERS, PREFILLER, STEERING

DECODE, PREFILL, ENCODE = "decode", "prefill", "encode"
NO_ENDPOINT: Final = "profile found no endpoint"  # reason in the log
UNKNOWN_MODEL: Final = "unknown"

OnNoPrefill = Literal["decode-only", "refuse"]

# The target of the previous stage, for filters and scorers of the current stage; None in the first stage.
PEER = Datum("peer-endpoint", Endpoint, per_profile=True)

DECISION_TYPES: Final = {  # (encode ran, prefill ran) -> label value
    (False, False): "decode-only",
    (False, True): "prefill-decode",
    (True, False): "encode-decode",
    (True, True): "encode-prefill-decode",
}
UNSERVED: Final = counter(
    "disagg_stage_unserved_total",
    "Requests with a wanted stage that found no endpoint, by outcome: the stage was skipped, or the request refused.",
    "stage",
    "outcome",
)


def decisions(name: str) -> Metric:
    """Returns the counter of decisions of a handler. `name`: the reference picker's name of this counter."""
    return counter(name, "Requests by the stages that serve them.", "model_name", "decision_type")


def wanted(decider: Decider, request: Request, run: ProfileRun | None) -> bool:
    """Returns whether the decider wants its stage. An exception of the decider is counted as the decider's failure, not the handler's."""
    try:
        return decider.wanted(request, run)
    except Exception as problem:
        blame(problem, decider)
        raise


def target(run: ProfileRun) -> Endpoint:
    """Returns the endpoint that was picked first."""
    return run.candidates.endpoint(run.picked[0])


def address_stages(decision: Decision, prefill: str, encode: str) -> None:
    """Sets the headers of the stages that found endpoints, and removes all other headers that steer a sidecar."""
    runs, headers = decision.runs, decision.headers
    if (run := runs.get(prefill)) is not None:
        headers[PREFILLER] = target(run).address
    if (run := runs.get(encode)) is not None:
        headers[ENCODERS] = ",".join([endpoint.address for endpoint in run.targets])
    removed = decision.removed_headers
    decision.removed_headers += tuple(name for name in STEERING if name not in headers and name not in removed)


@subclassed
class Staged(ProfileHandler):
    """Base class of the handlers for disaggregated serving: combines the runs of the stages into one decision."""

    decided: Metric

    def __init__(self, name: str, params: Any, *, decode: str, prefill: str, encode: str, on_no_prefill: OnNoPrefill) -> None:
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
        """Counts and logs stages that found no endpoint. Raises Refused if prefill is such a stage and `onNoPrefill` is `refuse`."""
        if self.encode in runs and runs[self.encode] is None:
            self._unserved.add(ENCODE, "skipped")
            self._services.warn(self, NO_ENDPOINT, profile=self.encode, effect="requests go on without an encode stage")
        if self.prefill in runs and runs[self.prefill] is None:
            self._unserved.add(PREFILL, "refused" if self.refuses else "skipped")
            done = "requests are refused" if self.refuses else "decode servers compute prompts themselves"
            self._services.warn(self, NO_ENDPOINT, profile=self.prefill, effect=f"{done} (onNoPrefill)")
            if self.refuses:
                raise Refused(Cause.NO_ENDPOINT_LEFT, f"profile {self.prefill}")
