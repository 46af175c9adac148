"""Remembers the counters of the last minutes, so that findings can tell what happens now from what happened once."""

from collections import deque
from collections.abc import Mapping
from typing import Final

STEP_S: Final = 30.0
SPAN_S: Final = 300.0
KEPT: Final = int(SPAN_S / STEP_S) + 1


class Recent:
    """Remembers the counters once per STEP_S, for SPAN_S. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._kept: deque[tuple[float, Mapping[str, int]]] = deque(maxlen=KEPT)

    def add(self, at: float, counters: Mapping[str, int]) -> None:
        """Remembers the counters at time `at`, unless the last ones are younger than STEP_S."""
        if not self._kept or at - self._kept[-1][0] >= STEP_S:
            self._kept.append((at, counters))

    def increases(self, counters: Mapping[str, int]) -> dict[str, int]:
        """Returns by how much each counter has grown since the oldest remembered ones. Leaves out those that have not grown."""
        if not self._kept:
            return {}
        then = self._kept[0][1]
        return {name: grown for name, count in counters.items() if (grown := count - then.get(name, 0)) > 0}
