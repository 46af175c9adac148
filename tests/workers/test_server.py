"""One ext_proc stream, from Envoy's first message to its end."""

import itertools
import json
import tracemalloc
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.candidates import Candidates
from epp.data import WAITING
from epp.decision import Decision, Response, Usage
from epp.errors import Cause, Refused
from epp.pipeline import Recipe, WiredProfile, compile_pipeline
from epp.plugin import DataProducer, NoParams, Parser, Plugin, ResponseComplete
from epp.plugins.parsers.openai import OpenAI
from epp.plugins.parsers.passthrough import Passthrough
from epp.plugins.pickers.max_score import MaxScore
from epp.plugins.producers.tokenizer import Tokens
from epp.plugins.profiles.single import SingleProfile
from epp.plugins.scorers.queue_depth import QueueDepth
from epp.request import Request
from tests.fakes import FakePool, FakeServices, candidates
from tests.pair import Pair, bodies, set_headers
from workers.app import SEVERAL_MAX
from workers.server import SMALL_PIECE, SMALL_PIECES_MAX

BODY = b'{"model":"m", "prompt":"hello",  "max_tokens":3}'
USAGE = b'{"id":"1","usage":{"prompt_tokens":9,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":5}}}'


class Remembers(ResponseComplete):
    def __init__(self) -> None:
        super().__init__("remembers", NoParams())
        self.usages: list[Usage | None] = []
        self.statuses: list[int] = []

    def response_complete(self, request: Request, decision: Decision, response: Response) -> None:
        self.statuses.append(response.status)
        self.usages.append(response.usage)


class Future:
    def __init__(self) -> None:
        self.callback: Any = None

    def add_done_callback(self, callback: Any) -> None:
        self.callback = callback

    def __await__(self) -> Generator["Future", None, None]:
        yield self


class Waits(DataProducer):
    def __init__(self) -> None:
        super().__init__("waits", NoParams())
        self.future = Future()

    def produce(self, request: Request, candidates: Candidates) -> Any:
        return self.future


class Denies(DataProducer):
    def produce(self, request: Request, candidates: Candidates) -> None:
        raise Refused(Cause.NO_ENDPOINT_LEFT)


class Broken(DataProducer):
    def produce(self, request: Request, candidates: Candidates) -> None:
        raise ZeroDivisionError


def pair(
    *others: Plugin, waiting: tuple[float, ...] = (2, 0, 1), parsers: tuple[Parser, ...] = (), **more: Any
) -> Pair:
    picker, scorer = MaxScore("p", MaxScore.Params()), QueueDepth("q", NoParams())
    parsers = (OpenAI("o", NoParams()), *parsers, Passthrough("x", NoParams()))
    pipeline = compile_pipeline(
        Recipe(
            plugins=(picker, scorer, *parsers, *others),
            parsers=parsers,
            handler=SingleProfile("h", NoParams()),
            profiles=(WiredProfile("default", ((scorer, 1.0), (picker, 1.0))),),
            producers=tuple(p for p in others if isinstance(p, DataProducer)),
            columns=(WAITING,),
        )
    )
    pipeline.start(FakeServices())
    return Pair(pipeline, FakePool(candidates({"waiting_requests": list(waiting)}, count=len(waiting))), **more)


def refusal(responses: list[Any]) -> tuple[int, dict[str, Any], dict[str, str]]:
    (response,) = responses
    immediate = response.immediate_response
    headers = {o.header.key: o.header.raw_value.decode() for o in immediate.headers.set_headers}
    return immediate.status.code, json.loads(immediate.body)["error"], headers


