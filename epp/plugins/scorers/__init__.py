"""Scorers: one score in [0, 1] per candidate."""

import numpy as np

from epp.candidates import Floats, Scores

FEW = 32


def fewest(values: Floats) -> Scores:
    """Min-max, lower is better: (max - x) / (max - min); 1 for all when they are equal."""
    if len(values) <= FEW:  # Python's own min and max are faster on few values
        plain = values.tolist()
        shortest, longest = min(plain), max(plain)
    else:
        shortest, longest = np.minimum.reduce(values), np.maximum.reduce(values)
    if shortest == longest:
        return np.ones(len(values))
    scores: Scores = (longest - values) / (longest - shortest)
    return scores
