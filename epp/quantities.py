"""Parses amounts in the form that operators write: Kubernetes quantities (`1Gi`, `500M`), Go durations (`1m30s`), Go booleans.

Each function raises ValueError with a text for the operator.
"""

import math
import re
from decimal import Decimal

INT64_MAX = 2**63 - 1
DURATION_MAX_S = INT64_MAX / 1e9  # the range of an int64 of nanoseconds

_QUANTITY = re.compile(
    r"(?P<number>[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+))"
    r"(?:(?P<unit>[KMGTPE]i|[numkMGTPE])|[eE](?P<exponent>[+-]?[0-9]{1,3}))?"
)
_UNITS = {
    "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"), "k": Decimal("1e3"), "M": Decimal("1e6"),
    "G": Decimal("1e9"), "T": Decimal("1e12"), "P": Decimal("1e15"), "E": Decimal("1e18"),
    "Ki": Decimal(2**10), "Mi": Decimal(2**20), "Gi": Decimal(2**30), "Ti": Decimal(2**40),
    "Pi": Decimal(2**50), "Ei": Decimal(2**60),
}  # fmt: skip
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h)")
_TEXT_MAX = 64
_TRUE, _FALSE = frozenset(("1", "t", "true")), frozenset(("0", "f", "false"))


def parse_quantity(text: str) -> int:
    """Parses a quantity: `1Gi` -> 1073741824. Fractions are rounded up, as in Kubernetes. The result fits an int64. Raises ValueError."""
    match = _QUANTITY.fullmatch(text) if len(text) <= _TEXT_MAX else None
    if match is None:
        raise ValueError(f"'{text[:_TEXT_MAX]}' is not a quantity; write for example 1000, 500M or 1Gi")
    amount = Decimal(match["number"])
    if match["unit"]:
        amount *= _UNITS[match["unit"]]
    elif match["exponent"]:
        amount = amount.scaleb(int(match["exponent"]))
    if abs(amount) > INT64_MAX:
        raise ValueError(f"'{text}' is more than a 64-bit integer holds")
    return math.ceil(amount)


def parse_size(text: str) -> int:
    """Parses a quantity of bytes, with or without a final B (`10MiB`, `25MB`); not negative. Raises ValueError."""
    stripped = text.strip()
    size = parse_quantity(stripped[:-1] if len(stripped) > 1 and stripped[-1] in "Bb" else stripped)
    if size < 0:
        raise ValueError(f"'{text}' is negative; a size is 0 or more")
    return size


def parse_duration(text: str) -> float:
    """Parses a duration: `1m30s` -> 90.0 seconds. May be negative. Every number except 0 needs a unit. Raises ValueError."""
    body = text[1:] if text[:1] in ("+", "-") else text
    if body == "0":
        return 0.0
    total, end = 0.0, 0
    for part in _DURATION_PART.finditer(body[:_TEXT_MAX]):
        if part.start() != end:
            break
        total += float(part[1]) * _SECONDS[part[2]]
        end = part.end()
    if not body or end != len(body):
        raise ValueError(f"'{text[:_TEXT_MAX]}' is not a duration; write for example 200ms, 5s or 1m30s")
    if total > DURATION_MAX_S:
        raise ValueError(f"'{text}' is more than 292 years")
    return -total if text[0] == "-" else total


def named_duration(name: str, text: str, above_0: str = "") -> float:
    """Parses the duration of a parameter. Raises ValueError with the parameter's name.

    `above_0`: what an operator can write instead, if the duration must be above 0.
    """
    try:
        seconds = parse_duration(text)
    except ValueError as problem:
        raise ValueError(f"{name}: {problem}") from None
    if above_0 and seconds <= 0:
        raise ValueError(f"{name}: '{text}' is not above 0; {above_0}")
    return seconds


def parse_bool(text: str) -> bool:
    """Parses 1, t, true, 0, f, false, in upper or lower case. Raises ValueError."""
    folded = text.strip().lower()
    if folded in _TRUE:
        return True
    if folded in _FALSE:
        return False
    raise ValueError(f"'{text[:_TEXT_MAX]}' is neither true nor false")
