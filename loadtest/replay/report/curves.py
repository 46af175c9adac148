"""What the charts of a report show, from the arrays of a run (`loadtest.replay.run.Run`)."""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from loadtest.replay.run import Floats, Run

BINS: Final = 60
PERCENTS: Final = (1, 5, 10, 25, 50, 75, 90, 95, 98, 99, 99.9)
BANDS_MAX: Final = 8

Points = list[tuple[float, float]]


def percentiles(runs: Sequence[Run]) -> Points:
    """Returns the time to the first token in milliseconds by percentile, over all these runs."""
    times = np.concatenate([run.first_s[~np.isnan(run.first_s)] for run in runs])
    if not len(times):
        return []
    return [(percent, float(value) * 1e3) for percent, value in zip(PERCENTS, np.percentile(times, PERCENTS), strict=True)]


def hit_rates(run: Run, edges: Floats) -> Points:
    """Returns the share of prompt tokens that were cached, in percent over time."""
    prompt = np.histogram(run.at, edges, weights=run.prompt)[0]
    cached = np.histogram(run.at, edges, weights=run.cached)[0]
    return [(float(at), float(100 * some / all_)) for at, some, all_ in zip(_middles(edges), cached, prompt, strict=True) if all_]


def loads(run: Run, names: Sequence[str], edges: Floats) -> Mapping[str, Points]:
    """Returns the mean number of requests in flight per endpoint over time."""
    begun = run.at + run.waited_s
    ended = run.at + run.lasted_s
    served = {name: run.target == slot for slot, name in enumerate(names)}
    return {name: _mean(begun[mask], ended[mask], edges) for name, mask in served.items()}


def waiting(run: Run, priorities: Sequence[int], edges: Floats) -> Mapping[str, Points]:
    """Returns the mean number of requests that wait in the picker, per band over time. `priorities`: the priority of each request."""
    of = np.array(priorities)
    bands = sorted(set(priorities), reverse=True)[:BANDS_MAX]
    waits = run.waited_s > 0
    return {
        f"priority {band}": _mean(run.at[mask], (run.at + run.waited_s)[mask], edges)
        for band in bands
        if (mask := (of == band) & waits).any()
    }


def moves(run: Run, base: Run, names: Sequence[str]) -> Mapping[str, Mapping[str, float]]:
    """Returns, per endpoint, how many requests stay there, how many come from other endpoints, and how many go to others or nowhere."""
    found = {}
    for slot, name in enumerate(names):
        here, there = run.target == slot, base.target == slot
        found[name] = {"stay": float((here & there).sum()), "come": float((here & ~there).sum()), "go": float((there & ~here).sum())}
    return found


def edges_of(runs: Sequence[Run]) -> Floats:
    """Returns the edges of the bins of time that all charts share."""
    last = max(float(run.at.max(initial=0.0)) for run in runs)
    return np.linspace(0.0, last or 1.0, BINS + 1)


def _middles(edges: Floats) -> Floats:
    return (edges[1:] + edges[:-1]) / 2


def _mean(begun: Floats, ended: Floats, edges: Floats) -> Points:
    """Returns how many intervals contain a point of time, as the mean over each bin."""
    known = ~np.isnan(ended)
    begun, ended = begun[known], ended[known]
    # The integral of the number of intervals up to a time t is the sum of min(t, end) - min(t, begin).
    totals = _clipped_sums(ended, edges) - _clipped_sums(begun, edges)
    means = np.diff(totals) / np.diff(edges)
    return [(float(at), round(float(mean), 3)) for at, mean in zip(_middles(edges), means, strict=True)]


def _clipped_sums(times: Floats, edges: Floats) -> Floats:
    """Returns for each edge the sum of min(edge, time)."""
    ordered = np.sort(times)
    sums = np.concatenate(([0.0], np.cumsum(ordered)))
    below = np.searchsorted(ordered, edges)
    return sums[below] + (len(ordered) - below) * edges
