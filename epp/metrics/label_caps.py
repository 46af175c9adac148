"""Decides which of the label values that clients choose get their own series: values of requests that a model server has served.

Until a model server has served a request with a model's name or a fairness id, that name or id is counted as `OTHER`. So a client that is
refused, or gets an error, cannot make a series. A series that has counted nothing for a while gives its room to a new one (`shm.series`).
If there is no room, a tuple is counted without its fairness id, or, as the last resort, as `OTHER`.
"""

from collections.abc import Callable, Iterable
from typing import Final

from epp.metrics import NO_FAIRNESS_ID, OTHER

NAMES_MAX: Final = 1000
PINNED_MAX: Final = 16384
FAIRNESS_ID: Final = "fairness_id"
MODEL_LABELS: Final = ("model_name", "target_model_name", "target_model")
PLAIN: Final = ("", OTHER, NO_FAIRNESS_ID)  # values that the picker sets itself, so that they need no cap

Labels = tuple[str, ...]


class LabelCaps:
    """Remembers the names of requests that were served: the last NAMES_MAX models and fairness ids.

    Models that operators name (`pin`) always keep their names.
    """

    def __init__(self, names_max: int = NAMES_MAX) -> None:
        self._models: dict[str, None] = {}  # the oldest first
        self._fairness_ids: dict[str, None] = {}
        self._pinned: set[str] = set()
        self._names_max = names_max

    def served(self, model: str, target_model: str, fairness_id: str) -> None:
        """Takes note of a request that a model server has served."""
        self._remember(self._models, model)
        self._remember(self._models, target_model)
        self._remember(self._fairness_ids, fairness_id)

    def pin(self, models: Iterable[str]) -> None:
        """Admits these models permanently, up to PINNED_MAX."""
        for name in models:
            if len(self._pinned) < PINNED_MAX:
                self._pinned.add(name)

    def model(self, name: str) -> str:
        """Returns the label value for a model."""
        return name if not name or name in self._models or name in self._pinned else OTHER

    def fairness_id(self, name: str) -> str:
        """Returns the label value for a fairness id."""
        return name if name in PLAIN or name in self._fairness_ids else OTHER

    def names(self, labels: Labels) -> "GroupNames":
        """Returns the names for the series of a table with these labels."""
        return GroupNames(self, labels)

    def recall(self, label: str, value: str) -> None:
        """Takes note of a value that a predecessor has used for this label."""
        if label == FAIRNESS_ID:
            self._remember(self._fairness_ids, value)
        elif label in MODEL_LABELS:
            self._remember(self._models, value)

    def _remember(self, known: dict[str, None], name: str) -> None:
        if name in PLAIN:
            return
        if name in known:
            del known[name]
        elif len(known) >= self._names_max:
            del known[next(iter(known))]
        known[name] = None


class GroupNames:
    """Decides under which names one table counts (the `Names` of `shm.series`)."""

    def __init__(self, caps: LabelCaps, labels: Labels) -> None:
        """`labels`: the names of the table's labels."""
        self._caps = caps
        self._labels = labels
        self._coarse = coarse(labels)

    def fold(self, labels: Labels) -> Labels:
        """Returns the tuple under which a tuple is counted: `OTHER` replaces each name with which no request was served."""
        caps = self._caps
        return tuple(
            [
                caps.fairness_id(value) if label == FAIRNESS_ID else caps.model(value) if label in MODEL_LABELS else value
                for label, value in zip(self._labels, labels, strict=True)
            ]
        )

    def coarse(self, labels: Labels) -> Labels:
        """Returns the tuple that is counted instead if there is no room."""
        return self._coarse(labels)

    def recall(self, labels: Labels) -> None:
        """Takes note of a tuple that the writer's predecessor has named."""
        for label, value in zip(self._labels, labels, strict=True):
            self._caps.recall(label, value)


class AtOnce(GroupNames):
    """Gives each tuple of gauges its own name at once, before any request was served. Gauges fall to 0 again, and their tuples then give up
    their room.
    """

    def fold(self, labels: Labels) -> Labels:
        return labels

    def recall(self, labels: Labels) -> None: ...


def coarse(labels: Labels) -> Callable[[Labels], Labels]:
    """Returns a function that replaces the fairness id of a tuple by `OTHER`. `labels`: the names of the labels."""
    if FAIRNESS_ID not in labels:
        return lambda values: values
    at = labels.index(FAIRNESS_ID)
    return lambda values: values if values[at] in PLAIN else (*values[:at], OTHER, *values[at + 1 :])
