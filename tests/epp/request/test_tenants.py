"""Which source names the tenant of a request, and what a tenant may claim."""

import pytest

from epp.errors import Cause, ProtocolViolation, Refused
from epp.protocol import codec
from epp.request import DEFAULT_FLOW, Tenant, client_headers
from epp.request.client_headers import names_tenant
from epp.request.intake import Intake, request_objective
from epp.request.tenant_keys import parse
from epp.request.tenants import KEPT_MAX, FromHeader, FromKey, FromMetadata, Salts, Source, Tenants
from loadtest.load.proto import ext_proc_pb2 as pb
from tests.epp.request.test_tenant_keys import hashed

JWT = "envoy.filters.http.jwt_authn"
KEYS, _ = parse(f"acme {hashed('one')}\nother {hashed('two')}")
CLAIM = FromMetadata(JWT, ("payload", "sub"))
HEADER = FromHeader("x-tenant", True)
KEY = FromKey("authorization", False, KEYS)


def name(sources: list[Source], headers: dict[str, str], claims: dict[str, object] | None = None, shares: bool = False) -> str:
    tenants = Tenants(sources, shares=shares)
    message = pb.ProcessingRequest()
    for key, value in headers.items():
        message.request_headers.headers.headers.add(key=key, raw_value=value.encode())
    message.request_headers.end_of_stream = False
    if claims is not None:
        message.metadata_context.filter_metadata[JWT].update({"payload": claims})
    data = message.SerializeToString()
    kind, start, end = codec.split(data)
    assert kind == codec.REQUEST_HEADERS
    return tenants.of(codec.Unseen(data, start, end, tenants.hidden(())), data).name


def test_the_first_source_that_gives_a_valid_name_counts() -> None:
    headers = {"x-tenant": "by-header", "authorization": "Bearer one"}
    assert name([CLAIM, HEADER, KEY], headers, {"sub": "by-claim"}) == "by-claim"
    assert name([CLAIM, HEADER, KEY], headers, {"sub": ""}) == "by-header"
    assert name([CLAIM, HEADER, KEY], {**headers, "x-tenant": "x" * 65}, {"sub": DEFAULT_FLOW}) == "acme"
    assert name([KEY, HEADER], {**headers, "authorization": "Bearer wrong"}) == "by-header"
    assert name([KEY, CLAIM], headers, {"sub": "by-claim"}) == "acme"


@pytest.mark.parametrize("claims", [None, {}, {"sub": True}, {"sub": 1.5}, {"sub": ["a"]}, {"sub": {"sub": "a"}}, {"sub": None}])
def test_a_claim_that_is_no_text_names_no_tenant(claims: dict[str, object] | None) -> None:
    with pytest.raises(Refused) as refused:
        name([CLAIM], {}, claims)
    assert refused.value.cause is Cause.UNKNOWN_TENANT


def test_a_whole_number_names_a_tenant() -> None:
    assert name([CLAIM], {}, {"sub": 4711}) == "4711"


def test_a_claim_is_found_at_any_depth() -> None:
    nested = FromMetadata(JWT, ("payload", "org", "team", "id"))
    assert name([nested], {}, {"org": {"team": {"id": "t"}}}) == "t"


def test_a_tenant_has_the_same_name_by_a_claim_and_by_a_header() -> None:
    assert name([CLAIM], {}, {"sub": "café"}) == name([HEADER], {"x-tenant": "café"}) == "café"


def test_what_a_client_says_itself_never_counts() -> None:
    claimed = {"x-llm-d-inference-fairness-id": "claimed", "x-other": "claimed"}
    with pytest.raises(Refused):
        name([CLAIM, HEADER, KEY], claimed)
    assert name([CLAIM, HEADER, KEY], claimed, shares=True) == "unknown"


def test_headers_with_keys_and_fairness_ids_are_hidden_and_a_trusted_one_is_not() -> None:
    assert Tenants([CLAIM, HEADER, KEY]).hidden(()) == {"authorization", *client_headers.FAIRNESS_ID}
    assert Tenants([FromHeader("x-tenant", False), FromKey("x-key", True, KEYS)]).hidden(("ttl",)) == {
        "ttl",
        "x-tenant",
        *client_headers.FAIRNESS_ID,
    }


