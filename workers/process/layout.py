"""Computes the layout of an instance's shared memory: its segments, their parts, and their sizes.

    segment   parts                                         written by
    state     table | documents | latency model |           the supervisor; reload status: the parent
              reload status
    areas     areas | series ... | decisions | profiles |   each process its own part
              flow areas | prompt starts | prefills |       remote area: the supervisor; it exists with a replica store
              answers | budgets | remote area
    index     prefix index                                  the supervisor
    kv        held blocks | links | positions | documents       the kv-events process, if there is one

If the picker has several pools, each pool has its own document for the latency model, its own flow areas and its own remote area. The
remote area of the first pool has the load of the endpoints of all pools.

The layout follows from options and configuration. This module creates and opens nothing. So `epp size`, `epp manifests` and tests use this
module, too.

A later configuration uses the same memory (`Names`). Its new columns, and the new histograms and counters of its plugins, take spare
room. Nothing that has a place ever moves, so processes with the old and the new configuration read and write the same words.
"""

import copy
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from epp.data import Column
from epp.metrics import PLUGIN_LABELS, Group, Metric
from epp.metrics.areas import (
    EXTRACT_ERRORS,
    POLL_ERRORS,
    STREAM_COUNTERS,
    STREAMS_INFLIGHT,
    SUPERVISOR_COUNTERS,
    WORKER_COUNTERS,
    WORKER_GAUGES,
)
from epp.metrics.flow_control import FLOW_GROUPS
from epp.metrics.request_series import GROUPS
from shm.answers import AnswersSchema
from shm.areas import AreaSchema
from shm.budgets import BudgetsSchema
from shm.documents import DocumentSchema
from shm.flow_areas import BANDS_MAX, HASH_LINES, FlowSchema
from shm.layout import Plan, Schema
from shm.prefills import PrefillsSchema, StartsSchema
from shm.prefix_index import IndexSchema
from shm.remote_area import RemoteSchema
from shm.segment import footprint
from shm.series import SeriesSchema
from shm.table import COLUMNS_MAX, TableSchema
from workers.process import StartError
from workers.process.kv_memory import KvLayout
from workers.process.names import CYCLES, FIXED, Family, Names, check_names, declared, with_names
from workers.process.sources import Sources
from workers.shared import decisions, pool_crashes, profiles, query_of_death, reload_status
from workers.shared.documents import MODELS_BYTES
from workers.shared.outliers import KINDS, OUTCOMES

if TYPE_CHECKING:
    from epp.config.effective import EffectiveConfig
    from epp.plugins.producers._precise_params import Settings
    from workers.host.options import Options

