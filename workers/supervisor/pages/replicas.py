"""Reads what the exchange with other replicas has counted, for the metrics page."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from epp.metrics import Metric
from epp.metrics import replicas as names

if TYPE_CHECKING:
    from workers.replicas.exchange import Exchange

Labels = tuple[str, ...]
Row = tuple[Labels, float]
CAUSES = ("lost", "old", "many", "rate", "form", "malformed", "long", "copy", "copies", "page", "backlog", "secret")


class ReplicaFigures:
    """The metrics of one exchange."""

    def __init__(self, exchange: "Exchange") -> None:
        self._exchange = exchange

    def families(self, now: float) -> Iterator[tuple[Metric, Labels, list[Row]]]:
        """Yields all metrics with their labels and rows."""
        exchange, others = self._exchange, self._exchange.others
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
