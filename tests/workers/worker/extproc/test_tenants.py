"""Tenants on streams: who is let in, whose request it is, and which headers model servers get."""

from typing import Any

import pytest

from epp.protocol.proto import ext_proc_pb2 as pb
from epp.request.client_headers import FAIRNESS_ID
from epp.request.intake import Intake
from epp.request.tenant_keys import parse
from epp.request.tenants import FromHeader, FromKey, FromMetadata, Tenants
from tests.epp.request.test_tenant_keys import hashed
from tests.pair import Pair
from tests.workers.worker.extproc.streams import BODY, pair, refusal
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
