"""Bounds the number of values of labels that clients choose."""

from collections.abc import Callable, Iterable
from typing import Final

from epp.metrics import OTHER, Group

LABEL_VALUES_MAX: Final = 1000
PINNED_MAX: Final = 16384


class LabelCaps:
    """Admits label values up to a limit; replaces all others by `OTHER`. An admitted value is never replaced later.

    An empty value does not count against the limit. Models that operators name (`pin`) do not count either, and are never replaced.
    """

    def __init__(self, models_max: int = LABEL_VALUES_MAX, fairness_ids_max: int = LABEL_VALUES_MAX) -> None:
        self._models: set[str] = set()
        self._pinned: set[str] = set()
        self._fairness_ids: set[str] = set()
        self._models_max = models_max
        self._fairness_ids_max = fairness_ids_max

    def model(self, name: str) -> str:
        """Returns the label value for a model. Requested and target models share one limit."""
        return name if name in self._pinned else _admitted(self._models, name, self._models_max)

    def pin(self, models: Iterable[str]) -> None:
        """Admits these models permanently, up to PINNED_MAX."""
        for name in models:
            if len(self._pinned) < PINNED_MAX:
                self._pinned.add(name)

    def fairness_id(self, name: str) -> str:
        """Returns the label value for a fairness id."""
        return _admitted(self._fairness_ids, name, self._fairness_ids_max)

    def fold(self, group: Group) -> Callable[[tuple[str, ...]], tuple[str, ...]]:
        """Returns a function for this group that maps a label tuple to the label tuple that it counts as."""
        bounded = {
            "model_name": self.model,
            "target_model_name": self.model,
            "target_model": self.model,
            "fairness_id": self.fairness_id,
        }
        rules = tuple(bounded.get(label) for label in group.labels)
        return lambda labels: tuple(
            rule(value) if rule is not None else value for rule, value in zip(rules, labels, strict=True)
        )


def _admitted(known: set[str], value: str, limit: int) -> str:
    if not value or value == OTHER or value in known:
        return value
    if len(known) >= limit:
        return OTHER
    known.add(value)
    return value
