"""Predicted and reported cached tokens: a worker counts at the end of an answer, the supervisor watches the sums."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from epp.config.load import load
from epp.decision.decision import Decision, ProfileRun, Usage
from epp.metrics.request_series import PREDICTION
from epp.plugins.producers.approx_prefix import ApproximatePrefix
from epp.prefix.divergence import CHECKED_MIN, SLICE_S, SLICES, Sums
from epp.prefix.match import PrefixMatch
from epp.request import Request
from shm.documents import DocumentReader, DocumentWriter
from shm.segment import Region
from shm.series import SeriesWriter
from shm.series_reader import SeriesReader
from shm.table import State, TableReader, TableWriter
from tests.fakes import candidates, request
from tests.pair import Pair
from tests.reports import Reports
from tests.workers.instances import made
from tests.workers.worker.extproc.streams import pair
from workers.cli.explain_view import lines
from workers.process.instance import Instance
from workers.process.layout import series_schema_of
from workers.shared.documents import ENDPOINTS, EndpointRecord, EndpointsView, encode
from workers.worker.telemetry.cache_prediction import TELL_AGAIN_S, Comparison, PredictionWatch, match_name, sums

MATCH = "prefix_match/p"
PROMPT = "so much to say " * 100
TURN = " and then what happened" * 60
CONFIG = "plugins:\n- {type: prefix-cache-scorer}\n"
NO_PREFIX = "plugins:\n- {type: queue-scorer}\n"


class Worker:
    """A comparison with its series in plain memory."""

    def __init__(self, match: str = MATCH) -> None:
        schema = series_schema_of(PREDICTION, areas=1)
        region = Region(memoryview(bytearray(schema.bytes)))
        self.told: list[tuple[int, int]] = []
        self.comparison = Comparison(
            match, SeriesWriter(schema, schema.area(region, 0)), lambda owner, tokens: self.told.append((owner, tokens))
        )
        self.reader = SeriesReader(schema, region, serving=lambda _: True)

    def counts(self, name: str = "pod-1") -> dict[str, int]:
        """The counters of one endpoint that are not 0. The keys are their names without `prefix_` and `_total`."""
        rows = self.reader.rows()
        names = [m.name.removeprefix("prefix_").removesuffix("_total") for m in PREDICTION.counters]
        found = rows.get((name, "default", "8000"))
        return {} if found is None else {n: v for n, v in zip(names, found.counters, strict=True) if v}


def decided(blocks: float | None, picked: int = 1, tokens: int = 1000, room: float | None = None) -> tuple[Request, Decision]:
    """A request to pod-1. `tokens`: its length by the picker's count. `blocks`: how many blocks of 64 tokens pod-1 holds of it.

    `room`: for how many tokens its cache has room, by its metrics.
    """
    those = candidates({} if room is None else {"cache_tokens": [9e9, room, 9e9]}, count=3)
    asked = request(b"x")
    asked.data[MATCH] = PrefixMatch(None if blocks is None else np.array([0.0, blocks, 0.0]), np.zeros(20, np.uint64), 64, tokens)
    run = ProfileRun(those, those.zeros(), [picked])
    return asked, Decision(run.targets, {"default": run}, "default")


def test_predicted_and_reported_tokens_are_counted_per_endpoint() -> None:
    worker = Worker()
    worker.comparison.answered(*decided(5), Usage(1000, 10, 256))
    worker.comparison.answered(*decided(2, tokens=500), Usage(500, 10, 384))
    assert worker.counts() == {
        "checked_requests": 2,
        "checked_prompt_tokens": 1500,
        "predicted_tokens": 320 + 128,
        "reported_tokens": 256 + 384,
        "overpredicted_tokens": 64,
        "underpredicted_tokens": 256,
    }
    assert worker.counts("pod-0") == {}


def test_hits_for_which_the_cache_has_no_room_by_its_metrics_are_told_and_only_when_there_are_more() -> None:
    worker, owner = Worker(), candidates(count=3).endpoints[1].owner
    for room, cached in ((1600.0, 1600), (1600.0, 1700), (1600.0, 1650), (1600.0, 1800), (None, 2000), (math.nan, 3000)):
        worker.comparison.answered(*decided(5, room=room), Usage(4000, 10, cached))
    assert worker.told == [(owner, 1700), (owner, 1800), (owner, 3000)]


def test_hits_beyond_the_room_are_told_again_after_a_minute() -> None:
    """The writer of the index may be another one by then."""
    worker = Worker()
    for at in (0.0, TELL_AGAIN_S - 1.0, TELL_AGAIN_S, TELL_AGAIN_S + 1.0):
        asked, decision = decided(5, room=100.0)
        asked.now = 50.0 + at
        worker.comparison.answered(asked, decision, Usage(4000, 10, 700))
    assert [tokens for _, tokens in worker.told] == [700, 700]


def test_predicted_and_reported_tokens_are_at_most_the_prompt() -> None:
    worker = Worker()
    worker.comparison.answered(*decided(5, tokens=300), Usage(300, 10, 10**9))
    assert (worker.counts()["predicted_tokens"], worker.counts()["reported_tokens"]) == (299, 300)


@pytest.mark.parametrize(("theirs", "predicted"), [(250, 80), (1000, 320), (4000, 1280)])
def test_the_prediction_is_scaled_to_the_servers_count_of_prompt_tokens(theirs: int, predicted: int) -> None:
    worker = Worker()
    worker.comparison.answered(*decided(5), Usage(theirs, 10, predicted))
    counts = worker.counts()
    assert (counts["predicted_tokens"], counts["reported_tokens"]) == (predicted, predicted)
    assert counts.keys().isdisjoint({"overpredicted_tokens", "underpredicted_tokens"})


@pytest.mark.parametrize("prompt", [None, 0, -5, 10**18])
def test_a_prompt_without_a_credible_length_is_not_counted(prompt: int | None) -> None:
    worker = Worker()
    worker.comparison.answered(*decided(5), Usage(prompt, 10, 5))
    assert worker.counts() == {}


def test_a_request_without_a_prediction_is_not_counted() -> None:
    worker = Worker("prefix_match/another")
    worker.comparison.answered(*decided(5), Usage(300, 10, 5))
    assert worker.counts() == {}


def test_a_server_that_never_reports_cached_tokens_is_not_compared() -> None:
    worker = Worker()
    for cached in (None, -1):
        worker.comparison.answered(*decided(5, tokens=300), Usage(300, 10, cached))
    assert worker.counts() == {"unreported_requests": 2, "unreported_hits": 2}


def test_predicted_hits_at_a_server_that_never_reports_are_counted() -> None:
    worker = Worker()
    for blocks in (1, 2):  # of 300 tokens, 64 are less than a quarter and 128 more
        worker.comparison.answered(*decided(blocks, tokens=300), Usage(300, 10, None))
    assert worker.counts() == {"unreported_requests": 2, "unreported_hits": 1}


def test_once_a_server_has_reported_cached_tokens_a_missing_figure_is_zero() -> None:
    worker = Worker()
    worker.comparison.answered(*decided(None), Usage(300, 10, 100))
    worker.comparison.answered(*decided(1, tokens=300), Usage(300, 10, None))
    counts = worker.counts()
    assert (counts["checked_requests"], counts["reported_tokens"], counts["overpredicted_tokens"]) == (2, 100, 64)


def compared(p: Pair) -> Worker:
    """Lets the worker of the pair compare."""
    worker = Worker(match_name(p.app.pipelines.current.pipeline.wiring))
    p.app.telemetry.comparison = worker.comparison
    return worker


def asked(p: Pair, cached: int | None, *, ends: bool = True, prompt: str | list[str] = PROMPT) -> None:
    """Sends one request and its answer. `cached`: None if the answer does not report it."""
    envoy = p.open()
    envoy.headers(**{"x-request-id": "r"})
    envoy.body(json.dumps({"model": "m", "prompt": prompt}).encode())
    if ends:
        envoy.response_headers()
        details = None if cached is None else {"cached_tokens": cached}
        usage = {"prompt_tokens": 380, "completion_tokens": 1, "prompt_tokens_details": details}
        envoy.response_body(json.dumps({"usage": usage}).encode())


def prefix() -> ApproximatePrefix:
    return ApproximatePrefix("p", ApproximatePrefix.Params())


def test_the_answer_of_a_stream_is_compared_with_its_decision() -> None:
    p = pair(prefix())
    worker = compared(p)
    asked(p, 0)
    assert worker.counts() == {"checked_requests": 1, "checked_prompt_tokens": 380}
    asked(p, 320)
    counts = worker.counts()
    # 1,500 bytes are 6 blocks of 256, the last not full; the server counts 380 tokens, and computes the last one.
    assert (counts["predicted_tokens"], counts["reported_tokens"], counts["overpredicted_tokens"]) == (379, 320, 59)
    assert p.faults == []


def test_a_prediction_is_compared_although_the_prompt_is_dropped_earlier() -> None:
    p = pair(prefix())
    worker = compared(p)
    asked(p, 0)
    asked(p, 320, prompt=PROMPT + TURN)
    counts = worker.counts()
    # 5 whole blocks of the first prompt, 320 of 720 tokens by the picker's count, are held; the server counts 380.
    assert (counts["predicted_tokens"], counts["reported_tokens"]) == (320 * 380 // 720, 320)


def test_a_request_with_several_prompts_is_not_compared() -> None:
    """Servers report the cached tokens of the last prompt alone."""
    p = pair(prefix())
    worker = compared(p)
    for _ in range(2):
        asked(p, 128, prompt=[PROMPT, PROMPT + TURN])
    assert worker.counts() == {}
    again, _ = p.recent.explained()
    assert again.cached is not None
    assert (again.cached.predicted, again.cached.reported) == (374 + 719, None)


def test_without_usage_nothing_is_counted() -> None:
    p = pair(prefix())
    worker = compared(p)
    asked(p, 0, ends=False)
    assert worker.counts() == {}


def test_an_explanation_has_the_prediction_and_later_the_reported_tokens() -> None:
    p = pair(prefix())
    compared(p)
    asked(p, 0)
    asked(p, 0, ends=False)
    waiting, answered = p.recent.explained()
    assert answered.cached is not None and waiting.cached is not None
    assert (answered.cached.predicted, answered.cached.reported, answered.cached.prompt) == (0, 0, 380)
    assert (waiting.cached.predicted, waiting.cached.reported, waiting.cached.prompt) == (374, None, None)
    (profile,) = waiting.profiles
    assert {c.endpoint: c.predicted_tokens for c in profile.candidates} == {"pod-0": 0, "pod-1": 374, "pod-2": 0}
    assert "predicted 374 prompt tokens in its prefix cache" in lines(waiting)
    assert "predicted 0 prompt tokens in its prefix cache; it reported 0 of 380" in lines(answered)
    (row,) = (line for line in lines(waiting) if "pod-1" in line and "374" in line)
    assert any(line.endswith("predicted cached") for line in lines(waiting)) and row.endswith("374")


def test_an_explanation_says_that_a_server_reported_nothing() -> None:
    p = pair(prefix())
    compared(p)
    asked(p, None)
    (found,) = p.recent.explained()
    text = "predicted 0 prompt tokens in its prefix cache; its answer does not say how many of 380 were cached"
    assert text in lines(found)


def test_without_a_prefix_producer_there_is_nothing_to_explain() -> None:
    p = pair()
    asked(p, 0)
    (found,) = p.recent.explained()
    assert found.cached is None
    assert [c.predicted_tokens for c in found.profiles[0].candidates] == [None] * 3
    assert not any("cached" in line for line in lines(found))


@pytest.mark.parametrize(("config", "name"), [(CONFIG, "prefix_match/approx-prefix-cache-producer"), (NO_PREFIX, "")])
def test_predictions_are_compared_only_if_a_producer_matches_prefixes(config: str, name: str) -> None:
    assert match_name(load(config, "test").pipeline.wiring) == name


class Supervised:
    """An instance with one endpoint, two workers that count, and a supervisor that watches."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.now = 1000.0
        self.warnings = Reports()
        self.evictions = 0
        self._table = TableWriter(instance.layout.table, instance.memory.table)
        handle = self._table.take(1, lambda _: True)
        assert handle is not None
        self._handle = handle
        record = EndpointRecord("default", "pod-1", "10.0.0.2", 8000, {}, *handle, 1)
        documents = DocumentWriter(instance.layout.documents, instance.memory.documents)
        documents.write(ENDPOINTS, encode([record]))
        self.workers = [Comparison(MATCH, instance.memory.series_writer(PREDICTION, index), lambda owner, tokens: None) for index in (0, 1)]
        self.watch = PredictionWatch(
            instance.memory.series_reader(PREDICTION),
            TableReader(instance.layout.table, instance.memory.table),
            EndpointsView(DocumentReader(instance.layout.documents, instance.memory.documents)),
            lambda: self.evictions,
            self.warnings,
        )

    def kv(self, share: float) -> None:
        columns = self.instance.layout.table.columns
        values: list[float] = [share if column == "kv_cache_usage" else 0.0 for column in columns]
        given: dict[str, Any] = {"state": State.FRESH, "flags": 0, "updated_at": self.now, "inflight_at_scrape": 0}
        self._table.write(self._handle, values=values, present=(1 << len(columns)) - 1, **given)

    def slices(self, cached: int) -> None:
        """Counts answers with 320 of 400 tokens predicted."""
        self.watch.look(self.now)
        for _ in range(SLICES):
            for worker in self.workers:
                for _ in range(CHECKED_MIN // SLICES // 2):
                    worker.answered(*decided(5, tokens=400), Usage(400, 10, cached))
            self.now += SLICE_S
            self.watch.look(self.now)


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[Supervised]:
    config = "plugins:\n- {type: prefix-cache-scorer}\n- {type: kv-cache-utilization-scorer}\n"
    with made(tmp_path, config) as instance:
        yield Supervised(instance)


def test_the_supervisor_sums_all_workers_and_warns_of_a_long_divergence(supervised: Supervised) -> None:
    supervised.kv(0.2)
    supervised.slices(0)
    (text,) = supervised.warnings
    assert text.startswith(
        f"prefix cache predictions are wrong minutes=5.0 requests={CHECKED_MIN} predicted=80% reported=0% servers=1 endpoints=['pod-1']"
    )
    assert sums(supervised.instance.memory.series_reader(PREDICTION)) == {
        ("pod-1", "default", "8000"): Sums(CHECKED_MIN, 400 * CHECKED_MIN, 320 * CHECKED_MIN, 0)
    }


def test_a_warning_says_how_full_the_servers_kv_caches_are(supervised: Supervised) -> None:
    supervised.kv(0.96)
    supervised.slices(100)
    (text,) = supervised.warnings
    assert "their KV caches are 96% full" in text


def test_the_supervisor_does_not_warn_while_predictions_are_right(supervised: Supervised) -> None:
    supervised.slices(320)
    supervised.slices(256)
    assert supervised.warnings == []
