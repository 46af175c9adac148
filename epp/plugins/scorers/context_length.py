"""Prefer endpoints that are labelled for the prompt's length: `llm-d.ai/context-length-range: 0-8192`."""

import re
from typing import Annotated

import msgspec
import numpy as np

from epp.candidates import Candidates, Floats, Mask, Roster, Scores
from epp.plugin import Filter, Profile, Scorer, plugin
from epp.request import Request
from epp.tokens import TOKENS, token_count

LABEL = "llm-d.ai/context-length-range"
NEUTRAL = 0.5
OUTSIDE_MAX = 0.3  # endpoints out of range score at most this; those in range score more
WIDTH_SHARE, ROOM_SHARE = 0.7, 0.3
WIDTH_SCALE, DISTANCE_SCALE = 10_000.0, 1_000.0

_RANGE = re.compile(r"\s*([0-9]{1,15})\s*-\s*([0-9]{1,15})\s*")


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Where the lengths are, and whether they filter.

    label: The label with the lengths that an endpoint is meant for.
    enable_filtering: Drop endpoints with the wrong length, in addition to scoring.
    """

    label: Annotated[str, msgspec.Meta(min_length=1)] = LABEL
    enable_filtering: bool = False


class Ranges:
    """Holds the labels of one roster as arrays. For n tokens from `low` to `high` the score is base + slope * (high - n).

    Without the label every prompt is in range, with the score NEUTRAL. With an invalid label no prompt is in range, at infinite distance.
    """

    __slots__ = ("base", "high", "low", "roster", "slope")

    def __init__(self, roster: Roster, label: str) -> None:
        self.roster = roster
        rows = [_row(endpoint.labels.get(label)) for endpoint in roster.endpoints]
        self.low, self.high, self.base, self.slope = np.array(rows, dtype=np.float64).reshape(-1, 4).T.copy()

    def distance(self, tokens: int) -> Floats:
        """Returns how far out of range each endpoint is; 0 or less: it is in range."""
        return np.maximum(tokens - self.high, self.low - tokens)


def _row(label: str | None) -> tuple[float, float, float, float]:
    if label is None:
        return -np.inf, float(2**62), NEUTRAL, 0.0
    match = _RANGE.fullmatch(label)
    low, high = (float(match[1]), float(match[2])) if match else (1.0, 0.0)
    if low > high:
        return np.inf, 0.0, 0.0, 0.0
    width = high - low
    if width == 0.0:
        return low, high, 1.0, 0.0
    raised = 1.0 - OUTSIDE_MAX
    base = OUTSIDE_MAX + raised * WIDTH_SHARE / (1.0 + width / WIDTH_SCALE)
    return low, high, base, raised * ROOM_SHARE / width


@plugin("context-length-aware")
class ContextLength(Filter, Scorer):
    """Scores endpoints by how well the prompt's length fits the range in their label, `min-max`.

    For n prompt tokens and a range of width w = max - min:

    in range:      0.3 + 0.7 * (0.7 / (1 + w / 10000) + 0.3 * (max - n) / w); 1 if w = 0
    out of range:  0.3 / (1 + distance / 1000)

    Without the label the score is 0.5, with an invalid label 0. As a filter it keeps endpoints in range and those without the label.
    """

    Params = Parameters
    optional = (TOKENS,)

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        self._label = params.label
        self._filters = params.enable_filtering
        self._ranges = Ranges(Roster(()), params.label)

    def keep(self, request: Request, candidates: Candidates, profile: Profile) -> Mask:
        if not self._filters:
            return np.ones(len(candidates), dtype=bool)
        distance = self._of(candidates).distance(token_count(request))
        inside: Mask = candidates.narrow(distance) <= 0.0
        return inside

    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores:
        tokens = token_count(request)
        ranges = self._of(candidates)
        distance = ranges.distance(tokens)
        inside = ranges.base + ranges.slope * (ranges.high - tokens)
        outside = OUTSIDE_MAX * DISTANCE_SCALE / (DISTANCE_SCALE + np.abs(distance))
        scores: Scores = np.where(distance <= 0.0, inside, outside)
        return candidates.narrow(scores)

    def _of(self, candidates: Candidates) -> Ranges:
        roster = candidates.snapshot.roster
        if roster is not self._ranges.roster:
            self._ranges = Ranges(roster, self._label)
        return self._ranges
