"""Tenants through a real Envoy: its JWT filter or an API key says who asks, and no client says it itself."""

import base64
import contextlib
import hashlib
import hmac
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from loadtest.demo.stack import get
from tests.bench import reload as bench
from tests.e2e.cluster import COMPLETIONS, Answer, Cluster, Picker, ask, completion, eventually
from tests.e2e.conftest import FAST
from tests.e2e.echo import Server, gateway, got, picker_for, servers
from tests.e2e.filters import TYPES, Json
from tests.epp.request.test_tenant_keys import hashed

SECRET = b"the secret of the issuer of tokens"
FILTER = "envoy.filters.http.jwt_authn"
CLAIMED = {"x-llm-d-inference-fairness-id": "somebody-else", "x-gateway-inference-fairness-id": "another", "x-tenant": "a-third"}
CONFIG = """\
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
plugins:
- {{type: queue-scorer}}
- {{type: file-discovery, parameters: {{path: {file}}}}}
dataLayer: {{discovery: {{endpoints: {{pluginRef: file-discovery}}}}}}
tenants:
  from:
  - metadata: {{namespace: envoy.filters.http.jwt_authn, path: payload.sub}}
  - {{header: x-tenant, trusted: true}}
  - apiKey: {{header: authorization, file: %s}}
"""


def encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def token(secret: bytes = SECRET, **claims: Any) -> str:
    """A signed JWT."""
    signed = f"{encoded(json.dumps({'alg': 'HS256', 'kid': 'k'}).encode())}.{encoded(json.dumps({'iss': 'us', **claims}).encode())}"
    return f"{signed}.{encoded(hmac.digest(secret, signed.encode(), hashlib.sha256))}"


def authenticated(manager: Json, _resources: Json) -> None:
    """Adds Envoy's JWT filter, which lets requests without a valid token pass, and removes x-tenant of clients."""
    keys = {"keys": [{"kty": "oct", "kid": "k", "alg": "HS256", "k": encoded(SECRET)}]}
    local = {"issuer": "us", "local_jwks": {"inline_string": json.dumps(keys)}, "payload_in_metadata": "payload", "forward": True}
    either = {"requires_any": {"requirements": [{"provider_name": "local"}, {"allow_missing_or_failed": {}}]}}
    manager["http_filters"].insert(
        0,
        {
            "name": FILTER,
            "typed_config": {
                "@type": TYPES + "extensions.filters.http.jwt_authn.v3.JwtAuthentication",
                "providers": {"local": local},
                "rules": [{"match": {"prefix": "/"}, "requires": either}],
            },
        },
    )
    (picker,) = [each for each in manager["http_filters"] if "processing_mode" in each["typed_config"]]
    picker["typed_config"]["metadata_options"] = {"forwarding_namespaces": {"untyped": [FILTER]}}
    (early,) = manager["early_header_mutation_extensions"]
    early["typed_config"]["mutations"].append({"remove": "x-tenant"})


def salted(text: str) -> str:
    return text + "  cacheSalt: tenant\n"


class Site:
    """A model server that tells what it got, a picker with tenants that follows its files, and an Envoy with a JWT filter."""

    def __init__(self, cluster: Cluster, started: list[Server]) -> None:
        self.cluster = cluster
        self.keys = cluster.directory / "keys"
        self.keys.write_text(f"acme {hashed('key-of-acme')}\n")
        self.started = started
        self.picker: Picker = picker_for(cluster, started, CONFIG % self.keys, "--config-watch", "--access-log=1")
        self.port = gateway(cluster, self.picker.grpc, authenticated)

    def ask(self, authorization: str = "", headers: dict[str, str] = CLAIMED) -> Answer:
        sent = headers | ({"authorization": f"Bearer {authorization}"} if authorization else {})
        return ask(self.port, COMPLETIONS, completion("hello"), sent)

    def flow(self) -> str:
        """Returns the fairness id of the last decision."""
        page = get(self.picker.metrics, "/debug/decisions?n=1")
        assert page is not None
        return str(json.loads(page)["decisions"][0]["flow"])

    def key_works(self, key: str) -> bool:
        return self.ask(key).status == 200


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with Cluster() as cluster, servers(1) as started:
        yield Site(cluster, started)


def test_the_claim_of_a_token_that_envoy_has_verified_names_the_tenant(site: Site) -> None:
    answer = site.ask(token(sub="ann"))
    arrived = dict(got(answer))
    assert site.flow() == "ann"
    assert not {*CLAIMED, "authorization"} & arrived.keys()
    assert '"flow": "ann"' in site.picker.child.text() or "flow=ann" in site.picker.child.text()


def test_an_api_key_names_the_tenant_and_does_not_reach_the_model_server(site: Site) -> None:
    answer = site.ask("key-of-acme")
    assert site.flow() == "acme"
    assert "key-of-acme" not in answer.body.decode()
    assert not {*CLAIMED, "authorization"} & dict(got(answer)).keys()


@pytest.mark.parametrize("authorization", ["", "a-wrong-key", "acme", token(b"another secret", sub="ann"), token(other="claim")])
def test_a_client_that_nobody_vouches_for_gets_401_and_its_request_reaches_no_server(site: Site, authorization: str) -> None:
    before = site.started[0].requests
    answer = site.ask(authorization)
    assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert answer.json()["error"] == {
        "message": "inference error: Unauthorized - this request has no valid credentials of a tenant",
        "type": "Unauthorized",
        "code": 401,
    }
    assert site.started[0].requests == before
    long = ask(site.port, COMPLETIONS, completion("word " * 50_000), CLAIMED)
    listed = ask(site.port, "/v1/models", None, CLAIMED, method="GET")
    assert (long.status, listed.status) == (401, 401)


