"""Figures of a run, and conditions on them."""

import operator
import re
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np


class Figures(msgspec.Struct, frozen=True):
    """The figures of one run. Times to the first token in seconds. `hit_rate`: cached tokens over prompt tokens, 0 to 1.

    `errors`: requests without an answer. `load`: requests of the busiest endpoint over the mean. `moved`: share of the requests that go to
    another endpoint than in the replay of the recorded configuration.
    """

    requests: int
    errors: int
    ttft_mean: float
    ttft_p50: float
    ttft_p95: float
    ttft_p99: float
    hit_rate: float
    load: float
    moved: float


NAMES = Figures.__struct_fields__
OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
NUMBER = r"\d+(?:\.\d+)?"
CONDITION = re.compile(rf"\s*([a-z_0-9]+)\s*(<=|>=|<|>)\s*(?:(?:({NUMBER})\s*\*\s*)?(base)|({NUMBER}))\s*")


class Condition(msgspec.Struct, frozen=True):
    """A condition such as `ttft_p95 > 1.1 * base`: `base` is the same figure of the recorded configuration."""

    name: str
    sign: str
    factor: float
    relative: bool

    def holds(self, found: Figures, base: Figures) -> bool:
        limit = self.factor * (getattr(base, self.name) if self.relative else 1.0)
        return OPERATORS[self.sign](getattr(found, self.name), limit)


def condition(text: str) -> Condition:
    """Parses a condition. Raises ValueError, whose text says what is allowed."""
    found = CONDITION.fullmatch(text)
    if found is None:
        raise ValueError(f"'{text}' is no condition; write NAME > NUMBER * base, or NAME > NUMBER, with <, <=, > or >=")
    name, sign, factor, base, number = found.groups()
    if name not in NAMES:
        raise ValueError(f"'{name}' is no figure; allowed: {', '.join(NAMES)}")
    return Condition(name, sign, float(number or factor or 1.0), base is not None)


def figures(
    waits: Sequence[float], cached: float, prompt: float, targets: Sequence[int], base: Sequence[int], endpoints: int
) -> Figures:
    """Computes the figures. `waits`: of answered requests. `targets`: index of the endpoint per request, -1: none; `base`: to compare."""
    if not waits:
        raise ValueError("no request got an answer")
    p50, p95, p99 = np.percentile(waits, (50, 95, 99)).tolist()
    counts = np.bincount([target for target in targets if target >= 0], minlength=endpoints)
    moved = sum(a != b for a, b in zip(targets, base, strict=True))
    return Figures(
        requests=len(targets),
        errors=sum(target < 0 for target in targets),
        ttft_mean=sum(waits) / len(waits),
        ttft_p50=p50,
        ttft_p95=p95,
        ttft_p99=p99,
        hit_rate=cached / prompt if prompt else 0.0,
        load=float(counts.max() / counts.mean()),
        moved=moved / len(targets),
    )
