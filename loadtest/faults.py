"""Ways in which a simulated server misbehaves on request: as a whole, or for one request.

A server has at most one fault. It lasts `seconds`, or until `none` is asked for; `delay` says how
slow the slow ones are. The header `x-sim-fault: KIND` or `KIND;delay=SECONDS` concerns only the
request that carries it.
"""

from __future__ import annotations

from enum import Enum

import msgspec

DELAY_DEFAULT_S = 2.0
SECONDS_MAX = 86_400.0


class ServerFault(Enum):
    """What a whole server can be told to do."""

    NONE = "none"
    HANG = "hang"  # no answer to anything but /sim/...
    ERROR = "error"  # 500 to every request for a model, metrics and health go on
    SLOW = "slow"  # requests for a model reach the engine `delay` late
    GARBAGE_METRICS = "garbage-metrics"  # 200 with bytes that are no metrics
    ENDLESS_METRICS = "endless-metrics"  # a page without end
    SLOW_METRICS = "slow-metrics"  # the page in small pieces over `delay`
    NAN_METRICS = "nan-metrics"  # a valid page whose load gauges are NaN
    HALF_PAGE = "half-page"  # the connection ends in the middle of the page
    VANISH = "vanish"  # no listening socket, no connections; back, with a cold cache, afterwards


class RequestFault(Enum):
    """What a request can ask for itself."""

    NONE = "none"
    HANG = "hang"
    ERROR = "error"
    SLOW = "slow"
    CUT = "cut"  # the connection ends in the middle of the answer


class FaultOrder(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /sim/fault. `server` names another server of the same process."""

    kind: ServerFault
    seconds: float | None = None
    delay: float = DELAY_DEFAULT_S
    server: str | int | None = None

    def __post_init__(self) -> None:
        limits = {"seconds": self.seconds, "delay": self.delay}
        for name, value in limits.items():
            if value is not None and not 0 <= value <= SECONDS_MAX:
                raise ValueError(f"{name} must be between 0 and {SECONDS_MAX:.0f}, got {value}")


class BadFault(Exception):
    """A fault that does not exist; the message lists those that do."""


_decoder = msgspec.json.Decoder(FaultOrder)


def parse_order(raw: bytes) -> FaultOrder:
    """The body of POST /sim/fault. Raises BadFault."""
    try:
        return _decoder.decode(raw)
    except msgspec.DecodeError as error:
        kinds = ", ".join(kind.value for kind in ServerFault)
        raise BadFault(f"{error}; kinds are {kinds}") from None


def parse_header(value: bytes) -> tuple[RequestFault, float]:
    """The header x-sim-fault -> (fault, delay). Raises BadFault."""
    kind, _, option = value.decode("latin-1").partition(";")
    name, _, number = option.strip().partition("=")
    try:
        delay = float(number) if option else DELAY_DEFAULT_S
        fault = RequestFault(kind.strip())
    except ValueError:
        delay, fault = -1.0, RequestFault.NONE
    if not 0 <= delay <= SECONDS_MAX or (option and name != "delay"):
        kinds = ", ".join(kind.value for kind in RequestFault)
        raise BadFault(f"x-sim-fault is KIND or KIND;delay=SECONDS, and kinds are {kinds}")
    return fault, delay
