"""Words that the findings about a state share."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

Values = Mapping[str, Any]

NAMED_MAX: Final = 5
NAME_CHARS_MAX: Final = 64


def names(which: Sequence[Values]) -> str:
    shown = ", ".join(f"{each['name'][:NAME_CHARS_MAX]} ({each['address']})" for each in which[:NAMED_MAX])
    return shown + (f" and {len(which) - NAMED_MAX} more" if len(which) > NAMED_MAX else "")


def cause(which: Sequence[Values]) -> str:
    """Returns the cause of the first endpoint that has one."""
    why = next((each["why"] for each in which if each.get("why")), "")
    return f": {why}" if why else ""


def some(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def singular(verb: str) -> str:
    """Returns a verb phrase for one endpoint: `refuse connections` -> `refuses connections`."""
    first, _, rest = verb.partition(" ")
    first = {"have": "has"}.get(first, f"{first}s")
    return f"{first} {rest}".replace("their", "its")
