"""Reads the averages of a cluster's pool from the metrics page of the cluster's picker."""

from collections.abc import Mapping, Sequence
from sys import float_info
from typing import Any

import msgspec

from epp.data import CLUSTER_KV_USAGE, CLUSTER_QUEUE, Column
from epp.plugin import plugin
from epp.plugins.extractors._pages import Extracted, ExtractError, PageExtractor, check_whole
from epp.plugins.extractors._ranks import each, mean
from epp.protocol.exposition import Finder, Malformed, Selector, parse_selector

KV_METRIC = "llm_d_epp_average_kv_cache_utilization"
QUEUE_METRIC = "llm_d_epp_average_queue_size"


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """The metrics to read, written as in `engineConfigs`: a name, or a name with labels in braces. Empty means the default.

    kv_cache_utilization_metric: The average utilization of the pool's KV caches, from 0 to 1.
    queue_size_metric: The average number of waiting requests of the pool's endpoints.
    """

    kv_cache_utilization_metric: str = msgspec.field(default=KV_METRIC, name="kvCacheUtilizationMetric")
    queue_size_metric: str = QUEUE_METRIC


@plugin("multicluster-metrics-extractor")
class MulticlusterMetricsExtractor(PageExtractor):
    """Emits a pool's average KV-cache utilization and average queue, for the multicluster scorers.

    A page with only one of the two metrics still gives this metric; a page without both is rejected. If a metric has several series, their
    mean is used.
    """

    Params = Parameters
    produces = (CLUSTER_KV_USAGE, CLUSTER_QUEUE)

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        self._selectors = (
            (CLUSTER_KV_USAGE, parse_selector(params.kv_cache_utilization_metric or KV_METRIC, "kvCacheUtilizationMetric")),
            (CLUSTER_QUEUE, parse_selector(params.queue_size_metric or QUEUE_METRIC, "queueSizeMetric")),
        )

    def extraction(self, labels: Mapping[str, str], wanted: Sequence[Column[Any]], pod: str = "") -> "Averages":
        return Averages(self._selectors, wanted)


class Averages:
    """Reads the metrics pages of one cluster's picker."""

    __slots__ = ("_finders", "_zeros")

    def __init__(self, selectors: Sequence[tuple[Column[float], Selector]], wanted: Sequence[Column[Any]]) -> None:
        numeric = [column.name for column in wanted if column.type is not frozenset]
        self._zeros = [0.0] * len(numeric)
        self._finders = [(Finder(selector), numeric.index(column.name) if column.name in numeric else -1) for column, selector in selectors]

    def extract(self, page: bytes) -> Extracted:
        """Returns the page's values. Raises ExtractError if the page is rejected."""
        check_whole(page)
        values, present, found = self._zeros.copy(), 0, 0
        problems: dict[str, str] = {}
        for finder, at in self._finders:
            try:
                alone = finder.find(page)
                averages = [alone] if alone == alone else each(finder.samples(page))
            except Malformed as wrong:
                problems[str(finder.selector)] = f"{finder.selector}: {wrong}"
                continue
            wrong_values = [value for value in averages if not 0.0 <= value <= float_info.max]
            if wrong_values:
                problems[str(finder.selector)] = f"{finder.selector}: {wrong_values[0]} is not a number of 0 or more"
            elif averages:
                found += 1
                if at >= 0:
                    values[at] = mean(averages)
                    present |= 1 << at
        if not found:
            names = " nor ".join(str(finder.selector) for finder, _ in self._finders)
            raise ExtractError("; ".join(problems.values()) or f"the page has neither {names}")
        return Extracted(tuple(values), present, {}, problems)
