"""A picker's instance seen from outside: found by its file in the run directory, attached read-only.

    run directory  ─ find ───▶ the instance that was meant: name, pid, ports, names of its segments
    its segments   ─ attach ─▶ parts by name: schema and region, checked against the layouts of this version

Nothing here writes, and nothing is locked: the pages are mapped without the right to write, and the lock of an instance's file
is not tried, since a picker that starts at that moment would take the trial for a running instance. So whether an instance
lives is told by its beats: what has beaten within `SILENT_S` runs, whatever its process id says in another container.

What this does not do: say what columns, counters or documents mean.
"""

import enum
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from shm.documents import DocumentSchema
from shm.flow_lanes import FlowSchema
from shm.lanes import Lanes, LaneSchema
from shm.layout import Plan, Schema
from shm.prefix_index import IndexSchema
from shm.segment import Recorded, Region, Segment, SegmentError, recorded
from shm.series import SeriesSchema
from shm.table import TableSchema

RUN_DIR = "/dev/shm/epp"
METRICS_PORT = 9090
SILENT_S = 5.0
NAMED_MAX = 8
LANES = "lanes"

Description = dict[str, Any]


class LayoutError(SegmentError):
    """The segment was laid out by another version; the text names the part."""


class Life(enum.Enum):
    """Whether an instance runs, as far as one sees from outside."""

    RUNNING = "running"
    FOREIGN = "of another version"
    STARTING = "starting: nothing has beaten yet"
    SILENT = f"silent: nothing has beaten for {SILENT_S:.0f} s, a process with its id exists"
    DEAD = f"dead: nothing has beaten for {SILENT_S:.0f} s, no process has its id; the next start here removes its file"


class Seen(NamedTuple):
    """An instance by its file."""

    name: str
    pid: int
    ports: Mapping[str, int]
    segments: tuple[str, ...]
    started_at: float  # wall clock
    life: Life

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid}, metrics port {self.ports.get('metrics', 'unknown')}, {self.life.value})"


class Part(NamedTuple):
    """A part of a segment; `schema` is None for a kind that this version does not know."""

    kind: str
    schema: Schema | None
    at: int
    region: Region


def _histograms(part: Description) -> tuple[tuple[str, tuple[float, ...]], ...]:
    return tuple((name, tuple(bounds)) for name, bounds in part["histograms"])


def _lane_schema(part: Description) -> Schema:
    scalars, counters = tuple(part["scalars"]), tuple(part["counters"])
    return LaneSchema(part["slots"], scalars, counters, _histograms(part), lanes=part["lanes"])


def _series_schema(part: Description) -> Schema:
    labels, gauges, counters = (tuple(part[kind]) for kind in ("labels", "gauges", "counters"))
    sizes = {"blocks": part["blocks"], "lanes": part["lanes"]}
    return SeriesSchema(part["name"], labels, gauges, counters, _histograms(part), **sizes)


SCHEMAS: Mapping[str, Callable[[Description], Schema]] = {
    "table": lambda part: TableSchema(tuple(part["columns"]), part["slots"]),
    "documents": lambda part: DocumentSchema(tuple(part["capacities"])),
    "lanes": _lane_schema,
    "series": _series_schema,
    "index": lambda part: IndexSchema(part["entries"]),
    "flow": lambda part: FlowSchema(part["bands"], part["workers"]),
}


def parts(segment: Segment) -> dict[str, Part]:
    """The parts that the segment's description names. Refused: layouts that this version would read wrongly."""
    found: dict[str, Part] = {}
    described: Description = json.loads(segment.description or b"{}")
    for name, part in described.items():
        make = SCHEMAS.get(part["kind"])
        try:
            schema = make(part) if make else None
            found[name] = Part(part["kind"], schema, part["at"], segment.part(part["at"], part["size"]))
        except (KeyError, TypeError, ValueError) as strange:
            raise _foreign(segment, f"part {name} cannot be read ({strange!r})") from strange
        if schema is not None and schema.bytes != part["size"]:
            raise _foreign(segment, f"part {name} has {part['size']} bytes, here it would have {schema.bytes}")
    schemas = {name: part.schema for name, part in found.items() if part.schema is not None}
    if found and len(schemas) == len(found) and (expected := Plan(schemas).layout_hash) != segment.layout_hash:
        raise _foreign(segment, f"its layout is {segment.layout_hash:016x}, here it would be {expected:016x}")
    return found


