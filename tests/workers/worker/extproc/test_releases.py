"""What a stream holds, and that it lets go of everything at its end, whatever the order of messages."""

import itertools
import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.decision.decision import Decision
from epp.plugin import NoParams
from epp.plugins.producers.tokenizer import Tokens
from tests.cases import cases
from tests.examples import examples
from tests.fakes import candidates
from tests.pair import set_headers
from tests.workers.worker.extproc.streams import BODY, USAGE, Denies, Remembers, Waits, pair
from workers.worker.extproc.app import SEVERAL_MAX


def test_pieces_of_a_body_count_as_held_until_it_is_routed() -> None:
    envoy = pair().open()
    envoy.headers()
    envoy.body(BODY[:5], last=False)
    envoy.body(BODY[5:9], last=False)
    assert envoy.stream.held == (4 + 5) + (4 + 4)  # the whole message of each piece
    envoy.body(BODY[9:])
    assert envoy.stream.held == 0


def test_a_body_of_one_piece_that_trailers_end_is_not_held_longer_than_others() -> None:
    envoy = pair().open()
    envoy.headers()
    envoy.body(BODY, last=False)
    assert envoy.stream.held > len(BODY)
    envoy.trailers()
    assert envoy.stream.held == 0


def test_a_body_of_one_piece_does_not_count_as_held() -> None:
    envoy = pair().open()
    envoy.headers()
    envoy.stream.held_max = -1
    assert [a.WhichOneof("response") for a in envoy.body(BODY)] == ["request_headers", "request_body"]


@cases("when", ["headers", "half body", "routed", "response headers", "half response", "done"])
@cases("how", ["closed", "half_closed"])
def test_every_ending_of_a_stream_releases_everything_once(when: str, how: str) -> None:
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


def test_a_decision_that_waits_continues_when_its_future_is_done() -> None:
    waits = Waits()
    envoy = pair(waits).open()
    envoy.headers()
    assert envoy.body(BODY) == []
    waits.future.callback(waits.future)
    assert set_headers(envoy.answers()[0])["x-gateway-destination-endpoint"] == "10.0.0.2:8000"


@pytest.mark.parametrize("ending", ["closed", "local reply"])
def test_a_waiting_decision_is_given_up_when_its_stream_ends(ending: str) -> None:
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


@pytest.mark.parametrize("routed", [True, False])
@pytest.mark.parametrize("what", ["prompt", "cache_salt"])
def test_during_an_answer_nothing_as_long_as_the_request_body_is_kept(what: str, routed: bool) -> None:
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


def test_the_cache_of_target_lists_is_bounded() -> None:
    app, pool = pair().app, candidates(count=8).endpoints
    for targets in itertools.islice(itertools.permutations(pool), SEVERAL_MAX + 10):
        wanted = ",".join(target.address for target in targets).encode()
        assert wanted in app.destination(Decision(targets, {}, "")).answer(10)
    assert 0 < len(app._several) <= SEVERAL_MAX
    assert app.destination(Decision(pool[:1], {}, "")) is app.destination(Decision(pool[:1], {}, ""))


messages = st.sampled_from(
    ["headers", "headers-last", "body", "body-last", "trailers", "rheaders", "rbody", "rbody-last", "rtrailers", "half", "closed"]
)


@given(st.lists(messages, max_size=14))
@examples(300)
def test_after_any_order_of_messages_nothing_is_held(order: list[str]) -> None:
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