def test_a_header_is_hidden_if_one_of_its_sources_hides_it() -> None:
    sources = [FromKey("authorization", True, KEYS), FromKey("authorization", False, KEYS)]
    assert "authorization" in Tenants(sources).hidden(())


def test_a_gateway_may_name_the_tenant_in_the_header_of_fairness_ids() -> None:
    current, older = client_headers.FAIRNESS_ID
    source = FromHeader(current, True)
    assert name([source], {current: "a", older: "b"}) == "a"
    assert Tenants([source]).hidden(client_headers.FAIRNESS_ID) == {older}


def test_malformed_headers_end_the_stream() -> None:
    data = b"\x0a\x05\x0a\x09ab"
    with pytest.raises(ProtocolViolation):
        Tenants([HEADER]).of(codec.Headers(data, 0, len(data)), data)


def test_a_tenant_claims_an_objective_of_its_list_and_else_gets_the_first() -> None:
    tenant = Tenant("t", ("batch", "standard"))
    assert [tenant.objective(claimed) for claimed in ("standard", "gold", "")] == ["standard", "batch", "batch"]
    assert [Tenant("t").objective(claimed) for claimed in ("gold", "")] == ["gold", ""]


def test_single_tenants_have_objectives_of_their_own() -> None:
    tenants = Tenants([HEADER], objectives=("batch",), per_tenant={"acme": ("gold", "batch")})
    assert (tenants.named("acme").objective(""), tenants.named("other").objective("gold")) == ("gold", "batch")


@pytest.mark.parametrize(("claimed", "allowed"), [(None, True), ("batch", True), ("gold", False), ("", False), ("No Name", False)])
def test_a_model_server_gets_only_an_objective_that_the_tenant_may_claim(claimed: str | None, allowed: bool) -> None:
    headers = {} if claimed is None else {"x-llm-d-inference-objective": claimed}
    assert Tenant("t", ("batch",)).may_send(headers) is allowed
    assert Tenant("t").may_send(headers)


@pytest.mark.parametrize(
    ("text", "valid"), [("a", True), ("a b", True), ("", False), (DEFAULT_FLOW, False), ("x" * 65, False), ("\n", False)]
)
def test_a_tenants_name_is_a_fairness_id_that_is_not_the_default(text: str, valid: bool) -> None:
    assert names_tenant(text) is valid


def test_the_tenant_is_the_fairness_id_and_decides_the_objective() -> None:
    headers = codec.headers_of({"x-llm-d-inference-fairness-id": "claimed", "x-llm-d-inference-objective": "gold"})
    request = Intake().begin(headers, 1.0, 0, None, Tenant("acme", ("batch",)))
    assert (request.fairness_id, request_objective(request)) == ("acme", "batch")
    assert request_objective(Intake().begin(headers, 1.0, 0, None, Tenant("acme"))) == "gold"
    assert request_objective(Intake().begin(headers, 1.0, 0, None)) == "gold"


def test_each_tenant_has_a_salt_of_its_own_which_the_secret_decides() -> None:
    one, again, other = Tenants([HEADER], salts=Salts(1)), Tenants([HEADER], salts=Salts(1)), Tenants([HEADER], salts=Salts(2))
    salts = {tenants.named(name).salt for tenants in (one, other) for name in ("acme", "bee", "unknown", "café")}
    assert len(salts) == 8 and all(len(salt) == 32 for salt in salts)
    assert one.named("acme").salt == again.named("acme").salt
    assert Tenants([HEADER]).named("acme").salt == ""


def test_a_gateway_that_vouches_for_very_many_tenants_fills_no_memory() -> None:
    tenants = Tenants([HEADER], per_tenant={"acme": ("gold",)})
    for number in range(2 * KEPT_MAX):
        assert tenants.named(str(number)).name == str(number)
    assert len(tenants._kept) <= KEPT_MAX
    assert tenants.named("acme").objectives == ("gold",)
