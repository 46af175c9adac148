"""Tenants on streams: who is let in, whose request it is, and which headers model servers get."""

import codecs
import gzip
import json
from typing import Any

import pytest

from epp.plugin import NoParams
from epp.plugins.parsers.anthropic import Anthropic
from epp.plugins.parsers.sglang_http import SglangHttp
from epp.plugins.parsers.vllm_http import VllmHttp
from epp.protocol.codec import BodyMode
from epp.request.client_headers import FAIRNESS_ID
from epp.request.intake import Intake
from epp.request.tenant_keys import parse
from epp.request.tenants import FromHeader, FromKey, FromMetadata, Salts, Tenants
from loadtest.load.proto import ext_proc_pb2 as pb
from tests.cases import cases
from tests.epp.request.test_tenant_keys import hashed
from tests.pair import Pair, bodies, set_headers
from tests.workers.worker.extproc.streams import BODY, Waits, pair, refusal
from tests.workers.worker.extproc.test_body_modes import begun
from tests.workers.worker.extproc.test_untrusted_headers import model_server_gets, send_headers

JWT = "envoy.filters.http.jwt_authn"
KEYS, _ = parse(f"acme {hashed('secret')}")
CLAIM = FromMetadata(JWT, ("payload", "sub"))
KEY = FromKey("authorization", False, KEYS)
OBJECTIVE = "x-llm-d-inference-objective"

Sent = list[tuple[str, bytes]]


def with_tenants(tenants: Tenants, priorities: dict[str, int] | None = None) -> Pair:
    p = pair()
    p.app.tenants = tenants
    p.app.guards.hidden_headers = tenants.hidden(())
    if priorities is not None:
        p.app.intake = Intake(priority_of=lambda objective: priorities.get(objective, 0))
    return p


def completed(p: Pair, sent: Sent) -> list[Any]:
    envoy = p.open()
    return send_headers(envoy, sent, "/v1/completions") + envoy.body(BODY)


def without_body(p: Pair, sent: Sent) -> list[Any]:
    return send_headers(p.open(), sent, "/v1/models", last=True)


def decided(p: Pair) -> list[str]:
    return [entry[1].fairness_id for entry in p.recent.kept]


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("sent", [[], [("authorization", b"Bearer wrong")], [(FAIRNESS_ID[0], b"acme"), ("x-tenant", b"acme")]])
def test_a_request_without_a_known_tenant_is_refused_before_its_body(sent: Sent, last: bool) -> None:
    p = with_tenants(Tenants([KEY]))
    envoy = p.open()
    status, error, headers = refusal(send_headers(envoy, sent, "/v1/completions", last=last))
    assert (status, error["type"], error["code"]) == (401, "Unauthorized", 401)
    assert error["message"] == "inference error: Unauthorized - this request has no valid credentials of a tenant"
    assert headers["www-authenticate"] == "Bearer"
    assert envoy.stream.ended == (0, "")
    assert (p.counter("refusals_total"), p.counter("load_refusals_total"), decided(p)) == (1, 0, [])


def test_unknown_tenants_may_share_one() -> None:
    p = with_tenants(Tenants([KEY], shares=True))
    completed(p, [(FAIRNESS_ID[0], b"claimed")])
    completed(p, [("authorization", b"Bearer secret")])
    assert decided(p) == ["unknown", "acme"]


@pytest.mark.parametrize("spelled", [str, str.upper, str.title])
def test_the_tenant_is_the_fairness_id_whatever_the_client_says(spelled: Any) -> None:
    p = with_tenants(Tenants([KEY]))
    sent = [(spelled(name), b"claimed") for name in FAIRNESS_ID] + [(spelled("authorization"), b"Bearer secret"), ("x-own", b"kept")]
    gets = dict(model_server_gets(sent, completed(p, sent)[0]))
    assert decided(p) == ["acme"]
    assert not {*FAIRNESS_ID, "authorization"} & gets.keys()
    assert gets["x-own"] == b"kept"
    assert "authorization" not in p.recent.kept[-1][1].headers