def test_metrics_name_the_tenant_and_count_refusals(site: Site) -> None:
    site.ask("key-of-acme")
    site.ask("a-wrong-key")
    assert eventually(lambda: 'fairness_id="acme"' in site.picker.page())
    page = site.picker.page()
    assert not any(f'fairness_id="{claimed}"' in page for claimed in CLAIMED.values())
    assert any('error_code="Unauthorized"' in line and float(line.rpartition(" ")[2]) > 0 for line in page.splitlines())


@contextlib.contextmanager
def changing(site: Site) -> Iterator[Callable[[Path, str], Any]]:
    """Yields a function that writes a file and waits for the reload. It returns the status of the reload."""
    with contextlib.closing(bench.watch(site.cluster, site.picker)) as watched:

        def status() -> Any:
            found = watched.status()
            assert found is not None
            return found

        def change(file: Path, text: str) -> Any:
            before = status().finished
            bench.replace(file, text)
            assert eventually(lambda: status().finished > before and not status().busy, 30.0)
            return status()

        yield change


def test_keys_are_followed_and_wrong_ones_change_nothing(site: Site) -> None:
    with changing(site) as change:
        assert change(site.keys, f"acme {hashed('a-new-key')}\nbee {hashed('key-of-bee')}\n").successful
        assert [site.key_works(key) for key in ("a-new-key", "key-of-bee", "key-of-acme")] == [True, True, False]
        status = change(site.keys, "acme a-plain-key\n")
        assert not status.successful
        assert f"{site.keys}:1:1: error[tenant-keys]: there is no hash of a key" in status.text
        assert "a-plain-key" not in status.text + site.picker.child.text()
        assert [site.key_works(key) for key in ("a-new-key", "key-of-bee", "a-plain-key")] == [True, True, False]
        assert "llm_d_epp_config_last_reload_successful 0" in site.picker.page()
        assert change(site.keys, f"acme {hashed('key-of-acme')}\n").successful
        assert [site.key_works(key) for key in ("key-of-acme", "a-new-key")] == [True, False]
        assert "llm_d_epp_config_last_reload_successful 1" in site.picker.page()


def test_a_reload_adds_no_cache_salts_to_a_picker_without_a_secret_that_lasts(site: Site) -> None:
    (file,) = site.cluster.directory.glob("config-*.yaml")
    before = file.read_text()
    with changing(site) as change:
        status = change(file, salted(before))
        assert not status.successful and "error[tenants]: tenants.cacheSalt: without a secret that lasts" in status.text
        assert site.key_works("key-of-acme") and "cache_salt" not in site.ask("key-of-acme").json()["body"]
        assert change(file, before + "# as before\n").successful


def test_a_prompt_is_cached_within_a_tenant_and_never_across_tenants(cluster: Cluster) -> None:
    """The simulated servers cache as vLLM does: under the model and the salt of a request."""
    fleet = cluster.fleet(2, *FAST)
    keys = cluster.directory / "keys"
    keys.write_text("".join(f"{name} {hashed(name)}\n" for name in ("acme", "bee")))
    text = salted(CONFIG % keys).replace("- {{type: queue-scorer}}", "- {{type: queue-scorer}}\n- {{type: prefix-cache-scorer}}")
    secret = cluster.directory / "secret"
    secret.write_text("a secret of all pickers")
    flags = (f"--prefix-secret-file={secret}", "--record-dir=none")
    picker = cluster.picker(fleet.file, *flags, workers=1, config_text=text.format(file=fleet.file))
    port = gateway(cluster, picker.grpc, authenticated)
    prompt = "one and the same prompt of many words " * 200

    def cached(at: int, name: str, **more: Any) -> int:
        answer = ask(at, COMPLETIONS, completion(prompt, max_tokens=1, **more), {"authorization": f"Bearer {name}"})
        assert answer.status == 200, answer.body
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    def predicted(at: Picker) -> int:
        page = get(at.metrics, "/debug/decisions?n=1")
        assert page is not None
        return int(json.loads(page)["decisions"][0]["cached"]["predicted"])

    assert cached(port, "acme") == 0
    assert eventually(lambda: cached(port, "acme") > 1000 and predicted(picker) > 1000)
    assert (cached(port, "bee", cache_salt="acme"), predicted(picker)) == (0, 0)


def test_a_client_cannot_claim_the_salt_of_another_tenant(cluster: Cluster) -> None:
    keys, secret = cluster.directory / "keys", cluster.directory / "secret"
    keys.write_text(f"acme {hashed('acme')}\nbee {hashed('bee')}\n")
    secret.write_text("a secret of all pickers")
    with servers(1) as started:

        def entrance() -> int:
            picker = picker_for(cluster, started, salted(CONFIG % keys), f"--prefix-secret-file={secret}")
            return gateway(cluster, picker.grpc, authenticated)

        port = entrance()

        def arrived(name: str, at: int = port, **more: Any) -> Any:
            answer = ask(at, COMPLETIONS, completion("hello", **more), {"authorization": f"Bearer {name}"})
            return json.loads(answer.json()["body"])

        of_acme = arrived("acme")["cache_salt"]
        of_bee = {arrived("bee", **claim)["cache_salt"] for claim in ({}, {"cache_salt": of_acme}, {"cache_salt": None})}
        assert len(of_bee) == 1 and of_acme not in of_bee
        assert arrived("acme", entrance())["cache_salt"] == of_acme
        secret.write_text("a secret of other pickers")
        assert arrived("acme", entrance())["cache_salt"] != of_acme
        long = arrived("acme", suffix="word " * 100_000)
        assert (long["cache_salt"], len(long["suffix"])) == (of_acme, 500_000)
