"""Confirms a candidate on the held-out part: how much better is it, and could that be chance?

Both configurations replay the same requests, with several seeds. The requests are cut into blocks in the order of arrival. A bootstrap
draws blocks with replacement and computes the gain of each draw; 95 % of the gains are within the interval. Blocks keep neighbours
together, because requests that come at the same time meet the same queues (Künsch, 1989: the block bootstrap).
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np

from loadtest.replay.configurations import Configuration
from loadtest.replay.figures import Figures, NoAnswer, figures
from loadtest.replay.run import Run
from loadtest.tune.search import Goal, Part

SEEDS: Final = 3
BLOCKS: Final = 24
DRAWS: Final = 400
INTERVAL: Final = (2.5, 50.0, 97.5)  # percent


class Verdict(msgspec.Struct, frozen=True):
    """How a candidate did on the held-out part. `gain`: the share by which the objective is better than with the base; it is between `low`
    and `high` with 95 % confidence. `better`: whether the candidate is better by more than chance and all conditions hold.
    """

    base: Figures
    best: Figures
    gain: float
    low: float
    high: float
    better: bool


def confirm(part: Part, base: Configuration, best: Configuration, goal: Goal, seed: int) -> Verdict:
    """Replays both configurations. Raises NoAnswer if one of them answers no request."""
    size = len(part.world.requests)
    runs = [_joined([part.run(config, seed + number) for number in range(SEEDS)]) for config in (base, best)]
    blocks = [
        np.concatenate([block + number * size for number in range(SEEDS)])
        for block in np.array_split(part.counted, min(BLOCKS, len(part.counted)))
    ]
    every = np.concatenate(blocks)
    found = [_figures(part, run, runs[0], every) for run in runs]
    rng = np.random.default_rng(seed)
    gains = []
    for _ in range(DRAWS):
        drawn = np.concatenate([blocks[at] for at in rng.integers(len(blocks), size=len(blocks))])
        try:
            gains.append(_gain(goal, *(_figures(part, run, runs[0], drawn) for run in runs)))
        except NoAnswer:
            continue
    low, _, high = np.percentile(gains, INTERVAL).tolist()
    better = low > 0 and goal.allows(found[1], found[0])
    return Verdict(found[0], found[1], _gain(goal, *found), low, high, better)


def _figures(part: Part, run: Run, base: Run, counted: np.ndarray) -> Figures:
    return figures(run, base.target, len(part.world.endpoints), counted)


def _gain(goal: Goal, base: Figures, best: Figures) -> float:
    before, after = goal.cost(base), goal.cost(best)
    return (before - after) / abs(before) if before else 0.0


def _joined(runs: Sequence[Run]) -> Run:
    """Returns the runs one after the other."""
    names = [name for name in Run.__struct_fields__ if name != "refused"]
    arrays: dict[str, Any] = {name: np.concatenate([getattr(run, name) for run in runs]) for name in names}
    return Run(**arrays, refused={})
