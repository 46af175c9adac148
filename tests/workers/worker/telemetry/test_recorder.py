"""What a worker records of its requests, from the stream to the records that a reader gets."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from epp.candidates import Candidates
from epp.config.load import load
from epp.plugin import DataProducer, NoParams
from epp.protocol.usage_structs import TOKENS_MAX
from epp.recording.batches import Assembler
from epp.recording.keys import Keyed, id_hash
from epp.recording.records import Batch, Configured, Decided, Ended, EndpointList, Record, decode, floats, frame, ints
from epp.recording.sample import Sample
from epp.request import Request
from tests.fakes import FakePool, FakeServices, candidates
from tests.pair import Envoy, Pair
from tests.workers.worker.extproc.streams import BODY, USAGE, Broken, Denies, pair
from workers.worker.telemetry.recorder import Recorder, RecordSender
from workers.worker.telemetry.request_telemetry import Telemetry

ID = "0a1b2c3d-1111-4222-8333-444455556666"
SECRET = 7
CONFIG = """
plugins:
- {type: prefix-cache-scorer}
- {type: queue-scorer}
- {type: kv-cache-utilization-scorer}
- {type: header-label-affinity-scorer, parameters: {headerName: X-Zone, labelKey: zone}}
"""


class Recording:
    """A pair whose requests are recorded, and what the supervisor would get. `full`: whether the bus is full."""

    def __init__(self, site: Pair, pipeline: Any = None) -> None:
        self.site = site
        self.full = False
        self.lost = 0
        self.packets: list[bytes] = []
        self.sender = RecordSender(3, self._offer, self._count)
        self.sender.use(1)
        used = pipeline or site.app.pipelines.whole
        site.app.telemetry.recorder = Recorder(self.sender, Keyed(SECRET), generation=2, config_hash="abc", pipeline=used)

    def _offer(self, packet: bytes) -> bool:
        if not self.full:
            self.packets.append(packet)
        return not self.full

    def _count(self, records: int) -> None:
        self.lost += records

    def batches(self) -> list[bytes]:
        """Returns all encoded batches that were sent since the last call."""
        self.sender.flush()
        assembler, packets = Assembler(), self.packets
        self.packets = []
        return [whole.data for packet in packets if (whole := assembler.take(packet)) is not None]

    def records(self) -> list[Record]:
        """Returns all records that were sent since the last call."""
        return [record for batch in decode(frame(self.batches())) for record in batch]

    def of(self, kind: type[Any]) -> Any:
        (found,) = [record for record in self.records() if isinstance(record, kind)]
        return found


def answered(site: Pair, body: bytes = BODY, *, status: str = "200", **headers: str) -> None:
    envoy = site.open()
    envoy.headers(**headers)
    envoy.body(body)
    site.time += 0.25
    envoy.response_headers(status=status)
    envoy.response_body(USAGE[:10], last=False)
    site.time += 0.5
    envoy.response_body(USAGE[10:])


def with_prefixes() -> tuple[Pair, Any]:
    pipeline = load(CONFIG, "test", allow_experimental=True).pipeline
    pipeline.start(FakeServices())
    pool = FakePool(candidates({"waiting_requests": (2, 0, 1), "kv_cache_usage": (0.1, 0.2, 0.3)}, inflight=(1, 2, 3)))
    return Pair(pipeline, pool), pipeline


def test_a_request_has_a_record_of_its_decision_and_one_of_its_end() -> None:
    site = pair()
    recording = Recording(site)
    answered(site, **{"x-request-id": ID, "x-llm-d-inference-fairness-id": "acme"})
    batch, configured, endpoint_list, decided, ended = recording.records()
    assert (batch.worker, configured.generation, configured.hash) == (3, 2, "abc")
    assert [(p.name, p.picker, p.scorers) for p in configured.profiles] == [("default", "p", [("q", 1.0, False)])]
    assert ints(endpoint_list.slots).tolist() == [0, 1, 2] and decided.endpoint_list == endpoint_list.number
    assert (decided.id, decided.model, decided.target_model) == (id_hash(ID), "m", "")
    assert decided.flow == Keyed(SECRET)("acme") and decided.body_bytes == len(BODY) and decided.max_tokens == 9
    (run,) = decided.runs
    assert floats(run.totals).tolist() == floats(run.scores[0]).tolist() == [0.0, 1.0, 0.5]
    assert decided.targets == [1] and run.picked == [1] and not decided.refused
    assert ints(decided.inflight).tolist() == [0, 0, 0]
    assert (ended.number, ended.status, ended.slot, ended.whole) == (decided.number, 200, 1, True)
    assert (ended.first_s, ended.lasted_s, ended.answer_bytes) == (0.25, 0.75, len(USAGE))
    assert (ended.prompt, ended.cached, ended.completion) == (9, 5, 4)


@pytest.mark.parametrize("plugins", [(), (Denies("d", NoParams()),), (Broken("b", NoParams()),)])
def test_a_request_is_recorded_if_the_recording_began_after_the_last_heartbeat(plugins: Any) -> None:
    site = pair(*plugins)
    begun: list[Recording] = []
    site.app.telemetry = Telemetry(
        site.area, site.series.metrics, site.recent, now=lambda: site.time, look=lambda: begun.append(Recording(site))
    )
    envoy = site.open()
    envoy.headers()
    envoy.body(BODY)
    (recording,) = begun
    assert bool(recording.of(Decided).refused) == bool(plugins)


def test_prefixes_and_facts_about_headers_are_hashes() -> None:
    site, pipeline = with_prefixes()
    recording = Recording(site, pipeline)
    prompt = "p" * 600
    answered(site, b'{"model":"m","prompt":"%s"}' % prompt.encode(), **{"x-zone": "zone-canary"})
    configured, decided = (r for r in recording.records() if isinstance(r, Configured | Decided))
    assert configured.headers == ["x-zone"] and decided.facts == [Keyed(SECRET)("zone-canary")]
    assert decided.block_tokens == 64 and len(np.frombuffer(decided.hashes, "<u8")) == 3
    assert ints(decided.inflight).tolist() == [1, 2, 3]
    static = [name for name, _, is_static in configured.profiles[0].scorers if is_static]
    assert static == ["kv-cache-utilization-scorer"]
    assert len(decided.runs[0].scores) == len(configured.profiles[0].scorers) - len(static)


def test_configuration_and_endpoints_are_described_once_per_file() -> None:
    site = pair()
    recording = Recording(site)
    for _ in range(3):
        answered(site)
    first = recording.records()
    recording.sender.use(2)
    answered(site)
    second = recording.records()
    for records in (first, second):
        assert [type(r) for r in records if isinstance(r, Configured | EndpointList)] == [Configured, EndpointList]
    assert [r.number for r in first if isinstance(r, Decided)] == [1, 2, 3]


@pytest.mark.parametrize(("plugin", "cause"), [(Denies("d", NoParams()), "no_endpoint_left"), (Broken("b", NoParams()), "internal")])
def test_a_refused_request_is_recorded_with_its_cause(plugin: Any, cause: str) -> None:
    site = pair(plugin)
    recording = Recording(site)
    envoy = site.open()
    envoy.headers()
    envoy.body(BODY)
    decided = recording.of(Decided)
    assert decided.refused.replace("-", "_") == cause and not decided.targets and not decided.runs


def test_an_answer_that_never_came_has_status_0() -> None:
    site = pair()
    recording = Recording(site)
    envoy = site.open()
    envoy.headers()
    envoy.body(BODY)
    envoy.handler.closed()
    ended = recording.of(Ended)
    assert ended.status == 0 and not ended.whole and ended.first_s != ended.first_s and ended.prompt is None


def test_an_error_of_the_server_is_recorded_with_its_status() -> None:
    site = pair()
    recording = Recording(site)
    answered(site, status="503")
    assert recording.of(Ended).status == 503


def test_a_full_bus_loses_records_and_no_request_and_later_records_do_not_refer_to_lost_ones() -> None:
    site = pair()
    recording = Recording(site)
    recording.full = True
    answered(site)
    assert not recording.records() and recording.lost == 4
    recording.full = False
    answered(site)
    assert [type(record) for record in recording.records()] == [Batch, Configured, EndpointList, Decided, Ended]


@pytest.mark.parametrize("most", [b"18446744073709551616", b"1e308"])
def test_a_request_may_ask_for_more_tokens_than_a_record_can_count(most: bytes) -> None:
    site = pair()
    recording = Recording(site)
    answered(site, BODY.replace(b"9", most))
    assert recording.of(Decided).max_tokens == TOKENS_MAX and not recording.lost


class Boasts(DataProducer):
    def produce(self, request: Request, candidates: Candidates) -> None:
        if request.id == "boaster":
            request.max_tokens = 1 << 64


def test_a_record_that_cannot_be_encoded_is_lost_alone() -> None:
    site = pair(Boasts("b", NoParams()))
    recording = Recording(site)
    for name in ("before", "boaster", "after"):
        answered(site, **{"x-request-id": name})
    decided = [record.id for record in recording.records() if isinstance(record, Decided)]
    assert decided == [id_hash("before"), id_hash("after")] and recording.lost == 1


def test_requests_of_before_are_not_recorded_at_their_end() -> None:
    site = pair()
    envoy: Envoy = site.open()
    envoy.headers()
    envoy.body(BODY)
    recording = Recording(site)
    envoy.response_headers()
    envoy.response_body(USAGE)
    assert not recording.records()


def test_nothing_is_recorded_without_a_recorder() -> None:
    site = pair()
    recording = Recording(site)
    off: Callable[[], None] = lambda: setattr(site.app.telemetry, "recorder", None)  # noqa: E731 - a step of the test
    off()
    answered(site)
    assert not recording.records()


def test_a_sample_leaves_out_usual_requests_and_keeps_failed_ones_whole() -> None:
    site = pair()
    recording = Recording(site)
    sample = Sample()
    site.app.telemetry.recorder.sample = sample
    while sample.decided(site.time):
        pass
    answered(site, id=ID)
    usual = recording.records()
    while sample.decided(site.time):
        pass
    answered(site, status="503", id=ID)
    failed = recording.records()
    assert not [record for record in usual if isinstance(record, Ended) and record.status == 200][1:]
    (decided,) = [record for record in failed if isinstance(record, Decided)]
    (ended,) = [record for record in failed if isinstance(record, Ended)]
    assert (decided.number, ended.status) == (ended.number, 503)
    assert decided.targets and decided.waited_s < ended.first_s
