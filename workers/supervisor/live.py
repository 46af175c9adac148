"""The live state of this picker for people: its history, and the pages that show it. `docs/live-page.md` describes them.

The history is sampled once per second from the start, because viewers may come at any time. All other data are computed when a client asks.
"""

import functools
import time
from collections.abc import Callable

from epp.metrics.request_series import TENANT
from shm.observe import Life, Seen
from workers.process.instance import Instance
from workers.supervisor.background import Background
from workers.supervisor.pages import tenant_use
from workers.supervisor.pages.page import Page
from workers.supervisor.pages.state.frames import Frames
from workers.supervisor.pages.state.history import STEP_S, History
from workers.supervisor.pages.state.parts import StateParts, Told
from workers.supervisor.pages.state.sampler import Sampler
from workers.supervisor.pages.state.source import Source
from workers.supervisor.pages.state.state_pages import StatePages
from workers.supervisor.pages.tenant_use import TenantUse, reader_of

COUNTED_BUCKETS = 1 << 14  # buckets of the prefix index per frame, which take 1 ms


class Live:
    """Samples the history, and makes the pages under /debug/state."""

    def __init__(self, instance: Instance, told: Callable[[], Told]) -> None:
        """`told`: returns the present data of the other parts of the supervisor."""
        self._instance = instance
        self._told = told
        self._history = History()
        self.tenants = TenantUse(reader_of(instance.memory.series_reader(TENANT)))

    def start(self, background: Background) -> None:
        """Begins to sample."""
        background.every(STEP_S, self._sample)
        background.every(tenant_use.STEP_S, self.tenants.sample)

    def use(self, instance: Instance) -> None:
        """Shows a later configuration."""
        self._instance = instance
        self.__dict__.pop("_parts", None)

    def pages(self) -> dict[str, Page]:
        """Returns the pages by path."""
        pages = StatePages(lambda: self._frames, self._history, now=time.monotonic)
        return {"/debug/state": pages.state, "/debug/state/stream": pages.stream, "/debug/state/history": pages.history} | {
            "/debug/tenants": self.tenants.page
        }

    def _sample(self) -> None:
        self._history.add(self._sampler.sample(time.monotonic()))

    @functools.cached_property
    def _source(self) -> Source:
        options, memory, lock = self._instance.options, self._instance.memory, self._instance.lock
        segments = list(memory.segments.values())  # not by name: another program may have removed the names
        seen = Seen(
            options.instance,
            self._instance.parent_pid,
            lock.info.get("ports", {}),
            tuple(segment.name for segment in segments),
            lock.written_at,
            Life.RUNNING,
            pools=self._instance.pool_names,
        )
        return Source(seen, options.run_dir, segments, counted_buckets=COUNTED_BUCKETS)

    @functools.cached_property
    def _sampler(self) -> Sampler:
        return Sampler(self._source)

    @functools.cached_property
    def _parts(self) -> StateParts:
        return StateParts(self._instance, self._history.recent, self._told, self.tenants)

    @functools.cached_property
    def _frames(self) -> Frames:
        return Frames(self._source, lambda counters: self._parts.further(counters), time.monotonic, time.time)
