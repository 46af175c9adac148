"""The objects that the ext_proc streams of one worker share.

`workers.worker.setup` creates an `App` for the first configuration, after the fork, and one for each later configuration. An `App` keeps no
state of single requests.
"""

import random
from collections.abc import Callable, Collection, Mapping
from typing import Final, NamedTuple, Protocol

from epp.decision.admission import OPEN, Admission
from epp.decision.decide import EndpointPool
from epp.decision.decision import Decision
from epp.decision.pipeline import Pipeline
from epp.protocol import codec
from epp.request import Request
from epp.request.intake import Intake
from epp.request.tenants import Tenants
from shm.areas import Area
from workers.shared.query_of_death import Deciding
from workers.transport.interface import Clock
from workers.worker.extproc.answer_counts import AnswerCounts
from workers.worker.extproc.budgets import Budgets
from workers.worker.extproc.pipelines import Pipelines
from workers.worker.extproc.turns import Turns
from workers.worker.flow.eviction import Evictions
from workers.worker.telemetry.request_telemetry import Telemetry

DESTINATIONS_MAX: Final = 16384  # remembered answers with one target
# Remembered answers with several targets. This limit is lower, because every order of the same targets is another entry of 4 KB.
SEVERAL_MAX: Final = 1024


Receipts = Callable[[Pipeline, Request, Decision], str]


class StreamPool(EndpointPool, Protocol):
    """The endpoints as streams see them: `workers.worker.extproc.pool.SharedPool`, or a stand-in."""

    @property
    def trials(self) -> Mapping[int, int]:
        """The trials that wait for a request of this worker: slot of the ejected endpoint -> number of the trial."""

    def tried(self, slot: int) -> None:
        """Tells the pool that a request is on its way to an endpoint on trial."""


class Guards:
    """The means by which a worker protects itself from requests and plugins.

    `body_bytes_max`: the longest body in bytes. `hidden_headers`: request headers to ignore and to remove, because clients may have set
    them. `deciding`: records the request under decision, in case it crashes the worker. `on_fault`: receives exceptions of plugins and of
    our own code.
    """

    def __init__(
        self, *, body_bytes_max: int, deciding: Deciding, on_fault: Callable[[BaseException], None], hidden_headers: Collection[str] = ()
    ) -> None:
        self.body_bytes_max = body_bytes_max
        self.deciding = deciding
        self.on_fault = on_fault
        self.hidden_headers = frozenset(hidden_headers)


class Times(NamedTuple):
    """The times of a worker. `clock`: the clock of the transport. `now`: returns monotonic seconds. `soon(call, *arguments)`: schedules a
    call for a later turn of the event loop.
    """

    clock: Clock
    now: Callable[[], float]
    soon: Callable[..., object]


class StreamOptions(NamedTuple):
    """Says what streams do besides naming the destination.

    `scores`: whether the answer has the score of each endpoint. `request_phase_only`: whether a stream ends with the answer to its request,
    so that the response passes without the picker. `receipts`: returns the id of a receipt (`epp.decision.receipt`) for a decision; None if
    clients get no receipts. `tenants`: finds the tenant of each request; None if no tenants are configured. `pool`: the number of the pool;
    UNDECIDED for streams without a known pool. `name`: the name of one of several pools. `budgets`: counts the use of tenants; None in
    tests. `turns`: the turns of one of several pools; None if the picker has one pool.
    """

    scores: bool = False
    request_phase_only: bool = False
    receipts: Receipts | None = None
    tenants: Tenants | None = None
    pool: int = 0
    name: str = ""
    budgets: Budgets | None = None
    turns: Turns | None = None


USUAL: Final = StreamOptions()


class App:
    """Holds what the streams of one worker share under one configuration."""

    def __init__(
        self,
        pipelines: Pipelines,
        pool: StreamPool,
        area: Area,
        answers: AnswerCounts,
        telemetry: Telemetry,
        guards: Guards,
        times: Times,
        rng: random.Random,
        *,
        intake: Intake | None = None,
        options: StreamOptions = USUAL,
    ) -> None:
        self.pipelines = pipelines
        self.pool = pool
        self.trials: Mapping[int, int] = pool.trials  # the trials of ejected endpoints, see `SharedPool.trials`
        self.area = area
        self.answers = answers
        self.telemetry = telemetry
        self.guards = guards
        self.clock, self.now, self.soon = times
        self.rng = rng
        # Flow control sets both when it is on. `evictions`: None without in-flight eviction.
        self.admission: Admission = OPEN
        self.evictions: Evictions | None = None
        self.intake = intake if intake is not None else Intake()
        self.emit_scores, self.request_phase_only, self.receipts, self.tenants, self.number, self.name, self.budgets, self.turns = options
        self._destinations: dict[str, codec.Destination] = {}
        self._several: dict[str, codec.Destination] = {}

    def scores(self, decision: Decision) -> Mapping[str, float] | None:
        """Returns the total score of each candidate of the primary profile, by address; None if the primary profile did not run."""
        run = decision.runs.get(decision.primary)
        if run is None:
            return None
        return dict(zip([e.address for e in run.candidates.endpoints], run.totals.tolist(), strict=True))

    def destination(self, decision: Decision) -> codec.Destination:
        """Returns the part of the answer that is the same for all requests with the same targets."""
        targets = decision.targets
        if len(targets) == 1:
            addresses, known, most = targets[0].address, self._destinations, DESTINATIONS_MAX
        else:
            addresses, known, most = ",".join(t.address for t in targets), self._several, SEVERAL_MAX
        destination = known.get(addresses)
        if destination is None:
            if len(known) >= most:
                known.clear()
            destination = known[addresses] = codec.Destination(addresses)
        return destination