def test_headers_are_removed_from_requests_without_a_body_too() -> None:
    p = with_tenants(Tenants([KEY]))
    sent = [("authorization", b"Bearer secret"), (FAIRNESS_ID[1], b"claimed")]
    assert dict(model_server_gets(sent, without_body(p, sent)[0])).keys() & {"authorization", *FAIRNESS_ID} == set()


def test_a_header_that_is_passed_on_reaches_the_model_server() -> None:
    p = with_tenants(Tenants([FromHeader("x-tenant", True), FromKey("authorization", True, KEYS)]))
    sent = [("x-tenant", b"acme"), ("authorization", b"Bearer server-key")]
    gets = dict(model_server_gets(sent, completed(p, sent)[0]))
    assert (gets["x-tenant"], gets["authorization"]) == (b"acme", b"Bearer server-key")


def test_a_claim_of_the_gateways_filter_names_the_tenant() -> None:
    p = with_tenants(Tenants([CLAIM]))
    envoy = p.open()
    request = pb.ProcessingRequest()
    for name, value in ((":path", b"/v1/completions"), ("x-request-id", b"1")):
        request.request_headers.headers.headers.add(key=name, raw_value=value)
    request.metadata_context.filter_metadata[JWT].update({"payload": {"sub": "ann"}})
    assert envoy.say(request) == []
    assert envoy.body(BODY)[0].WhichOneof("response") == "request_headers"
    assert decided(p) == ["ann"]


def test_a_claim_that_comes_only_with_the_body_is_too_late() -> None:
    p = with_tenants(Tenants([CLAIM]))
    assert refusal(p.open().headers())[0] == 401


@pytest.mark.parametrize(
    ("claimed", "priority", "passed"),
    [("standard", 1, True), ("gold", -1, False), ("", -1, None), ("batch", -1, True), ("No One", -1, False)],
)
def test_a_tenant_gets_the_priority_of_an_objective_that_it_may_claim(claimed: str, priority: int, passed: bool | None) -> None:
    p = with_tenants(Tenants([KEY], objectives=("batch", "standard")), {"gold": 9, "standard": 1, "batch": -1})
    sent = [("authorization", b"secret"), *([(OBJECTIVE, claimed.encode())] if claimed else [])]
    gets = dict(model_server_gets(sent, completed(p, sent)[0]))
    assert p.recent.kept[-1][1].priority == priority
    assert gets.get(OBJECTIVE) == (claimed.encode() if passed else None)


def test_without_a_list_a_tenant_may_claim_any_objective() -> None:
    p = with_tenants(Tenants([KEY]), {"gold": 9})
    completed(p, [("authorization", b"secret"), (OBJECTIVE, b"gold")])
    assert p.recent.kept[-1][1].priority == 9


# Cache salts

SALTS = Salts(7)
SECRET = ("authorization", b"Bearer secret")


def salted(**more: Any) -> Pair:
    p = pair(parsers=(Anthropic("a", NoParams()), SglangHttp("s", NoParams()), VllmHttp("v", NoParams())), **more)
    p.app.tenants = Tenants([KEY], shares=True, salts=SALTS)
    p.app.guards.hidden_headers = p.app.tenants.hidden(())
    return p


