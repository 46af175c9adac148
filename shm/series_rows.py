"""Chooses which label tuples of a series have a row of their own on a page, within limits of number and weight."""

from collections.abc import Callable
from typing import Final

Labels = tuple[str, ...]

UNLIMITED: Final = 1 << 60
RESERVED: Final = 4  # the last quarter of the room is for tuples that cannot count as a coarser one


def most_fine(room: int) -> int:
    """Returns the part of a room that tuples may take that can count as a coarser one."""
    return room - room // RESERVED


class Rows:
    """The rows of a reader: which tuples have a row of their own, within limits of number and weight."""

    # `of`: label tuple -> its row, for tuples with a row of their own. The order is that in which they got it.

    def __init__(self, other: Labels, count: int, coarse: Callable[[Labels], Labels], weigh: Callable[[Labels], int], room: int) -> None:
        self._coarse = coarse
        self._weigh = weigh
        self._count = count
        self._room = room or UNLIMITED
        self._free = list(range(count, 0, -1))
        self._taken = self._fine = self._fine_weight = 0
        self._users = [1, *[0] * count]  # by row: how many tuples count there
        self.of: dict[Labels, int] = {other: 0}
        self._labels: dict[int, Labels] = {0: other}

    def enter(self, labels: Labels) -> int:
        """Returns the row where a tuple counts that is new, or was not there for a while."""
        row = self.of.get(labels)
        if row is None:
            row = self._own(labels)
        if row is None:
            coarse = self._coarse(labels)
            row = self.of.get(coarse) if coarse != labels else 0
            row = self._own(coarse) if row is None else row
        self._users[row or 0] += 1
        return row or 0

    def leave(self, row: int) -> bool:
        """Notes that a tuple of this row is gone. Returns whether the row is gone with it."""
        self._users[row] -= 1
        if self._users[row]:
            return False
        labels = self._labels.pop(row)
        del self.of[labels]
        self._free.append(row)
        weight, fine = self._weigh(labels), self._coarse(labels) != labels
        self._taken -= weight
        self._fine -= fine
        self._fine_weight -= weight * fine
        return True

    def _own(self, labels: Labels) -> int | None:
        weight, fine = self._weigh(labels), self._coarse(labels) != labels
        if not self._free or self._taken + weight > self._room:
            return None
        if fine and (self._fine >= most_fine(self._count) or self._fine_weight + weight > most_fine(self._room)):
            return None
        row = self.of[labels] = self._free.pop()
        self._labels[row] = labels
        self._taken += weight
        self._fine += fine
        self._fine_weight += weight * fine
        return row
