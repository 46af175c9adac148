"""The precise prefix producer: precise where endpoints say what they hold, approximate for the others."""

import math

import msgspec
import numpy as np
import pytest

from epp.config.load import load
from epp.plugin import HeldView
from epp.plugins.producers.approx_prefix import ApproximatePrefix
from epp.plugins.producers.precise_prefix import BLOCKS_MAX, UNNAMED, PrecisePrefix, PreciseScorer, kv_settings
from epp.plugins.producers.tokenizer import Tokens
from epp.plugins.scorers.prefix_cache import PrefixCache
from epp.prefix.deciding import deciding_producer
from epp.prefix.held import adapter_word, held_links, held_root, index_keys
from epp.prefix.match import APPROXIMATE, PrefixMatch, prefix_match
from epp.request.tokens import NO_TOKENS, TOKENS, Feature, PromptTokens, TokenizedPrompt
from tests.epp.plugins.calls import PROFILE
from tests.fakes import FakeServices, candidates, request

SECRET = 99  # of the fake services
IDS = np.arange(165, dtype=np.uint32)  # ten blocks of 16 and a rest


def parameters(**given: object):
    return msgspec.convert(given, PrecisePrefix.Params)


def keys(size: int, adapter: str = "", count: int | None = None) -> list[int]:
    chain = index_keys(held_links(IDS, size, held_root(adapter, size, SECRET), SECRET))
    return chain.tolist()[:count]


def view(*sizes: int, adapters: frozenset[int] = frozenset()) -> HeldView:
    """Endpoints with these block sizes; 0: not followed."""
    found = sorted({size for size in sizes if size}, key=lambda size: -sizes.count(size))
    followed = np.array([size > 0 for size in sizes])
    return HeldView(tuple(found), followed, followed, sizes, tuple("" if size else "cut" for size in sizes), adapters)


class World:
    def __init__(self, *sizes: int, adapters: frozenset[int] = frozenset(), **given: object) -> None:
        self.services = FakeServices()
        self.held = self.services.held_blocks
        self.held.view_ = view(*sizes, adapters=adapters)
        self.producer = PrecisePrefix("precise-prefix-cache-producer", parameters(**given))
        self.producer.start(self.services)
        self.candidates = candidates({"waiting_requests": [0] * len(sizes)})

    def hold(self, row: int, hashes: list[int], weight: int = 1000) -> None:
        self.held.by_row.setdefault(row, {}).update(dict.fromkeys(hashes, weight))

    def match(self, approximate: list[float] | None = None, *, tokens: bool = True, model: str = "base") -> PrefixMatch:
        r = request(b"x" * 600, model=model, target_model=model)
        blocks = None if approximate is None else np.array(approximate)
        r[prefix_match(APPROXIMATE)] = PrefixMatch(blocks, np.arange(3, dtype=np.uint64), 64, 165)
        if tokens:
            r[TOKENS] = TokenizedPrompt([PromptTokens(IDS)])
        self.producer.produce(r, self.candidates)
        self.request = r
        return r[prefix_match(self.producer.name)]


def test_blocks_are_counted_from_the_first_one_and_weighted_by_tier() -> None:
    world = World(16, 16)
    world.hold(0, keys(16))
    world.hold(1, keys(16), 800)
    match = world.match()
    assert (match.blocks.tolist(), match.total) == ([10, 10], 10)
    assert (match.cached.tolist(), match.counted.tolist()) == ([160, 160], [160, 128])
    assert list(match.why) == ["", ""]


def test_a_server_with_several_ranks_behind_one_address_is_matched_approximately_and_says_why() -> None:
    world = World(16, 16, 16)
    world.candidates = candidates({"waiting_requests": [0, 0, 0], "cache_ranks": [1, 2, math.nan]})
    for row in range(3):
        world.hold(row, keys(16))
    match = world.match(approximate=[0, 2, 0])
    assert match.blocks.tolist() == [10, 8, 10]
    assert list(match.why) == ["", "2 data-parallel ranks share the address, each with a cache of its own", ""]
    assert world.match().blocks.tolist() == [10, 0, 10]


def test_a_pool_in_which_every_server_has_several_ranks_is_matched_approximately() -> None:
    world = World(16, 16)
    world.candidates = candidates({"waiting_requests": [0, 0], "cache_ranks": [2, 2]})
    world.hold(0, keys(16))
    assert world.match(approximate=[0, 2]).blocks.tolist() == [0, 2]
    assert world.match().blocks is None


