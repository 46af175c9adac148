"""The latency predictor's sidecars: what they are asked and taught, and how requests share calls.

Questions that come within a short window go to one server in one call (`Batch`); all requests of a batch wait for the same. While
too many calls are under way, a batch stays open and grows. After FAILURES_MAX calls in a row without an answer nobody asks for
REST_S, then one batch tries: a dead or slow predictor costs few requests its timeout.

What was measured is sampled (every sample of a flush is as likely as any other) and sent now and then. A sample that cannot be
sent is lost. Every worker has its own batches, samples and opinion of the predictor.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from epp.errors import ProducerFailed
from epp.plugin import Plugin, Services, Waiting

PREDICT_S = 0.4  # what a decision waits at most
MARGIN_S = 0.02  # of it for all but the call, so that a late answer is told from requests that have left
WINDOW_MS_MAX = 200
FAILURES_MAX = 3
REST_S = 2.0
ROWS_MAX = 10_000  # of one call
SAMPLES_MAX = 10_000  # of one flush
BUSY_S = 0.001
SAID_CHARS_MAX = 256
JSON: Mapping[str, str] = {"content-type": "application/json"}
ACCEPTED = (200, 202)


class Settings(NamedTuple):
    """As the field's environment variables say.

    LATENCY_MAX_BULK_SIZE, LATENCY_USE_NATIVE_XGBOOST and LATENCY_METRICS_INTERVAL_SEC have no effect: one call holds all of a request's
    rows, however many they are, and no model is read from the sidecars.
    """

    training_url: str = "http://localhost:8000"
    prediction_urls: tuple[str, ...] = ("http://localhost:8001",)
    samples: int = 1000
    flush_s: float = 1.0
    timeout_s: float = 10.0
    window_s: float = 0.001
    rows: int = ROWS_MAX
    calls: int = 36


def settings(environment: Mapping[str, str], wrong: Callable[[str], object]) -> Settings:
    """What is missing has its default; so has what is no number in its range, and `wrong` is told."""
    default = Settings()

    def whole(name: str, least: int, most: int, otherwise: float) -> int:
        text = environment.get(name, "")
        if not text:
            return int(otherwise)
        if text.isascii() and text.isdecimal() and least <= int(text) <= most:
            return int(text)
        wrong(f"{name}={text[:64]!r} is no whole number from {least} to {most}: {otherwise:g} is used")
        return int(otherwise)

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
    """One endpoint's state as one request finds it; names are those of the sidecars."""

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
    """A row with what came of it; one of the two is 0."""

    actual_ttft_ms: float
    actual_tpot_ms: float


class Prediction(msgspec.Struct, gc=False):
    """Of one row."""

    ttft_ms: float
    tpot_ms: float


class Predictions(msgspec.Struct):
    """Of all rows of a call, in their order."""

    predictions: list[Prediction]


Give = Callable[[Sequence[Prediction], float], None]  # takes predictions and how long the predictor took

_predictions = msgspec.json.Decoder(Predictions)


class Batch:
    """Questions that go together."""

    __slots__ = ("asked_at", "gives", "rows", "waiting")

    def __init__(self, asked_at: float) -> None:
        self.asked_at = asked_at
        self.rows: list[Row] = []
        self.gives: list[tuple[Give, int]] = []
        self.waiting: Waiting | None = None

    def add(self, rows: Sequence[Row], give: Give) -> None:
        self.rows += rows
        self.gives.append((give, len(rows)))


class Predictor:
    """Asks and teaches, for one plugin of one worker."""

    def __init__(self, services: Services, plugin: Plugin) -> None:
        self._services = services
        self._plugin = plugin
        self.settings = settings(services.environment, lambda text: services.warn(plugin, text))
        self._batch: Batch | None = None
        self._calls = 0
        self._failures = 0
        self._rests_until = 0.0
        self._samples: list[Sample] = []
        self._seen = 0
        self._flushing = False

    def start(self) -> None:
        """Greets the predictor, so that the first request finds a connection, and flushes from now on."""
        greeting = self._services.http("GET", self._server() + "/status", timeout_s=self.settings.timeout_s)
        self._services.spawn(self._greet(greeting), self.settings.timeout_s + 1.0)
        self._services.every(self.settings.flush_s, self.flush)

    def ask(self, rows: Sequence[Row], now: float, give: Give) -> Waiting:
        """`give` is called with the predictions before what is returned is done. Raises ProducerFailed."""
        if self._failures >= FAILURES_MAX and (now < self._rests_until or self._calls):
            raise ProducerFailed(f"'{self._plugin.name}': the predictor does not answer and is left alone for a while")
        batch = self._batch
        if batch is not None and batch.waiting is not None and len(batch.rows) + len(rows) <= self.settings.rows:
            batch.add(rows, give)
            return batch.waiting
        batch = Batch(now)
        batch.add(rows, give)
        if self.settings.window_s:
            self._batch = batch
        batch.waiting = self._services.spawn(self._call(batch), PREDICT_S)
        return batch.waiting

    async def _call(self, batch: Batch) -> None:
        """One call, from the opening of its window on."""
        try:
            if self.settings.window_s:
                await self._services.after(self.settings.window_s)
            while self._calls >= self.settings.calls:
                await self._services.after(BUSY_S)
            self._close(batch)
            await self._predict(batch)
        except ProducerFailed:
            self._failures += 1
            self._rests_until = batch.asked_at + REST_S
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
            said = answer.body[:SAID_CHARS_MAX].decode(errors="replace")
            raise ProducerFailed(f"'{self._plugin.name}': {url} answered {answer.status}: {said}")
        try:
            found = _predictions.decode(answer.body).predictions
        except msgspec.MsgspecError as problem:
            raise ProducerFailed(f"'{self._plugin.name}': {url} answered no predictions: {problem}") from None
        if len(found) != len(batch.rows):
            raise ProducerFailed(f"'{self._plugin.name}': {url} answered {len(found)} of {len(batch.rows)} predictions")
        at = 0
        for give, count in batch.gives:
            give(found[at : at + count], answer.seconds)
            at += count

    def learn(self, sample: Sample) -> None:
        """Every sample since the last flush is kept with the same probability."""
        self._seen += 1
        if len(self._samples) < self.settings.samples:
            self._samples.append(sample)
        elif (place := self._services.rng.randrange(self._seen)) < len(self._samples):
            self._samples[place] = sample

    def flush(self) -> None:
        """Sends what was learned; while the last flush is under way, samples wait."""
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
            self._services.warn(self._plugin, f"{len(samples)} samples for the predictor are lost: {problem}")
        else:
            if answer.status not in ACCEPTED:
                said = f"{url} answered {answer.status}"
                self._services.warn(self._plugin, f"{len(samples)} samples for the predictor are lost: {said}")
        finally:
            self._flushing = False

    async def _greet(self, greeting: Waiting) -> Any:
        try:
            answer = await greeting
        except (OSError, TimeoutError) as problem:
            self._services.warn(self._plugin, f"the predictor does not answer yet: {problem}")
        else:
            if answer.status != 200:
                self._services.warn(self._plugin, f"the predictor is not ready yet: status {answer.status}")

    def _server(self) -> str:
        urls = self.settings.prediction_urls
        return urls[0] if len(urls) == 1 else self._services.rng.choice(urls)