def test_a_request_goes_to_the_shortest_queue_and_its_body_passes_byte_for_byte() -> None:
    p = pair()
    envoy = p.open()
    assert envoy.headers() == []
    answers = envoy.body(BODY)
    assert set_headers(answers[0])["x-gateway-destination-endpoint"] == "10.0.0.2:8000"
    assert set_headers(answers[0])["content-length"] == str(len(BODY))
    assert answers[0].dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"] == "10.0.0.2:8000"
    assert bodies(answers[1:]) == (BODY, [True])
    assert p.inflight[:3] == [0, 1, 0]
    assert [r.WhichOneof("response") for r in envoy.response_headers()] == ["response_headers"]
    assert bodies(envoy.response_body(USAGE), "response_body") == (USAGE, [True])
    assert p.inflight[:3] == [0, 0, 0]
    envoy.handler.half_closed()
    assert envoy.stream.ended == (0, "")


@given(st.lists(st.integers(0, 400_000), max_size=6), st.integers(0, 200_000))
@settings(max_examples=40, deadline=None)
def test_a_body_of_any_chunking_passes_byte_for_byte(cuts: list[int], size: int) -> None:
    body = b'{"model":"m","prompt":"' + b"p" * (size + 1) + b'"}'
    envoy = pair().open()
    envoy.headers()
    borders = [0, *sorted(c % len(body) for c in cuts), len(body)]
    answers = []
    for a, b in itertools.pairwise(borders):
        answers = envoy.body(body[a:b], last=b == len(body) and b is borders[-1])
    assert bodies(answers[1:])[0] == body
    assert bodies(answers[1:])[1][-1] is True and not any(bodies(answers[1:])[1][:-1])


@pytest.mark.parametrize("large", [None, 100, 2000, 2999])
def test_very_many_small_pieces_become_few_and_pass_byte_for_byte(large: int | None) -> None:
    pieces = [bytes([byte]) for byte in b'{"model":"m","prompt":"' + b"p" * 3000 + b'"}']
    if large is not None:
        pieces[large] = b"P" * SMALL_PIECE
    envoy = pair().open()
    envoy.headers()
    for piece in pieces[:-1]:
        assert envoy.body(piece, last=False) == []
    answers = envoy.body(pieces[-1])[1:]
    assert bodies(answers)[0] == b"".join(pieces)
    assert bodies(answers)[1] == [False] * (len(answers) - 1) + [True]
    assert len(answers) < 2 * SMALL_PIECES_MAX


def test_request_trailers_end_a_body() -> None:
    envoy = pair().open()
    envoy.headers()
    envoy.body(BODY, last=False)
    answers = envoy.trailers()
    assert [r.WhichOneof("response") for r in answers] == ["request_headers", "request_body", "request_trailers"]
    assert bodies(answers)[1] == [False]


def test_a_repeated_last_body_piece_is_harmless() -> None:
    p = pair()
    envoy = p.open()
    envoy.headers()
    envoy.body(BODY)
    assert envoy.body(BODY) == []
    assert p.inflight[:3] == [0, 1, 0]
    envoy.response_headers()
    assert bodies(envoy.response_body(USAGE), "response_body")[0] == USAGE


def test_usage_of_the_model_server_reaches_plugins_and_counters() -> None:
    remembers = Remembers()
    p = pair(remembers)
    envoy = p.open()
    envoy.headers()
    envoy.body(BODY)
    envoy.response_headers()
    envoy.response_body(USAGE[:30], last=False)
    envoy.response_body(USAGE[30:])
    assert remembers.usages == [Usage(9, 4, 5)]
    assert [p.counter(n) for n in ("prompt_tokens_total", "cached_prompt_tokens_total", "completion_tokens_total")] == [
        9,
        5,
        4,
    ]


