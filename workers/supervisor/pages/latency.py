"""Shows the learned latency model on the metrics page."""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from epp.candidates import Endpoint
from epp.learning.model import LatencyModel
from epp.learning.words import terms
from epp.metrics import Metric
from epp.metrics.learning import BY_ENDPOINT, ERRORS, RECENT, SECONDS, USED

Labels = tuple[str, ...]
Row = tuple[Labels, float | tuple[list[int], float]]


class LatencyFigures:
    """Reads the supervisor's own model; None: nothing was learned. Yields nothing before the first answer."""

    def __init__(self, model: Callable[[int], LatencyModel | None]) -> None:
        """`model`: returns that of a pool."""
        self._model = model

    def families(
        self, pool: str, endpoints: Sequence[Endpoint], now: float, number: int = 0, *, alone: bool = True
    ) -> Iterator[tuple[Metric, Labels, list[Row]]]:
        """Yields all metrics of a pool with their labels and rows. `alone`: whether there is no other pool; else those without its name are
        left out.
        """
        model = self._model(number)
        if model is None:
            return
        known = [(endpoint.name, model.endpoints[endpoint.slot]) for endpoint in endpoints if endpoint.slot in model.endpoints]
        if not any(each.samples for _, each in known):
            return
        yield ERRORS, BY_ENDPOINT, [((pool, name), (list(accumulate(e.errors)), e.error_sum)) for name, e in known]
        coefficients: list[Row] = [
            ((pool, name, term), seconds) for name, each in known for term, seconds in terms(model, each.slot, now).items()
        ]
        yield SECONDS, SECONDS.labels, coefficients
        if not alone:
            return
        yield USED, (), [((), float(model.trusted))]
        yield RECENT, RECENT.labels, [(("model",), model.error), (("mean",), model.mean_error)]
