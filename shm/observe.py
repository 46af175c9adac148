"""Read-only access to a picker's instance from another process: find it in the run directory and attach to its segments.

    run directory  ─ find ───▶ one instance: name, pid, ports, names of its segments
    its segments   ─ attach ─▶ parts by name: schema and region, checked against the layouts of this version

This module does not write or lock. It maps pages read-only. It does not test the lock of an instance's file, because a picker that
starts at that moment would take the test for a running instance. Heartbeats decide whether an instance is alive: it runs if one of its
processes has had a heartbeat within `SILENT_S`. A process id alone does not prove this, because another container may use the same id.

This module does not know what columns, counters or documents mean.
"""

import enum
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from shm.answers import AnswersSchema
from shm.areas import Areas, AreaSchema
from shm.budgets import BudgetsSchema
from shm.documents import DocumentSchema
from shm.flow_areas import FlowSchema
from shm.instance_lock import Recorded, recorded
from shm.layout import Plan, Schema
from shm.link_table import LinkSchema
from shm.prefills import PrefillsSchema, StartsSchema
from shm.prefix_index import IndexSchema
from shm.remote_area import RemoteSchema
from shm.segment import Region, Segment, SegmentError
from shm.series import SeriesSchema
from shm.stream_positions import StreamPositionsSchema
from shm.table import TableSchema

RUN_DIR = "/dev/shm/epp"
METRICS_PORT = 9090
SILENT_S = 5.0
NAMED_MAX = 8
AREAS = "areas"
SECRET = "secret"  # key of an instance's file
POOLS = "pools"  # key of an instance's file

Description = dict[str, Any]


class LayoutError(SegmentError):
    """Raised if another version created the segment, with another layout. The text names the part."""


class Life(enum.Enum):
    """Says whether an instance runs, as far as another process can see."""

    RUNNING = "running"
    FOREIGN = "of another version"
    STARTING = "starting: no heartbeat yet"
    NAMELESS = "its names in /dev/shm were removed: it serves on, but no command can attach to it until it is restarted"
    SILENT = f"silent: no heartbeat for {SILENT_S:.0f} s, but a process with its id exists"
    DEAD = f"dead: no heartbeat for {SILENT_S:.0f} s, and no process has its id; the next start here removes its file"


class Seen(NamedTuple):
    """Describes an instance, by its file in the run directory."""

    name: str
    pid: int
    ports: Mapping[str, int]
    segments: tuple[str, ...]
    started_at: float  # seconds since 1970
    life: Life
    secret: str = ""  # the token for private pages of its metrics port
    pools: tuple[str, ...] = ()  # names of its pools by number at its start; "" for a pool that comes later; empty if it has one pool

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid}, metrics port {self.ports.get('metrics', 'unknown')}, {self.life.value})"


class Part(NamedTuple):
    """A part of a segment. `schema`: its layout; None if this version does not know its kind."""

    schema: Schema | None
    region: Region


SCHEMAS: Mapping[str, Callable[..., Schema]] = {
    "answers": AnswersSchema,
    "areas": AreaSchema,
    "budgets": BudgetsSchema,
    "documents": DocumentSchema,
    "flow": FlowSchema,
    "index": IndexSchema,
    "links": LinkSchema,
    "positions": StreamPositionsSchema,
    "prefills": PrefillsSchema,
    "remote": RemoteSchema,
    "series": SeriesSchema,
    "starts": StartsSchema,
    "table": TableSchema,
}


def _frozen(value: Any) -> Any:
    """Returns a decoded JSON value with tuples in place of lists."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def parts(segment: Segment) -> dict[str, Part]:
    """Returns the parts that the segment's description names, by name. Raises LayoutError if this version would misread one."""
    named: dict[str, Part] = {}
    described: Description = json.loads(segment.description or b"{}")
    for name, part in described.items():
        arguments = {key: _frozen(value) for key, value in part.items() if key not in ("at", "size", "kind")}
        try:
            make = SCHEMAS.get(part["kind"])
            schema = make(**arguments) if make else None
            named[name] = Part(schema, segment.part(part["at"], part["size"]))
        except (KeyError, TypeError, ValueError) as strange:
            raise _foreign(segment, f"part {name} cannot be read ({strange!r})") from strange
        if schema is not None and schema.bytes != part["size"]:
            raise _foreign(segment, f"part {name} has {part['size']} bytes, this version expects {schema.bytes}")
    schemas = {name: part.schema for name, part in named.items() if part.schema is not None}
    if named and len(schemas) == len(named) and (expected := Plan(schemas).layout_hash) != segment.layout_hash:
        raise _foreign(segment, f"its layout is {segment.layout_hash:016x}, this version expects {expected:016x}")
    return named


def every_part(segments: Iterable[Segment]) -> dict[str, Part]:
    """Returns the parts of all segments by name. Raises LayoutError."""
    return {name: part for segment in segments for name, part in parts(segment).items()}


