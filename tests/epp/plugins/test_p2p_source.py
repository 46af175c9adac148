"""Which server the prompt's KV cache is copied from. Blocks have 64 tokens; the expected values are computed by hand."""

import asyncio
from collections import Counter
from typing import Any

import numpy as np
import pytest

from epp.config.load import load
from epp.decision.decide import choose
from epp.decision.decision import Decision, ProfileRun
from epp.prefix.match import APPROXIMATE, PRECISE, PrefixMatch, prefix_match
from epp.request.client_headers import ENCODERS, KV_SOURCE, PREFILLER
from tests.epp.plugins.calls import made
from tests.fakes import FakePool, FakeServices, candidates, request

SOURCE = "p2p-source-producer"


def decided(
    blocks: list[float] | None,
    target: int = 0,
    *,
    prefill: int | None = None,
    waiting: list[float] | None = None,
    of: Any = None,
    keep: list[int] | None = None,
    prefill_profile: str = "prefill",
) -> Decision:
    """The decision for a request with these cached blocks per endpoint, sent to `target`, after the plugin ran."""
    size = len(blocks or (0, 0, 0))
    c = candidates({"waiting_requests": waiting or [0.0] * size})
    r = request()
    narrowed = c if keep is None else c.keep(np.isin(np.arange(size), keep))
    r.considered = narrowed
    held = None if blocks is None else np.array(blocks)
    r[prefix_match(APPROXIMATE)] = PrefixMatch(held, np.zeros(10, dtype=np.uint64), 64)
    runs: dict[str, ProfileRun | None] = {"decode": ProfileRun(c, c.zeros(), [target])}
    if prefill is not None:
        runs[prefill_profile] = ProfileRun(c, c.zeros(), [prefill])
    run = runs["decode"]
    assert run is not None
    decision = Decision(run.targets, runs, "decode")
    (of or made(SOURCE)).before_send(r, decision)
    return decision


def source(*args: Any, **more: Any) -> str | None:
    decision = decided(*args, **more)
    value = decision.headers.get(KV_SOURCE)
    assert (KV_SOURCE in decision.removed_headers) == (value is None), "a client's header never passes"
    return value


def test_the_longest_match_is_the_source() -> None:
    assert source([0, 5, 2]) == "10.0.0.2:8000"


def test_without_a_match_there_is_no_source() -> None:
    assert source(None) is None
    assert source([0, 0, 0]) is None


def test_the_computing_server_is_never_its_own_source() -> None:
    assert source([2, 5, 0], target=1) is None


@pytest.mark.parametrize(("delta", "expected"), [(1, True), (192, True), (193, False)])
def test_the_source_must_have_the_configured_number_of_tokens_more(delta: int, expected: bool) -> None:
    """5 blocks against 2: 3 x 64 = 192 tokens more."""
    assert (source([2, 5, 0], of=made(SOURCE, minCachedTokenDelta=delta)) is not None) == expected


def test_the_prefill_server_computes_the_prompt_if_there_is_one() -> None:
    assert source([0, 5, 5], target=0, prefill=1, of=made(SOURCE, minCachedTokenDelta=1)) is None
    assert source([5, 0, 0], target=0, prefill=1) == "10.0.0.1:8000"


def test_the_prefill_profile_may_have_another_name() -> None:
    named = made(SOURCE, prefillProfileName="compute")
    assert source([5, 0, 0], target=0, prefill=1, prefill_profile="compute", of=named) == "10.0.0.1:8000"
    assert source([5, 0, 0], target=0, prefill=1, of=named) is None


def test_servers_with_one_block_less_share_the_copies_by_their_queues() -> None:
    """Weights 1/(1+0) = 1 for endpoint 1, 1/(1+3) = 0.25 for endpoint 2; endpoint 3 is two blocks short."""
    plugin = made(SOURCE)
    drawn = Counter(source([0, 4, 5, 3], waiting=[0, 0, 3, 0], of=plugin) for _ in range(4000))
    assert set(drawn) == {"10.0.0.2:8000", "10.0.0.3:8000"}
    assert drawn["10.0.0.2:8000"] / 4000 == pytest.approx(0.8, abs=0.03)


def test_endpoints_that_are_no_candidates_are_no_sources() -> None:
    assert source([0, 5, 2], keep=[0, 2]) == "10.0.0.3:8000"


@pytest.mark.parametrize("delta", [0, -1])
def test_the_difference_is_at_least_one_token(delta: int) -> None:
    with pytest.raises(ValueError, match=">= 1"):
        made(SOURCE, minCachedTokenDelta=delta)


PLUGINS = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
{first}
- type: approx-prefix-cache-producer
- type: disagg-profile-handler
- type: always-disagg-pd-decider
{second}
schedulingProfiles:
- name: prefill
- name: decode
"""
P2P = f"- type: {SOURCE}"


@pytest.mark.parametrize(("first", "second"), [(P2P, ""), ("", P2P)])
@pytest.mark.parametrize("cached", [True, False])
def test_the_header_is_set_or_removed_wherever_the_plugin_is_listed(first: str, second: str, cached: bool) -> None:
    pipeline = load(PLUGINS.format(first=first, second=second), "test", allow_experimental=True).pipeline
    services = FakeServices()
    for plugin in pipeline.plugins.values():
        plugin.start(services)
    pool, r = FakePool(candidates({"waiting_requests": [0.0, 0.0]})), request(b"x" * 4096)
    if cached:
        warm = request(b"x" * 4096)
        decision = asyncio.run(choose(pipeline, warm, pool))
        others = [e for e in pool.fixed.endpoints if e.slot != decision.targets[0].slot]
        services.held = {block: {others[0].owner} for block in services.held}
    decision = asyncio.run(choose(pipeline, r, pool))
    named = [name for name in decision.removed_headers if name in (KV_SOURCE, PREFILLER, ENCODERS)]
    assert len(named) == len(set(named)) and not set(named) & set(decision.headers)
    assert (KV_SOURCE in decision.headers) != (KV_SOURCE in named)
    if not cached:
        assert KV_SOURCE in named


def test_it_reads_the_only_prefix_producer_that_is_configured() -> None:
    plugin: Any = made(SOURCE)
    plugin.meet([plugin, made(PRECISE)])
    assert prefix_match(PRECISE) in plugin.consumes
    named: Any = made(SOURCE, prefixMatchInfoProducerName=APPROXIMATE)
    named.meet([named, made(PRECISE)])
    assert prefix_match(APPROXIMATE) in named.consumes
