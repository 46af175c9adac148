"""Computes the figures of the picker's processes for the metrics page: memory, CPU time, ends by cause, and certificates."""

import time
from collections.abc import Callable, Iterator

from epp.metrics.computed import (
    CERTIFICATE_EXPIRY,
    CERTIFICATE_SOON,
    PROCESS_CPU,
    PROCESS_EXITS,
    PROCESS_MEMORY,
    SUPERVISOR_STARTS,
    Count,
    Counts,
)
from shm.areas import SUPERVISOR_AREA
from workers.host.proc import ProcessUse, process_use
from workers.process import layout
from workers.process.instance import Instance
from workers.process.restart import child_name

PARENT = "parent"


class ProcessFigures:
    """Reads the figures from what the parent records of children, from /proc, and from the areas."""

    def __init__(
        self, instance: Instance, use: Callable[[int], ProcessUse | None] = process_use, wall: Callable[[], float] = time.time
    ) -> None:
        """`use(pid)` returns the memory and the CPU time of a process, or None if the process is gone. `wall`: seconds since the epoch."""
        self._areas = instance.memory.areas
        self._children = instance.children
        self._parent_pid = instance.parent_pid
        self._metrics_port = instance.credentials.metrics
        self._use = use
        self._wall = wall
        self._cpu_s: dict[str, float] = {}  # process name -> CPU time on the last page

    def families(self) -> Iterator[Counts]:
        """Yields each metric with its label names and rows."""
        children, ordinals = self._children, self._areas.schema.areas
        yield SUPERVISOR_STARTS, (), [((), self._areas.successions()[SUPERVISOR_AREA])]
        memory: list[Count] = []
        cpu: list[Count] = []
        exits: list[Count] = []
        self._add_use(PARENT, self._parent_pid, 0.0, memory, cpu)
        for ordinal in range(children.ordinals):
            ends, pid = children.ends(ordinal), children.pid(ordinal)
            if not pid and not any(ends.values()):
                continue
            name = child_name(ordinal, ordinals)
            self._add_use(name, pid, children.ended_cpu_s(ordinal), memory, cpu)
            exits += [((name, cause.name.lower()), count) for cause, count in ends.items()]
        yield PROCESS_MEMORY, PROCESS_MEMORY.labels, memory
        yield PROCESS_CPU, PROCESS_CPU.labels, cpu
        yield PROCESS_EXITS, PROCESS_EXITS.labels, exits
        certificates, now = list(self._certificates()), self._wall()
        yield CERTIFICATE_EXPIRY, CERTIFICATE_EXPIRY.labels, [((port,), until) for port, until, _ in certificates]
        yield CERTIFICATE_SOON, CERTIFICATE_SOON.labels, [((port,), int(now >= soon_at)) for port, _, soon_at in certificates]

    def _add_use(self, name: str, pid: int, ended_s: float, memory: list[Count], cpu: list[Count]) -> None:
        use = self._use(pid) if pid else None
        if use is not None:
            memory.append(((name,), use.resident_bytes))
        # Until the parent has recorded the end of a child, neither /proc nor the record has its CPU time. The counter must not fall then.
        shown = max(self._cpu_s.get(name, 0.0), ended_s + (use.cpu_s if use is not None else 0.0))
        self._cpu_s[name] = shown
        cpu.append(((name,), shown))

    def _certificates(self) -> Iterator[tuple[str, float, float]]:
        """Yields each port, when its certificate ends, and from when on it expires soon."""
        areas = self._areas
        until, soon = areas.scalars(layout.CERTIFICATE_UNTIL), areas.scalars(layout.CERTIFICATE_SOON)
        # The earliest end is shown, because a worker that cannot read the new files still has the old certificate.
        if ends := [(until[ordinal], soon[ordinal]) for ordinal in range(1, len(until)) if until[ordinal] and areas.serving(ordinal)]:
            yield "ext_proc", *min(ends)
        if self._metrics_port is not None:
            yield "metrics", self._metrics_port.valid_until, self._metrics_port.soon_at
