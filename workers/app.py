"""What the ext_proc streams of one worker share: the pipeline, the pool, the lane and who is told of what happens.

One `App` per worker, made after the fork; `workers.server` has the streams. It keeps nothing of a single request.
"""

import random
from collections.abc import Callable, Collection, Mapping
from typing import Final

from epp.decision import Decision
from epp.paths import Parsers
from epp.pipeline import Pipeline
from epp.protocol import codec
from shm.lanes import Lane
from workers.decisions import Recent
from workers.eviction import Evictions
from workers.flow import FlowControl
from workers.honesty import Comparison
from workers.objectives import Priorities
from workers.pool import SharedPool
from workers.query_of_death import Deciding
from workers.request_metrics import RequestMetrics
from workers.shadows import Agreements
from workers.shedding import Shedding
from workers.timing import Timing
from workers.tracing import Tracer
from workers.transport.interface import Clock

DESTINATIONS_MAX: Final = 16384
SEVERAL_MAX: Final = 1024  # of lists of several targets, which are as many as their orders, at 4 KB each


class Counters:
    """Indices of this worker's counters and histograms in its lane."""

    __slots__ = (
        "cached_tokens", "completion_tokens", "faults", "picks", "prompt_tokens", "refusals", "request_processing", "response_processing",
        "scheduler_e2e", "streams", "violations",
    )  # fmt: skip

    def __init__(self, lane: Lane) -> None:
        counter, histogram = lane.schema.counter, lane.schema.histogram
        self.streams = counter["streams_total"]
        self.picks = counter["picks_total"]
        self.refusals = counter["refusals_total"]
        self.faults = counter["faults_total"]
        self.violations = counter["violations_total"]
        self.prompt_tokens = counter["prompt_tokens_total"]
        self.cached_tokens = counter["cached_prompt_tokens_total"]
        self.completion_tokens = counter["completion_tokens_total"]
        self.request_processing = histogram["request_processing_duration_seconds"]
        self.response_processing = histogram["response_processing_duration_seconds"]
        self.scheduler_e2e = histogram["scheduler_e2e_duration_seconds"]


class App:
    """What the streams of one worker share."""

    def __init__(
        self,
        pipeline: Pipeline,
        pool: SharedPool,
        lane: Lane,
        metrics: RequestMetrics,
        *,
        body_bytes_max: int,
        clock: Clock,
        now: Callable[[], float],
        soon: Callable[..., object],
        rng: random.Random,
        on_fault: Callable[[BaseException], None],
        tracer: Tracer | None = None,
        emit_scores: bool = False,
        recent: Recent,
        deciding: Deciding,
        comparison: Comparison | None = None,
        agreements: Agreements | None = None,
        hidden_headers: Collection[str] = (),
        request_phase_only: bool = False,
        rewrite: Callable[[str], str | None] | None = None,
        evictions: Evictions | None = None,
        flow: FlowControl | None = None,
        shedding: Shedding | None = None,
        priorities: Priorities | None = None,
        timing: Timing | None = None,
    ) -> None:
        """`soon` makes a call in the next turn of the loop. `hidden_headers` are those of clients that are not honoured.
        `request_phase_only`: streams end with the answer to the request. `rewrite` says by which name a model is to be asked for
        (None: by its own), over what a header says."""
        self.pipeline = pipeline
        self.pool = pool
        self.lane = lane
        self.metrics = metrics
        self.counters = Counters(lane)
        self.body_bytes_max = body_bytes_max
        self.clock = clock
        self.now = now
        self.soon = soon
        self.rng = rng
        self.on_fault = on_fault
        self.tracer = tracer
        self.emit_scores = emit_scores
        self.reads_response = pipeline.reads_response
        self.recent = recent
        self.deciding = deciding
        self.comparison = comparison
        self.agreements = agreements
        self.hidden_headers = frozenset(hidden_headers)
        self.request_phase_only = request_phase_only
        self.rewrite = rewrite
        self.flow = flow  # None: nothing waits
        self.shedding = shedding  # None: nobody can be sheddable, or flow control decides
        self.priorities = priorities  # None: there are no objectives
        self.timing = timing  # None: all requests are decided by `pipeline` as it is
        self.evictions = evictions  # None: nobody is given up once sent
        self.parser = Parsers(pipeline).find
        self._destinations: dict[str, codec.Destination] = {}
        self._several: dict[str, codec.Destination] = {}

    def use(self, pipeline: Pipeline) -> None:
        """Requests whose turn comes from now on are decided by this one."""
        self.pipeline = pipeline
        if self.timing is not None:
            self.timing.use(pipeline)

    def scores(self, decision: Decision) -> Mapping[str, float] | None:
        """What every candidate of the primary profile scored, by address."""
        run = decision.runs.get(decision.primary)
        if run is None:
            return None
        return dict(zip([e.address for e in run.candidates.endpoints], run.totals.tolist(), strict=True))

    def destination(self, decision: Decision) -> codec.Destination:
        """The answer's constant part for these targets."""
        targets = decision.targets
        if len(targets) == 1:
            addresses, known, most = targets[0].address, self._destinations, DESTINATIONS_MAX
        else:
            addresses, known, most = ",".join(t.address for t in targets), self._several, SEVERAL_MAX
        found = known.get(addresses)
        if found is None:
            if len(known) >= most:
                known.clear()
            found = known[addresses] = codec.Destination(addresses)
        return found