def test_an_endpoint_that_holds_the_whole_prompt_computes_its_last_block() -> None:
    world = World(16, 16)
    world.hold(0, keys(16))
    r = request(b"x" * 600, model="base", target_model="base")
    r[TOKENS] = TokenizedPrompt([PromptTokens(IDS[:160])])
    world.producer.produce(r, world.candidates)
    match = r[prefix_match(world.producer.name)]
    assert (match.blocks.tolist(), match.cached.tolist(), match.most()) == ([10, 0], [144, 0], 144)
    assert match.share(world.candidates).tolist() == [1, 0]


def test_a_server_that_reuses_larger_blocks_than_its_events_have_is_predicted_in_larger_ones() -> None:
    """Such as a model with a sliding window, whose groups of caches have to agree on what is reused."""
    world = World(16, 16)
    world.candidates = candidates({"cache_block_size": [64, 16]})
    for row in (0, 1):
        world.hold(row, keys(16))
    assert world.match().cached.tolist() == [128, 160]


def test_several_prompts_are_cached_and_cut_each_for_itself() -> None:
    world = World(16, 16)
    world.hold(0, keys(16))
    r = request(b"x" * 600, model="base", target_model="base")
    r[TOKENS] = TokenizedPrompt([PromptTokens(IDS[:160]), PromptTokens(IDS), PromptTokens(IDS[:10])])
    world.producer.produce(r, world.candidates)
    match = r[prefix_match(world.producer.name)]
    assert (match.blocks.tolist(), match.cached.tolist()) == ([20, 0], [144 + 160, 0])
    assert (match.total, match.tokens, match.prompts, match.most()) == (20, 335, 3, 144 + 160)


def test_blocks_of_one_token_and_media_of_any_length_cost_a_bounded_number_of_keys() -> None:
    world = World(1)
    r = request(b"x", model="base", target_model="base")
    features = [Feature("image", "pic", 5, 1 << 60)]
    r[TOKENS] = TokenizedPrompt([PromptTokens(np.zeros(2 * BLOCKS_MAX, dtype=np.uint32), features)])
    world.producer.produce(r, world.candidates)
    match = r[prefix_match(world.producer.name)]
    assert (match.total, match.tokens) == (BLOCKS_MAX, 2 * BLOCKS_MAX)


def test_an_endpoint_that_is_not_precise_gets_the_approximate_match_in_the_same_unit() -> None:
    world = World(16, 0, 0)
    world.hold(0, keys(16, count=3))
    match = world.match([2, 1, 3])
    assert match.blocks.tolist() == [3, 4, 10]  # blocks of 64 tokens are four of 16, and at most the prompt
    assert match.cached.tolist() == [48, 64, 164]
    assert list(match.why) == ["", "cut", "cut"]


def test_without_a_precise_endpoint_or_without_tokens_the_approximate_match_holds() -> None:
    for world, tokens in ((World(0, 0), True), (World(16, 16), False)):
        match = world.match([2, 0], tokens=tokens)
        assert (match.blocks.tolist(), match.total, match.block_tokens) == ([2, 0], 3, 64)


@pytest.mark.parametrize("approximate", [[2.0, 0.0], None])
def test_without_tokens_no_match_is_precise_and_the_reason_is_that_of_the_token_producer(approximate: list[float] | None) -> None:
    world = World(16, 0)
    r = request(b"x" * 600, model="base", target_model="base")
    if approximate is not None:
        r[prefix_match(APPROXIMATE)] = PrefixMatch(np.array(approximate), np.arange(3, dtype=np.uint64), 64, 165)
    r[NO_TOKENS] = "403 from /render: fix it"
    world.producer.produce(r, world.candidates)
    assert r[prefix_match(world.producer.name)].why == ["no tokens (403 from /render: fix it)", "cut"]
    assert list(world.match(tokens=False).why) == ["no tokens", "cut"]


def test_servers_with_blocks_of_different_sizes_are_compared_in_tokens() -> None:
    world = World(16, 16, 32)
    world.hold(0, keys(16, count=6))
    world.hold(2, keys(32))
    assert world.match().blocks.tolist() == [6, 0, 10]
    assert world.match().cached.tolist() == [96, 0, 160]