def attach(names: Iterable[str]) -> tuple[list[Segment], dict[str, Part]]:
    """Maps these segments read-only and returns them with all their parts by name. Raises SegmentError."""
    segments: list[Segment] = []
    attached: dict[str, Part] = {}
    try:
        for name in names:
            segments.append(Segment.attach(name, None, writable=False))
            attached |= parts(segments[-1])
    except SegmentError:
        attached.clear()
        for segment in segments:
            segment.close()
        raise
    return segments, attached


def instances(run_dir: str) -> list[Seen]:
    """Returns all instances with a file in `run_dir`, dead ones included. Raises SegmentError if the directory cannot be read."""
    try:
        return [_seen(file) for file in recorded(run_dir)]
    except OSError as refused:
        raise SegmentError(
            f"run directory {run_dir} cannot be read ({refused.strerror}): run as the picker's user, or give --run-dir"
        ) from refused


def instance(run_dir: str, name: str) -> Seen | None:
    """Returns the instance of that name; None if it has no file in `run_dir`."""
    return next((each for each in instances(run_dir) if each.name == name), None)


def find(run_dir: str, *, metrics_port: int | None = None, name: str = "", ask: Callable[[list[Seen]], Seen] | None = None) -> Seen:
    """Returns the live instance with this name, or, if `name` is empty, with this metrics port. If neither is given, returns the only live
    instance.

    If several instances match, only those in the first of these states are considered: running, of another version, silent, starting. If
    several are in this state, and neither name nor port is given, `ask` chooses; without `ask`, the instance with the metrics port
    METRICS_PORT is returned. Raises SegmentError unless exactly one live instance matches.
    """
    known = instances(run_dir)
    wanted = f"with the name {name}" if name else "" if metrics_port is None else f"with the metrics port {metrics_port}"
    meant = known
    if name or metrics_port is not None:
        meant = [each for each in known if (each.name == name if name else each.ports.get("metrics") == metrics_port)]
    for state in (Life.RUNNING, Life.FOREIGN, Life.SILENT, Life.STARTING, Life.NAMELESS):
        living = [each for each in meant if each.life is state]
        if len(living) > 1 and not wanted and ask is not None:
            return ask(living)
        if len(living) > 1 and not wanted:
            living = [each for each in living if each.ports.get("metrics") == METRICS_PORT] or living
        if len(living) == 1 and state is Life.NAMELESS:
            raise SegmentError(f"instance {living[0]}")
        if len(living) == 1:
            return living[0]
        if living:
            raise SegmentError(
                f"several instances{wanted and ' '}{wanted} in {run_dir}: {_listed(living)}; name one, as --instance {living[0].name}"
            )
    if meant:
        raise SegmentError(f"instance {_listed(meant)} in {run_dir}; start it again, or give --metrics-port or --instance of a running one")
    if not known:
        raise SegmentError(
            f"no instance in {run_dir}: start a picker, or give the --run-dir of a running one; restart one whose file there was removed"
        )
    other = next((each for each in known if each.life is not Life.DEAD), known[0])
    raise SegmentError(
        f"no instance {wanted} in {run_dir}; found {_listed(known)}; name one with --metrics-port, or as --instance {other.name}"
    )


def life(pid: int, segments: Iterable[str], now: float, recorded_s: float = 0.0) -> Life:
    """Returns the state of an instance. The youngest heartbeat in its areas decides or, if no heartbeat is recent, its process id.

    `now`: monotonic seconds. `recorded_s`: the age of the instance's file in seconds. If the file is old, the file names all segments.
    """
    try:
        age = _youngest_heartbeat(segments, now)
    except LayoutError:
        return Life.FOREIGN
    if age is not None and age < SILENT_S:
        return Life.RUNNING
    if not os.path.exists(f"/proc/{pid}"):
        return Life.DEAD
    if age is None and recorded_s > SILENT_S:
        return Life.NAMELESS
    return Life.STARTING if age is None or age == math.inf else Life.SILENT


def _youngest_heartbeat(names: Iterable[str], now: float) -> float | None:
    """Returns the age of the youngest heartbeat in seconds; infinite before the first heartbeat, None if there are no areas."""
    try:
        segments, attached = attach(name for name in names if name.endswith(f"-{AREAS}"))
    except LayoutError:
        raise
    except SegmentError:
        return None
    part = attached.get(AREAS)
    age = None
    if part is not None and isinstance(part.schema, AreaSchema):
        age = min(Areas(part.schema, part.region).ages(now))
    del attached, part
    for segment in segments:
        segment.close()
    return age


def _seen(file: Recorded) -> Seen:
    pid, names = int(file.info.get("pid", 0)), tuple(file.info["segments"])
    return Seen(
        file.name,
        pid,
        file.info.get("ports", {}),
        names,
        file.written_at,
        life(pid, names, time.monotonic(), time.time() - file.written_at),
        file.info.get(SECRET, ""),
        tuple(file.info.get(POOLS, ())),
    )


def _listed(instances: list[Seen]) -> str:
    more = f", … and {len(instances) - NAMED_MAX} more" if len(instances) > NAMED_MAX else ""
    return ", ".join(str(each) for each in instances[:NAMED_MAX]) + more


def _foreign(segment: Segment, what: str) -> LayoutError:
    return LayoutError(f"segment {segment.name}: {what}; the picker runs another version: use the tools of that version")
