"""The section `tenants`: what it means, and what its files of keys may have. invalid_documents.txt has its errors."""

import pytest

from epp.config.load import ConfigErrors, load
from epp.config.tenants_section import key_files, keys_of, tenants_of
from epp.errors import Refused
from epp.protocol import codec
from epp.request.budget import BEHIND
from epp.request.client_headers import FAIRNESS_ID
from tests.epp.config.loading import ok
from tests.epp.request.test_tenant_keys import hashed

TEXT = """\
tenants:
  from:
  - metadata: {namespace: envoy.filters.http.jwt_authn, path: payload.sub}
  - {header: X-Tenant, trusted: true}
  - apiKey: {header: Authorization, file: keys}
  - apiKey: {header: x-key, file: keys, passOn: true}
  objectives: [batch, standard]
  perTenant: {acme: {objectives: [gold]}, plain: {}}
plugins: [{type: queue-scorer}]
"""


def test_the_section_is_written_with_its_defaults_and_read_again() -> None:
    config = ok(TEXT)
    assert config.document["tenants"] == {
        "from": [
            {"metadata": {"namespace": "envoy.filters.http.jwt_authn", "path": "payload.sub"}},
            {"header": "x-tenant", "trusted": True, "passOn": True},
            {"apiKey": {"header": "authorization", "file": "keys", "passOn": False}},
            {"apiKey": {"header": "x-key", "file": "keys", "passOn": True}},
        ],
        "unknown": "refuse",
        "cacheSalt": "none",
        "objectives": ["batch", "standard"],
        "perTenant": {"acme": {"objectives": ["gold"]}, "plain": {}},
    }
    assert load(config.as_yaml(), "again").as_yaml() == config.as_yaml()


def test_a_configuration_without_the_section_has_no_tenants() -> None:
    config = ok("plugins: [{type: queue-scorer}]")
    assert (config.tenants, "tenants" in config.document, key_files(config.tenants)) == (None, False, {})


def test_a_source_has_the_line_that_gives_it() -> None:
    text, lines = ok(TEXT).with_origins()
    found = {line.strip(): origin for line, origin in zip(text.splitlines(), lines, strict=True)}
    assert (found["- metadata:"], found["- header: x-tenant"], found["unknown: refuse"]) == (3, 4, 0)


def test_the_sources_of_a_configuration_name_tenants_and_their_objectives() -> None:
    entry = ok(TEXT).tenants
    assert entry is not None
    assert key_files(entry) == {"keys": (5, 43)}
    tenants = tenants_of(entry, keys_of({"keys": f"acme {hashed('k')}"}))
    assert tenants.hidden(()) == {"authorization", *FAIRNESS_ID}
    for headers, name, objective in (
        ({"x-tenant": "plain", "x-key": "k"}, "plain", "batch"),
        ({"authorization": "Bearer k"}, "acme", "gold"),
        ({"x-key": "k"}, "acme", "gold"),
        ({"x-tenant": "other"}, "other", "batch"),
    ):
        tenant = tenants.of(codec.headers_of(headers), b"")
        assert (tenant.name, tenant.objective("")) == (name, objective)
    with pytest.raises(Refused):
        tenants.of(codec.headers_of({"authorization": "Bearer other"}), b"")


def test_unknown_tenants_share_one_only_if_the_configuration_says_so() -> None:
    entry = ok("tenants: {from: [{header: x-tenant, trusted: true}], unknown: share}").tenants
    assert entry is not None
    assert tenants_of(entry, {}).of(codec.headers_of({}), b"").name == "unknown"


def test_a_wrong_file_of_keys_is_refused_with_all_its_lines() -> None:
    with pytest.raises(ConfigErrors) as refused:
        keys_of({"/etc/keys": f"acme {hashed('k')}\nacme plain\nb {hashed('k')}", "empty": ""})
    assert [str(error).split(" (")[0] for error in refused.value.errors] == [
        "/etc/keys:2:1: error[tenant-keys]: there is no hash of a key",
        "/etc/keys:3:1: error[tenant-keys]: the same key as in line 1",
        "empty: error[tenant-keys]: the file has no key",
    ]


def test_tenants_have_salts_only_if_the_configuration_says_so() -> None:
    text = "tenants: {from: [{header: x-tenant, trusted: true}], cacheSalt: tenant}"
    entry, plain = ok(text).tenants, ok(text.replace("tenant}", "none}")).tenants
    assert entry is not None and plain is not None
    assert (entry.salt_place, plain.salt_place) == ((1, 65), None)
    assert tenants_of(entry, {}, 1).named("a").salt not in ("", tenants_of(entry, {}, 2).named("a").salt)
    assert tenants_of(plain, {}, 1).named("a").salt == ""
    assert ok(text).document["tenants"]["cacheSalt"] == "tenant"


def test_tenants_of_a_group_share_a_salt_that_no_tenant_has() -> None:
    text = "tenants: {from: [{header: x-tenant, trusted: true}], cacheSalt: tenant, perTenant: {a: {saltGroup: c}, b: {saltGroup: c}}}"
    config = ok(text)
    assert config.tenants is not None
    assert config.document["tenants"]["perTenant"] == {"a": {"saltGroup": "c"}, "b": {"saltGroup": "c"}}
    tenants = tenants_of(config.tenants, {}, 1)
    salts = {name: tenants.named(name).salt for name in ("a", "b", "c", "d")}
    assert salts["a"] == salts["b"] and len(set(salts.values())) == 3


def test_a_tenant_has_the_budget_of_its_own_or_that_of_the_section() -> None:
    text = """\
tenants:
  from: [{header: x-tenant, trusted: true}]
  budget: {tokensPerMinute: 120k, requests: 60}
  perTenant:
    acme: {budget: {tokensPerMinute: 6k, burst: 1k, concurrent: 4, cachedPrice: 0.1}}
    free: {budget: {mode: none}}
"""
    config = ok(text)
    assert config.tenants is not None
    assert config.document["tenants"]["budget"] == {
        "tokensPerMinute": 120_000, "burst": 120_000, "cachedPrice": 1.0, "requests": 60, "mode": "shed",
    }  # fmt: skip
    assert config.document["tenants"]["perTenant"]["free"] == {"budget": {"mode": "none"}}
    assert load(config.as_yaml(), "again").as_yaml() == config.as_yaml()
    tenants = tenants_of(config.tenants, {})
    acme, other = tenants.named("acme").budget, tenants.named("other").budget
    assert tenants.named("free").budget is None
    assert acme is not None and acme.tokens is not None and other is not None and other.tokens is not None and other.requests is not None
    assert (acme.tokens.rate, acme.tokens.size, acme.requests, acme.concurrent, acme.cached_price) == (100.0, 1000.0, None, 4, 0.1)
    assert (other.tokens.rate, other.tokens.size, other.requests.rate, other.concurrent, other.queues) == (2000.0, 120_000.0, 1.0, 0, False)


def test_a_budget_that_queues_has_a_band_behind_all_others() -> None:
    text = "featureGates: [flowControl]\ntenants: {from: [{header: x-tenant, trusted: true}], budget: {requests: 60, mode: queue}}"
    config = ok(text)
    assert config.flow is not None
    assert config.flow.static() == {0, BEHIND}
    assert [*config.flow.priorities([5, -5])] == [5, 0, -5, BEHIND]
    assert config.document["tenants"]["budget"] == {"requests": 60, "mode": "queue"}
