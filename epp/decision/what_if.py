"""Answers "what if the weights were different" for a decision that was made: the same scores, added up with other weights.

The totals come from the same addition as those of a decision (`compiled/kernels/`, called by `epp.decision.decide`). An explanation has the
best candidates of a run only, so an endpoint that is not among them cannot become the best one here. Filters and scores stay as they were.
"""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from compiled.calls import add_scaled
from epp.candidates import Floats
from epp.decision.explain import Profiled


class Ranked(msgspec.Struct, frozen=True):
    """One candidate with other weights. `parts`: scorer -> its part of `total`."""

    endpoint: str
    total: float
    parts: dict[str, float]


class WhatIf(msgspec.Struct, frozen=True):
    """A profile with other weights. `ranked`: the candidates, best first; those with equal totals in the order of the decision.

    `same`: whether the first one was picked. `margin`: its total minus that of the second; None: there is no other. `more`: how many
    candidates the explanation leaves out.
    """

    profile: str
    weights: dict[str, float]
    ranked: list[Ranked]
    same: bool
    margin: float | None
    more: int


def what_if(profile: Profiled, weights: Mapping[str, float]) -> WhatIf | None:
    """Ranks the candidates of a profile anew. `weights`: by scorer; a scorer that is missing keeps its weight.

    Returns None if the profile had no candidate.
    """
    if not profile.candidates:
        return None
    first = profile.candidates[0]
    used = {scored.scorer: weights.get(scored.scorer, scored.weight) for scored in first.scores}
    raw: Sequence[Floats] = [np.array([candidate.scores[at].raw for candidate in profile.candidates]) for at in range(len(first.scores))]
    totals: Floats = np.zeros(len(profile.candidates))
    for scores, weight in zip(raw, used.values(), strict=True):
        add_scaled(totals, scores, weight)
    order = np.argsort(-totals, kind="stable").tolist()
    ranked = [
        Ranked(
            profile.candidates[row].endpoint,
            round(float(totals[row]), 4),
            {name: round(float(raw[at][row]) * weight, 4) for at, (name, weight) in enumerate(used.items())},
        )
        for row in order
    ]
    margin = round(float(totals[order[0]] - totals[order[1]]), 4) if len(order) > 1 else None
    return WhatIf(profile.profile, used, ranked, profile.candidates[order[0]].picked, margin, profile.more)
