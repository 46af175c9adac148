"""Computes how much shared memory a picker takes per entry of the prefix index, per endpoint and per worker."""

from typing import Final, NamedTuple

from epp.metrics.flow_control import FLOW_GROUPS
from epp.metrics.request_series import GROUPS
from shm.areas import AreaSchema
from shm.budgets import BudgetsSchema
from shm.flow_areas import BANDS_MAX, FlowSchema
from shm.layout import WORD
from shm.prefills import PrefillsSchema, StartsSchema
from shm.prefix_index import IndexSchema
from workers.process.layout import (
    SPARE_HISTOGRAM_WORDS,
    SPARE_TABLES,
    UNUSED,
    answers_schema_of,
    document_schema_of,
    latency_schema_of,
    room_for,
    series_schema_of,
    spare_schema,
    table_schema_of,
)
from workers.shared import decisions, profiles, reload_status

COLUMNS_USUAL: Final = 6  # numeric columns of a usual configuration


class UnitBytes(NamedTuple):
    """Bytes of shared memory per unit, for a picker with API objects and flow control."""

    entry: int  # per entry of the prefix index
    endpoint: int
    worker: int  # bytes per worker, without counters that plugins declare
    fixed: int  # bytes of a picker without entries, endpoints and workers


ORDINALS_USUAL: Final = 64  # the number of workers' ordinals that `unit_bytes` assumes


def unit_bytes(columns: int = COLUMNS_USUAL) -> UnitBytes:
    """Computes how many bytes the segments grow per unit. `columns`: the numeric columns of an endpoint."""
    entries, endpoints = 1 << 16, 1 << 10
    few, many = IndexSchema(entries).bytes, IndexSchema(2 * entries).bytes
    entry = (many - few) // entries
    names = [str(column) for column in range(columns)]
    table = table_schema_of(names, slots=endpoints, width=room_for(names)).bytes
    listed, alone = (document_schema_of(count, [True]).bytes for count in (endpoints, 1))
    modelled, model = (latency_schema_of((count,)).bytes for count in (endpoints, 1))
    series = sum(series_schema_of(group, areas=1).area_bytes for group in (*GROUPS, *FLOW_GROUPS))
    bare = AreaSchema(endpoints, (), (), (), areas=1).area_bytes
    area = bare + SPARE_HISTOGRAM_WORDS * WORD
    spares = SPARE_TABLES * spare_schema("spare", UNUSED, areas=1).area_bytes
    return UnitBytes(
        entry=entry,
        endpoint=(table + listed - alone + modelled - model) // (endpoints - 1),
        worker=series
        + spares
        + decisions.schema(1).bytes
        + profiles.schema(1).bytes
        + FlowSchema(BANDS_MAX, ORDINALS_USUAL).area_bytes  # this part grows with the number of ordinals
        + StartsSchema(endpoints, 1).bytes
        + PrefillsSchema(1).bytes
        + BudgetsSchema(1).row_bytes
        + answers_schema_of(endpoints, 1).row_bytes
        + area,
        fixed=reload_status.schema(None).bytes
        + alone
        + model
        + few
        - entry * entries
        + area
        + bare,  # the supervisor's area, and histograms
    )
