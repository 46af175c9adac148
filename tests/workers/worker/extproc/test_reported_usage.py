"""Usage that a model server reports counts within the bounds of the request, for every reader, and the server is named."""

import json

import pytest

from epp.candidates import Endpoint
from epp.decision.decision import Usage
from epp.metrics.request_series import OUTPUT_TOKENS, PREDICTION, REQUEST_FIGURES, USAGE_BEYOND_BOUNDS
from epp.protocol.usage_bounds import TEMPLATE_TOKENS
from shm.segment import Region
from shm.series import SeriesWriter
from shm.series_reader import SeriesReader
from tests.pair import Pair
from tests.reports import Reports
from tests.workers.worker.extproc.streams import BODY, Remembers, pair
from workers.host.log import REPORT_EVERY_S
from workers.process.layout import series_schema_of
from workers.worker.telemetry.request_telemetry import UsageDoubts

LIMIT = json.loads(BODY)["max_tokens"]
LIE = 100_000


class World:
    """A stream with a plugin that reads usage, and the counter of implausible reports."""

    def __init__(self) -> None:
        self.remembers = Remembers()
        self.pair: Pair = pair(self.remembers)
        self.reports = Reports()
        schema = series_schema_of(PREDICTION, areas=1)
        region = Region(memoryview(bytearray(schema.bytes)))
        self.series = SeriesReader(schema, region, serving=lambda _: True)
        doubts = UsageDoubts(SeriesWriter(schema, region), self.reports, lambda: self.pair.time)
        self.pair.app.telemetry.doubts = doubts

    def answered(self, answer: bytes, body: bytes = BODY, *, whole: bool = True) -> Usage | None:
        """Returns the usage that plugins get for this answer. `whole`: whether it comes to its end."""
        envoy = self.pair.open()
        envoy.headers()
        envoy.body(body)
        envoy.response_headers()
        envoy.response_body(answer, last=whole)
        envoy.handler.closed()
        return self.remembers.usages[-1]

    def counted(self) -> dict[str, int]:
        at = self.series.schema.counter_at[USAGE_BEYOND_BOUNDS.name] - self.series.schema.values_at
        return {labels[0]: values.counters[at] for labels, values in self.series.rows().items() if values.counters[at]}


def usage(prompt: int, completion: int) -> bytes:
    return json.dumps({"id": "1", "usage": {"prompt_tokens": prompt, "completion_tokens": completion}}).encode()


@pytest.mark.parametrize("whole", [True, False])
def test_plugins_counters_and_histograms_get_the_bounded_usage(whole: bool) -> None:
    world = World()
    assert world.answered(usage(LIE, LIE), whole=whole) == Usage(len(BODY) + TEMPLATE_TOKENS, LIMIT)
    p = world.pair
    assert p.counter("prompt_tokens_total") == len(BODY) + TEMPLATE_TOKENS
    assert p.counter("completion_tokens_total") == LIMIT
    if whole:
        (values,) = [each for each in p.series.rows(REQUEST_FIGURES).values() if any(each.histograms[OUTPUT_TOKENS][0])]
        assert values.histograms[OUTPUT_TOKENS][1] == LIMIT


def test_without_a_limit_of_the_request_its_answer_has_at_most_as_many_tokens_as_bytes() -> None:
    answer = usage(5, LIE)
    assert World().answered(answer, b'{"model":"m", "prompt":"hello"}') == Usage(5, len(answer))


def test_the_bytes_of_all_pieces_count() -> None:
    world = World()
    envoy = world.pair.open()
    envoy.headers()
    envoy.body(b'{"model":"m", "prompt":"hello"}')
    envoy.response_headers()
    for _ in range(10):
        envoy.response_body(b" " * 1000, last=False)
    envoy.response_body(usage(5, 9000))
    assert world.remembers.usages == [Usage(5, 9000)]


@pytest.mark.parametrize(("completion", "named"), [(LIMIT, False), (2 * LIMIT, False), (LIE, True)])
def test_a_server_that_reports_far_more_than_is_possible_is_counted_and_named(completion: int, named: bool) -> None:
    world = World()
    world.answered(usage(9, completion))
    assert world.counted() == ({"pod-1": 1} if named else {})
    assert len(world.reports) == named
    if named:
        assert f"pod-1 (10.0.0.2:8000): 9 prompt and {LIE} completion tokens reported, 9 and {LIMIT}" in world.reports[0]


def test_each_server_is_named_once_in_a_while() -> None:
    world = World()
    for _ in range(5):
        world.answered(usage(9, LIE))
    assert len(world.reports) == 1
    other = Endpoint(name="other", namespace="default", host="10.0.0.9", port=8000, slot=7, generation=1)
    world.pair.app.telemetry.doubted(other, Usage(1, LIE), Usage(1, 1))
    assert len(world.reports) == 2
    world.pair.time += REPORT_EVERY_S
    world.answered(usage(9, LIE))
    assert len(world.reports) == 3
    assert world.counted() == {"pod-1": 6, "other": 1}
