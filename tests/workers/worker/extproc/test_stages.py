"""Disaggregated requests in a worker: where and how long they are in flight, and what the gateway gets."""

from typing import Any

import numpy as np
import pytest

from epp.candidates import Candidates, EndpointList, Snapshot
from epp.decision.pipeline import WiredProfile, Wiring, compile_pipeline
from epp.plugin import NoParams, Plugin, ResponseStreaming
from epp.plugins.deciders.simple import Always
from epp.plugins.filters.roles import DecodeFilter, EncodeFilter, PrefillFilter
from epp.plugins.parsers.openai import OpenAI
from epp.plugins.pickers.max_score import MaxScore
from epp.plugins.profiles._disagg_parameters import StageDeciders
from epp.plugins.profiles.disagg import Disaggregated
from epp.protocol.codec import NEVER_PASSED
from loadtest.load.proto import ext_proc_pb2 as pb
from tests.fakes import FakePool, FakeServices, endpoints
from tests.pair import Envoy, Pair, set_headers

BODY = b'{"model":"m","prompt":"hello","max_tokens":3}'
ROLES = ("decode", "prefill", "encode")
PREFILLER, ENCODERS = "x-prefiller-host-port", "x-encoder-hosts-ports"


class Streams(ResponseStreaming):
    def __init__(self) -> None:
        super().__init__("streams", NoParams())
        self.pieces = 0

    def response_streaming(self, request: Any, decision: Any) -> None:
        self.pieces += 1


def pair(*others: Plugin, roles: tuple[str, ...] = ROLES) -> Pair:
    picker, parser = MaxScore("p", MaxScore.Params()), OpenAI("o", NoParams())
    deciders = StageDeciders(prefill="always", encode="always")
    handler = Disaggregated("h", Disaggregated.Params(deciders=deciders))
    always = Always("always", NoParams())
    handler.resolve({"prefill": always, "encode": always})
    profiles = {"decode": DecodeFilter, "prefill": PrefillFilter, "encode": EncodeFilter}
    pipeline = compile_pipeline(
        Wiring(
            plugins=(handler, picker, parser, *others),
            parsers=(parser,),
            handler=handler,
            profiles=tuple(WiredProfile(name, ((kind(name, NoParams()), 1.0), (picker, 1.0))) for name, kind in profiles.items()),
            producers=(),
        )
    )
    pipeline.start(FakeServices())  # type: ignore[arg-type]
    size = len(roles)
    yes, no, zeros = np.ones(size, dtype=bool), np.zeros(size, dtype=bool), np.zeros(size)
    endpoint_list = EndpointList(endpoints(size, [{"llm-d.ai/role": role} for role in roles]))
    return Pair(pipeline, FakePool(Candidates(Snapshot(endpoint_list, {}, fresh=yes, known=yes, down=no, inflight_at_scrape=zeros), zeros)))


def sent(p: Pair) -> Envoy:
    envoy = p.open()
    envoy.headers()
    envoy.body(BODY)
    return envoy


def test_a_request_is_in_flight_at_the_servers_of_all_stages_until_the_first_piece_of_the_answer() -> None:
    p = pair()
    envoy = sent(p)
    assert p.inflight[:3] == [1, 1, 1]
    envoy.response_headers(kind="text/event-stream")
    assert p.inflight[:3] == [1, 1, 1]
    for _ in range(3):
        envoy.response_body(b"data: {}\n\n", last=False)
        assert p.inflight[:3] == [1, 0, 0]
    envoy.response_body(b"data: [DONE]\n\n")
    assert p.inflight[:3] == [0, 0, 0]
    envoy.handler.closed()
    assert p.inflight[:3] == [0, 0, 0]


def test_plugins_see_every_piece_but_the_last() -> None:
    streams = Streams()
    envoy = sent(pair(streams))
    envoy.response_headers(kind="text/event-stream")
    for _ in range(3):
        envoy.response_body(b"data: {}\n\n", last=False)
    envoy.response_body(b"data: [DONE]\n\n")
    assert streams.pieces == 3


@pytest.mark.parametrize("ending", ["closed", "half_closed", "violation", "headers only", "whole", "local reply"])
def test_every_ending_of_the_stream_releases_everything_once(ending: str) -> None:
    p = pair()
    envoy = sent(p)
    assert p.inflight[:3] == [1, 1, 1]
    if ending == "violation":
        envoy.handler.message(pb.ProcessingRequest(request_headers=pb.HttpHeaders()).SerializeToString())
    elif ending == "headers only":
        envoy.response_headers("500", last=True)
    elif ending == "whole":
        envoy.response_headers()
        envoy.response_body(b"{}")
    elif ending == "local reply":
        envoy.response_headers("503")
    else:
        getattr(envoy.handler, ending)()
    envoy.handler.closed()
    assert p.inflight == [0] * len(p.inflight)
    assert p.faults == []


def test_a_server_of_two_stages_counts_the_request_twice() -> None:
    p = pair(roles=("both", "encode"))
    envoy = sent(p)
    assert p.inflight[:2] == [2, 1]
    envoy.handler.closed()
    assert p.inflight[:2] == [0, 0]


def test_a_failed_stage_has_nothing_in_flight() -> None:
    p = pair(roles=("decode", "encode"))
    envoy = sent(p)
    assert p.inflight[:2] == [1, 1]
    envoy.handler.closed()
    assert p.inflight[:2] == [0, 0]


def test_stage_headers_are_set_or_removed() -> None:
    for roles, prefills in ((ROLES, True), (("decode", "encode"), False)):
        envoy = pair(roles=roles).open()
        envoy.headers(**{PREFILLER: "10.9.9.9:1", ENCODERS: "10.9.9.9:1"})
        answer = envoy.body(BODY)[0]
        removed = answer.request_headers.response.header_mutation.remove_headers
        assert set_headers(answer)["x-gateway-destination-endpoint"] == "10.0.0.1:8000"
        assert set_headers(answer).get(PREFILLER) == ("10.0.0.2:8000" if prefills else None)
        assert ENCODERS in set_headers(answer)
        unset = [*([] if prefills else [PREFILLER]), "x-data-parallel-host-port", "x-kv-cache-source-host-port"]
        assert list(removed) == [*unset, *NEVER_PASSED]
