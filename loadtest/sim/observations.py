"""Holds what a simulated engine counts: totals and histograms, with the bucket bounds of vLLM.

The engine counts, and `loadtest.sim.exposition` renders the counts. Each histogram has a version that grows
with every observation. Its version tells the metrics page whether a histogram has changed.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from functools import partial

TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
    240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
STEP_TOKENS = (
    1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0,
)  # fmt: skip
REQUEST_TOKENS = (
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0,
    20000.0, 50000.0, 100000.0,
)  # fmt: skip


class Histogram:
    """A histogram. `counts`: one count per bucket, not cumulative; the last bucket has no upper bound."""

    __slots__ = ("bounds", "counts", "sum", "version")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self.version = 0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts `times` observations of `value`."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times
        self.version += 1


@dataclass(slots=True)
class Observations:
    """All counts of one engine since its start. Times are in seconds of engine time, which runs `time_scale` times as fast as the clock."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    transferred: int = 0  # prompt tokens whose KV blocks came from another server
    served: int = 0
    aborted: int = 0

    ttft: Histogram = field(default_factory=partial(Histogram, TTFT_S))
    inter_token: Histogram = field(default_factory=partial(Histogram, TOKEN_S))
    per_output_token: Histogram = field(default_factory=partial(Histogram, TOKEN_S))
    end_to_end: Histogram = field(default_factory=partial(Histogram, REQUEST_S))
    queued: Histogram = field(default_factory=partial(Histogram, REQUEST_S))
    prefill: Histogram = field(default_factory=partial(Histogram, REQUEST_S))
    decode: Histogram = field(default_factory=partial(Histogram, REQUEST_S))
    step_tokens: Histogram = field(default_factory=partial(Histogram, STEP_TOKENS))
    request_prompt_tokens: Histogram = field(default_factory=partial(Histogram, REQUEST_TOKENS))
    request_generation_tokens: Histogram = field(default_factory=partial(Histogram, REQUEST_TOKENS))