DOCUMENT_BYTES_PER_ENDPOINT: Final = 1024
LATENCY_BYTES: Final = 2048  # the size of the pool's part of the latency model
LATENCY_BYTES_PER_ENDPOINT: Final = 192
OBJECTIVES_BYTES: Final = 512 << 10
REWRITES_BYTES: Final = 512 << 10
BANDS_BYTES: Final = 4 << 10  # instead of OBJECTIVES_BYTES, if there are no objectives
# Spare room for columns, histograms and counters that only later configurations name
SPARE_COLUMNS: Final = 8
SPARE_HISTOGRAM_WORDS: Final = 4096  # words per area; one histogram takes 16 or 24 words
SPARE_TABLES: Final = 4  # for counters with labels that plugins declare; one table per counter
SPARE_BLOCKS: Final = 256  # label sets for which a spare table has room
SPARE_LABELS: Final = 8
# For each of several pools:
POOL_BANDS_MIN: Final = 4
NAME_BYTES: Final = 264
POOL_OBJECTIVES_BYTES: Final = 32 << 10
POOL_BANDS_BYTES: Final = 512  # instead of POOL_OBJECTIVES_BYTES, if there are no objectives
POOL_REWRITES_BYTES: Final = 64 << 10
POOL_HASH_LINES: Final = 64  # the hash lines of the pool's flow areas
UNUSED: Final = Group("unused", (), counters=(Metric("unused_total", "counter", "Of a spare table without an owner."),))
# Gauges of the supervisor. LOADED: 1 after the first endpoints are known. LEADS_UNTIL: the end of the supervisor's lease, in milliseconds
# on the clock of `workers.supervisor.kube.lease`, or 0 if the supervisor does not lead
LOADED: Final = "loaded"
LEADS_UNTIL: Final = "leads_until_ms"
# Gauge of a worker: whether the worker stays or leaves, as a number of `workers.host.memory.Leaving`
LEAVING: Final = "leaving"
# Gauge of a worker: the end of its certificate's validity in seconds since the epoch, or 0 without a certificate
CERTIFICATE_UNTIL: Final = "certificate_until_s"
# Gauge of a worker: from when on its certificate expires soon, in seconds since the epoch
CERTIFICATE_SOON: Final = "certificate_soon_s"
# Gauge of a worker and of the supervisor: the number of the configuration that the process uses. If the picker has
# several pools, this gauge is for the list of pools, and each pool has its own gauge (`gauge_of_pool`)
GENERATION: Final = "config_generation"
# Gauge of a worker: the number of the candidate that the worker uses, or 0 without a candidate
CANDIDATE: Final = "config_candidate"
# Gauge of the supervisor: the number of the recording's file that the supervisor writes, negative for a sample; 0 without a recording
RECORDING: Final = "recording_file"
# Gauge of the supervisor: the number, from 1, of the only pool that is recorded; 0 if all pools are recorded
RECORDED_POOL: Final = "recorded_pool"
# Gauges of the supervisor, the scaling signal. REPLICAS_NEEDED: 0 while this number is unknown. HEADROOM: in thousandths
REPLICAS_NEEDED: Final = "replicas_needed"
HEADROOM: Final = "pool_headroom"
UNKNOWN_HEADROOM: Final = -(1 << 31)
OWN_GAUGES: Final = (
    REPLICAS_NEEDED,
    HEADROOM,
    GENERATION,
    CANDIDATE,
    RECORDING,
    RECORDED_POOL,
    LOADED,
    LEADS_UNTIL,
    LEAVING,
    CERTIFICATE_UNTIL,
    CERTIFICATE_SOON,
    query_of_death.DECIDING,
    pool_crashes.RUNNING,
    pool_crashes.LOADING,
    *query_of_death.TRIED,
    *decisions.SCALARS,
    *profiles.SCALARS,
)


RETIRED: Final = "retired "


class Shape(NamedTuple):
    """The pools of a picker. `endpoints`: the largest number of endpoints of each pool. `bands`: the number of bands of flow control for
    which each pool has room.

    `objects`: which pools may have objectives and model rewrites; None with one pool, for which the options say this. `found`: whether the
    pools are found while the picker runs. `kv`: what the precise prefix producers of several pools need together. `kv_of`: what the
    producer of each pool needs, by the pool's name. The name "" means all pools that are found and have no own configuration.
    """

    endpoints: tuple[int, ...]
    bands: tuple[int, ...] = (BANDS_MAX,)
    hash_lines: int = HASH_LINES
    objects: tuple[bool, ...] | None = None
    found: bool = False
    kv: "Settings | None" = None
    kv_of: Mapping[str, "Settings | None"] = {}


