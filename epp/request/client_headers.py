"""Reads the client headers, by which a request may state wishes. Each wish has bounds, and has an effect only if the operator trusts the
header.

Any client can send these headers, unless the gateway removes them. Therefore each is read as a typed value within fixed bounds. A TTL or
latency objective above its bound is lowered to the bound. A request with an invalid model name is refused. Any other invalid value is
treated as absent. `untrusted` lists the headers that the operator does not trust: the picker hides them from all readers (`codec.Unseen`)
and removes them from requests. Trusted client headers reach the model server, which may be another picker. The current name of a header
takes precedence over its older name, even with an empty value.

The group `debug` is not trusted by default. Its header is not hidden, because hiding costs every request. Instead, streams give no receipts
if the group is not trusted (`workers.worker.setup`).

Headers that choose an endpoint are no client headers: the picker never reads them and never passes them on (`codec.NEVER_PASSED`).
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from epp.errors import Cause, Refused
from epp.quantities import parse_duration

FAIRNESS_ID: Final = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
OBJECTIVE: Final = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
TTL: Final = "x-llm-d-inference-ttl"  # a Go duration, such as 2s
TTL_MS: Final = "x-llm-d-request-ttl-ms"
TTFT_SLO_MS: Final = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
TPOT_SLO_MS: Final = ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")
DEBUG: Final = ("x-llm-d-debug",)
PREFER: Final = "prefer"  # the header of RFC 7240; read for the preference if-available (`epp.decision.if_available`)
MODEL_REWRITE: Final = ("x-llm-d-model-name-rewrite", "x-gateway-model-name-rewrite")
GROUPS: Final[Mapping[str, tuple[str, ...]]] = {  # name in --trust-client-headers -> the headers of this group
    "fairness": FAIRNESS_ID,
    "objective": OBJECTIVE,
    "ttl": (TTL, TTL_MS),
    "slo": (*TTFT_SLO_MS, *TPOT_SLO_MS),
    "model": MODEL_REWRITE,
    "if-available": (PREFER,),
    "debug": DEBUG,
}
GATEWAY: Final = "gateway"  # in --trust-client-headers: the gateway removes the headers of clients
DEBUG_GROUP: Final = "debug"
TRUSTED_BY_DEFAULT: Final = tuple(group for group in GROUPS if group != DEBUG_GROUP)

# Only the picker sets these headers, which steer the sidecar of a model server: a client that could set one could make the sidecar call any
# server. So every plugin that owns one of these headers sets or removes it.
PREFILLER: Final = "x-prefiller-host-port"  # the server that computes the prompt
ENCODERS: Final = "x-encoder-hosts-ports"  # the servers that encode media, separated by commas
RANK_HEADER: Final = "x-data-parallel-host-port"  # the rank of a data-parallel server
KV_SOURCE: Final = "x-kv-cache-source-host-port"  # the server from which the prompt's KV cache is copied
STEERING: Final = (PREFILLER, ENCODERS, RANK_HEADER, KV_SOURCE)

DEFAULT_FLOW: Final = "default-flow"  # the flow of requests that state no fairness id
FAIRNESS_CHARS_MAX: Final = 64
TENANT_RULE: Final = f"a tenant's name has 1 to {FAIRNESS_CHARS_MAX} printable characters and is not '{DEFAULT_FLOW}'"
OBJECTIVE_CHARS_MAX: Final = 253
MODEL_CHARS_MAX: Final = 256
DEBUG_CHARS_MAX: Final = 64
RECEIPT: Final = "receipt"
TTL_S_MAX: Final = 3_600.0  # the longest time that a client can ask to wait
SLO_MS_MAX: Final = 86_400_000.0
DIGITS_MAX: Final = 18
_OBJECTIVE: Final = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")  # the form of a Kubernetes object's name

Headers = Mapping[str, str]


def untrusted(trusted: Collection[str]) -> frozenset[str]:
    """Returns the headers to hide if the operator trusts only these groups. Headers of the group `debug` are never hidden."""
    return frozenset(name for group in TRUSTED_BY_DEFAULT if group not in trusted for name in GROUPS[group])


def first_value(headers: Headers, names: Sequence[str]) -> str | None:
    """Returns the value of the first of these headers that the request has. Returns None if it has no such header."""
    for name in names:
        value = headers.get(name)
        if value is not None:
            return value
    return None


def fairness_id(headers: Headers) -> str:
    """Returns the fairness id that the request states; empty without a valid fairness id."""
    value = first_value(headers, FAIRNESS_ID)
    return value if value and names_flow(value) else ""


def names_flow(value: str) -> bool:
    """Returns whether a text is a valid fairness id: short enough and printable, so that queues and metric labels can use it."""
    return len(value) <= FAIRNESS_CHARS_MAX and value.isprintable()


def names_tenant(name: str) -> bool:
    """Returns whether a text is a valid name of a tenant: a valid fairness id other than DEFAULT_FLOW."""
    return bool(name) and name != DEFAULT_FLOW and names_flow(name)


def objective(headers: Headers) -> str:
    """Returns the name of the InferenceObjective that the request states; empty without a valid name."""
    value = first_value(headers, OBJECTIVE)
    return value if value and names_objective(value) else ""


def names_objective(value: str) -> bool:
    """Returns whether a text is a valid name of an InferenceObjective."""
    return len(value) <= OBJECTIVE_CHARS_MAX and _OBJECTIVE.fullmatch(value) is not None


def ttl_s(headers: Headers) -> float | None:
    """Returns how long the request may wait, in seconds above 0, at most TTL_S_MAX. Returns None if the request states no valid time above
    0.

    There are two headers. If both have a valid time, the shorter time is used.
    """
    shortest = min(_duration_s(headers.get(TTL)), _milliseconds_s(headers.get(TTL_MS)))
    return None if shortest == math.inf else min(shortest, TTL_S_MAX)


def _duration_s(value: str | None) -> float:
    """Returns a duration in seconds; infinite if the duration is not stated, invalid or not above 0."""
    try:
        seconds = parse_duration(as_utf8(value)) if value else 0.0
    except ValueError:
        seconds = 0.0
    return seconds if seconds > 0.0 else math.inf


def _milliseconds_s(value: str | None) -> float:
    """Returns a whole number of milliseconds in seconds; infinite if the number is not stated, invalid or 0."""
    if not value or not value.isascii() or not value.isdigit():
        return math.inf
    return (int(value) / 1000.0 if len(value) <= DIGITS_MAX else TTL_S_MAX) or math.inf


def slo_ms(headers: Headers, names: Sequence[str]) -> float:
    """Returns a latency objective in milliseconds, at most SLO_MS_MAX. Returns 0 if the header has no finite number above 0."""
    value = first_value(headers, names)
    try:
        slo = float(value) if value and len(value) <= 2 * DIGITS_MAX else 0.0
    except ValueError:
        return 0.0
    return min(slo, SLO_MS_MAX) if slo > 0.0 and math.isfinite(slo) else 0.0


def wants_receipt(headers: Headers) -> bool:
    """Returns whether the request asks for a receipt (`epp.decision.receipt`): the word `receipt`, perhaps among others after commas."""
    value = headers.get(DEBUG[0])
    return value is not None and RECEIPT in (word.strip() for word in value[:DEBUG_CHARS_MAX].split(","))


def model_rewrite(headers: Headers) -> str | None:
    """Returns the model that replaces the body's model; maybe empty, None if the header is missing. Raises Refused for a bad name."""
    value = first_value(headers, MODEL_REWRITE)
    if value is None:
        return None
    name = as_utf8(value)
    if len(name) > MODEL_CHARS_MAX or not name.isprintable():
        detail = f"invalid header {MODEL_REWRITE[0]}: a model's name has at most {MODEL_CHARS_MAX} printable characters"
        raise Refused(Cause.INVALID_BODY, detail)
    return name.strip()


def as_utf8(value: str) -> str:
    """Returns the text of a header value that is UTF-8, because all header values are decoded as Latin-1."""
    if value.isascii():
        return value
    try:
        return value.encode("latin-1").decode()
    except ValueError:
        return value
