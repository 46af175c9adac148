"""Compares the predicted cached tokens with the cached tokens that model servers report. Each worker counts, and the supervisor watches.

    worker      `Comparison.answered` at the end of each answer with usage: adds to counters in the worker's series
    supervisor  `PredictionWatch.look` every few seconds: sums over all workers, and the KV cache usage -> warnings

Some servers omit a figure of 0 (vLLM does). So after an endpoint has reported cached tokens once, a missing figure is taken as 0. For an
endpoint that has never reported cached tokens, the picker only counts the answers, and warns if it predicted many hits for them. Both
classes are used only if a prefix producer is configured.
"""

from collections.abc import Callable, Mapping
from typing import Final

from compiled.calls import increase
from epp.candidates import Endpoint
from epp.data import CACHE_TOKENS, KV_USAGE
from epp.decision.decision import Decision, Usage
from epp.decision.pipeline import Wiring
from epp.metrics.request_series import PREDICTION
from epp.plugin import Scorer
from epp.prefix.divergence import APART, Key, Sums, Watch
from epp.prefix.match import PrefixMatch
from epp.prefix.prediction import REPORTED, compared_match, predicted_row
from epp.request import Request
from shm.series import SeriesWriter
from shm.series_reader import SeriesReader
from shm.table import TableReader
from workers.shared.documents import EndpointsView

LOOK_S: Final = 5.0
PROMPT_TOKENS_MAX: Final = 1 << 32  # a server that reports more tokens is wrong
VIEWS_MAX: Final = 4096
TELL_AGAIN_S: Final = 60.0
REPORTED_NAME: Final = REPORTED.name
CACHE_TOKENS_NAME: Final = CACHE_TOKENS.name
CHECKED: Final = 0
UNREPORTED: Final = 1
PROMPT_SUM: Final = 2
PREDICTED_SUM: Final = 3
REPORTED_SUM: Final = 4
OVER: Final = 5
UNDER: Final = 6
MISSED: Final = 7
# The counters of `Sums`, in its order.
WATCHED: Final = (CHECKED, PROMPT_SUM, PREDICTED_SUM, REPORTED_SUM, MISSED)


def match_name(wiring: Wiring) -> str:
    """Returns the name in `Request.data` of the prefix match to compare, or "" without a prefix match."""
    match = compared_match(wiring.producers, wiring.of(Scorer))
    return "" if match is None else match.name


class Comparison:
    """Counts predicted and reported tokens in one worker. This runs once per answer, so it must be fast.

    `beyond(owner, tokens)`: called with the reported tokens if the endpoint's metrics say that it has no room for this number of tokens.
    """

    __slots__ = ("_beyond", "_epoch", "_match", "_series", "_told", "_views")

    def __init__(self, match: str, series: SeriesWriter, beyond: Callable[[int, int], object]) -> None:
        self._match = match
        self._series = series
        self._beyond = beyond
        self._told: dict[int, tuple[int, float]] = {}  # owner -> the largest number of tokens given to `beyond`, and the time
        self._epoch = series.epoch
        self._views: dict[Endpoint, memoryview] = {}

    def answered(self, request: Request, decision: Decision, usage: Usage) -> None:
        """Counts an answer that has ended with this usage."""
        data, prompt = request.data, usage.prompt
        match: PrefixMatch | None = data.get(self._match)
        if match is None or match.prompts != 1 or not prompt or prompt < 0 or prompt > PROMPT_TOKENS_MAX:
            return
        row = predicted_row(decision)
        if row < 0:
            return
        predicted = match.reported(row, prompt)
        data[REPORTED_NAME] = usage
        target = decision.targets[0]
        if self._series.epoch != self._epoch:  # blocks were freed
            self._epoch = self._series.epoch
            self._views.clear()
        counts = self._views.get(target) or self._view(target)
        reported = usage.cached
        if reported is None or reported < 0:
            if not counts[REPORTED_SUM]:
                counts[UNREPORTED] += 1
                if predicted > APART * prompt:
                    counts[MISSED] += 1
                return
            reported = 0
        increase(counts, CHECKED)
        increase(counts, PROMPT_SUM, prompt)
        if predicted:
            increase(counts, PREDICTED_SUM, predicted)
        if reported:
            if reported > prompt:
                reported = prompt
            increase(counts, REPORTED_SUM, reported)
            run = decision.runs[decision.primary]
            sizes = run.candidates.snapshot.values.get(CACHE_TOKENS_NAME) if run is not None else None
            if run is not None and sizes is not None and not reported <= sizes.item(run.row):  # NaN if the endpoint reports no size
                self._tell(target.owner, reported, request.now)
        if predicted > reported:
            counts[OVER] += predicted - reported
        elif predicted < reported:
            counts[UNDER] += reported - predicted

    def _tell(self, owner: int, tokens: int, now: float) -> None:
        """Calls `beyond` for more tokens than before, and once per TELL_AGAIN_S also for fewer, because the index may have another
        writer.
        """
        before, at = self._told.get(owner, (0, 0.0))
        if tokens <= before and now - at < TELL_AGAIN_S:
            return
        if len(self._told) >= VIEWS_MAX:
            self._told.clear()
        self._told[owner] = tokens, now
        self._beyond(owner, tokens)

    def _view(self, target: Endpoint) -> memoryview:
        if len(self._views) >= VIEWS_MAX:  # bounded, because endpoints come and go
            self._views.clear()
        series = self._series
        first = series.block((target.name, target.namespace, str(target.port))) + series.schema.values_at
        view = self._views[target] = series.words[first : first + len(PREDICTION.counters)]
        return view


class PredictionWatch:
    """Runs in the supervisor and watches the counts of all workers. `report` gets each warning."""

    def __init__(
        self, series: SeriesReader, table: TableReader, endpoints: EndpointsView, evictions: Callable[[], int], report: Callable[..., None]
    ) -> None:
        self._series = series
        self._table = table
        self._endpoints = endpoints
        self._evictions = evictions
        self._report = report
        self._watch = Watch()
        columns = table.schema.columns
        self._kv = columns.index(KV_USAGE.name)

    def look(self, now: float) -> None:
        """Evaluates the counts since the last look. `now`: monotonic seconds."""
        if self._watch.saw(now, self._kv_usage()):
            for divergence in self._watch.close(now, by_server(sums(self._series)), self._evictions()):
                self._report("prefix cache predictions are wrong", **divergence._asdict())

    def _kv_usage(self) -> Mapping[Key, float]:
        index = self._kv
        copy = self._table.copy()
        rows, column = len(copy.rows), copy.column(index)
        return {
            (e.name, e.namespace, str(e.port)): float(column[e.slot])
            for e in self._endpoints.current()
            if e.slot < rows and int(copy.generation[e.slot]) == e.generation and int(copy.present[e.slot]) >> index & 1
        }


def sums(series: SeriesReader) -> dict[Key, Sums]:
    """Returns the sums over all workers since the start, by the labels of the series. Skips label sets without any count."""
    labels, ints, _, _ = series.totals()
    rows = zip(labels, ints[:, WATCHED].tolist(), strict=True)
    return {key: Sums(*values) for key, values in rows if any(values)}


def by_server(found: Mapping[Key, Sums]) -> dict[Key, Sums]:
    """Adds up the sums of each server that is in several pools."""
    added: dict[Key, Sums] = {}
    for key, each in found.items():
        server = key[: len(PREDICTION.labels)]
        added[server] = Sums(*map(sum, zip(added.get(server, Sums()), each, strict=True)))
    return added
