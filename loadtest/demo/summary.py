"""Summarises one or several runs of users: computes figures, shows them as a table or as JSON, and compares two runs in a sentence.

Runs are compared over the requests that all of them finished, so that all columns are about the same work. Only the numbers of requests and
errors, the requests per second and the predicted share are about the whole run.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from loadtest.demo.traffic import Key, Result, Run


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one run. Times are in milliseconds. `cached_share`: the share of prompt tokens from a cache, from 0 to 1.

    `predicted_share`: the share that the picker predicted as cached, over all requests of the run; None without a picker.
    """

    requests: int
    errors: int
    compared: int
    requests_per_s: float
    first_token_mean_ms: float
    first_token_p50_ms: float
    first_token_p95_ms: float
    total_p50_ms: float
    total_p95_ms: float
    cached_share: float
    predicted_share: float | None


ROWS = (
    ("requests", "requests", "{:.0f}"),
    ("errors", "errors", "{:.0f}"),
    ("requests per second", "requests_per_s", "{:.1f}"),
    ("time to first token mean", "first_token_mean_ms", "{:.0f} ms"),
    ("time to first token p50", "first_token_p50_ms", "{:.0f} ms"),
    ("time to first token p95", "first_token_p95_ms", "{:.0f} ms"),
    ("end to end p50", "total_p50_ms", "{:.0f} ms"),
    ("end to end p95", "total_p95_ms", "{:.0f} ms"),
    ("prompt tokens from cache", "cached_share", "{:.0%}"),
    ("predicted by the picker", "predicted_share", "{:.0%}"),
)
UNKNOWN = "–"
COMPARED_MIN = 30
BUSY_S = 0.01
STANDARD_ERRORS = 2.0


def percentile(values: Sequence[float], share: float) -> float:
    """Returns a percentile by the nearest rank. `share`: from 0 to 1; 0.5 is the median. Returns 0 if there are no values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def finished(results: Iterable[Result]) -> dict[Key, Result]:
    """Returns the results without an error, by key."""
    return {result.key: result for result in results if not result.error}


def figures(run: Run, keys: Iterable[Key] | None = None) -> Figures:
    """Computes the figures of a run. `keys` limits times and shares to these requests."""
    results, answers = run.results, finished(run.results)
    of = [answers[key] for key in (answers if keys is None else keys)]
    prompt = sum(result.prompt_tokens for result in of)
    first = [result.first_token_s * 1e3 for result in of]
    total = [result.total_s * 1e3 for result in of]
    return Figures(
        requests=len(results),
        errors=len(results) - len(answers),
        compared=len(of),
        requests_per_s=len(answers) / run.seconds if run.seconds > 0 else 0.0,
        first_token_mean_ms=statistics.fmean(first) if first else 0.0,
        first_token_p50_ms=percentile(first, 0.5),
        first_token_p95_ms=percentile(first, 0.95),
        total_p50_ms=percentile(total, 0.5),
        total_p95_ms=percentile(total, 0.95),
        cached_share=sum(result.cached_tokens for result in of) / prompt if prompt else 0.0,
        predicted_share=run.predicted_share,
    )


def columns(runs: Mapping[str, Run]) -> dict[str, Figures]:
    """Returns the figures of all runs, over the requests that every run finished. Leaves out runs without a result."""
    seen = {name: run for name, run in runs.items() if run.results}
    keys = _common(list(seen.values()))
    return {name: figures(run, keys) for name, run in seen.items()}


def verdict(runs: Mapping[str, Run]) -> str:
    """Compares the first run with the second in a sentence. Returns "" unless both have results.

    The compared figure is the mean time to the first token over the requests that both finished. A difference within two standard errors is
    taken as chance. If the demo's own timers were late (95th percentile) by `BUSY_S` or more, and by half of the difference or more, the
    difference says how busy the machine was, not how good the picker is.
    """
    seen = [(name, run) for name, run in runs.items() if run.results]
    if len(seen) != 2:
        return ""
    (name, one), (other_name, other) = seen
    keys = _common([one, other])
    if len(keys) < COMPARED_MIN:
        return f"no comparison: both finished only {len(keys)} requests, {COMPARED_MIN} are needed; give more --seconds"
    ours, theirs = ([answers[key].first_token_s for key in keys] for answers in (finished(one.results), finished(other.results)))
    mean, instead = statistics.fmean(ours), statistics.fmean(theirs)
    late = max(percentile(one.late_s, 0.95), percentile(other.late_s, 0.95))
    if late >= max(BUSY_S, abs(mean - instead) / 2):
        return (
            f"no comparison: this machine was too busy. The demo's own timers were up to {late * 1e3:.0f} ms late, "
            f"and the means of the time to the first token differ by {abs(mean - instead) * 1e3:.0f} ms"
        )
    differences = [b - a for a, b in zip(ours, theirs, strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    figures = f"first token after {mean * 1e3:.0f} ms on average ({name}) instead of {instead * 1e3:.0f} ms ({other_name})"
    if abs(mean - instead) <= STANDARD_ERRORS * error:
        return f"{figures}: no more than chance"
    return f"{figures}: {abs(1 - mean / instead):.0%} {'sooner' if mean < instead else 'later'}"


def _common(runs: Sequence[Run]) -> list[Key]:
    """Returns the keys of the requests that every run finished, in order."""
    return sorted(set.intersection(*(set(finished(run.results)) for run in runs))) if runs else []


def table(shown: Mapping[str, Figures]) -> Table:
    """Returns the figures as a table for the terminal."""
    compared = next(iter(shown.values())).compared
    over = f"over the {compared} requests that both finished" if len(shown) > 1 else f"{compared} requests"
    drawn = Table(caption=f"times and shares {over}", caption_justify="left")
    drawn.add_column("")
    for name in shown:
        drawn.add_column(name, justify="right")
    for title, field, form in ROWS:
        values = (getattr(each, field) for each in shown.values())
        drawn.add_row(title, *(UNKNOWN if value is None else form.format(value) for value in values))
    return drawn


def as_json(shown: Mapping[str, Figures]) -> dict[str, Any]:
    """Returns the figures as JSON values, with the names of `Figures`."""
    return {name.replace(" ", "_").replace("-", "_"): asdict(each) for name, each in shown.items()}