class Layout:
    """The schema of every part and the plan of every segment, by name. Raises StartError for a metric that no area can hold.

    `shown` and `shown_groups`: the metrics of the present configuration. `names`: the names of all configurations so far. `pools`: the
    number of pools, or 0 if the picker has one pool. `listed`: the key of the list of pools among the configurations
    (`workers.process.rollouts`); None without a list.
    """

    def __init__(self, options: "Options", config: "EffectiveConfig", before: Names | None = None, shape: Shape | None = None) -> None:
        """`before`: the names of all configurations before this one, and the names of other pools, without sizes; None for the first
        configuration of one pool.

        `shape`: the pools; None if the picker has one pool, with room for the bands of objectives.
        """
        self.pools = len(shape.endpoints) if shape is not None and len(shape.endpoints) > 1 else 0
        self.listed = len(shape.endpoints) if shape is not None else None
        shape = shape or Shape((options.max_endpoints,))
        self._whole = options, shape
        self.workers_max = options.workers_max or 2 * options.workers  # `options.workers` of them run at the start
        self.ordinals = 1 + self.workers_max  # the supervisor's ordinal and the ordinals of workers, with or without a process
        self._show(options, config)
        known = with_names(before or Names(), declared(options, config))
        self.families = (*FIXED, *known.families)
        groups = known.groups
        own = known.own if known.area_end else len(groups)
        check_names(self.families, groups)

        self.table = table_schema_of(known.columns, slots=options.max_endpoints, width=known.width or room_for(known.columns))
        most, end = options.max_endpoints, known.area_end
        self.areas = area_schema_of(self.families, slots=most, areas=self.ordinals, end=end, spare=not end, pools=self.listed or 0)
        self.names = Names(self.table.columns, self.families[len(FIXED) :], groups, self.table.width, self.areas.end, own)
        self._check_room(known)
        self.groups = tuple(self.own_group(group) for group in (*GROUPS, *FLOW_GROUPS, *groups))

        objects = (bool(options.objects_dir or options.pool_given),) if shape.objects is None else shape.objects
        self.documents = document_schema_of(options.max_endpoints, objects, several=shape.objects is not None, found=shape.found)
        self.latency = latency_schema_of(shape.endpoints)
        self.status = reload_status.schema(self.listed)
        self.starts = StartsSchema(options.max_endpoints, self.workers_max)
        self.prefills = PrefillsSchema(self.workers_max)
        self.answers = answers_schema_of(options.max_endpoints, self.workers_max)
        self.budgets = BudgetsSchema(self.workers_max)
        self.index = IndexSchema(options.index_entries)
        self.spares = {group.name: f"spare {number}" for number, group in enumerate(groups[own:])}
        self.series = {group.name: self._series_of(group) for group in self.groups}
        self.decisions = decisions.schema(self.workers_max)
        self.profiles = profiles.schema(self.workers_max)
        self.flows = [FlowSchema(bands, self.workers_max, shape.hash_lines) for bands in shape.bands]
        # The first remote area has the load of all endpoints and the bands of the first pool. Each other remote area has the bands of its
        # pool.
        slots = (options.max_endpoints if pool == 0 else 1 for pool in range(len(shape.bands)))
        remotes = [RemoteSchema(each, bands) for each, bands in zip(slots, shape.bands, strict=True)]
        self.remotes = remotes if options.replica_store else []
        self.kv_settings = settings = shape.kv or (Sources(options, config).kv_events if shape.objects is None else None)
        self.kv_events: KvLayout | None = None
        if settings is not None:
            self.kv_events = KvLayout(min(settings.blocks_max or options.kv_index_blocks, options.kv_index_blocks), options.max_endpoints)
        self._parts = self._parts_of_segments()
        self.plans: Mapping[str, Plan] = {segment: Plan(parts) for segment, parts in self._parts.items()}

    def _show(self, options: "Options", config: "EffectiveConfig") -> None:
        flow = config.flow is not None
        own, self.plugin_groups, self.wanted = declared(options, config)
        self.shown = (*FIXED[:-1], *own, *((CYCLES,) if flow else ()))
        self.shown_groups = (*GROUPS, *(FLOW_GROUPS if flow else ()), *self.plugin_groups)

    def later(self, options: "Options", config: "EffectiveConfig", names: Names) -> "Layout":
        """Returns the layout for a later configuration, with the same sizes. `names`: the names that have places already.

        `options`: as the pool of the configuration sees them. Raises StartError.
        """
        if self.listed is None:
            return Layout(options, config, names)
        every, shape = self._whole
        known = with_names(names, declared(options, config))
        present = self.names
        same = (known.columns, known.families, known.groups) == (present.columns, present.families, present.groups)
        return (self if same else Layout(every, config, names, shape)).of_pool(options, config)

    def kv_of(self, pool: str) -> "Settings | None":
        """Returns what the pool named `pool` needs of the kv-events process, as known at the start; None if the pool needs nothing."""
        _, shape = self._whole
        return shape.kv_of.get(pool, shape.kv_of.get("")) if shape.objects is not None else self.kv_settings

    def of_pool(self, options: "Options", config: "EffectiveConfig") -> "Layout":
        """Returns this layout as one of the pools sees it. `config`: a configuration that has only names of this layout."""
        shown = copy.copy(self)
        shown._show(options, config)
        return shown

    def showing_all(self) -> "Layout":
        """Returns this layout with the metrics of all pools shown."""
        every = copy.copy(self)
        every.shown, every.shown_groups = (*FIXED[:-1], *self.families[len(FIXED) :], CYCLES), self.groups
        return every

    def own_group(self, group: Group) -> Group:
        """Returns the group as this layout has it: with the label of the pool, if there are several pools."""
        return group.by_pool(self.pools) if self.pools else group

    def _check_room(self, before: Names) -> None:
        """Raises StartError if the spare room is too small for the new names of this configuration."""
        names = self.names
        missing = [
            (0 < before.width < names.width, f"{len(names.columns)} columns of metrics, and a row has {before.width}"),
            (0 < before.area_end < names.area_end, f"{len(names.families)} histograms of plugins"),
            (
                len(names.groups) - names.own > SPARE_TABLES,
                f"{len(names.groups) - names.own} counters of plugins besides the first ones, and there is room for {SPARE_TABLES}",
            ),
        ]
        if lacking := [text for lacks, text in missing if lacks]:
            raise StartError(
                f"the shared memory has no room for all that the configurations since the start have named: {'; '.join(lacking)}; "
                "restart the picker with this configuration"
            )

    def _series_of(self, group: Group) -> SeriesSchema:
        if group.name not in self.spares:
            return series_schema_of(group, areas=self.workers_max)
        if len(group.labels) > SPARE_LABELS:
            raise StartError(
                f"the counter {group.name} has {len(group.labels) - len(PLUGIN_LABELS)} labels; in a configuration that is loaded while "
                f"the picker runs, a counter has at most {SPARE_LABELS - len(PLUGIN_LABELS)}"
            )
        return spare_schema(group.name, group, areas=self.workers_max)

    @property
    def table_columns(self) -> list[Column[Any]]:
        """Returns the columns that the supervisor scrapes: first the numeric columns in the order of the table, then the other columns.

        A column that no plugin reads any more keeps its place under a name that occurs on no page, so the supervisor never fills the
        column.
        """
        wanted = {column.name: column for column in self.wanted if column.type is not frozenset}
        numeric = [wanted.get(name) or Column(f"{RETIRED}{name}", float) for name in self.table.columns]
        return [*numeric, *(column for column in self.wanted if column.type is frozenset)]

    @property
    def measures(self) -> dict[tuple[str, str], int]:
        """(plugin name, metric name) -> index of the histogram that the plugin declares."""
        members = [family for family in self.shown if family.plugin_name and not family.extension_point]
        return {(family.plugin_name, family.metric.name): self.families.index(family) for family in members}

    @property
    def timers(self) -> dict[tuple[str, str], int]:
        """(extension point, plugin name) -> index of the histogram of the plugin's calls."""
        members = [family for family in self.shown if family.extension_point]
        return {(family.extension_point, family.plugin_name): self.families.index(family) for family in members}

    def needs(self) -> dict[str, int]:
        """Segment -> bytes of shared memory that `epp serve` takes."""
        return {segment: footprint(plan) for segment, plan in self.plans.items()}

    def _parts_of_segments(self) -> dict[str, Mapping[str, Schema]]:
        areas: dict[str, Schema] = {"areas": self.areas}
        areas |= {name: schema for name, schema in self.series.items() if name not in self.spares}
        for number in range(SPARE_TABLES):
            areas[f"spare {number}"] = spare_schema(f"spare {number}", UNUSED, areas=self.workers_max)
        areas |= {"decisions": self.decisions, "profiles": self.profiles}
        areas |= {part_of("flow", pool): schema for pool, schema in enumerate(self.flows)}
        areas |= {"starts": self.starts, "prefills": self.prefills, "answers": self.answers, "budgets": self.budgets}
        areas |= {part_of("remote", pool): schema for pool, schema in enumerate(self.remotes)}
        parts: dict[str, Mapping[str, Schema]] = {
            "state": {"table": self.table, "documents": self.documents, "latency": self.latency, "reload": self.status},
            "areas": areas,
            "index": {"index": self.index},
        }
        if self.kv_events is not None:
            parts["kv"] = self.kv_events.parts
        return parts