def test_response_trailers_end_the_response() -> None:
    remembers = Remembers()
    envoy = pair(remembers).open()
    envoy.headers()
    envoy.body(BODY)
    envoy.response_headers()
    envoy.response_body(USAGE, last=False)
    assert [r.WhichOneof("response") for r in envoy.response_trailers()] == ["response_trailers"]
    envoy.handler.half_closed()
    assert len(remembers.usages) == 1


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v1/completions", b"{", 400, "inference error: BadRequest - invalid request body: "),
        ("/v1/completions", b'{"prompt":"x"}', 400, "inference error: BadRequest - model not found in request body"),
        (
            "/v1/completions",
            b'{"model":7,"prompt":"x"}',
            400,
            "inference error: BadRequest - model not found in request body",
        ),
        (
            "/v1/completions",
            b'{"model":"m"}',
            400,
            "inference error: BadRequest - invalid completions request: must have prompt field",
        ),
        (
            "/v1/completions",
            b'{"model":"m","prompt":["a",1]}',
            400,
            "inference error: BadRequest - invalid completions request: prompt: ",
        ),
        (
            "/v1/chat/completions",
            b'{"model":"m","messages":[]}',
            400,
            "inference error: BadRequest - invalid chat completions request: must have valid messages field",
        ),
        (
            "/v1/embeddings",
            b'{"model":"m","input":""}',
            400,
            "inference error: BadRequest - invalid embeddings request: must have input field",
        ),
        (
            "/v1/responses",
            b'{"model":"m"}',
            400,
            "inference error: BadRequest - invalid responses request: must have input field",
        ),
        (
            "/v1/conversations",
            b'{"model":"m","items":[]}',
            400,
            "inference error: BadRequest - invalid conversations request: must have items field",
        ),
        (
            "/v1/images/generations",
            b'{"model":"m"}',
            400,
            "inference error: BadRequest - invalid images generations request: must have prompt field",
        ),
        ("/v1/completions", b"[" * 100_000, 400, "inference error: BadRequest - invalid request body: "),
    ],
)
def test_bad_bodies_are_refused_in_openais_shape(path: str, body: bytes, status: int, message: str) -> None:
    p = pair()
    envoy = p.open()
    envoy.headers(path)
    code, error, headers = refusal(envoy.body(body))
    assert (code, error["type"], error["code"]) == (status, "BadRequest", status)
    assert error["message"].startswith(message)
    assert headers["content-type"] == "application/json"
    assert envoy.stream.ended == (0, "")
    assert p.counter("refusals_total") == 1 and sum(p.inflight) == 0


def test_a_body_over_the_limit_is_413_before_it_is_whole() -> None:
    envoy = pair(body_bytes_max=1000).open()
    envoy.headers()
    assert envoy.body(b"x" * 900, last=False) == []
    code, error, _ = refusal(envoy.body(b"x" * 101, last=False))
    assert (code, error["type"], error["message"]) == (
        413,
        "PayloadTooLarge",
        "inference error: PayloadTooLarge - request body exceeds 1000 bytes",
    )
    envoy.handler.message(b"\x22\x02\x10\x01")  # what is still under way is ignored
    assert envoy.answers() == []


def test_a_body_that_stops_coming_is_408() -> None:
    envoy = pair().open()
    assert envoy.handler.awaited() == 0
    envoy.headers()
    envoy.body(BODY[:5], last=False)
    assert envoy.handler.awaited() == 5
    envoy.handler.give_up_waiting(30.0)
    code, error, _ = refusal(envoy.answers())
    assert (code, error["type"]) == (408, "RequestTimeout")
    assert "came for 30 seconds" in error["message"]
    assert envoy.handler.awaited() == -1


def test_a_stream_without_a_request_ends_with_a_status_since_there_is_nothing_to_answer() -> None:
    envoy = pair().open()
    envoy.handler.give_up_waiting(30.0)
    assert envoy.answers() == []
    assert envoy.stream.ended == (4, "no request came for 30 seconds")


def test_a_routed_request_owes_nothing() -> None:
    envoy = pair().open()
    envoy.headers()
    envoy.body(BODY)
    assert envoy.handler.awaited() == -1


