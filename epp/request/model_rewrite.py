"""Compiles InferenceModelRewrites: objects with rules that replace the requested model by another model.

    Rewrite objects ─ compiled ─▶ Rules: model -> Choice, and a Choice for all other models ─ pick ─▶ the model to request

- A rule that names the model takes precedence over a rule for every model. Between rules of the same kind the rule of the oldest
  object applies, and within one object the first rule. An object without an age is taken as older than all others. Objects of equal age are
  taken in their order in the input.
- A rule lists the models to which it applies. A rule with an empty tuple never applies; a rule with None applies to every model.
- One of the rule's targets is drawn per request. If a target has a weight, targets are drawn in proportion to their weights, and
  targets without a weight are never drawn. Otherwise all targets have equal shares.

The caller must check names and numbers before (against `WEIGHT_MAX`, `TARGETS_MAX`, `RULES_MAX`, `MODELS_MAX`). This module does not
fetch objects, and does not change requests.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Final, NamedTuple

import msgspec

WEIGHT_MAX: Final = 1_000_000
TARGETS_MAX: Final = 64  # per rule
MODELS_MAX: Final = 1024  # per rule
RULES_MAX: Final = 1024  # per object
MODEL_CHARS_MAX: Final = 1024
NO_CHOICE: Final = -1


class Target(NamedTuple):
    """Names a model to request instead. `weight` is from 1 to WEIGHT_MAX, or None."""

    model: str
    weight: int | None = None


class Rule(NamedTuple):
    """Holds a rule: the models to which it applies (None for all models) and at least one target."""

    models: tuple[str, ...] | None
    targets: tuple[Target, ...]


class Rewrite(NamedTuple):
    """Holds one object with its rules. `created`: seconds on one clock for all objects; None means older than all others."""

    name: str
    created: float | None
    rules: tuple[Rule, ...]


class Choice(msgspec.Struct, array_like=True, frozen=True):
    """Holds one compiled rule: the models to draw from. `sums` are the cumulative sums of their weights."""

    rewrite: str  # the name of the object that has the rule
    models: tuple[str, ...]
    sums: tuple[int, ...]

    def pick(self, random: Callable[[], float]) -> str:
        """Draws the model to request. `random` returns a number in [0, 1)."""
        models = self.models
        last = len(models) - 1
        if not last:
            return models[0]
        # `last` bounds the index, because the product may be rounded up to the total.
        return models[bisect_right(self.sums, random() * self.sums[last], 0, last)]


class Rules(msgspec.Struct, array_like=True, frozen=True):
    """Holds all rules that can apply. `exact` maps a model to its index in `choices`; `every` is the index for all other models."""

    choices: tuple[Choice, ...] = ()
    exact: dict[str, int] = {}
    every: int = NO_CHOICE

    def choice(self, model: str) -> Choice | None:
        """Returns the choice of a model, or None if no rule applies."""
        at = self.exact.get(model, self.every)
        return None if at == NO_CHOICE else self.choices[at]

    def target(self, model: str, random: Callable[[], float]) -> str | None:
        """Returns the model to request instead of `model`, or None if no rule applies."""
        choice = self.choice(model)
        return None if choice is None else choice.pick(random)

    def names(self) -> Iterator[str]:
        """Yields all models that rules name, as requested models or as targets."""
        yield from self.exact
        for choice in self.choices:
            yield from choice.models


def compiled(rewrites: Iterable[Rewrite]) -> Rules:
    """Compiles objects to rules. Rules that can never apply, because others take precedence, are dropped."""
    choices: list[Choice] = []
    exact: dict[str, int] = {}
    every = NO_CHOICE
    for rewrite in sorted(rewrites, key=_age):  # the sort is stable, so objects of equal age keep their order
        for rule in rewrite.rules:
            if rule.models is None:
                if every != NO_CHOICE:
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
