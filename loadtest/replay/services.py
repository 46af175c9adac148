"""The services that a worker gives its plugins, in virtual time: timers, waits, and a latency model that learns. There are no other
servers.
"""

import heapq
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final

from epp.learning.local import LocalLearning
from loadtest.replay.fleet import Batch
from loadtest.replay.waiting import Pause
from workers.cli.offline import OfflineError
from workers.worker.services import WorkerServices

BATCHES_S: Final = 0.1  # how often the supervisor tells the latency model what servers run


class Timers:
    """Calls the timers that are due. The owner tells the time with `passed`."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, float, Callable[[], object]]] = []  # heap
        self._order = 0

    def after(self, seconds: float, act: Callable[[], object], every: float = 0.0) -> None:
        """Calls `act` after `seconds`, and then every `every` seconds, or only once if `every` is 0."""
        self._order += 1
        heapq.heappush(self._due, (self.now + seconds, self._order, every, act))

    def passed(self, now: float) -> None:
        """Calls what is due, each at its time."""
        due = self._due
        while due and due[0][0] <= now:
            self.now, _, every, act = heapq.heappop(due)
            if every:
                self.after(every, act, every)
            act()
        self.now = now


class ReplayServices(WorkerServices):
    """The services of a worker, with timers and waits in virtual time, and without other servers."""

    def __init__(self, *of_worker: Any, **named: Any) -> None:
        super().__init__(*of_worker, **named)
        self.timers = Timers()

    def every(self, seconds: float, act: Callable[[], object]) -> None:
        self.timers.after(seconds, act, seconds)

    def after(self, seconds: float) -> Pause:  # type: ignore[override]
        return Pause(seconds, self.timers.after)

    def spawn(self, work: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
        work.close()
        raise self._elsewhere("works in the background")

    def http(self, method: str, url: str, *_: Any, **__: Any) -> Any:
        raise self._elsewhere(f"asks another server ({method} {url})")

    def _elsewhere(self, does: str) -> OfflineError:
        name = f"the plugin '{self._owner.name}'" if self._owner is not None else "a plugin"
        return OfflineError(f"{name} {does}, which a replay cannot do: leave it out of the configuration")


class ReplayLearning(LocalLearning):
    """Learns from answers at once, and from scrapes as the supervisor does: how many requests an endpoint runs at most."""

    def __init__(self, batches: Callable[[], Iterable[Batch]]) -> None:
        """`batches` returns what the last scrape of each endpoint said."""
        super().__init__()
        self._batches = batches

    def look(self) -> None:
        """Tells the model what endpoints run, once it has learned anything. Call it every BATCHES_S."""
        model = self.model()
        if model.changes:
            for slot, running, waiting in self._batches():
                if running > 0.0:
                    model.scraped(slot, 0, running, waiting)
