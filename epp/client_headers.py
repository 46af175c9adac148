"""What a request may ask for in headers: read in one place, bounded, and ignored where the operator does not trust it.

Any client can send these headers, unless the gateway removes them. So each is read as a typed value within fixed bounds, what is
out of bounds counts as not given, and `untrusted` names the headers that are hidden from every reader (`codec.Unseen`) when
they are not to be honoured. The current name of a header hides its older one, even when it is empty.

What this does not do: headers that choose an endpoint. Those are never read, and never go on (`codec.NEVER_PASSED`).
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from epp.errors import Cause, Refused

FAIRNESS_ID: Final = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
OBJECTIVE: Final = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
TTL_MS: Final = ("x-llm-d-request-ttl-ms",)
TTFT_SLO_MS: Final = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
TPOT_SLO_MS: Final = ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")
MODEL_REWRITE: Final = ("x-llm-d-model-name-rewrite", "x-gateway-model-name-rewrite")
GROUPS: Final[Mapping[str, tuple[str, ...]]] = {  # what can be trusted or not -> the headers that say it
    "fairness": FAIRNESS_ID,
    "objective": OBJECTIVE,
    "ttl": TTL_MS,
    "slo": (*TTFT_SLO_MS, *TPOT_SLO_MS),
    "model": MODEL_REWRITE,
}

FAIRNESS_CHARS_MAX: Final = 64
OBJECTIVE_CHARS_MAX: Final = 253
MODEL_CHARS_MAX: Final = 256
TTL_MS_MAX: Final = 3_600_000  # an hour; nobody waits longer for an answer to begin
SLO_MS_MAX: Final = 86_400_000.0
DIGITS_MAX: Final = 18
_OBJECTIVE: Final = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")  # names of Kubernetes objects

Headers = Mapping[str, str]


def untrusted(trusted: Collection[str]) -> frozenset[str]:
    """The headers to hide where only these of `GROUPS` are trusted."""
    return frozenset(name for group, names in GROUPS.items() if group not in trusted for name in names)


def given(headers: Headers, names: Sequence[str]) -> str | None:
    """The value under the first of these names that is there."""
    for name in names:
        value = headers.get(name)
        if value is not None:
            return value
    return None


def fairness_id(headers: Headers) -> str:
    """The flow that is asked for; empty: none."""
    value = given(headers, FAIRNESS_ID)
    return value if value and names_flow(value) else ""


def names_flow(value: str) -> bool:
    """Whether it may stand in queues and metrics."""
    return len(value) <= FAIRNESS_CHARS_MAX and value.isprintable()


def objective(headers: Headers) -> str:
    """The name of the objective that is asked for; empty: none."""
    value = given(headers, OBJECTIVE)
    return value if value and len(value) <= OBJECTIVE_CHARS_MAX and _OBJECTIVE.fullmatch(value) else ""


def ttl_ms(headers: Headers) -> int | None:
    """How long the request may wait, at most TTL_MS_MAX; None: not said."""
    value = given(headers, TTL_MS)
    if not value or not value.isascii() or not value.isdigit():
        return None
    said = int(value) if len(value) <= DIGITS_MAX else TTL_MS_MAX
    return min(said, TTL_MS_MAX) or None


def slo_ms(headers: Headers, names: Sequence[str]) -> float:
    """A latency that is asked for, at most SLO_MS_MAX; 0: none, or no finite number above 0."""
    value = given(headers, names)
    try:
        said = float(value) if value and len(value) <= 2 * DIGITS_MAX else 0.0
    except ValueError:
        return 0.0
    return min(said, SLO_MS_MAX) if said > 0.0 and math.isfinite(said) else 0.0


def model_rewrite(headers: Headers) -> str | None:
    """The model to ask for instead of the body's, possibly empty; None: not said. Raises Refused for what is no name."""
    value = given(headers, MODEL_REWRITE)
    if value is None:
        return None
    try:
        name = value.encode("latin-1").decode()  # header values come as Latin-1, names of models are UTF-8
    except ValueError:
        name = value
    if len(name) > MODEL_CHARS_MAX or not name.isprintable():
        detail = f"invalid header {MODEL_REWRITE[0]}: a model's name has at most {MODEL_CHARS_MAX} printable characters"
        raise Refused(Cause.INVALID_BODY, detail)
    return name.strip()
