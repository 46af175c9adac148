"""Observes a picker's processes and areas from outside: live processes, serving workers, the owners of connections."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from loadtest.demo.children import command_name, descendants
from shm import observe
from shm.areas import Areas
from shm.segment import Segment

ESTABLISHED = "01"
SUPERVISOR = 0


class Watched:
    """Observes a running picker. `pid`: its parent's. `instance`: the instance's name."""

    def __init__(self, pid: int, instance: str, grpc_port: int) -> None:
        self.pid = pid
        self.grpc_port = grpc_port
        # A picker that was killed may have left segments under the same name.
        mapped = Path(f"/proc/{pid}/maps").read_text()
        (path,) = (path for path in Path("/dev/shm").glob(f"{instance}-*-areas") if path.name in mapped)
        segment = Segment.attach(f"/{path.name}", None, writable=False)
        part = observe.parts(segment)["areas"]
        assert part.schema is not None
        self.areas = Areas(part.schema, part.region)  # type: ignore[arg-type]
        self.slots = part.schema.slots  # type: ignore[attr-defined]

    def children(self) -> dict[int, int]:
        """Returns ordinal -> pid of the child."""
        names = {command_name(pid): pid for pid in descendants(self.pid)}
        ordinals = {int(name.split()[-1]) + 1: pid for name, pid in names.items() if name.startswith("epp: worker ")}
        if "epp: supervisor" in names:
            ordinals[SUPERVISOR] = names["epp: supervisor"]
        return ordinals

    def serving(self) -> list[int]:
        """Returns the ordinals of the workers that the parent counts as serving."""
        return [ordinal for ordinal in range(1, self.areas.schema.areas) if self.areas.serving(ordinal)]

    def generation(self, ordinal: int) -> int:
        """Returns how many children the ordinal has had."""
        return self.areas.successions()[ordinal]

    def up(self, ordinal: int, generation: int) -> bool:
        """Returns whether a child serves in the ordinal that came after number `generation`."""
        return self.generation(ordinal) > generation and self.areas.serving(ordinal)

    def gauges(self, name: str) -> list[int]:
        """Returns the values of a gauge, one per serving worker."""
        values = self.areas.scalars(name)
        return [values[ordinal] for ordinal in self.serving()]

    def in_flight(self) -> int:
        return int(self.areas.inflight(self.slots).sum()) + int(self.areas.tokens(self.slots).sum())

    def client_ports(self, pid: int) -> set[int]:
        """Returns the clients' ports of the ext_proc connections that a process holds."""
        held = set()
        for entry in links(pid):
            if entry.startswith("socket:["):
                held.add(entry[8:-1])
        ports = set()
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                local, remote = (int(fields[n].rpartition(":")[2], 16) for n in (1, 2))
                if local == self.grpc_port and fields[3] == ESTABLISHED and fields[9] in held:
                    ports.add(remote)
        return ports


def descriptors(pid: int) -> int:
    """Returns the number of open descriptors of a process."""
    return len(links(pid))


def proportional_kib(pid: int) -> int:
    """Returns the memory of a process in KiB: its private pages and its part of shared pages. Raises AssertionError without a figure."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1])
    raise AssertionError("smaps_rollup has no Pss line")


def alive(pid: int) -> bool:
    """Returns whether the process runs. A zombie does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def until(happened: Callable[[], bool], seconds: float) -> bool:
    """Waits until the condition is true, for at most `seconds`. Returns whether it became true."""
    end = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def links(pid: int) -> list[str]:
    """Returns what the open descriptors of a process are: paths of files, or names of sockets and pipes."""
    found = []
    for entry in os.listdir(f"/proc/{pid}/fd"):
        try:
            found.append(os.readlink(f"/proc/{pid}/fd/{entry}"))
        except FileNotFoundError:
            continue
    return found