def part_of(name: str, pool: int) -> str:
    """Returns the name of the pool's part, for a kind of part that each pool has."""
    return f"{name} {pool}" if pool else name


def room_for(columns: Sequence[str]) -> int:
    """Returns the number of columns for which a table row has room. `columns`: the columns of the first configuration."""
    return min(COLUMNS_MAX, len(columns) + SPARE_COLUMNS)


def table_schema_of(columns: Sequence[str], *, slots: int, width: int) -> TableSchema:
    """Returns the schema of the endpoint table: one row per endpoint, with its numeric columns. Raises StartError for too many columns."""
    if len(columns) > COLUMNS_MAX:
        raise StartError(f"the configuration reads {len(columns)} metrics of endpoints; a row holds {COLUMNS_MAX}")
    return TableSchema(tuple(columns), slots, width)


def document_schema_of(endpoints: int, objects: Sequence[bool], *, several: bool = False, found: bool = False) -> DocumentSchema:
    """Returns the schema of the supervisor's documents, in the order of `workers.shared.documents`.

    `objects`: which pools can have objectives and model rewrites, from files or from the API. `several`: whether a list of pools is served,
    even if it has one pool. `found`: whether the picker finds InferencePools while it runs. Then no request finds its pool by its model.
    """
    listed = DOCUMENT_BYTES_PER_ENDPOINT * endpoints
    full, bands = (OBJECTIVES_BYTES, REWRITES_BYTES), BANDS_BYTES
    if several:
        full, bands = (POOL_OBJECTIVES_BYTES, POOL_REWRITES_BYTES), POOL_BANDS_BYTES
    each = itertools.chain.from_iterable(full if has else (bands, 1) for has in objects)
    last = (1 if found else MODELS_BYTES, NAME_BYTES * len(objects)) if several else ()
    return DocumentSchema((listed, listed, *each, *last))


