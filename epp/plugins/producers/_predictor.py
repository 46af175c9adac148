"""Calls the latency predictor's sidecars: gets predictions for requests, and sends samples for training.

Requests that arrive within a short window share one call to one server (`Batch`), and wait for the same answer. While too many calls
are under way, a batch stays open and grows. After FAILURES_MAX failed calls in a row, no batch calls the predictor for REST_S seconds. The
next batch then calls it again. So a dead or slow predictor delays few requests.

Measured latencies are sampled, all with the same probability, and sent periodically. A sample that cannot be sent is lost. Each worker
has its own batches, samples and view of the predictor's health.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from epp.errors import UNREADABLE, ProducerFailed
from epp.plugin import Plugin, Services, Waiting

PREDICT_S = 0.4  # the longest wait of a decision
# The call gets this much less time than the decision waits, so that it ends by its own timeout and not by being cancelled.
MARGIN_S = 0.02
WINDOW_MS_MAX = 200
FAILURES_MAX = 3
REST_S = 2.0
ROWS_MAX = 10_000  # rows of one call
SAMPLES_MAX = 10_000  # samples of one flush
BUSY_S = 0.001
ERROR_CHARS_MAX = 256
JSON: Mapping[str, str] = {"content-type": "application/json"}
ACCEPTED = (200, 202)


class Settings(NamedTuple):
    """Holds settings from the environment variables of the reference picker.

    LATENCY_MAX_BULK_SIZE, LATENCY_USE_NATIVE_XGBOOST and LATENCY_METRICS_INTERVAL_SEC have no effect: one call has all rows of a
    request, whatever their number, and no model is read from the sidecars.
    """

    training_url: str = "http://localhost:8000"
    prediction_urls: tuple[str, ...] = ("http://localhost:8001",)
    samples: int = 1000
    flush_s: float = 1.0
    timeout_s: float = 10.0
    window_s: float = 0.001
    rows: int = ROWS_MAX
    calls: int = 36


def settings(environment: Mapping[str, str], warn: Callable[..., object]) -> Settings:
    """Reads the settings. A missing or invalid setting gets its default. Calls `warn(event, **fields)` for each invalid setting."""
    default = Settings()

    def whole(name: str, least: int, most: int, fallback: float) -> int:
        text = environment.get(name, "")
        if not text:
            return int(fallback)
        if text.isascii() and text.isdecimal() and least <= int(text) <= most:
            return int(text)
        warn(
            "invalid setting: its default is used",
            variable=name,
            value=text[:64],
            default=fallback,
            reason=f"not a whole number from {least} to {most}",
        )
        return int(fallback)

    urls = [url.strip().rstrip("/") for url in environment.get("PREDICTION_SERVER_URL", "").split(",")]
    return Settings(
        training_url=environment.get("TRAINING_SERVER_URL", "").rstrip("/") or default.training_url,
        prediction_urls=tuple(url for url in urls if url) or default.prediction_urls,
        samples=whole("LATENCY_MAX_SAMPLE_SIZE", 1, SAMPLES_MAX, default.samples),
        flush_s=whole("LATENCY_FLUSH_INTERVAL_SEC", 1, 86_400, default.flush_s),
        timeout_s=whole("LATENCY_HTTP_TIMEOUT_SEC", 1, 86_400, default.timeout_s),
        window_s=whole("LATENCY_COALESCE_WINDOW_MS", 0, WINDOW_MS_MAX, default.window_s * 1000) / 1000,
        rows=whole("LATENCY_MAX_COALESCED_ROWS", 0, ROWS_MAX, 0) or ROWS_MAX,
        calls=whole("LATENCY_MAX_CONCURRENT_DISPATCHES", 1, 1024, default.calls),
    )


class Row(msgspec.Struct, gc=False, omit_defaults=True):
    """Describes the state of one endpoint when a request is scheduled. The names of the fields are those of the sidecars' API."""

    kv_cache_percentage: float
    input_token_length: int
    num_request_waiting: int
    num_request_running: int
    num_tokens_generated: int
    prefix_cache_score: float
    encoder_input_size: int
    encoder_matched_size: int
    prefill_tokens_in_flight: int
    decode_tokens_in_flight: int
    pod_type: str = ""


class Sample(Row, gc=False, omit_defaults=True, kw_only=True):
    """Joins a row and a latency that was measured: TTFT or TPOT. The other latency is 0."""

    actual_ttft_ms: float
    actual_tpot_ms: float


class Prediction(msgspec.Struct, gc=False):
    """Holds the prediction for one row."""

    ttft_ms: float
    tpot_ms: float


class Predictions(msgspec.Struct):
    """Holds the predictions for all rows of a call, in their order."""

    predictions: list[Prediction]


Deliver = Callable[[Sequence[Prediction], float], None]  # takes predictions and the seconds that the predictor took

_predictions = msgspec.json.Decoder(Predictions)


class Batch:
    """Collects rows of several requests that share one call."""

    __slots__ = ("deliveries", "opened_at", "rows", "waiting")

    def __init__(self, opened_at: float) -> None:
        self.opened_at = opened_at
        self.rows: list[Row] = []
        self.deliveries: list[tuple[Deliver, int]] = []
        self.waiting: Waiting | None = None

    def add(self, rows: Sequence[Row], deliver: Deliver) -> None:
        self.rows += rows
        self.deliveries.append((deliver, len(rows)))


