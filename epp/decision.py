"""What a decision is: the targets, how each profile came to its own, and headers for the model server."""

from collections.abc import Mapping, Sequence

from epp.candidates import Candidates, Endpoint, Scores


class ProfileRun:
    """One run of one profile: who was left, how they scored, who was picked (indices, best first)."""

    __slots__ = ("candidates", "picked", "totals")

    def __init__(self, candidates: Candidates, totals: Scores, picked: Sequence[int]) -> None:
        self.candidates = candidates
        self.totals = totals
        self.picked = picked

    @property
    def targets(self) -> list[Endpoint]:
        """Picked endpoints, best first."""
        return [self.candidates.endpoint(index) for index in self.picked]


class Decision:
    """Where the request goes: `targets` in order of preference; `headers` go to the model server with it."""

    __slots__ = ("headers", "primary", "runs", "targets")

    def __init__(self, targets: Sequence[Endpoint], runs: Mapping[str, ProfileRun | None], primary: str) -> None:
        self.targets = tuple(targets)
        self.runs = runs
        self.primary = primary
        self.headers: dict[str, str] = {}
