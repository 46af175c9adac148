from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.config.load import load
from epp.prefix.match import APPROXIMATE, PRECISE, PrefixMatch, prefix_match
from epp.request import Request
from tests.epp.plugins.calls import made, only, permuted, score
from tests.fakes import candidates, request


def prompt(tokens: int, blocks: list[float] | None = None, block_tokens: int = 64) -> Request:
    made = request(b"x" * (4 * tokens))
    made[prefix_match(APPROXIMATE)] = PrefixMatch(
        None if blocks is None else np.array(blocks), np.zeros(tokens // block_tokens + 1, np.uint64), block_tokens
    )
    return made


def loaded(*tokens: float) -> Any:
    return candidates(count=len(tokens), tokens=tokens)


@pytest.mark.parametrize(
    ("parameters", "tokens", "r", "expected"),
    [
        # t = 0 + 0, 250, 500, 1000 of 1000
        ({"queueThresholdTokens": 1000}, [0, 250, 500, 1000], request(), [1.0, 0.75, 0.5, 0.0]),
        # t = 0 + 250, 750 + 250, 9000 + 250: limited to 1000
        ({"queueThresholdTokens": 1000}, [0, 750, 9000], request(b"x" * 1000), [0.75, 0.0, 0.0]),
        # 256 tokens, with 0, 64 and 256 of them cached: t = 256, 192, 0 of 512
        ({"queueThresholdTokens": 512}, [0, 0, 0], prompt(256, [0, 1, 4]), [0.5, 0.625, 1.0]),
        # the last block is not full: 100 tokens in 2 blocks, both cached: t = 0, not -28
        ({"queueThresholdTokens": 100}, [0, 28], prompt(100, [2, 2]), [1.0, 0.72]),
        # no endpoint holds a block
        ({"queueThresholdTokens": 512}, [0, 128], prompt(128), [0.75, 0.5]),
        # 0 or less means 4194304
        ({"queueThresholdTokens": 0}, [2097152], request(), [0.5]),
        ({"queueThresholdTokens": -1}, [4194304], request(), [0.0]),
        ({}, [1048576], request(), [0.75]),
    ],
)
def test_tokens_in_flight_and_uncached_tokens_of_the_prompt_count(
    parameters: dict[str, int], tokens: list[float], r: Request, expected: list[float]
) -> None:
    assert score(made("token-load-scorer", **parameters), loaded(*tokens), r) == pytest.approx(expected)


def test_filtered_candidates_score_by_their_own_tokens_and_matches() -> None:
    c = only(loaded(100, 200, 300), 0, 2)
    # 100 + 256 - 64 = 292 and 300 + 256 - 128 = 428 of 1000
    scorer = made("token-load-scorer", queueThresholdTokens=1000)
    assert score(scorer, c, prompt(256, [1, 0, 2])) == pytest.approx([0.708, 0.572])


@given(st.lists(st.tuples(st.integers(-10, 10**7), st.integers(0, 30)), min_size=1, max_size=12), st.integers(0, 5000), st.randoms())
def test_scores_are_in_range_and_move_with_their_endpoints(rows: list[tuple[int, int]], tokens: int, rng: Any) -> None:
    order = list(range(len(rows)))
    rng.shuffle(order)
    scorer = made("token-load-scorer")

    def scores(of: list[tuple[int, int]]) -> list[float]:
        load, blocks = zip(*of, strict=True)
        return score(scorer, loaded(*load), prompt(tokens, list(blocks)))

    straight = scores(rows)
    assert all(0 <= s <= 1 for s in straight)
    assert scores(permuted(rows, order)) == permuted(straight, order)


def test_the_scorer_brings_its_load_producer_but_no_prefix_producer() -> None:
    config = load("plugins: [{type: token-load-scorer}]", "c.yaml")
    assert "inflight-load-producer" in config.pipeline.plugins
    assert "approx-prefix-cache-producer" not in config.pipeline.plugins


def test_it_reads_the_only_prefix_producer_that_is_configured() -> None:
    plugin: Any = made("token-load-scorer")
    plugin.meet([plugin, made(PRECISE)])
    assert prefix_match(PRECISE) in plugin.optional
    assert prefix_match(APPROXIMATE) not in plugin.optional
    plugin = made("token-load-scorer")
    plugin.meet([plugin, made(PRECISE), made(APPROXIMATE)])
    assert prefix_match(APPROXIMATE) in plugin.optional
