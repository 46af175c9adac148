"""The order of messages on a stream: which orders are legal, and what messages have besides headers and bodies."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.candidates import Candidates
from epp.data import Datum
from epp.decision.decision import SERVED, Decision, Response
from epp.plugin import DataProducer, NoParams, ResponseComplete, ResponseReceived
from epp.prefix.match import PrefixMatch, prefix_match
from epp.protocol.message_order import ILLEGAL, NEXT, Kind, State, violation
from epp.request import Request
from loadtest.load.proto import ext_proc_pb2 as pb
from tests.cases import cases
from tests.examples import examples
from tests.pair import Envoy, Pair, bodies, set_headers
from tests.workers.worker.extproc.streams import BODY, USAGE, Remembers, pair, refusal

SAY = {
    Kind.REQUEST_HEADERS: lambda e: e.headers(),
    Kind.REQUEST_BODY: lambda e: e.body(BODY),
    Kind.REQUEST_TRAILERS: lambda e: e.trailers(),
    Kind.RESPONSE_HEADERS: lambda e: e.response_headers(),
    Kind.RESPONSE_BODY: lambda e: e.response_body(USAGE, last=False),
    Kind.RESPONSE_TRAILERS: lambda e: e.response_trailers(),
}
INTO: dict[State, tuple[Kind, ...]] = {  # state -> the messages that lead to it
    State.AWAIT_HEADERS: (),
    State.AWAIT_BODY: (Kind.REQUEST_HEADERS,),
    State.ROUTED: (Kind.REQUEST_HEADERS, Kind.REQUEST_BODY),
    State.RESPONDING: (Kind.REQUEST_HEADERS, Kind.REQUEST_BODY, Kind.RESPONSE_HEADERS),
    State.DONE: (Kind.REQUEST_HEADERS, Kind.REQUEST_BODY, Kind.RESPONSE_HEADERS, Kind.RESPONSE_TRAILERS),
}


@cases("kind", Kind)
@cases("state", INTO)
def test_every_message_is_accepted_or_closes_the_stream_with_the_state_in_its_status(state: State, kind: Kind) -> None:
    p = pair(Remembers())
    envoy = p.open()
    for step in INTO[state]:
        SAY[step](envoy)
    SAY[kind](envoy)
    if NEXT[state][kind] == ILLEGAL:
        assert envoy.stream.ended == (3, str(violation(state, kind)))
        assert f"{kind.name.lower()} in state {state.name.lower()}: expected " in envoy.stream.ended[1]
        assert p.counter("violations_total") == 1
    else:
        assert envoy.stream.ended in (None, (0, "")), "a body without a model is refused"
    envoy.handler.closed()
    assert sum(p.inflight) == 0 and p.faults == []


def test_a_stream_may_have_only_a_local_reply_of_an_earlier_filter() -> None:
    envoy = pair().open()
    assert [a.WhichOneof("response") for a in envoy.response_headers("429", last=False)] == ["response_headers"]
    assert bodies(envoy.response_body(b"slow down"), "response_body") == (b"slow down", [True])
    assert [a.WhichOneof("response") for a in envoy.response_trailers()] == ["response_trailers"]
    assert envoy.stream.ended is None


def test_both_directions_may_end_with_trailers() -> None:
    envoy = pair().open()
    envoy.headers()
    envoy.body(BODY, last=False)
    assert [a.WhichOneof("response") for a in envoy.trailers()] == ["request_headers", "request_body", "request_trailers"]
    envoy.response_headers()
    assert bodies(envoy.response_body(USAGE, last=False), "response_body") == (USAGE, [False])
    assert [a.WhichOneof("response") for a in envoy.response_trailers()] == ["response_trailers"]


def test_trailers_of_the_request_may_come_after_the_answer_has_begun() -> None:
    envoy = pair().open()
    envoy.headers()
    envoy.body(BODY)
    envoy.response_headers()
    assert [a.WhichOneof("response") for a in envoy.trailers()] == ["request_trailers"]
    assert bodies(envoy.response_body(USAGE), "response_body")[0] == USAGE


@pytest.mark.parametrize("times", [1, 3])
def test_a_repeated_last_piece_is_harmless_in_any_state(times: int) -> None:
    remembers = Remembers()
    p = pair(remembers)
    envoy = p.open()
    envoy.headers()
    answers = envoy.body(BODY)
    for _ in range(times):
        assert envoy.body(BODY) == [] and envoy.body(b"") == []
    assert bodies(answers[1:]) == (BODY, [True])
    envoy.response_headers()
    for _ in range(times):
        assert envoy.body(BODY) == []
    assert bodies(envoy.response_body(USAGE), "response_body") == (USAGE, [True])
    for _ in range(times):
        assert envoy.body(BODY) == []
        envoy.response_body(USAGE)
    envoy.handler.closed()
    assert sum(p.inflight) == 0 and len(remembers.usages) == 1


STEPS = ("headers", "end", "body", "last", "trailers", "rheaders", "rbody", "rlast", "rtrailers")
ORDER = ("request_headers", "request_body", "request_trailers", "response_headers", "response_body", "response_trailers")


@given(st.lists(st.sampled_from(STEPS), max_size=16), st.booleans(), st.booleans(), st.sampled_from([1, 7, 90_000]))
@examples(400)
def test_answers_keep_their_order_and_a_stream_ends_once_for_any_messages(
    steps: list[str], renamed: bool, one_way: bool, size: int
) -> None:
    remembers = Remembers()
    p = pair(remembers)
    p.app.request_phase_only = one_way
    envoy = p.open()
    more = {"x-llm-d-model-name-rewrite": "other"} if renamed else {}
    event = b'data: {"model":"other"}' * size
    say: dict[str, Any] = {
        "headers": lambda: envoy.headers(**more),
        "end": lambda: envoy.headers(last=True),
        "body": lambda: envoy.body(BODY[:9], last=False),
        "last": lambda: envoy.body(BODY),
        "trailers": lambda: envoy.trailers(),
        "rheaders": lambda: envoy.response_headers(),
        "rbody": lambda: envoy.response_body(event, last=False),
        "rlast": lambda: envoy.response_body(event),
        "rtrailers": lambda: envoy.response_trailers(),
    }
    kinds: list[str] = []
    for step in steps:
        if envoy.stream.ended is not None and envoy.stream.ended[0]:
            break
        kinds += [str(answer.WhichOneof("response")) for answer in say[step]()]
    for which in ("request", "response"):
        places = [ORDER.index(kind) for kind in kinds if kind.startswith(which)]
        assert places == sorted(places) and places.count(ORDER.index(f"{which}_headers")) <= 1
    assert kinds.count("immediate_response") <= 1
    if "immediate_response" in kinds:
        assert kinds[-1] == "immediate_response" and envoy.stream.ended == (0, "")
    envoy.handler.closed()
    assert sum(p.inflight) == 0 and p.faults == [] and len(remembers.usages) <= 1


# The endpoint that served the request


class Served(ResponseReceived, ResponseComplete):
    def __init__(self) -> None:
        super().__init__("served", NoParams())
        self.addresses: list[str] = []
        self.targets: list[str] = []

    def response_received(self, request: Request, decision: Decision, response: Response) -> None:
        self.addresses.append(response.served)

    def response_complete(self, request: Request, decision: Decision, response: Response) -> None:
        self.targets = [target.address for target in decision.targets]


def answered(envoy: Envoy, **lb: Any) -> list[Any]:
    message = pb.ProcessingRequest()
    message.response_headers.headers.headers.add(key=":status", raw_value=b"200")
    message.metadata_context.filter_metadata["envoy.lb"].update(lb)
    return envoy.say(message)


def routed(*plugins: Any, **more: Any) -> tuple[Pair, Envoy]:
    p = pair(*plugins, **more)
    envoy = p.open()
    envoy.headers()
    envoy.body(BODY)
    return p, envoy


def test_the_load_moves_to_the_endpoint_that_served_the_request_and_is_released_there() -> None:
    served = Served()
    p, envoy = routed(served)
    assert p.inflight[:3] == [0, 1, 0]
    answered(envoy, **{SERVED: "10.0.0.3:8000"})
    assert p.inflight[:3] == [0, 0, 1]
    envoy.response_body(USAGE)
    assert sum(p.inflight) == 0
    assert served.addresses == ["10.0.0.3:8000"]
    assert served.targets[0] == "10.0.0.3:8000"


@pytest.mark.parametrize("metadata", [{}, {SERVED: 7.0}, {SERVED: "10.0.0.2:8000"}, {SERVED: "10.9.9.9:1"}, {"other": "x"}])
def test_the_load_stays_if_the_gateway_names_no_other_known_endpoint(metadata: dict[str, Any]) -> None:
    p, envoy = routed(Served())
    answered(envoy, **metadata)
    assert p.inflight[:3] == [0, 1, 0]
    envoy.handler.closed()
    assert sum(p.inflight) == 0


# Prefer: if-available

MATCH: Datum[PrefixMatch] = prefix_match("matches")


class Matches(DataProducer):
    produces = (MATCH,)

    def __init__(self, blocks: list[int] | None) -> None:
        super().__init__("matches", NoParams())
        self.blocks = blocks

    def produce(self, request: Request, candidates: Candidates) -> None:
        if self.blocks is not None:
            request[MATCH] = PrefixMatch(np.array(self.blocks), np.zeros(4, np.uint64), 64)


def preferring(value: str, *plugins: Any) -> list[Any]:
    envoy = pair(*plugins).open()
    envoy.headers(prefer=value)
    return envoy.body(BODY)


@pytest.mark.parametrize("value", ["if-available", "If-Available", "wait=10, if-available;x=1", " if-available "])
def test_a_request_that_prefers_a_cached_prompt_is_refused_if_there_is_none(value: str) -> None:
    code, error, _ = refusal(preferring(value, Matches([5, 0, 5])))
    assert code == 412
    assert error["message"] == "inference error: PreconditionFailed - no decode worker has the requested KV cache"
    assert refusal(preferring(value))[0] == 412, "no plugin matches prefixes"
    assert refusal(preferring(value, Matches(None)))[0] == 412


@pytest.mark.parametrize("value", ["if-available", "return=minimal, if-available"])
def test_a_match_at_the_chosen_endpoint_is_enough(value: str) -> None:
    assert set_headers(preferring(value, Matches([0, 1, 0]))[0])["x-gateway-destination-endpoint"] == "10.0.0.2:8000"


@pytest.mark.parametrize("value", ["", "return=minimal", "if-available-not", "x;if-available"])
def test_other_preferences_change_nothing(value: str) -> None:
    assert preferring(value, Matches([0, 0, 0]))[0].WhichOneof("response") == "request_headers"


# No response phase


def test_without_a_response_phase_the_stream_ends_with_the_answer_to_the_request() -> None:
    p = pair()
    p.app.request_phase_only = True
    for last in (False, True):
        envoy = p.open()
        answers = envoy.headers(last=last) + ([] if last else envoy.body(BODY))
        assert answers[0].WhichOneof("response") == "request_headers"
        assert envoy.stream.ended == (0, "")
        assert sum(p.inflight) == 0
        envoy.handler.closed()
    assert p.counter("picks_total") == 2
