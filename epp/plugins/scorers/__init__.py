"""Scorers: one score in [0, 1] per candidate."""

import numpy as np

from epp.candidates import Floats, Scores


def fewest(values: Floats) -> Scores:
    """Min-max, lower is better: (max - x) / (max - min); 1 for all when they are equal."""
    shortest, longest = np.minimum.reduce(values), np.maximum.reduce(values)
    if shortest == longest:
        return np.ones(len(values))
    scores: Scores = (longest - values) / (longest - shortest)
    return scores