def test_pieces_of_a_body_count_as_held_until_it_is_routed() -> None:
    envoy = pair().open()
    envoy.headers()
    envoy.body(BODY[:5], last=False)
    envoy.body(BODY[5:9], last=False)
    assert envoy.stream.held == (4 + 5) + (4 + 4)  # of each the whole message
    envoy.body(BODY[9:])
    assert envoy.stream.held == 0


def test_a_body_of_one_piece_that_trailers_end_is_held_no_longer_than_others() -> None:
    envoy = pair().open()
    envoy.headers()
    envoy.body(BODY, last=False)
    assert envoy.stream.held > len(BODY)
    envoy.trailers()
    assert envoy.stream.held == 0


def test_a_body_of_one_piece_is_not_counted() -> None:
    envoy = pair().open()
    envoy.headers()
    envoy.stream.held_max = -1
    assert [a.WhichOneof("response") for a in envoy.body(BODY)] == ["request_headers", "request_body"]


def test_bodies_that_together_hold_too_much_are_429() -> None:
    envoy = pair().open()
    envoy.headers()
    envoy.stream.held_max = 100
    assert envoy.body(b"x" * 90, last=False) == []
    code, error, headers = refusal(envoy.body(b"x" * 20, last=False))
    assert (code, error["type"]) == (429, "ResourceExhausted")
    assert headers["x-llm-d-request-dropped-reason"] == "rejected-saturated"


@pytest.mark.parametrize("subset", [[], ["10.9.9.9:1"]])
def test_a_subset_without_endpoints_is_503_with_a_reason(subset: list[str]) -> None:
    envoy = pair().open()
    envoy.headers()
    code, error, headers = refusal(envoy.body(BODY, subset=subset))
    assert (code, error["type"]) == (503, "ServiceUnavailable")
    assert headers["x-llm-d-request-dropped-reason"] == "rejected-no-endpoints"


def test_the_subset_of_either_message_is_obeyed_and_the_bodys_wins() -> None:
    for first, second, expected in (
        (["10.0.0.1"], None, "10.0.0.1:8000"),
        (["10.0.0.1"], ["10.0.0.3:8000"], "10.0.0.3:8000"),
    ):
        envoy = pair().open()
        envoy.headers(subset=first)
        assert set_headers(envoy.body(BODY, subset=second)[0])["x-gateway-destination-endpoint"] == expected


def test_a_request_without_a_body_is_routed_at_once_within_its_subset() -> None:
    p = pair()
    envoy = p.open()
    (answer,) = envoy.headers("/v1/models", last=True, subset=["10.0.0.3"])
    assert set_headers(answer)["x-gateway-destination-endpoint"] == "10.0.0.3:8000"
    assert p.inflight[:3] == [0, 0, 1]
    envoy.response_headers(last=True)
    assert sum(p.inflight) == 0


def test_a_request_without_a_body_is_503_without_endpoints() -> None:
    code, _, headers = refusal(pair(waiting=()).open().headers("/v1/models", last=True))
    assert (code, headers["x-llm-d-request-dropped-reason"]) == (503, "rejected-no-endpoints")


def test_a_request_id_is_made_when_there_is_none_and_kept_when_there_is() -> None:
    envoy = pair().open()
    envoy.headers()
    assert len(set_headers(envoy.body(BODY)[0])["x-request-id"]) == 36
    envoy = pair().open()
    envoy.headers(**{"x-request-id": "mine"})
    assert "x-request-id" not in set_headers(envoy.body(BODY)[0])