def latency_schema_of(endpoints: Sequence[int]) -> DocumentSchema:
    """Returns the schema of the documents with the latency models. `endpoints`: the number of endpoints of each pool."""
    return DocumentSchema(tuple(LATENCY_BYTES + LATENCY_BYTES_PER_ENDPOINT * each for each in endpoints))


def answers_schema_of(endpoints: int, workers: int) -> AnswersSchema:
    """Returns the schema of the workers' counts of requests and failed answers (`workers.shared.outliers`)."""
    return AnswersSchema(endpoints, workers, KINDS, len(OUTCOMES))


def gauge_of_pool(gauge: str, pool: int | None) -> str:
    """Returns the gauge's name in the areas: with the pool's number if there are several pools.

    `pool`: None if the picker has one pool, or for the gauge of the list of pools.
    """
    return gauge if pool is None else f"{gauge} {pool}"


def area_schema_of(members: Sequence[Family], *, slots: int, areas: int, end: int = 0, spare: bool = False, pools: int = 0) -> AreaSchema:
    """Returns the schema of the areas, in which each process publishes its own numbers.

    `end`: see `AreaSchema`. `spare`: whether to leave room for histograms of later configurations. `pools`: the number of pools, or 0 with
    one pool.
    """
    of_pools = (gauge_of_pool(gauge, pool) for pool in range(pools) for gauge in (GENERATION, CANDIDATE))
    gauges = (*(metric.name for metric in (*WORKER_GAUGES, STREAMS_INFLIGHT)), *OWN_GAUGES, *of_pools)
    plain = tuple(metric.name for metric in (*WORKER_COUNTERS, *SUPERVISOR_COUNTERS))
    counters = (*plain, *STREAM_COUNTERS, *POLL_ERRORS, *EXTRACT_ERRORS)
    histograms = tuple((family.key, family.metric.buckets) for family in members)
    schema = AreaSchema(slots, gauges, counters, histograms, areas=areas, end=end)
    if not spare:
        return schema
    return AreaSchema(slots, gauges, counters, histograms, areas=areas, end=schema.used + SPARE_HISTOGRAM_WORDS)


def spare_schema(name: str, values: Group, *, areas: int) -> SeriesSchema:
    """Returns the schema of a spare table, for a plugin's counter or gauge with labels that a later configuration brings."""
    labels = tuple(f"label_{number}" for number in range(SPARE_LABELS))
    gauges, counters = (tuple(metric.name for metric in metrics) for metrics in (values.gauges, values.counters))
    return SeriesSchema(name, labels, gauges, counters, blocks=SPARE_BLOCKS, areas=areas)


def series_schema_of(group: Group, *, areas: int) -> SeriesSchema:
    """Returns the schema of a group's series, in which each worker publishes metrics with the labels of requests."""
    return SeriesSchema(
        group.name,
        group.labels,
        tuple(metric.name for metric in group.gauges),
        tuple(metric.name for metric in group.counters),
        tuple((histogram.key, histogram.metric.buckets) for histogram in group.histograms),
        blocks=group.blocks,
        areas=areas,
    )
