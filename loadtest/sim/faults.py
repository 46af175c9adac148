"""Defines the faults that a simulated server shows on request: for all requests, or for one.

POST /sim/fault orders a fault of the whole server. A server has at most one such fault. It lasts
`seconds`, or until an order of the kind `none`. `delay` is the delay of the slow kinds, in seconds, and
`status` the status of the kind `error`; with 200 the answer has no body. The
header `x-sim-fault: KIND` or `x-sim-fault: KIND;delay=SECONDS` orders a fault of the request that
carries the header.
"""

from __future__ import annotations

from enum import Enum

import msgspec

DELAY_DEFAULT_S = 2.0
SECONDS_MAX = 86_400.0
STATUS_DEFAULT = 500
EMPTY_STATUS = 200  # the status of an answer without a body


class ServerFault(Enum):
    """Faults of a whole server."""

    NONE = "none"
    HANG = "hang"  # no answer to any path but /sim/...
    ERROR = "error"  # `status` to every model request, at once; metrics and health still work
    SLOW = "slow"  # the server passes model requests to the engine only after `delay`
    GARBAGE_METRICS = "garbage-metrics"  # 200 with bytes that are not metrics
    ENDLESS_METRICS = "endless-metrics"  # the page has no end
    SLOW_METRICS = "slow-metrics"  # the page comes in small pieces over `delay`
    NAN_METRICS = "nan-metrics"  # a valid page with load gauges that are NaN
    HALF_PAGE = "half-page"  # the connection ends in the middle of the metrics page
    KV_LOST = "kv-lost"  # messages with KV events get numbers but are not sent
    KV_GARBAGE = "kv-garbage"  # messages with KV events that cannot be decoded
    KV_JUMP = "kv-jump"  # each message with KV events skips 1,000 numbers
    VANISH = "vanish"  # no listening socket and no connections; the server returns after the fault, with a cold cache


class RequestFault(Enum):
    """Faults that a request can ask for."""

    NONE = "none"
    HANG = "hang"
    ERROR = "error"
    SLOW = "slow"
    CUT = "cut"  # the connection ends in the middle of the answer to a model request


class FaultOrder(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /sim/fault. `server` names another server of the same process."""

    kind: ServerFault
    seconds: float | None = None
    delay: float = DELAY_DEFAULT_S
    server: str | int | None = None
    status: int = STATUS_DEFAULT

    def __post_init__(self) -> None:
        if self.status != EMPTY_STATUS and not 400 <= self.status <= 599:
            raise ValueError(f"status must be from 400 to 599, or 200, got {self.status}")
        limits = {"seconds": self.seconds, "delay": self.delay}
        for name, value in limits.items():
            if value is not None and not 0 <= value <= SECONDS_MAX:
                raise ValueError(f"{name} must be from 0 to {SECONDS_MAX:.0f}, got {value}")


class BadFault(Exception):
    """An order asks for a fault that does not exist. The message lists the valid kinds."""


_decoder = msgspec.json.Decoder(FaultOrder)


def parse_order(raw: bytes) -> FaultOrder:
    """Decodes the body of POST /sim/fault. Raises BadFault."""
    try:
        return _decoder.decode(raw)
    except msgspec.DecodeError as error:
        kinds = ", ".join(kind.value for kind in ServerFault)
        raise BadFault(f"{error}; valid kinds: {kinds}") from None


def parse_header(value: bytes) -> tuple[RequestFault, float]:
    """Decodes the header x-sim-fault into (fault, delay in seconds). Raises BadFault."""
    kind, _, option = value.decode("latin-1").partition(";")
    name, _, number = option.strip().partition("=")
    try:
        delay = float(number) if option else DELAY_DEFAULT_S
        fault = RequestFault(kind.strip())
    except ValueError:
        delay, fault = -1.0, RequestFault.NONE
    if not 0 <= delay <= SECONDS_MAX or (option and name != "delay"):
        kinds = ", ".join(kind.value for kind in RequestFault)
        raise BadFault(f"x-sim-fault must be KIND or KIND;delay=SECONDS; valid kinds: {kinds}")
    return fault, delay
