"""Words that the findings about a state share."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from epp.metrics import Metric
from workers.supervisor.pages.state.look import counts_of

Values = Mapping[str, Any]

NAMED_MAX: Final = 5
NAME_CHARS_MAX: Final = 64


def names(which: Sequence[Values]) -> str:
    shown = ", ".join(f"{each['name'][:NAME_CHARS_MAX]} ({each['address']})" for each in which[:NAMED_MAX])
    return shown + (f" and {len(which) - NAMED_MAX} more" if len(which) > NAMED_MAX else "")


def recent_answers(values: Values, metric: Metric, least: int) -> tuple[int, str]:
    """Returns at how many endpoints a metric has counted `least` answers or more in the last minutes, and a text that names them."""
    counted = {name: count for name, count in counts_of(values.get("recent", {}), metric).items() if count >= least}
    shown = [f"{name[:NAME_CHARS_MAX]}: {count} answers" for name, count in list(counted.items())[:NAMED_MAX]]
    return len(counted), ", ".join(shown)


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