@pytest.mark.parametrize("when", ["headers", "half body", "routed", "response headers", "half response", "done"])
@pytest.mark.parametrize("how", ["closed", "half_closed"])
def test_whatever_ends_a_stream_releases_it_once(when: str, how: str) -> None:
    remembers = Remembers()
    p = pair(remembers)
    envoy = p.open()
    steps = {
        "headers": lambda: envoy.headers(),
        "half body": lambda: envoy.body(BODY[:5], last=False),
        "routed": lambda: envoy.body(BODY[5:]),
        "response headers": lambda: envoy.response_headers(),
        "half response": lambda: envoy.response_body(USAGE[:9], last=False),
        "done": lambda: envoy.response_body(USAGE[9:]),
    }
    for name, step in steps.items():
        step()
        if name == when:
            break
    getattr(envoy.handler, how)()
    envoy.handler.closed()
    assert sum(p.inflight) == 0
    assert len(remembers.usages) == (0 if when in ("headers", "half body") else 1)
    assert p.faults == []


def test_a_message_out_of_order_closes_the_stream_and_names_the_state() -> None:
    p = pair()
    envoy = p.open()
    envoy.headers()
    envoy.response_body(b"x")
    assert envoy.stream.ended is not None
    status, text = envoy.stream.ended
    assert status == 3 and "response_body in state await_body" in text
    assert p.counter("violations_total") == 1


def test_garbage_closes_the_stream() -> None:
    envoy = pair().open()
    envoy.handler.message(b"\xff\xff\xff")
    assert envoy.stream.ended is not None and envoy.stream.ended[0] == 3


def test_a_broken_plugin_is_500_for_this_request_only() -> None:
    p = pair(Broken("broken", NoParams()))
    envoy = p.open()
    envoy.headers()
    code, error, _ = refusal(envoy.body(BODY))
    assert (code, error["type"]) == (500, "Internal")
    assert isinstance(p.faults[0], ZeroDivisionError) and sum(p.inflight) == 0


def test_a_decision_that_waits_goes_on_when_its_future_is_done() -> None:
    waits = Waits()
    envoy = pair(waits).open()
    envoy.headers()
    assert envoy.body(BODY) == []
    waits.future.callback(waits.future)
    assert set_headers(envoy.answers()[0])["x-gateway-destination-endpoint"] == "10.0.0.2:8000"


@pytest.mark.parametrize("ending", ["closed", "half_closed", "local reply"])
def test_a_waiting_decision_is_given_up_when_nobody_waits_for_it(ending: str) -> None:
    waits = Waits()
    p = pair(waits)
    envoy = p.open()
    envoy.headers()
    envoy.body(BODY)
    if ending == "local reply":
        assert [r.WhichOneof("response") for r in envoy.response_headers("504")] == ["response_headers"]
    else:
        getattr(envoy.handler, ending)()
    waits.future.callback(waits.future)
    assert envoy.answers() == [] and sum(p.inflight) == 0 and p.faults == []


@pytest.mark.parametrize(("told", "text"), [("decision", "evicted from queue"), ("body", "rejected pre-queue")])
def test_what_waits_when_the_worker_leaves_is_refused_with_the_reason(told: str, text: str) -> None:
    waits = Waits()
    p = pair(waits)
    envoy = p.open()
    envoy.headers()
    envoy.body(BODY, last=told == "decision")
    assert envoy.handler.refuse_waiting()
    (answer,) = envoy.answers()
    assert answer.immediate_response.status.code == 503
    said = answer.immediate_response.body.decode()
    assert f"flow controller shutting down: request {text}: flow controller is not running" in said
    headers = {o.header.key: o.header.raw_value for o in answer.immediate_response.headers.set_headers}
    assert headers["x-llm-d-request-dropped-reason"] == b"rejected-shutting-down"
    assert not envoy.handler.refuse_waiting()
    assert sum(p.inflight) == 0 and p.faults == []


def test_what_is_routed_or_has_not_begun_is_not_refused_when_the_worker_leaves() -> None:
    envoy = pair().open()
    assert not envoy.handler.refuse_waiting()
    envoy.headers()
    envoy.body(BODY)
    assert not envoy.handler.refuse_waiting()


