"""Decides in which order the children of an earlier program are replaced after an upgrade in place. The parent sends the signals.

A worker gets SIGTERM: it leaves, and its successor serves before it drains. The next worker gets the signal after the last one has ended,
so the memory never doubles. The other processes have no streams: they are killed, and their successors take over the same memory. They are
replaced last, because workers of both programs need them.

If the new program has created segments again (`workers.process.resumption`), its workers need the other processes, so these come first.
If the endpoint table was created again, earlier workers get no more updates. So each is told to leave as soon as the successor of the last
one serves, even while the last one drains. If all other seats have workers that still drain, the next worker waits for a seat.
"""

from collections.abc import Collection, Iterable
from typing import Final

READY_S: Final = (
    30.0  # a successor that is not ready by then ends the renewal: the other workers of the earlier program stay
)


class Renewal:
    """Keeps the children that must still be replaced, and names the next one."""

    def __init__(self, children: Iterable[tuple[int, bool]], *, overlaps: bool = False) -> None:
        """`children`: (pid, whether it is a worker) of each child of the earlier program, in the order in which they are replaced.

        `overlaps`: whether a worker is told to leave while others still drain.
        """
        self._children = list(children)
        self._overlaps = overlaps
        self._asked: dict[int, bool] = {}  # the children that were told to end and have not ended yet
        self._missing_at: float | None = None  # since when a successor is missing
        self.failed = False

    @property
    def over(self) -> bool:
        """Whether all children are replaced, or the renewal was given up."""
        return self.failed or not (self._children or self._asked)

    def next(
        self, now: float, alive: Collection[int], *, missing: bool, crowded: bool = False
    ) -> tuple[int, bool] | None:
        """Returns the pid of the next child to end, and whether it is a worker; None if no child must end now.

        `alive`: the pids of all children. `missing`, `crowded`: see `Policy`.
        """
        if self.failed:
            return None
        if missing:
            self._missing_at = now if self._missing_at is None else self._missing_at
            if now - self._missing_at > READY_S:
                self.failed = True
            return None
        self._missing_at = None
        self._asked = {pid: is_worker for pid, is_worker in self._asked.items() if pid in alive}
        if crowded or (self._asked and not (self._overlaps and all(self._asked.values()))):
            return None  # a child drains, however long that takes
        while self._children:
            pid, is_worker = self._children.pop(0)
            if pid in alive:
                self._asked[pid] = is_worker
                return pid, is_worker
        return None