def sent_on(p: Pair, path: str, body: bytes, *more: tuple[str, bytes], pieces: int = 1) -> tuple[dict[str, str], bytes, list[str]]:
    """Returns the headers that the answer sets, the body that goes on, and the headers that it removes."""
    envoy = p.open()
    assert send_headers(envoy, [SECRET, *more], path) == []
    size = -(-len(body) // pieces)
    answers = [answer for at in range(0, len(body), size) for answer in envoy.body(body[at : at + size], last=at + size >= len(body))]
    removed = answers[0].request_headers.response.header_mutation.remove_headers
    return dict(set_headers(answers[0])), bodies(answers)[0], list(removed)


@cases("pieces", [1, 7])
@cases(
    ("path", "member", "body", "claim"),
    [
        ("/v1/completions", "cache_salt", b'{"model":"m", "prompt":"hello",  "max_tokens":9}', b""),
        ("/v1/completions", "cache_salt", b'{"model":"m", "prompt":"hello",  "max_tokens":9', b',"cache_salt":"that of another"}'),
        ("/v1/chat/completions", "cache_salt", b'{"model":"m","messages":[{"role":"user","content":"cache_salt"}]}', b""),
        ("/v1/messages", "cache_salt", b'{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"x"}]}', b""),
        ("/generate", "extra_key", b'{"input_ids":[1,2,3]', b', "extra_key": ["a"]}'),
        ("/v1/completions", "cache_salt", b'{"model":"m", "prompt":"\\ud83d"}', b""),
        ("/v1/completions", "cache_salt", codecs.BOM_UTF8 + b'{"model":"m", "prompt":"x"', b',"cache_salt":"that of another"}'),
    ],
)
def test_a_request_goes_on_with_the_salt_of_its_tenant_and_else_as_it_is(
    path: str, member: str, body: bytes, claim: bytes, pieces: int
) -> None:
    p = salted()
    headers, sent, removed = sent_on(p, path, body + claim, pieces=pieces)
    salt = f'"{member}":"{SALTS.of("acme")}"'.encode()
    compact = sent.replace(b'": ', b'":') if claim else sent
    assert compact.count(salt) == 1
    assert b"another" not in sent and b'["a"]' not in sent
    assert compact.replace(salt, b"").replace(b"{,", b"{").replace(b",}", b"}").replace(b", }", b"}").rstrip(b"}") == body.rstrip(b"}")
    assert headers["content-length"] == str(len(sent))
    assert not {"accept-encoding", "content-encoding"} & {*removed}
    assert decided(p) == ["acme"]


ESCAPED = b'"c\\u0061che\\u005fsalt":"theirs"'
CLAIMS = {
    "a text": b'"cache_salt":"theirs"',
    "null": b'"cache_salt":null',
    "a number": b'"cache_salt" : 7',
    "an object": b'"cache_salt":{"cache_salt":"theirs"}',
    "an escaped name": ESCAPED,
    "twice": b'"cache_salt":"theirs","cache_salt":null',
    "twice, once escaped": b'"cache_salt":null,' + ESCAPED,
    "with half a surrogate pair": b'"cache_salt":"\\ud83d"',
}
NESTED = b'"metadata":{"cache_salt":"mine","c\\u0061che_salt":[{"cache_salt":null}]}'
PLAIN = {  # path -> the members of a body
    "/v1/completions": b'"model":"m","prompt":"hello"',
    "/v1/chat/completions": b'"model":"m","messages":[{"role":"user","content":"x"}]',
    "/v1/responses": b'"model":"m","input":"hello"',
    "/v1/messages": b'"model":"m","max_tokens":1,"messages":[{"role":"user","content":"x"}]',
    "/inference/v1/generate": b'"model":"m","token_ids":[1,2,3]',
}


def salts_in(body: bytes) -> list[Any]:
    """Returns the values of all members cache_salt of a body, whichever of them a model server reads."""
    return [value for name, value in json.loads(body, object_pairs_hook=list) if name == "cache_salt"]


@cases("renamed", [False, True])
@cases("first", [False, True])
@cases("claim", [*CLAIMS, ""])
@cases("path", PLAIN)
def test_whatever_salt_a_client_sends_the_model_server_reads_that_of_the_tenant(path: str, claim: str, first: bool, renamed: bool) -> None:
    parts = [PLAIN[path], NESTED]
    parts.insert(0 if first else 2, CLAIMS.get(claim, b'"user":"u"'))
    more = [("x-llm-d-model-name-rewrite", b"other")] if renamed else []
    _, sent, _ = sent_on(salted(), path, b"{" + b",".join(parts) + b"}", *more)
    found = salts_in(sent)
    assert found and {*map(str, found)} == {SALTS.of("acme")}
    assert NESTED in sent and json.loads(sent)["model"] == ("other" if renamed else "m")


@pytest.mark.parametrize("blanks", [0, 1, 100, 300, 70_000])
@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("size", [10, 61_900, 62_000, 200_000])
def test_a_salt_is_inserted_into_bodies_of_all_sizes(size: int, pieces: int, blanks: int) -> None:
    body = b" " * blanks + b'{"model":"m","prompt":"%b"}' % (b"x" * size)
    headers, sent, _ = sent_on(salted(body_bytes_max=1 << 20), "/v1/completions", body, pieces=pieces)
    assert json.loads(sent) == {"cache_salt": SALTS.of("acme"), **json.loads(body)}
    assert headers["content-length"] == str(len(sent)) == str(len(body) + len(SALTS.of("acme")) + len('"cache_salt":"",'))


def test_a_body_with_a_salt_before_trailers_does_not_end_the_stream() -> None:
    envoy = salted().open()
    send_headers(envoy, [SECRET], "/v1/completions")
    answers = [*envoy.body(BODY, last=False), *envoy.trailers()]
    sent, ends = bodies(answers)
    assert salts_in(sent) == [SALTS.of("acme")] and not any(ends)


def test_the_pickers_own_index_uses_the_salt() -> None:
    p = pair(Waits())
    p.app.tenants = Tenants([KEY], shares=True, salts=SALTS)
    p.app.guards.hidden_headers = p.app.tenants.hidden(())
    for sent, name in (([SECRET], "acme"), ([], "unknown")):
        envoy = p.open()
        send_headers(envoy, sent, "/v1/completions")
        envoy.body(BODY[:-1] + b',"cache_salt":"mine"}')
        assert envoy.handler.request.cache_salt == SALTS.of(name)


def test_a_body_that_is_renamed_has_the_salt_too() -> None:
    _, sent, removed = sent_on(salted(), "/v1/completions", BODY, ("x-llm-d-model-name-rewrite", b"other"))
    assert (json.loads(sent)["model"], json.loads(sent)["cache_salt"]) == ("other", SALTS.of("acme"))
    assert "accept-encoding" in removed


def test_a_compressed_body_goes_on_unpacked() -> None:
    _, sent, removed = sent_on(salted(), "/v1/completions", gzip.compress(BODY), ("content-encoding", b"gzip"))
    assert json.loads(sent) == {"cache_salt": SALTS.of("acme"), **json.loads(BODY)}
    assert "content-encoding" in removed and "accept-encoding" not in removed


def test_a_buffered_body_is_replaced() -> None:
    envoy = begun(salted(), BodyMode.BUFFERED, authorization="Bearer secret")
    envoy.answers()
    (answer,) = envoy.body(BODY)
    assert json.loads(answer.request_body.response.body_mutation.body)["cache_salt"] == SALTS.of("acme")


@pytest.mark.parametrize(("path", "body"), [("/v1/messages/count_tokens", b'{"model":"m"}'), ("/anything", b"no JSON")])
def test_a_body_that_reaches_no_cache_or_that_no_parser_reads_passes_unchanged(path: str, body: bytes) -> None:
    assert sent_on(salted(), path, body)[1] == body


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"model":"m","prompt":"x"} {}', b'{"prompt":"x"}'])
def test_a_body_that_cannot_be_read_is_refused(body: bytes) -> None:
    envoy = salted().open()
    send_headers(envoy, [SECRET], "/v1/completions")
    assert refusal(envoy.body(body))[0] == 400


def test_without_salts_a_clients_salt_counts() -> None:
    p = with_tenants(Tenants([KEY]))
    body = BODY[:-1] + b',"cache_salt":"mine"}'
    assert sent_on(p, "/v1/completions", body)[1] == body