def test_any_path_goes_to_the_parser_with_the_longest_suffix_and_else_to_the_fallback() -> None:
    app = pair().app
    types = {
        path: app.parser(path)[0].type_name for path in ("/v1/chat/completions/", "/p/v1/completions", "/whatever")
    }
    assert list(types.values()) == ["openai-parser", "openai-parser", "passthrough-parser"]


def test_very_long_paths_are_found_by_their_ends_and_not_remembered() -> None:
    p = pair()
    tracemalloc.start()
    try:
        for number in range(100):
            path = f"/{number}{'/p' * 25_000}/v1/chat/completions/"
            assert p.app.parser(path)[0].type_name == "openai-parser"
            envoy = p.open()
            envoy.headers(path)
            (answer, _) = envoy.body(b'{"model":"m","messages":[{"content":"hello"}]}')
            assert answer.WhichOneof("response") == "request_headers"
            del envoy
        p.recent.kept.clear()
        assert tracemalloc.get_traced_memory()[0] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("routed", [True, False])
@pytest.mark.parametrize("what", ["prompt", "cache_salt"])
def test_while_an_answer_lasts_nothing_as_long_as_the_body_is_kept(what: str, routed: bool) -> None:
    tokens = Tokens("token-producer", Tokens.Params())
    p = pair(tokens, *(() if routed else (Denies("d", NoParams()),)))
    body = json.dumps({"model": "m", "prompt": "x", what: "y" * 1_000_000}).encode()
    tracemalloc.start()
    try:
        envoy = p.open()
        envoy.headers()
        answers = envoy.body(body)
        assert (answers[0].WhichOneof("response") == "request_headers") is routed
        del answers
        assert len(p.recent.kept) == 1
        assert tracemalloc.get_traced_memory()[0] < 100_000
    finally:
        tracemalloc.stop()


def test_of_lists_of_targets_fewer_are_remembered_than_there_are_orders() -> None:
    app, pool = pair().app, candidates(count=8).endpoints
    for targets in itertools.islice(itertools.permutations(pool), SEVERAL_MAX + 10):
        wanted = ",".join(target.address for target in targets).encode()
        assert wanted in app.destination(Decision(targets, {}, "")).answer(10)
    assert 0 < len(app._several) <= SEVERAL_MAX
    assert app.destination(Decision(pool[:1], {}, "")) is app.destination(Decision(pool[:1], {}, ""))


def test_a_passthrough_body_may_be_anything() -> None:
    envoy = pair().open()
    envoy.headers("/v2/infer")
    answers = envoy.body(b"\x00\xff not json")
    assert set_headers(answers[0])["x-gateway-destination-endpoint"] == "10.0.0.2:8000"


messages = st.sampled_from(
    [
        "headers",
        "headers-last",
        "body",
        "body-last",
        "trailers",
        "rheaders",
        "rbody",
        "rbody-last",
        "rtrailers",
        "half",
        "closed",
    ]
)


@given(st.lists(messages, max_size=14))
@settings(max_examples=300, deadline=None)
def test_any_order_of_messages_ends_with_nothing_held(order: list[str]) -> None:
    p = pair(Remembers())
    envoy = p.open()
    say = {
        "headers": lambda: envoy.headers(),
        "headers-last": lambda: envoy.headers(last=True),
        "body": lambda: envoy.body(BODY[:9], last=False),
        "body-last": lambda: envoy.body(BODY),
        "trailers": lambda: envoy.trailers(),
        "rheaders": lambda: envoy.response_headers(),
        "rbody": lambda: envoy.response_body(USAGE[:9], last=False),
        "rbody-last": lambda: envoy.response_body(USAGE),
        "rtrailers": lambda: envoy.response_trailers(),
    }
    for step in order:
        if step == "half":
            envoy.handler.half_closed()
        elif step == "closed":
            envoy.handler.closed()
            break
        else:
            say[step]()
        if envoy.stream.ended is not None and step == "half":
            break
    envoy.handler.closed()
    assert sum(p.inflight) == 0
    assert p.faults == []
