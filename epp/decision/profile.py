"""A scheduling profile, compiled to a tuple of calls. `epp.decision.pipeline` makes it from the configuration; `epp.decision.decide` runs
it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from epp.candidates import Candidates, Mask, Scores
from epp.points.base import Plugin
from epp.request import Request

FilterCall = Callable[[Request, Candidates, "Profile"], Mask]
ScorerCall = Callable[[Request, Candidates, "Profile"], Scores | None]
PickCall = Callable[[Request, Candidates, Scores, "Profile"], Sequence[int]]

NO_OWNERS: Final[Mapping[int, Plugin]] = {}


class Picker(Protocol):
    """The method of a picker plugin (`epp.plugin.Picker`) that a profile calls."""

    name: str

    def pick(self, request: Request, candidates: Candidates, totals: Scores, profile: "Profile") -> Sequence[int]: ...


class Profile:
    """Holds one compiled profile. Plugins read its `name`.

    `filters`, `scorers`, `static_scorers` and `pick` are calls, in order; each scorer's call comes with its weight. `scorers` has no static
    scorer. `owners`: `id(call)` -> the plugin of the call.
    """

    __slots__ = ("filters", "name", "owners", "pick", "picker", "scorers", "static_scorers")

    def __init__(
        self,
        name: str,
        filters: tuple[FilterCall, ...],
        scorers: tuple[tuple[ScorerCall, float], ...],
        picker: Picker,
        static_scorers: tuple[tuple[ScorerCall, float], ...] = (),
        *,
        pick: PickCall | None = None,
        owners: Mapping[int, Plugin] = NO_OWNERS,
    ) -> None:
        self.name = name
        self.owners = owners
        self.filters = filters
        self.scorers = scorers
        self.static_scorers = static_scorers
        self.picker = picker
        self.pick = pick or picker.pick