def test_an_adapter_that_events_have_named_is_another_prompt_than_the_base_model() -> None:
    world = World(16, adapters=frozenset({adapter_word("sql", SECRET)}))
    world.hold(0, keys(16, "sql"))
    assert world.match(model="base").blocks is None
    assert world.match(model="sql").blocks.tolist() == [10]


def test_where_older_blocks_are_unknown_the_longer_match_counts() -> None:
    world = World(16, 16, 16)
    world.held.view_ = world.held.view_._replace(whole=np.array([False, False, True]), why=("partial", "partial", ""))
    world.hold(0, keys(16, count=3))
    world.hold(1, keys(16, count=6))
    match = world.match([1, 1, 1])
    assert match.blocks.tolist() == [4, 6, 0]
    assert match.cached.tolist() == [64, 96, 0]


def test_a_model_that_may_be_an_adapter_without_events_is_matched_approximately_and_says_why() -> None:
    """A second name of the base model would be one, too."""
    world = World(16, 0, adapters=frozenset({adapter_word("sql", SECRET)}))
    world.producer.meet([Tokens("token-producer", msgspec.convert({"modelName": "base"}, Tokens.Params))])
    world.hold(0, keys(16))
    assert world.match([0, 1]).blocks.tolist() == [10, 4]
    match = world.match([2, 1], model="poems")
    assert (match.blocks.tolist(), list(match.why)) == ([2, 1], [UNNAMED, "cut"])


def test_without_adapters_every_name_is_one_of_the_base_model() -> None:
    world = World(16)
    world.producer.meet([Tokens("token-producer", msgspec.convert({"modelName": "base"}, Tokens.Params))])
    world.hold(0, keys(16))
    assert world.match(model="poems").blocks.tolist() == [10]


@pytest.mark.parametrize("bad", [
    {"kvEventsConfig": {"zmqEndpoint": "5557"}},
    {"kvEventsConfig": {"discoverPods": False}},
    {"speculativeTTL": "-1s"},
    {"indexerConfig": {"kvCacheBackendConfigs": [{"name": f"t{n}"} for n in range(6)]}},
    {"indexerConfig": {"kvCacheBackendConfigs": [{"name": "GPU"}, {"name": "gpu"}]}},
])  # fmt: skip
def test_parameters_that_cannot_work_are_refused(bad) -> None:
    with pytest.raises(ValueError, match=":"):
        PrecisePrefix("p", parameters(**bad))


def test_sizes_limit_the_index_and_the_first_that_is_set_counts() -> None:
    def blocks(**index: object) -> int:
        return PrecisePrefix("p", parameters(indexerConfig={"kvBlockIndexConfig": index})).settings.blocks_max

    assert blocks() == 0
    assert blocks(inMemoryConfig={"size": 1e8}) == 100_000_000
    assert blocks(inMemoryConfig={"size": 5}, costAwareMemoryConfig={"size": "2GiB"}) == (2 << 30) // 68


def test_the_older_form_scores_by_itself_and_beside_a_producer_only_scores() -> None:
    producer = PrecisePrefix("precise-prefix-cache-producer", parameters())
    alone, beside = (PreciseScorer("s", parameters()) for _ in range(2))
    alone.meet([alone])
    beside.meet([beside, producer])
    assert [key.name for key in alone.produces] == ["prefix_match/s"]
    assert (beside.produces, [key.name for key in beside.consumes]) == ((), ["prefix_match/precise-prefix-cache-producer"])
    assert kv_settings([beside, producer]) is producer.settings
    r = request()
    r[prefix_match("s")] = PrefixMatch(np.array([2.0, 4.0]), np.arange(4, dtype=np.uint64), 16, 65)
    scores = alone.score(r, candidates({"waiting_requests": [0, 0]}), PROFILE)
    assert scores is not None
    assert scores.tolist() == [0.5, 1.0]


def test_a_scorer_without_a_name_reads_the_only_producer_that_is_listed() -> None:
    precise, approximate = PrecisePrefix("precise", parameters()), ApproximatePrefix("a", ApproximatePrefix.Params())
    for listed, read in (([precise], "precise"), ([precise, approximate], APPROXIMATE), ([], APPROXIMATE)):
        scorer = PrefixCache("s", PrefixCache.Params())
        scorer.meet([scorer, *listed])
        assert [key.name for key in scorer.consumes] == [f"prefix_match/{read}"]


