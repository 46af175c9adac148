"""Deciders of disaggregated serving: when a prompt is worth a prefill server or an encoder."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from epp.candidates import Candidates
from epp.decision.decision import ProfileRun
from epp.plugin import NoParams, Plugin
from epp.plugins.deciders.prefix_based import PrefixBased
from epp.plugins.deciders.simple import Multimodal
from epp.plugins.producers.approx_prefix import ApproximatePrefix, MulticlusterApproximatePrefix
from epp.prefix.match import APPROXIMATE, PrefixMatch, prefix_match
from epp.request import Request
from epp.request.tokens import TOKENS, Feature, PromptTokens, TokenizedPrompt
from tests.epp.plugins.stages import servers
from tests.fakes import request


def prefix_based(**params: Any) -> PrefixBased:
    return PrefixBased("d", msgspec.convert(params, PrefixBased.Params))


def matched(tokens: int, blocks: Sequence[float] | None, producer: str = APPROXIMATE) -> Request:
    made = request(b"x" * (4 * tokens))
    held = None if blocks is None else np.array(blocks)
    made[prefix_match(producer)] = PrefixMatch(held, np.zeros(tokens // 64, np.uint64), 64)
    return made


def decode_run(candidates: Candidates, picked: int) -> ProfileRun:
    return ProfileRun(candidates, candidates.zeros(), [picked])


# Blocks have 64 tokens: of 1,000 tokens with 10 cached blocks, 1000 - 640 = 360 are left to compute.
@pytest.mark.parametrize(
    ("params", "tokens", "cached_blocks", "wanted"),
    [
        ({}, 1000, 0, False),
        ({"nonCachedTokens": 360}, 1000, 10, True),
        ({"nonCachedTokens": 361}, 1000, 10, False),
        ({"nonCachedTokens": 1000}, 1000, 0, True),
        ({"nonCachedTokens": 1001}, 1000, 0, False),
        ({"nonCachedTokens": 100, "promptTokens": 1000}, 1000, 0, True),
        ({"nonCachedTokens": 100, "promptTokens": 1001}, 1000, 0, False),
    ],
)
def test_prefill_is_wanted_if_enough_of_a_long_prompt_is_not_cached(
    params: dict[str, int], tokens: int, cached_blocks: int, wanted: bool
) -> None:
    decider = prefix_based(**params)
    assert decider.wanted(matched(tokens, [99, cached_blocks]), decode_run(servers("decode", "decode"), 1)) is wanted


def test_the_cache_of_the_decode_target_counts_also_among_filtered_candidates() -> None:
    candidates = servers("prefill", "decode", "decode").keep(np.array([False, True, True]))
    decider = prefix_based(nonCachedTokens=64)
    r = matched(1024, [0, 0, 16])
    assert decider.wanted(r, decode_run(candidates, 0))
    assert not decider.wanted(r, decode_run(candidates, 1))


def test_without_a_prefix_match_nothing_counts_as_cached() -> None:
    run = decode_run(servers("decode"), 0)
    assert prefix_based(nonCachedTokens=64).wanted(request(b"x" * 256), run)
    assert prefix_based(nonCachedTokens=64).wanted(matched(64, None), run)
    assert not prefix_based(nonCachedTokens=64).wanted(request(b"x" * 252), run)


def test_the_count_of_the_token_producer_precedes_the_estimate_from_bytes() -> None:
    r = request(b"x" * 400)
    run = decode_run(servers("decode"), 0)
    decider = prefix_based(nonCachedTokens=100)
    assert decider.wanted(r, run)
    r[TOKENS] = TokenizedPrompt([PromptTokens(np.zeros(99, np.uint32))])
    assert not decider.wanted(r, run)
    r[TOKENS] = TokenizedPrompt([PromptTokens(None, [IMAGE])])  # the producer counted no tokens
    assert decider.wanted(r, run)
    assert decider.optional == (TOKENS,)


IMAGE = Feature("image", "cafe", 0, 1)


@pytest.mark.parametrize(
    ("prompts", "wanted"),
    [(None, False), ([], False), ([PromptTokens(None)], False), ([PromptTokens(None), PromptTokens(None, [IMAGE])], True)],
)
def test_requests_with_media_run_the_encode_stage(prompts: Any, wanted: bool) -> None:
    r = request()
    if prompts is not None:
        r[TOKENS] = TokenizedPrompt(prompts)
    assert Multimodal("m", NoParams()).wanted(r, None) is wanted


def test_the_decider_reads_the_only_listed_producer_or_the_one_that_it_names() -> None:
    other = MulticlusterApproximatePrefix("precise", ApproximatePrefix.Params())
    usual = ApproximatePrefix(APPROXIMATE, ApproximatePrefix.Params())

    def reads(plugins: Sequence[Plugin], **params: Any) -> list[str]:
        decider = prefix_based(nonCachedTokens=1, **params)
        decider.meet(plugins)
        return [key.name for key in decider.consumes]

    assert reads([]) == [f"prefix_match/{APPROXIMATE}"]
    assert reads([other]) == ["prefix_match/precise"]
    assert reads([other, usual]) == [f"prefix_match/{APPROXIMATE}"]
    assert reads([other, usual], prefixMatchInfoProducerName="precise") == ["prefix_match/precise"]


def test_a_decider_that_never_disaggregates_needs_no_producer_and_is_reported_at_start() -> None:
    assert prefix_based().consumes == ()
    assert prefix_based().without_effect == ["nonCachedTokens: is 0, so this decider never disaggregates a request"]
