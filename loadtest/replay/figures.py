"""Figures of a run, and conditions on them."""

import operator
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec
import numpy as np

from loadtest.replay.reading import Recording
from loadtest.replay.run import Floats, Ints, Run, empty

PERCENTILES: Final = (50, 95, 99)


class NoAnswer(ValueError):
    """Raised if no request of a run got an answer."""


class Figures(msgspec.Struct, frozen=True):
    """The figures of one run. Times are in seconds: `ttft_*` to the first token, `latency_*` to the end, `wait_*` in queues of the picker.

    `hit_rate`: cached tokens over prompt tokens, 0 to 1. `errors`: requests without an answer; `refused`: those of them that the picker
    refused. `load`: the requests of the busiest endpoint, divided by the mean over the endpoints. `moved`: the share of the requests that
    go to another endpoint than in the replay of the recorded configuration.
    """

    requests: int
    errors: int
    refused: int
    ttft_mean: float
    ttft_p50: float
    ttft_p95: float
    ttft_p99: float
    latency_mean: float
    latency_p50: float
    latency_p95: float
    wait_mean: float
    wait_p95: float
    hit_rate: float
    load: float
    moved: float


NAMES = Figures.__struct_fields__
HIGHER_IS_BETTER: Final = frozenset({"requests", "hit_rate"})
OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
NUMBER = r"\d+(?:\.\d+)?"
CONDITION = re.compile(rf"\s*([a-z_0-9]+)\s*(<=|>=|<|>)\s*(?:(?:({NUMBER})\s*\*\s*)?(base)\s*(?:([+-])\s*({NUMBER}))?|({NUMBER}))\s*")


class Condition(msgspec.Struct, frozen=True):
    """A condition such as `ttft_p95 > 1.1 * base`, where `base` is the same figure of the recorded configuration."""

    text: str
    name: str
    sign: str
    factor: float
    added: float

    def holds(self, found: Figures, base: Figures) -> bool:
        limit = self.factor * getattr(base, self.name) + self.added
        return OPERATORS[self.sign](getattr(found, self.name), limit)


def condition(text: str) -> Condition:
    """Parses a condition. Raises ValueError, whose text says what is allowed."""
    found = CONDITION.fullmatch(text)
    if found is None:
        raise ValueError(f"'{text}' is no condition; write NAME > NUMBER * base + NUMBER, or NAME > NUMBER, with <, <=, > or >=")
    name, sign, factor, base, plus, added, number = found.groups()
    checked(name)
    if base is None:
        return Condition(text, name, sign, 0.0, float(number))
    return Condition(text, name, sign, float(factor or 1.0), float(f"{plus}{added}") if added else 0.0)


def checked(name: str) -> str:
    """Returns the name of a figure. Raises ValueError if there is no such figure."""
    if name not in NAMES:
        raise ValueError(f"'{name}' is no figure; allowed: {', '.join(NAMES)}")
    return name


def figures(run: Run, base: Ints, endpoints: int, counted: slice | np.ndarray = slice(None)) -> Figures:
    """Computes the figures of the requests in `counted`. `base`: for each request, the endpoint to compare with the chosen one. Raises
    NoAnswer.
    """
    target, first = run.target[counted], run.first_s[counted]
    answered = (target >= 0) & ~np.isnan(first)
    if not answered.any():
        raise NoAnswer("no request got an answer")
    times = first[answered]
    lasted = run.lasted_s[counted][answered]
    waits = run.waited_s[counted]
    p50, p95, p99 = np.percentile(times, PERCENTILES).tolist()
    prompt, cached = run.prompt[counted][answered].sum(), run.cached[counted][answered].sum()
    counts = np.bincount(target[answered], minlength=endpoints)
    return Figures(
        requests=len(target),
        errors=int(len(target) - answered.sum()),
        refused=int((target == -1).sum()),
        ttft_mean=float(times.mean()),
        ttft_p50=p50,
        ttft_p95=p95,
        ttft_p99=p99,
        latency_mean=float(lasted.mean()),
        latency_p50=_percentile(lasted, 50),
        latency_p95=_percentile(lasted, 95),
        wait_mean=float(waits.mean()),
        wait_p95=_percentile(waits, 95),
        hit_rate=float(cached / prompt) if prompt else 0.0,
        load=float(counts.max() / counts.mean()),
        moved=float((target != base[counted]).mean()),
    )


def median(each: Sequence[Figures]) -> Figures:
    """Returns the median of each figure. `each`: the figures of an odd number of runs."""
    return Figures(*(statistics.median(values) for values in zip(*map(msgspec.structs.astuple, each), strict=True)))


def _percentile(values: Floats, percent: float) -> float:
    return float(np.percentile(values, percent))


def measured(recording: Recording) -> Run:
    """Returns the recorded traffic in the form of a run. A request whose answer was not recorded to its end is shown without an answer."""
    asked = recording.asked
    run = empty(len(asked))
    start = asked[0].at
    for number, each in enumerate(asked):
        run.at[number] = each.at - start
        run.waited_s[number] = each.waited_s
        if each.answered:
            run.target[number] = each.target
            run.first_s[number], run.lasted_s[number] = each.first_s, each.lasted_s
            run.prompt[number], run.output[number] = each.prompt, each.output or 0
            run.cached[number] = each.expected if each.cached is None else each.cached
    return run
