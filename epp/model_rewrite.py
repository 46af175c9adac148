"""Rules by which a model that is asked for becomes another one: compiled to one choice per model, and the choice itself.

    Rewrite objects ─ compiled ─▶ Rules: model -> Choice, and a Choice for all other models ─ pick ─▶ the model to ask for

- A rule that names the model goes before one for every model. Among those of a kind the oldest object's counts, objects without
  an age being the oldest of all, in the order in which they are given; within an object the first rule.
- A rule has models (it is for these), an empty tuple of them (it never applies), or None (it is for every model).
- Of its targets one is drawn for each request: by weight over the sum of weights, where at least one target has a weight (those
  without are never drawn then), else each as often as any other.

Whoever makes rules has checked names and numbers (`WEIGHT_MAX`, `TARGETS_MAX`, `RULES_MAX`, `MODELS_MAX` bound what is checked).
What this does not do: draw a number itself, read objects, or rename anything.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Final, NamedTuple

import msgspec

WEIGHT_MAX: Final = 1_000_000
TARGETS_MAX: Final = 64  # of a rule
MODELS_MAX: Final = 1024  # that a rule names
RULES_MAX: Final = 1024  # of an object
MODEL_CHARS_MAX: Final = 1024
NOBODY: Final = -1


class Target(NamedTuple):
    """A model to ask for instead; `weight`, if it has one, is from 1 to WEIGHT_MAX."""

    model: str
    weight: int | None = None


class Rule(NamedTuple):
    """For requests for these models; None: for all. At least one target."""

    models: tuple[str, ...] | None
    targets: tuple[Target, ...]


class Rewrite(NamedTuple):
    """An object with its rules. `created` is in seconds, of whatever clock is the same for all; None: before all others."""

    name: str
    created: float | None
    rules: tuple[Rule, ...]


class Choice(msgspec.Struct, array_like=True, frozen=True):
    """What one rule comes to. `sums` are the running sums of the models' weights."""

    rewrite: str  # whose rule it is
    models: tuple[str, ...]
    sums: tuple[int, ...]

    def pick(self, random: Callable[[], float]) -> str:
        """The model to ask for; `random` draws from [0, 1)."""
        models = self.models
        last = len(models) - 1
        if not last:
            return models[0]
        # Never beyond the last one, to which a product may be rounded up.
        return models[bisect_right(self.sums, random() * self.sums[last], 0, last)]


class Rules(msgspec.Struct, array_like=True, frozen=True):
    """All rules that can apply: choices, and by model or for every other one which of them it is."""

    choices: tuple[Choice, ...] = ()
    exact: dict[str, int] = {}
    every: int = NOBODY

    def by_model(self) -> dict[str, Choice]:
        """The choice of each model that a rule names."""
        return {model: self.choices[at] for model, at in self.exact.items()}

    def others(self) -> Choice | None:
        """That of all other models."""
        return None if self.every == NOBODY else self.choices[self.every]

    def target(self, model: str, random: Callable[[], float]) -> str | None:
        """The model to ask for instead of this one; None: no rule is for it."""
        at = self.exact.get(model, self.every)
        return None if at == NOBODY else self.choices[at].pick(random)

    def names(self) -> Iterator[str]:
        """Models that rules name, as asked for or as targets."""
        yield from self.exact
        for choice in self.choices:
            yield from choice.models


def compiled(rewrites: Iterable[Rewrite]) -> Rules:
    """Rules that are hidden by others are left out."""
    choices: list[Choice] = []
    exact: dict[str, int] = {}
    every = NOBODY
    for rewrite in sorted(rewrites, key=_age):  # stable: those of one age stay in the given order
        for rule in rewrite.rules:
            if rule.models is None:
                if every != NOBODY:
                    continue
                every = len(choices)
            else:
                new = [model for model in rule.models if model not in exact]
                if not new:
                    continue
                exact |= dict.fromkeys(new, len(choices))
            choices.append(_choice(rewrite.name, rule.targets))
    return Rules(tuple(choices), exact, every)


def _age(rewrite: Rewrite) -> tuple[bool, float]:
    return rewrite.created is not None, rewrite.created or 0.0


def _choice(name: str, targets: tuple[Target, ...]) -> Choice:
    weights: Mapping[int, int] = {at: target.weight for at, target in enumerate(targets) if target.weight is not None}
    if not weights:
        weights = dict.fromkeys(range(len(targets)), 1)
    return Choice(name, tuple(targets[at].model for at in weights), tuple(accumulate(weights.values())))
