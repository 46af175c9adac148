"""Derives from options and configuration where endpoints, metrics and API objects come from."""

import functools
from typing import TYPE_CHECKING

from epp.config.defaults import DEFAULT_EXTRACTOR, DEFAULT_SOURCE
from epp.data import (
    CACHE_BLOCK_SIZE,
    CACHE_NUM_BLOCKS,
    CACHE_RANKS,
    CACHE_TOKENS,
    INFLIGHT_REQUESTS,
    INFLIGHT_TOKENS,
    KV_USAGE,
    MAX_LORA,
    RUNNING,
    WAITING,
)
from epp.plugins.extractors._pages import PageExtractor
from epp.plugins.extractors.core_metrics import CoreMetricsExtractor
from epp.plugins.extractors.metrics_source import MetricsDataSource
from epp.plugins.producers._precise_params import Settings
from epp.plugins.producers.precise_prefix import kv_settings
from workers.shared.freshness import Fresh, believed_for, fresh_for
from workers.shared.index_limits import PrefixUse, prefix_use
from workers.shared.scrape_pace import Pacing

if TYPE_CHECKING:
    from epp.config.effective import EffectiveConfig
    from workers.host.options import Options


METRICS_BUDGET = 0.01
# What the picker knows between two pages: the first columns change with what it has sent, and the others stay as they are.
KNOWN_BETWEEN_PAGES = {
    column.name
    for column in (
        *(WAITING, RUNNING, KV_USAGE, INFLIGHT_REQUESTS, INFLIGHT_TOKENS),
        *(MAX_LORA, CACHE_BLOCK_SIZE, CACHE_NUM_BLOCKS, CACHE_TOKENS, CACHE_RANKS),
    )
}


class Sources:
    """Says where the picker reads its data, how often it scrapes, and how long values are fresh (`workers.shared.freshness`).

    `pacing`: how often the pages that fill the endpoint table are read.
    """

    def __init__(self, options: "Options", config: "EffectiveConfig") -> None:
        self._options = options
        self._config = config
        self.prefix_use: PrefixUse | None = prefix_use(config.pipeline.plugins.values())
        self.kv_events: Settings | None = kv_settings(config.pipeline.plugins.values())
        self.pacing: Pacing = self._pacing(*self.scraped)
        self.fresh_for_s: float = fresh_for(self.pacing.interval_s, options.metrics_staleness_threshold_s)
        # What readers of the table assume.
        self.believed = Fresh(believed_for(self.pacing.interval_s, self.fresh_for_s), paced=self.pacing.budget is not None)

    @property
    def scrapes(self) -> bool:
        """Whether there is a data source. Without a data source, the picker uses endpoints without knowing their metrics."""
        return bool(self._pairs)

    @functools.cached_property
    def scraped(self) -> tuple[MetricsDataSource, PageExtractor]:
        """The source that fills the endpoint table, and the extractor that reads its pages. Returns defaults if nothing is scraped.

        The source is the first source that shows the endpoints' health, or else the first source of all.
        """
        if not self.scrapes:
            source = MetricsDataSource(DEFAULT_SOURCE, MetricsDataSource.Params())
            return source, CoreMetricsExtractor(DEFAULT_EXTRACTOR, CoreMetricsExtractor.Params())
        return next((pair for pair in self._pairs if pair[0].shows_health), self._pairs[0])

    @functools.cached_property
    def further(self) -> tuple[tuple[MetricsDataSource, PageExtractor, Pacing], ...]:
        """The other sources with values that a plugin reads. Each has its extractor, and the pacing of its pages."""
        read = {column.name for column in self._config.pipeline.columns}
        return tuple(
            (source, extractor, self._pacing(source, extractor))
            for source, extractor in self._pairs
            if source is not self.scraped[0] and any(key.name in read for key in extractor.produces)
        )

    @property
    def all(self) -> tuple[MetricsDataSource, ...]:
        """All sources that are scraped."""
        return (self.scraped[0], *(source for source, _, _ in self.further))

    @functools.cached_property
    def _pairs(self) -> list[tuple[MetricsDataSource, PageExtractor]]:
        return [
            (each.source, extractor)
            for each in self._config.sources
            for extractor in each.extractors
            if isinstance(each.source, MetricsDataSource) and isinstance(extractor, PageExtractor)
        ]

    def _pacing(self, source: MetricsDataSource, extractor: PageExtractor) -> Pacing:
        """Returns how often the pages of a source are read: at the configured interval, or else within a budget.

        If a plugin reads values that only pages have, such as the adapters that a server has loaded, the pages are read at the interval,
        too. A configured budget applies in any case.
        """
        read = {column.name for column in self._config.pipeline.columns} & {key.name for key in extractor.produces}
        fixed = source.interval_s is not None or "refresh_metrics_interval" in self._options.given or not read <= KNOWN_BETWEEN_PAGES
        budget = source.budget if source.budget is not None or fixed else METRICS_BUDGET
        return Pacing(source.interval_s or self._options.scrape_interval_s, budget)

    @property
    def in_kubernetes(self) -> bool:
        """Whether endpoints come from Kubernetes: the options name a pool or a selector, and there is no other source of endpoints."""
        options = self._options
        pool_or_selector = options.pool_given or bool(options.endpoint_selector)
        return pool_or_selector and not options.endpoints and self._config.discovery is None

    @property
    def asks_objects(self) -> bool:
        """Whether objectives and model rewrites come from the Kubernetes API. They refer to an InferencePool, not to a selector."""
        return self.in_kubernetes and not self._options.endpoint_selector

    @property
    def has_objects(self) -> bool:
        """Whether there is any source of objectives and model rewrites."""
        return bool(self._options.objects_dir) or self.asks_objects
