"""The limits of endpoints in the prefix index."""

import pytest

from epp.config.load import ConfigErrors, load
from epp.data import CACHE_TOKENS, WAITING
from epp.plugins._parameters import LRU_CAPACITY
from epp.plugins.extractors.core_metrics import Extracted
from epp.plugins.producers.approx_prefix import ApproximatePrefix
from epp.prefix.match import TIERS_MAX, Capacity, assign_tiers
from shm.prefix_writer import TIERS, in_tier
from workers.shared.index_limits import IndexLimits, PrefixUse, prefix_use

WANTED = (CACHE_TOKENS, WAITING)
TUNED = PrefixUse(64, (Capacity(True, LRU_CAPACITY),))


class Index:
    def __init__(self) -> None:
        self.limits: list[tuple[int, int]] = []

    def limit(self, owner: int, blocks: int) -> None:
        self.limits.append((owner, blocks))


def page(tokens: float = 0.0, present: int = 0b11) -> Extracted:
    return Extracted((tokens, 5.0), present, {})


def producer(name: str = "approx-prefix-cache-producer", **params: object) -> ApproximatePrefix:
    return ApproximatePrefix(name, ApproximatePrefix.Params(**params))  # type: ignore[arg-type]


def test_the_cache_size_of_a_server_sets_its_limit_in_blocks_of_the_index_once() -> None:
    index = Index()
    limits = IndexLimits(index, TUNED, WANTED)
    for _ in range(3):
        limits.scraped(7, page(160_000))
    limits.scraped(8, page(8_000))
    assert index.limits == [(7, 2500), (8, 125)]
    limits.scraped(7, page(320_000))
    assert index.limits[-1] == (7, 5000)


@pytest.mark.parametrize("reported", [page(present=0b10), page(8_000, 0b10), page(0), page(32)])
def test_a_server_without_cache_metrics_gets_the_configured_limit(reported: Extracted) -> None:
    index = Index()
    IndexLimits(index, PrefixUse(64, (Capacity(True, 77),)), WANTED).scraped(3, reported)
    assert index.limits == [(3, 77)]


def test_without_auto_tune_all_servers_get_the_configured_limit() -> None:
    index = Index()
    limits = IndexLimits(index, PrefixUse(64, (Capacity(False, 900),)), WANTED)
    limits.appeared(3)
    limits.scraped(3, page(160_000))
    assert index.limits == [(3, 900)]


def test_a_new_endpoint_has_the_configured_limit_until_its_first_scrape_and_failures_change_no_limit() -> None:
    index = Index()
    limits = IndexLimits(index, TUNED, WANTED)
    limits.appeared(3)
    limits.scraped(3, page(6_400))
    limits.appeared(3)
    assert index.limits == [(3, LRU_CAPACITY), (3, 100)]
    limits.left(3)
    limits.appeared(3)
    assert index.limits[-1] == (3, LRU_CAPACITY)


def test_hits_beyond_the_size_of_the_cache_raise_the_limit_until_the_server_reports_another_size() -> None:
    index = Index()
    limits = IndexLimits(index, TUNED, WANTED)
    limits.reported(7, 1 << 20)
    limits.scraped(7, page(2_560))
    for tokens in (2_560, 5_000, 4_000, 64_000, 64_000):
        limits.reported(7, tokens)
        limits.scraped(7, page(2_560))
    assert index.limits == [(7, 40), (7, 78), (7, 1000)]
    limits.scraped(7, page(12_800))
    assert index.limits[-1] == (7, 200)
    limits.left(7)
    limits.reported(7, 1 << 20)
    assert index.limits[-1] == (7, 200)


def test_hits_raise_no_limit_that_is_configured_for_all_servers() -> None:
    index = Index()
    limits = IndexLimits(index, PrefixUse(64, (Capacity(False, 900),)), WANTED)
    limits.scraped(3, page(160_000))
    limits.reported(3, 1 << 20)
    assert index.limits == [(3, 900)]


def test_without_a_producer_no_endpoint_has_a_limit() -> None:
    index = Index()
    limits = IndexLimits(index, None, (WAITING,))
    limits.appeared(3)
    limits.scraped(3, Extracted((1.0,), 1, {}))
    assert index.limits == []


def test_producers_with_different_capacities_have_tiers_with_limits_of_their_own() -> None:
    assert prefix_use([]) is None
    assert prefix_use([producer()]) == TUNED
    both = [producer(), producer("cpu", auto_tune=False, lru_capacity_per_server=50_000), producer("like the first")]
    assign_tiers(both)
    use = prefix_use(both)
    assert use == PrefixUse(64, (Capacity(True, LRU_CAPACITY), Capacity(False, 50_000)))
    index = Index()
    IndexLimits(index, use, WANTED).scraped(3, page(6_400))
    assert index.limits == [(3, 100), (in_tier(3, 1), 50_000)]


def test_more_capacities_than_tiers_share_the_last_tier() -> None:
    many = [producer(str(size), lru_capacity_per_server=size) for size in range(1, TIERS + 3)]
    assign_tiers(many)
    assert [each.tier for each in many] == [0, 1, 2, 3, 3, 3]
    use = prefix_use(many)
    assert use is not None
    assert [capacity.blocks for capacity in use.tiers] == [1, 2, 3, 4]


def test_two_block_sizes_are_a_configuration_error() -> None:
    text = """\
plugins:
- {type: approx-prefix-cache-producer, name: coarse, parameters: {blockSizeTokens: 256}}
- {type: approx-prefix-cache-producer, name: fine}
- {type: prefix-cache-scorer, name: one, parameters: {prefixMatchInfoProducerName: coarse}}
- {type: prefix-cache-scorer, name: two, parameters: {prefixMatchInfoProducerName: fine}}
"""
    with pytest.raises(ConfigErrors, match=r"c.yaml:2:3: error\[block-sizes\]: 'coarse' .*has blocks of 256 tokens"):
        load(text, "c.yaml")


def test_the_index_has_room_for_all_tiers() -> None:
    assert TIERS_MAX == TIERS