class Predictor:
    """Calls the predictor for one plugin in one worker."""

    def __init__(self, services: Services, plugin: Plugin) -> None:
        self._services = services
        self._plugin = plugin
        self.settings = settings(services.environment, partial(services.warn, plugin))
        self._batch: Batch | None = None
        self._calls = 0
        self._failures = 0
        self._rests_until = 0.0
        self._samples: list[Sample] = []
        self._seen = 0
        self._flushing = False

    def start(self) -> None:
        """Contacts the predictor, so that the first request finds an open connection, and starts the periodic flushes."""
        greeting = self._services.http("GET", self._server() + "/status", timeout_s=self.settings.timeout_s)
        self._services.spawn(self._greet(greeting), self.settings.timeout_s + 1.0)
        self._services.every(self.settings.flush_s, self.flush)

    def ask(self, rows: Sequence[Row], now: float, deliver: Deliver) -> Waiting:
        """Asks for predictions for these rows. `deliver` gets the predictions before the returned wait ends.

        Raises ProducerFailed while no batch calls the predictor, because calls have failed.
        """
        if self._failures >= FAILURES_MAX and (now < self._rests_until or self._calls):
            raise ProducerFailed(f"'{self._plugin.name}': the predictor does not answer and is not called for {REST_S:g} s")
        batch = self._batch
        if batch is not None and batch.waiting is not None and len(batch.rows) + len(rows) <= self.settings.rows:
            batch.add(rows, deliver)
            return batch.waiting
        batch = Batch(now)
        batch.add(rows, deliver)
        if self.settings.window_s:
            self._batch = batch
        batch.waiting = self._services.spawn(self._call(batch), PREDICT_S)
        return batch.waiting

    async def _call(self, batch: Batch) -> None:
        """Makes the call of one batch: waits until the batch's window is over, sends all its rows, and delivers the answer."""
        try:
            if self.settings.window_s:
                await self._services.after(self.settings.window_s)
            while self._calls >= self.settings.calls:
                await self._services.after(BUSY_S)
            self._close(batch)
            await self._predict(batch)
        except ProducerFailed:
            self._failures += 1
            self._rests_until = batch.opened_at + REST_S
            raise
        finally:
            self._close(batch)
        self._failures = 0

    def _close(self, batch: Batch) -> None:
        if self._batch is batch:
            self._batch = None

    async def _predict(self, batch: Batch) -> None:
        url = self._server() + "/predict/bulk/strict"
        body = msgspec.json.encode({"requests": batch.rows})
        timeout_s = min(self.settings.timeout_s, PREDICT_S - self.settings.window_s - MARGIN_S)
        self._calls += 1
        try:
            answer = await self._services.http("POST", url, JSON, body, timeout_s=timeout_s)
        except (OSError, TimeoutError) as problem:
            raise ProducerFailed(f"'{self._plugin.name}': {problem}") from None
        finally:
            self._calls -= 1
        if answer.status != 200:
            text = answer.body[:ERROR_CHARS_MAX].decode(errors="replace")
            raise ProducerFailed(f"'{self._plugin.name}': {url} answered {answer.status}: {text}")
        try:
            predictions = _predictions.decode(answer.body).predictions
        except UNREADABLE as problem:
            raise ProducerFailed(f"'{self._plugin.name}': the answer of {url} has no predictions: {problem}") from None
        if len(predictions) != len(batch.rows):
            counts = f"{len(predictions)} predictions for {len(batch.rows)} rows"
            raise ProducerFailed(f"'{self._plugin.name}': the answer of {url} has {counts}")
        at = 0
        for deliver, count in batch.deliveries:
            deliver(predictions[at : at + count], answer.seconds)
            at += count

    def learn(self, sample: Sample) -> None:
        """Adds a sample. Beyond a maximum, keeps a random selection of the samples since the last flush, each with the same probability."""
        self._seen += 1
        if len(self._samples) < self.settings.samples:
            self._samples.append(sample)
        elif (place := self._services.rng.randrange(self._seen)) < len(self._samples):
            self._samples[place] = sample

    def flush(self) -> None:
        """Sends the samples. While the previous flush is under way, the samples wait."""
        if self._samples and not self._flushing:
            samples, self._samples, self._seen = self._samples, [], 0
            self._flushing = True
            self._services.spawn(self._teach(samples), self.settings.timeout_s + 1.0)

    async def _teach(self, samples: Sequence[Sample]) -> None:
        url = self.settings.training_url + "/add_training_data_bulk"
        body = msgspec.json.encode({"entries": samples})
        try:
            answer = await self._services.http("POST", url, JSON, body, timeout_s=self.settings.timeout_s)
        except (OSError, TimeoutError, ProducerFailed) as problem:
            self._lost(samples, str(problem))
        else:
            if answer.status not in ACCEPTED:
                self._lost(samples, f"{url} answered {answer.status}")
        finally:
            self._flushing = False

    def _lost(self, samples: Sequence[Sample], reason: str) -> None:
        self._services.warn(self._plugin, "samples for the predictor are lost", count=len(samples), reason=reason)

    async def _greet(self, greeting: Waiting) -> Any:
        try:
            answer = await greeting
        except (OSError, TimeoutError) as problem:
            self._services.warn(self._plugin, "the predictor does not answer yet", reason=str(problem))
        else:
            if answer.status != 200:
                self._services.warn(self._plugin, "the predictor is not ready yet", status=answer.status)

    def _server(self) -> str:
        urls = self.settings.prediction_urls
        return urls[0] if len(urls) == 1 else self._services.rng.choice(urls)
