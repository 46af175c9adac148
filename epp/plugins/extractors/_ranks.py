"""Joins several series of one metric. A server reports several series if it runs several schedulers, or several models.

    labels                                                  the series are
    tp_rank, pp_rank and others of REPEATED                 the same queue, seen by several processes: one counts
    priority                                                parts of a queue; the one without a priority is their total
    any others: engine, dp_rank, model …                    different queues: `Join` says what they become

The order of the series has no effect. Of series with the same labels, the one with the latest timestamp is used, then the largest.
"""

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from epp.protocol.exposition import Sample, labels_of

Join: TypeAlias = Callable[[Sequence[float]], float]

REPEATED: Final = frozenset((b"tp_rank", b"pp_rank", b"moe_ep_rank", b"ep_rank", b"cp_rank", b"attn_tp_rank", b"attn_cp_rank"))
PRIORITY: Final = b"priority"
RANK: Final = (b"engine", b"dp_rank")  # labels of a data-parallel rank
APART: Final = (*RANK, b"model_name", b"model")  # labels by which information metrics of one server differ

Labels: TypeAlias = frozenset[tuple[bytes, bytes]]


def each(samples: Sequence[Sample]) -> list[float]:
    """Returns one value for each queue. Raises Malformed."""
    if len(samples) == 1:
        return [samples[0].value]
    series: dict[Labels, tuple[float, float]] = {}
    for text, value, stamp in samples:
        labels = frozenset(pair for pair in labels_of(text).items() if pair[0] not in REPEATED)
        series[labels] = max(series.get(labels, (stamp, value)), (stamp, value))
    totals: dict[Labels, float] = {}
    parts: dict[Labels, float] = {}
    for labels, (_, value) in series.items():
        queue = frozenset(pair for pair in labels if pair[0] != PRIORITY)
        if dict(labels).get(PRIORITY):
            parts[queue] = parts.get(queue, 0.0) + value
        else:
            totals[queue] = max(totals.get(queue, value), value)
    return list({**parts, **totals}.values())


def total(values: Sequence[float]) -> float:
    """Returns the sum."""
    return sum(values, 0.0)


def mean(values: Sequence[float]) -> float:
    """Returns the mean of at least one value."""
    return sum(values) / len(values)