def attach(names: Iterable[str]) -> tuple[list[Segment], dict[str, Part]]:
    """These segments, mapped read-only, and all their parts by name."""
    segments: list[Segment] = []
    found: dict[str, Part] = {}
    try:
        for name in names:
            segments.append(Segment.attach(name, None, writable=False))
            found |= parts(segments[-1])
    except SegmentError:
        found.clear()
        for segment in segments:
            segment.close()
        raise
    return segments, found


def instances(run_dir: str) -> list[Seen]:
    """All that have a file there, dead ones too."""
    try:
        return [_seen(each) for each in recorded(run_dir)]
    except OSError as refused:
        raise SegmentError(
            f"run directory {run_dir} cannot be read ({refused.strerror}): run as the picker's user, or give --run-dir"
        ) from refused


def instance(run_dir: str, name: str) -> Seen | None:
    """The one of that name; None = it has no file there."""
    return next((each for each in instances(run_dir) if each.name == name), None)


def find(run_dir: str, *, metrics_port: int = METRICS_PORT, name: str = "") -> Seen:
    """The living instance of that name or, without one, that metrics port."""
    known = instances(run_dir)
    wanted = f"with the name {name}" if name else f"with the metrics port {metrics_port}"
    meant = [each for each in known if (each.name == name if name else each.ports.get("metrics") == metrics_port)]
    for state in (Life.RUNNING, Life.FOREIGN, Life.SILENT, Life.STARTING):
        living = [each for each in meant if each.life is state]
        if len(living) == 1:
            return living[0]
        if living:
            raise SegmentError(
                f"several instances {wanted} in {run_dir}: {_listed(living)}; say which one: --instance {living[0].name}"
            )
    if meant:
        raise SegmentError(
            f"instance {_listed(meant)} in {run_dir}; start it again, or give --metrics-port or --instance of one that runs"
        )
    if not known:
        raise SegmentError(f"no instance in {run_dir}: start a picker, or give the --run-dir with which it was started")
    other = next((each for each in known if each.life is not Life.DEAD), known[0])
    raise SegmentError(
        f"no instance {wanted} in {run_dir}; found {_listed(known)}; "
        f"say which one is meant, by --metrics-port or as --instance {other.name}"
    )


def life(pid: int, segments: Iterable[str], now: float) -> Life:
    """By the youngest beat in the lanes, then by the process id."""
    try:
        age = _youngest_beat(segments, now)
    except LayoutError:
        return Life.FOREIGN
    if age is not None and age < SILENT_S:
        return Life.RUNNING
    if not os.path.exists(f"/proc/{pid}"):
        return Life.DEAD
    return Life.STARTING if age is None or age == math.inf else Life.SILENT


def _youngest_beat(names: Iterable[str], now: float) -> float | None:
    """Seconds; infinite before the first, None where there are no lanes to look at."""
    try:
        segments, found = attach(name for name in names if name.endswith(f"-{LANES}"))
    except LayoutError:
        raise
    except SegmentError:
        return None
    part = found.get(LANES)
    age = None
    if part is not None and isinstance(part.schema, LaneSchema):
        age = min(Lanes(part.schema, part.region).ages(now))
    del found, part
    for segment in segments:
        segment.close()
    return age


def _seen(each: Recorded) -> Seen:
    pid, names = int(each.info.get("pid", 0)), tuple(each.info["segments"])
    return Seen(each.name, pid, each.info.get("ports", {}), names, each.written_at, life(pid, names, time.monotonic()))


def _listed(found: list[Seen]) -> str:
    more = f", … and {len(found) - NAMED_MAX} more" if len(found) > NAMED_MAX else ""
    return ", ".join(str(each) for each in found[:NAMED_MAX]) + more


def _foreign(segment: Segment, what: str) -> LayoutError:
    return LayoutError(f"segment {segment.name}: {what}; the picker runs another version: look at it with that version")
