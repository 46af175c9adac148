"""The optional parts of the metrics page, and the figures of two of them: latency model and replicas."""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from epp.candidates import Endpoint
from epp.learning.model import LatencyModel
from epp.learning.words import terms
from epp.metrics import replicas as names
from epp.metrics.computed import BY_ENDPOINT, LEARNED_ERRORS, LEARNED_RECENT, LEARNED_SECONDS, LEARNED_USED, Figures, Row
from workers.supervisor.pages.flow import FlowFigures
from workers.supervisor.pages.kv_events import KvFigures
from workers.supervisor.pages.processes import ProcessFigures

if TYPE_CHECKING:
    from workers.replicas.exchange import Exchange

CAUSES = ("lost", "old", "many", "rate", "form", "malformed", "long", "copy", "copies", "page", "backlog", "secret")

Signals = Sequence[tuple[int, int, float | None]]  # pool, replicas needed and headroom


class Sections(NamedTuple):
    """The optional parts of the page. `flow`: the figures of pools with flow control. `latency`: returns the latency model of a pool.
    `signals`: the scaling signals of several pools.
    """

    flow: Sequence[FlowFigures] = ()
    kv_events: KvFigures | None = None
    latency: Callable[[int], LatencyModel | None] | None = None
    replicas: "Exchange | None" = None
    processes: ProcessFigures | None = None
    signals: Callable[[], Signals] | None = None


def latency_figures(model: LatencyModel, pool: str, endpoints: Sequence[Endpoint], now: float, *, alone: bool) -> Iterator[Figures]:
    """Yields the figures of a pool's model, or no figures before the first answer. `alone`: whether there is no other pool. If there is
    one, skips the figures without the pool's name.
    """
    known = [(endpoint.name, model.endpoints[endpoint.slot]) for endpoint in endpoints if endpoint.slot in model.endpoints]
    if not any(each.samples for _, each in known):
        return
    yield LEARNED_ERRORS, BY_ENDPOINT, [((pool, name), (list(accumulate(e.errors)), e.error_sum)) for name, e in known]
    coefficients: list[Row] = [
        ((pool, name, term), seconds) for name, each in known for term, seconds in terms(model, each.slot, now).items()
    ]
    yield LEARNED_SECONDS, LEARNED_SECONDS.labels, coefficients
    if not alone:
        return
    yield LEARNED_USED, (), [((), float(model.trusted))]
    yield LEARNED_RECENT, LEARNED_RECENT.labels, [(("model",), model.error), (("mean",), model.mean_error)]


def replica_figures(exchange: "Exchange", now: float) -> Iterator[Figures]:
    """Yields the counts of the exchange with other replicas."""
    others = exchange.others
    yield names.CONNECTED, (), [((), float(exchange.connected))]
    yield names.CONNECTIONS, (), [((), float(exchange.connections))]
    errors: list[Row] = [((cause,), float(count)) for cause, count in sorted(exchange.failures.items())]
    yield names.STORE_ERRORS, names.STORE_ERRORS.labels, errors
    yield names.REPLICAS, (), [((), float(1 + len(others.live)))]
    live = sorted(others.live.items())
    yield names.AGE, names.AGE.labels, [((name,), now - other.heard_at) for name, other in live]
    loads: list[Row] = [((name,), float(sum(requests for requests, _ in other.loads.values()))) for name, other in live]
    yield names.REQUESTS, names.REQUESTS.labels, loads
    yield names.LAG, (), [((), exchange.lag_s)]
    for metric, sent, received in ((names.MESSAGES, exchange.sent, others.messages), (names.BYTES, exchange.sent_bytes, others.bytes)):
        yield metric, metric.labels, [(("sent",), float(sent)), (("received",), float(received))]
    dropped = others.refused | {
        "lost": others.lost,
        "page": exchange.parts.pages.foreign,
        "backlog": exchange.parts.taught.dropped,
        "secret": exchange.foreign_blocks,
    }
    yield names.DROPPED, names.DROPPED.labels, [((cause,), float(dropped.get(cause, 0))) for cause in CAUSES]
    yield names.COPIED, (), [((), float(exchange.joining.entries))]
    yield names.PAGES, (), [((), float(exchange.parts.pages.used))]
    yield names.FOREIGN, (), [((), float(exchange.foreign))]
