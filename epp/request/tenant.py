"""A tenant: who sends a request, by what the gateway or a key vouches for."""

from collections.abc import Mapping, Sequence
from typing import Final

from epp.request.budget import Budget
from epp.request.client_headers import DEFAULT_FLOW, FAIRNESS_CHARS_MAX, OBJECTIVE, first_value, names_flow

UNKNOWN: Final = "unknown"  # the tenant that all requests without a known one share, if the operator wants that


class Tenant:
    """`name`: also the fairness id of its requests. `objectives`: the InferenceObjectives that it may claim; empty: any.

    The first of the objectives is that of a request that claims none, or another one. `salt`: the cache salt of its requests, so that it
    shares no prefixes with others; "": clients give theirs. `budget`: None without limits.
    """

    __slots__ = ("budget", "members", "name", "objectives", "salt")

    def __init__(self, name: str, objectives: Sequence[str] = (), salt: str = "", budget: Budget | None = None) -> None:
        self.name = name
        self.budget = budget
        self.objectives = objectives
        self.salt = salt
        self.members: dict[str, bytes] = {}  # the salt as a member of a body, by the member's name; parsers determine the names

    def objective(self, claimed: str) -> str:
        """Returns the objective of a request. `claimed`: what its client says; "" for nothing. The result may be "", too."""
        objectives = self.objectives
        return claimed if not objectives or claimed in objectives else objectives[0]

    def may_send(self, headers: Mapping[str, str]) -> bool:
        """Returns whether model servers may get the client's objective header: there is none, or the tenant may claim what it says."""
        claimed = first_value(headers, OBJECTIVE) if self.objectives else None
        return claimed is None or self.objective(claimed) == claimed


def names_tenant(name: str) -> bool:
    """Returns whether a text is a valid name of a tenant: a valid fairness id that does not stand for requests without one."""
    return bool(name) and name != DEFAULT_FLOW and names_flow(name)


NAME_RULE: Final = f"a tenant's name has 1 to {FAIRNESS_CHARS_MAX} printable characters and is not '{DEFAULT_FLOW}'"
