"""Headers with which a client could choose its server, in 200 spellings, on every path of a request: none is passed on."""

import random
from typing import Any

import pytest

from epp.plugin import NoParams
from epp.plugins.parsers.anthropic import Anthropic
from epp.protocol.codec import DESTINATION, NEVER_PASSED
from epp.request import DEFAULT_FLOW, client_headers
from loadtest.load.proto import ext_proc_pb2 as pb
from tests.cases import cases
from tests.pair import Envoy, Pair
from tests.workers.worker.extproc.streams import BODY, Broken, Remembers, pair

EVIL = b"6.6.6.6:666"
CONTROL = (DESTINATION, *NEVER_PASSED)


def variants() -> list[list[tuple[str, bytes]]]:
    """Names in many spellings, alone, twice, and all together."""
    rng = random.Random(7)
    spelled = [lambda n: n, str.upper, str.title, lambda n: "".join(rng.choice((c, c.upper())) for c in n)]
    found: list[list[tuple[str, bytes]]] = []
    while len(found) < 200:
        names = rng.choices(CONTROL, k=rng.randint(1, 5))
        values = (EVIL, b"", EVIL + b",10.0.0.1:8000", b"\xff\xfe", b" " + EVIL)
        found.append([(rng.choice(spelled)(name), rng.choice(values)) for name in names])
    return found


def model_server_gets(sent: list[tuple[str, bytes]], answer: pb.ProcessingResponse) -> list[tuple[str, bytes]]:
    """The headers after the gateway applied the answer. Names have no case, removals come first, a set header replaces all of its name."""
    mutation = answer.request_headers.response.header_mutation
    gone = {name.lower() for name in mutation.remove_headers}
    put = {o.header.key.lower(): o.header.raw_value for o in mutation.set_headers}
    return [(n.lower(), v) for n, v in sent if n.lower() not in gone | put.keys()] + list(put.items())


def send_headers(envoy: Envoy, sent: list[tuple[str, bytes]], path: str, *, last: bool = False) -> list[Any]:
    message = pb.ProcessingRequest()
    for name, value in [(":method", b"POST"), (":path", path.encode()), *sent]:
        message.request_headers.headers.headers.add(key=name, raw_value=value)
    message.request_headers.end_of_stream = last
    return envoy.say(message)


def pick(p: Pair, sent: list[tuple[str, bytes]]) -> list[Any]:
    envoy = p.open()
    return send_headers(envoy, sent, "/v1/completions") + envoy.body(BODY)


def without_body(p: Pair, sent: list[tuple[str, bytes]]) -> list[Any]:
    return send_headers(p.open(), sent, "/v1/models", last=True)


def skipped(p: Pair, sent: list[tuple[str, bytes]]) -> list[Any]:
    envoy = p.open()
    return send_headers(envoy, sent, "/v1/messages/count_tokens") + envoy.body(b"{}")


def refused(p: Pair, sent: list[tuple[str, bytes]]) -> list[Any]:
    envoy = p.open()
    return send_headers(envoy, sent, "/v1/completions") + envoy.body(b"{}")


def rewritten(p: Pair, sent: list[tuple[str, bytes]]) -> list[Any]:
    return pick(p, [*sent, ("x-llm-d-model-name-rewrite", b"other")])


WAYS = (pick, without_body, skipped, refused, rewritten)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scores", [False, True])
def test_no_header_that_chooses_an_endpoint_survives(way: Any, scores: bool) -> None:
    p = pair(Remembers(), parsers=(Anthropic("a", NoParams()),))
    p.app.emit_scores = scores
    for sent in variants():
        answers = way(p, sent)
        if answers[0].WhichOneof("response") == "immediate_response":  # the request reaches no server, and the client gets only this
            assert EVIL not in answers[0].SerializeToString()
            continue
        gets = model_server_gets(sent, answers[0])
        chosen = [value for name, value in gets if name == DESTINATION]
        assert len(chosen) == 1 and chosen[0].startswith(b"10.0.0.")
        assert not [name for name, _ in gets if name in NEVER_PASSED]
        assert EVIL not in answers[0].SerializeToString()


def test_no_header_survives_a_fault() -> None:
    p = pair(Broken("broken", NoParams()))
    for sent in variants():
        (answer,) = pick(p, sent)
        assert answer.immediate_response.status.code == 500
        assert EVIL not in answer.SerializeToString()


def test_headers_of_clients_count_unless_they_are_hidden() -> None:
    p = pair()
    header = [("x-llm-d-inference-fairness-id", b"tenant"), ("x-gateway-inference-fairness-id", b"older")]
    pick(p, header)
    p.app.guards.hidden_headers = client_headers.untrusted(())
    pick(p, header)
    assert [entry[1].fairness_id for entry in p.recent.kept] == ["tenant", DEFAULT_FLOW]
    shown = p.recent.kept[-1][1].headers
    assert shown.get(header[0][0]) is None and shown.get(":method") == "POST" and header[0][0] not in list(shown)


WISHES = [(name, b"5") for names in client_headers.GROUPS.values() for name in names]
SPELLED = (str, str.upper, str.title)


@cases("way", [pick, without_body, skipped, rewritten])
@cases("trusted", [(), ("objective",), ("fairness", "slo", "model", "ttl")])
@cases("spelled", SPELLED)
def test_hidden_headers_do_not_reach_the_model_server(way: Any, trusted: tuple[str, ...], spelled: Any) -> None:
    p = pair(parsers=(Anthropic("a", NoParams()),))
    hidden = p.app.guards.hidden_headers = client_headers.untrusted(trusted)
    sent = [(spelled(name), value) for name, value in (*WISHES, ("user-agent", b"x"))]
    names = [name for name, _ in model_server_gets(sent, way(p, sent)[0])]
    assert hidden and not hidden & {*names}
    assert {name for name, _ in WISHES} - hidden | {"user-agent"} <= {*names}


def test_an_answer_to_a_request_without_hidden_headers_removes_none() -> None:
    p = pair()
    p.app.guards.hidden_headers = client_headers.untrusted(())
    mutation = pick(p, [("user-agent", b"x")])[0].request_headers.response.header_mutation
    assert tuple(mutation.remove_headers) == NEVER_PASSED


@pytest.mark.parametrize("way", [pick, without_body, skipped])
def test_trusted_headers_reach_the_model_server(way: Any) -> None:
    p = pair(parsers=(Anthropic("a", NoParams()),))
    names = {name for name, _ in model_server_gets(WISHES, way(p, WISHES)[0])}
    assert {name for name, _ in WISHES} <= names


def test_two_requests_with_equal_ids_are_counted_separately() -> None:
    p = pair()
    same = [("x-request-id", b"one")]
    first, second = p.open(), p.open()
    for envoy in (first, second):
        send_headers(envoy, same, "/v1/completions")
        envoy.body(BODY)
    assert sum(p.inflight) == 2
    first.handler.closed()
    assert sum(p.inflight) == 1
    second.response_headers()
    second.response_body(b"{}")
    assert sum(p.inflight) == 0
