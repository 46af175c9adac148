"""Declarations of all metrics: names, labels, buckets, help texts, and older names for existing dashboards.

Names, labels and buckets follow the reference picker, so that its dashboards carry over. Each module has the families whose values are kept
in the same way:

    areas          in areas of shared memory; label values are known before the fork, or there are no labels
    series         in tables of shared memory; label values come with the requests, one block of values per label tuple
    flow_control   the series of flow control, and families computed when the page is read
    computed       computed when the page is read: pool, endpoints, index, workers

`catalogue` lists them all. A plugin declares its own families with `Metric`. Clients choose the values of some labels, so `label_caps`
decides which of these values are named, and `page_size` bounds how much of the page they take.
"""

from typing import Final, Literal, NamedTuple

PREFIX: Final = "llm_d_epp_"
OTHER: Final = "other"
NO_FAIRNESS_ID: Final = "default-flow"  # the fairness id of requests that name no fairness id
PLUGIN_LABELS: Final = ("plugin_name", "plugin_type")
POOL: Final = "pool"  # a label that only a picker of several pools has
OF_POOL: Final = "inference_pool"  # a label that some metrics have with any number of pools
BLOCKS_PER_POOL: Final = 2


class Metric(NamedTuple):
    """Declares one metric family.

    `name`: without the prefix; a counter's name ends in `_total`. `help`: one line. `buckets`: the upper bounds of a histogram's
    buckets, ascending, without infinity. A plugin's metrics get the labels `PLUGIN_LABELS`. `labels`: more labels of a plugin's counter or
    gauge, whose values come from `Count.add` or `Gauge.set`. `over_workers`: how the page combines the workers' values of a plugin's gauge.
    """

    name: str
    kind: Literal["counter", "histogram", "gauge"]
    help: str
    buckets: tuple[float, ...] = ()
    labels: tuple[str, ...] = ()
    over_workers: Literal["sum", "mean"] = "sum"


def counter(name: str, help: str, *labels: str) -> Metric:
    """Declares a counter."""
    return Metric(name, "counter", help, labels=labels)


def gauge(name: str, help: str, *labels: str, over_workers: Literal["sum", "mean"] = "sum") -> Metric:
    """Declares a gauge."""
    return Metric(name, "gauge", help, labels=labels, over_workers=over_workers)


def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Metric:
    """Declares a histogram."""
    return Metric(name, "histogram", help, buckets)


class Group(NamedTuple):
    """Joins metrics with the same labels. A worker has at most `blocks` label tuples, each with one block of values.

    `page_bytes`: how many bytes of the metrics page the metrics may take; 0 for any number. `at_once`: names that clients choose get a
    series as soon as they are seen, not only after a request with the name was served. `ages`: tuples that count nothing for a while give
    their blocks to new tuples, so a writer must forget a block when `SeriesWriter.epoch` changes. `pooled`: whether the metrics are per
    pool.

    Gauges are stored as whole numbers of `1 / parts`. With `weighed`, the group has two gauges: the page shows the first divided by the
    second, for label tuples where the second is not 0.
    """

    name: str
    labels: tuple[str, ...]
    gauges: tuple[Metric, ...] = ()
    counters: tuple[Metric, ...] = ()
    histograms: tuple["Labelled", ...] = ()
    blocks: int = 256
    parts: int = 1
    weighed: bool = False
    page_bytes: int = 0
    at_once: bool = False
    ages: bool = False
    pooled: bool = True

    def by_pool(self, pools: int) -> "Group":
        """Returns the group with a label for the pool and room for some tuples of each pool; the group itself if it has such a label or is
        not `pooled`.
        """
        if OF_POOL in self.labels or not self.pooled:
            return self
        return self._replace(labels=(*self.labels, POOL), blocks=max(self.blocks, BLOCKS_PER_POOL * pools))


class Labelled(NamedTuple):
    """Names a histogram of a group. If a metric has several histograms in the group, they differ in a further label: `label` is its name,
    `value` its fixed value.
    """

    metric: Metric
    label: str = ""
    value: str = ""

    @property
    def key(self) -> str:
        """Returns a name that is unique in the group."""
        return f"{self.metric.name}@{self.value}" if self.label else self.metric.name
