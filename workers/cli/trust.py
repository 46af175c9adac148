"""The flag --trust-client-headers, which `epp serve` obeys and `epp config check` explains."""

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from epp.request.client_headers import GATEWAY, GROUPS, TRUSTED_BY_DEFAULT
from workers.cli.flags import NAMES, flag

ALL, NONE = "all", "none"
WORDS: Final = (ALL, NONE)
TEXT: Final = (
    f"Client headers to honour: all, none, or some of {', '.join(GROUPS)}. Model servers get none of the others. With {GATEWAY}, alone or "
    "besides groups: the gateway removes them from requests that come from outside, so those that arrive are its own."
)

F = TypeVar("F", bound=Callable[..., Any])
trust_option: Callable[[F], F] = flag("trust-client-headers", NAMES, ",".join(TRUSTED_BY_DEFAULT), TEXT)


def faults(names: Sequence[str]) -> list[str]:
    """Returns what is wrong with the names that were given."""
    known = (*WORDS, GATEWAY, *GROUPS)
    found = [
        f"--trust-client-headers: '{name[:128]}' is not known; write all, none, {GATEWAY}, or some of {', '.join(GROUPS)}"
        for name in names
        if name not in known
    ]
    if len(names) > 1 and set(WORDS) & set(names):
        found.append("--trust-client-headers: all and none cannot be combined with other values")
    return found


def trusted(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the groups of client headers that the picker reads, after GATEWAY if the gateway removes those of clients.

    `names`: faultless. Without a group, GATEWAY stands for the groups that are trusted by default.
    """
    if ALL in names:
        return tuple(GROUPS)
    groups = tuple(name for name in GROUPS if name in names)
    return (GATEWAY, *(groups or TRUSTED_BY_DEFAULT)) if GATEWAY in names else groups