SIDE_BY_SIDE = """
featureGates: [flowControl]
plugins:
- {type: token-producer, parameters: {modelName: m, vllm: {url: "http://127.0.0.1:9"}}}
- {type: approx-prefix-cache-producer}
- {type: precise-prefix-cache-producer}
- {name: by-precise, type: prefix-cache-scorer, parameters: {prefixMatchInfoProducerName: PRODUCER}}
- {type: token-load-scorer}
- {type: token-weighted-fairness-policy}
schedulingProfiles:
- {name: default, plugins: [{pluginRef: token-load-scorer}, {pluginRef: by-precise, weight: 2}]}
flowControl: {defaultPriorityBand: {fairnessPolicyRef: token-weighted-fairness-policy}}
"""


@pytest.mark.parametrize("named", ["precise-prefix-cache-producer", APPROXIMATE])
def test_cached_tokens_are_counted_by_the_producer_that_scorers_read_if_several_are_listed(named: str) -> None:
    plugins = load(SIDE_BY_SIDE.replace("PRODUCER", named), "c.yaml").pipeline.plugins
    for follower in ("token-load-scorer", "inflight-load-producer", "token-weighted-fairness-policy"):
        matches = [key.name for key in plugins[follower].optional if key.name.startswith("prefix_match/")]
        assert matches == [f"prefix_match/{named}"]


def test_a_producer_that_no_one_listed_follows_the_only_prefix_producer_that_is_listed() -> None:
    text = SIDE_BY_SIDE.replace("- {type: approx-prefix-cache-producer}\n", "").replace("PRODUCER", '""')
    load_producer = load(text, "c.yaml").pipeline.plugins["inflight-load-producer"]
    assert prefix_match("precise-prefix-cache-producer") in load_producer.optional


def test_two_producers_side_by_side_give_each_scorer_the_match_that_it_names() -> None:
    """The endpoint that has the prompt by its events is not the one that it was sent to."""
    config = load(SIDE_BY_SIDE.replace("PRODUCER", "precise-prefix-cache-producer"), "c.yaml")
    services = FakeServices()
    services.held_blocks.view_ = view(16, 16)
    services.held_blocks.by_row[1] = dict.fromkeys(keys(16), 1000)
    precise, scorer = config.pipeline.plugins["precise-prefix-cache-producer"], config.pipeline.plugins["by-precise"]
    other = PrefixCache("other", PrefixCache.Params(prefix_match_info_producer_name=APPROXIMATE))
    other.meet(list(config.pipeline.plugins.values()))
    precise.start(services)
    r, both = request(b"x" * 600, model="base", target_model="base"), candidates({"waiting_requests": [0, 0]})
    r[prefix_match(APPROXIMATE)] = PrefixMatch(np.array([3.0, 0.0]), np.arange(3, dtype=np.uint64), 64, 165)
    r[TOKENS] = TokenizedPrompt([PromptTokens(IDS)])
    precise.produce(r, both)  # type: ignore[attr-defined]
    assert scorer.score(r, both, PROFILE).tolist() == [0.0, 1.0]  # type: ignore[attr-defined]
    scores = other.score(r, both, PROFILE)
    assert scores is not None
    assert scores.tolist() == [1.0, 0.0]


def test_the_older_form_beside_another_producer_is_the_one_by_which_tokens_are_counted() -> None:
    approximate = ApproximatePrefix("a", ApproximatePrefix.Params())
    assert deciding_producer([approximate, PreciseScorer("s", parameters())]) == "s"
    assert deciding_producer([approximate, PrecisePrefix("p", parameters()), PreciseScorer("s", parameters())]) == "p"
    assert deciding_producer([approximate]) == "a"
    assert deciding_producer([]) == APPROXIMATE


def test_look_ups_are_counted_if_metrics_of_the_index_are_wanted() -> None:
    world = World(16, 16, indexerConfig={"kvBlockIndexConfig": {"enableMetrics": True}})
    world.hold(0, keys(16, count=4))
    world.hold(1, keys(16, count=7))
    world.match()
    world.match()
    totals = {name: sum(counted.values.values()) for name, counted in world.services.counted.items()}
    assert totals == {
        "kv_cache_index_lookup_requests_total": 2,
        "kv_cache_index_lookup_hits_total": 14,
        "kv_cache_index_max_pod_hit_count_total": 14,
    }
    quiet = World(16)
    quiet.match()
    assert quiet.services.counted == {}
