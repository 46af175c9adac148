"""The predicted number of cached tokens."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from epp.candidates import Candidates, Snapshot
from epp.data import Datum
from epp.decision.decision import Decision, ProfileRun
from epp.endpoints.server_blocks import ServerBlocks, server_blocks, whole
from epp.plugin import DataProducer, NoParams, Scorer
from epp.prefix.match import PrefixMatch, prefix_match
from epp.prefix.prediction import compared_match, predicted_tokens
from tests.fakes import candidates


class Produces(DataProducer):
    def __init__(self, name: str) -> None:
        super().__init__(name, NoParams())
        self.produces = (prefix_match(name), Datum(f"{name}/more", int))


class Reads(Scorer):
    def __init__(self, name: str) -> None:
        super().__init__("reads", NoParams())
        self.consumes = (prefix_match(name),)


def match(*blocks: float) -> PrefixMatch:
    return PrefixMatch(np.array(blocks) if blocks else None, np.zeros(9, np.uint64), 64)


def run(picked: int, those: Candidates | None = None) -> ProfileRun:
    those = those or candidates(count=3)
    return ProfileRun(those, those.zeros(), [picked])


def decided(**runs: ProfileRun | None) -> Decision:
    name, primary = next(iter(runs.items()))
    return Decision(primary.targets if primary is not None else (), runs, name)


def test_the_prediction_is_what_the_picked_endpoint_holds_in_whole_blocks() -> None:
    assert [predicted_tokens(match(1, 5, 0), decided(default=run(i))) for i in range(3)] == [64, 320, 0]


def test_the_prediction_is_zero_if_no_endpoint_holds_blocks() -> None:
    assert predicted_tokens(match(), decided(default=run(0))) == 0


def test_the_prediction_uses_the_right_row_after_filters() -> None:
    left = candidates(count=3).keep(np.array([False, True, True]))
    assert predicted_tokens(match(1, 2, 3), decided(default=run(1, left))) == 192


def test_nothing_is_predicted_if_another_server_computes_the_prompt() -> None:
    assert predicted_tokens(match(1, 2, 3), decided(decode=run(1), prefill=run(0))) is None
    assert predicted_tokens(match(1, 2, 3), decided(decode=run(1), prefill=None)) == 128
    assert predicted_tokens(match(1, 2, 3), decided(decode=run(1), encode=run(0))) == 128


def test_nothing_is_predicted_without_a_primary_run() -> None:
    assert predicted_tokens(match(1, 2, 3), Decision(run(0).targets, {}, "")) is None


def held_tokens(held: int, tokens: int, block: float) -> PrefixMatch:
    """What one server holds of a prompt of `tokens` tokens by the picker's count. `block`: the size of its blocks."""
    servers = ServerBlocks(np.array([block]))
    return PrefixMatch(np.array([held / 64]), np.zeros(16, np.uint64), 64, tokens, servers=servers)


def test_in_server_tokens_the_prediction_is_the_same_share_of_the_prompt() -> None:
    match = held_tokens(256, 1000, 1)
    assert [match.reported(0, prompt) for prompt in (400, 1000, 3000)] == [102, 256, 768]
    assert held_tokens(0, 1000, 1).reported(0, 500) == 0


def test_a_server_reuses_whole_blocks_of_its_own_and_computes_the_last_token() -> None:
    """Reported by vLLM 0.32.0 with blocks of 128: it recomputes the last token, and with it the block that it is in."""
    for prompt, cached in ((152, 128), (128, 0), (129, 128), (256, 128), (100, 0)):
        assert held_tokens(1024, 1000, 128).reported(0, prompt) == cached
    assert [held_tokens(512, 1000, block).reported(0, 500) for block in (1, 16, 32, 128, math.nan)] == [
        256, 256, 256, 256, 256,
    ]  # fmt: skip
    assert [held_tokens(512, 1000, block).reported(0, 450) for block in (1, 16, 32, 128)] == [230, 224, 224, 128]


def test_the_number_of_the_decision_follows_the_same_rule() -> None:
    for block, cached in ((1, 999), (16, 992), (64, 960), (128, 896)):
        match = held_tokens(1024, 1000, block)
        assert predicted_tokens(match, decided(default=run(0))) == match.reported(0, 1000) == match.most() == cached


def test_a_full_match_scores_as_much_as_any_however_large_the_servers_blocks_are() -> None:
    servers = ServerBlocks(np.array([16.0, 128.0, 16.0]))
    match = PrefixMatch(np.array([16.0, 16.0, 8.0]), np.zeros(16, np.uint64), 64, 1000, servers=servers)
    shares = match.share(candidates(count=3))
    assert shares is not None
    assert shares.tolist() == [1.0, 896 / 992, 512 / 992]
    equal = PrefixMatch(np.array([16.0, 14.0, 8.0]), np.zeros(16, np.uint64), 64, 1000, servers=ServerBlocks(np.full(3, 128.0)))
    shares = equal.share(candidates(count=3))
    assert shares is not None
    assert shares.tolist() == [1.0, 1.0, 512 / 896]


def test_a_prompt_shorter_than_a_servers_block_is_never_cached() -> None:
    match = held_tokens(64, 100, 128)
    assert (predicted_tokens(match, decided(default=run(0))), match.share(candidates(count=1))) == (0, None)


def test_servers_whose_blocks_are_not_known_compute_the_last_token() -> None:
    match = PrefixMatch(np.array([4.0, 2.0]), np.zeros(4, np.uint64), 64)
    assert match.cached is not None
    assert match.cached.tolist() == [255, 128]


@given(st.integers(0, 3000), st.integers(1, 3000), st.sampled_from([1.0, 16.0, 64.0, 128.0]))
def test_the_rule_in_arrays_is_the_rule_of_one_server(held: int, tokens: int, block: float) -> None:
    servers = ServerBlocks(np.array([block]))
    (reused,) = servers.reused(np.array([float(held)]), 1.0, tokens).tolist()
    assert reused == whole(held, tokens, block) <= max(tokens - 1, 0) // block * block


def test_snapshots_share_the_blocks_of_their_servers_until_one_changes() -> None:
    first = candidates({"cache_block_size": [16.0, math.nan, 128.0]}).snapshot
    blocks = server_blocks(first)
    assert blocks.sizes.tolist() == [16, 1, 128]
    assert server_blocks(first) is blocks

    def later(sizes: list[float]) -> Snapshot:
        none = np.zeros(3)
        values = {"cache_block_size": np.array(sizes)}
        return Snapshot(first.endpoint_list, values, fresh=none == 0, known=none == 0, down=none == 1, inflight_at_scrape=none)

    assert server_blocks(later([16.0, math.nan, 128.0])) is blocks
    assert server_blocks(later([16.0, 32.0, 128.0])).sizes.tolist() == [16, 32, 128]


def test_the_match_that_scorers_read_is_compared_or_else_the_first() -> None:
    producers = [Produces("a"), Produces("b")]
    assert compared_match(producers, [Reads("b")]) == prefix_match("b")
    assert compared_match(producers, []) == prefix_match("a")
    assert compared_match([], [Reads("b")]) is None
