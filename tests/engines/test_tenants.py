"""Tenants of a picker in front of a real vLLM: whose prompts it caches, and what a tenant has used of its budget."""

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import pytest

from loadtest.demo.children import python
from loadtest.demo.stack import LOOPBACK, get
from tests.e2e.cluster import CHAT, COMPLETIONS, Answer, Cluster, ask, eventually, run
from tests.engines.conftest import APPROXIMATE, PRECISE, Pool, Site
from tests.engines.servers import MODEL
from tests.engines.test_vllm import BLOCK, HELLO, MESSAGES, RESPONSES

SALTED: Final = "tenants: {from: [{header: x-tenant, trusted: true}], cacheSalt: tenant}\n"
LIMITED: Final = "tenants: {from: [{header: x-tenant, trusted: true}], budget: {tokensPerMinute: 1, burst: 1000, cachedPrice: 0.5}}\n"
BURST: Final = 1000
HITS: Final = "vllm:prefix_cache_hits_total"
QUERIES: Final = "vllm:prefix_cache_queries_total"
TEXT: Final = HELLO[0]["content"]


class Api(NamedTuple):
    """An API that knows cache salts. `cached`: the path in its answer to the number of cached tokens; empty: it reports none."""

    path: str
    fields: Mapping[str, Any]
    cached: tuple[str, ...] = ()


APIS: Final[Mapping[str, Api]] = {
    "chat": Api(CHAT, {"messages": HELLO}, ("usage", "prompt_tokens_details", "cached_tokens")),
    "completions": Api(COMPLETIONS, {"prompt": TEXT}, ("usage", "prompt_tokens_details", "cached_tokens")),
    "responses": Api(RESPONSES, {"input": TEXT, "max_output_tokens": 4}, ("usage", "input_tokens_details", "cached_tokens")),
    "messages": Api(MESSAGES, {"messages": HELLO}, ("usage", "cache_read_input_tokens")),
    "generate": Api("/inference/v1/generate", {"token_ids": list(range(300, 700)), "sampling_params": {"max_tokens": 1}}),
}


def site_of(cluster: Cluster, pair: Pool, plugins: str, section: str) -> Site:
    """Returns a site with one engine, so that all tenants meet in its cache."""
    secret = cluster.directory / "secret"
    secret.write_text("the secret of these tests")
    return Site(cluster, pair._replace(engines=pair.engines[:1]), plugins, f"--prefix-secret-file={secret}", section=section)


def send(site: Site, tenant: str, api: Api, **more: Any) -> Answer:
    body = {"model": MODEL, "max_tokens": 4, "temperature": 0, **api.fields, **more}
    answer = ask(site.gateway, api.path, json.dumps(body).encode(), {"x-tenant": tenant})
    assert answer.status in (200, 429), answer
    return answer


def hits(site: Site, tenant: str, api: Api, **more: Any) -> tuple[int, int]:
    """Sends a prompt. Returns how many of its tokens the engine counts as cached, and how many its answer reports (-1: it reports none)."""
    (engine,) = site.pool.engines
    before, asked = engine.total(HITS), engine.total(QUERIES)
    answer = send(site, tenant, api, **more).json()
    assert engine.total(QUERIES) > asked
    for name in api.cached:
        answer = answer[name] or {}
    return int(engine.total(HITS) - before), int(answer or 0) if api.cached else -1


def predicted(site: Site) -> int:
    """Returns how many tokens of the last prompt the picker took to be cached at its server."""
    decisions = json.loads(get(site.picker.metrics, "/debug/decisions?n=1") or b"{}")["decisions"]
    return int(decisions[0]["cached"]["predicted"])


@pytest.mark.parametrize("name", APIS)
def test_vllm_has_a_prompt_cached_for_the_tenant_that_sent_it_and_for_no_other(cluster: Cluster, pair: Pool, name: str) -> None:
    api = APIS[name]
    site = site_of(cluster, pair, APPROXIMATE, SALTED)
    assert hits(site, "acme", api)[0] == 0
    found, reported = hits(site, "acme", api)
    assert found >= BLOCK and reported in (found, -1)
    found_by_others, reported_to_others = hits(site, "bee", api, cache_salt="acme")
    assert (found_by_others, max(0, reported_to_others)) == (0, 0)
    assert hits(site, "bee", api)[0] == found  # by now, it has sent the prompt itself


@pytest.mark.parametrize("plugins", [APPROXIMATE, PRECISE], ids=["approximate", "precise"])
def test_the_picker_predicts_cached_prompts_per_tenant_as_vllm_has_them(cluster: Cluster, pair: Pool, plugins: str) -> None:
    site = site_of(cluster, pair, plugins, SALTED)
    if plugins == PRECISE:
        assert eventually(site.is_precise), site.endpoints()
    send(site, "acme", APIS["chat"])

    def agree() -> bool:
        found, _ = hits(site, "acme", APIS["chat"])
        return found >= BLOCK and predicted(site) == found

    assert eventually(agree), predicted(site)
    assert (hits(site, "bee", APIS["chat"])[0], predicted(site)) == (0, 0)


def test_a_tenant_is_refused_when_what_vllm_reports_has_used_up_its_budget(cluster: Cluster, pair: Pool) -> None:
    site = site_of(cluster, pair, APPROXIMATE, LIMITED)
    used, prompt, seen = 0.0, 0, Counter[str]()
    while (answer := send(site, "acme", APIS["chat"])).status == 200:
        usage = answer.json()["usage"]
        cached, prompt = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0), usage["prompt_tokens"]
        seen.update(requests=1, input_tokens=prompt, cached_tokens=cached, output_tokens=usage["completion_tokens"])
        used += prompt - 0.5 * cached + usage["completion_tokens"]
    assert BURST - prompt <= used <= BURST + 8  # an answer of 4 tokens may overdraw, and a few tokens come back while this runs
    assert answer.headers["x-ratelimit-limit-tokens"] == "1" and int(answer.headers["retry-after"]) >= 1
    listed = run(python("workers", "tenants", f"--url=http://{LOOPBACK}:{site.picker.metrics}", "--json"))
    (acme,) = [each["hour"] for each in json.loads(listed.stdout)["tenants"] if each["tenant"] == "acme"]
    assert acme.items() >= {**seen, "over_budget": 1, "refused": 1}.items()
    assert send(site, "bee", APIS["chat"]).status == 200
