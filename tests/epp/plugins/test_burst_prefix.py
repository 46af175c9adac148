"""Where the requests of a burst meet. Endpoints have the owner ids 1, 2, ...; the expected places are found by hand."""

from typing import Any

import pytest

from epp.errors import ProducerFailed
from epp.plugins.producers._bursts import Rules, assign
from epp.prefix.match import prefix_match
from tests.epp.plugins.calls import made
from tests.fakes import candidates, request

BURST = "burst-prefix-cache-producer"
A, B, C = (1, 2, 3), (4, 5), (1, 2, 9)
IDLE = {1: 0.0, 2: 0.0}


def test_equal_prompts_meet_and_different_groups_spread() -> None:
    assert assign([A, B, A, B], IDLE, Rules(-1, 0, False)) == [1, 2, 1, 2]


def test_a_single_request_or_one_without_blocks_has_no_preference() -> None:
    assert assign([A, B, (), A, ()], IDLE, Rules(-1, 0, False)) == [1, None, None, 1, None]


def test_ties_go_to_the_endpoint_with_fewer_running_requests() -> None:
    assert assign([A, A], {1: 3.0, 2: 1.0}, Rules(-1, 0, False)) == [2, 2]


def test_a_full_endpoint_passes_the_rest_on_and_more_than_all_have_room_for_balances() -> None:
    assert assign([A] * 4, IDLE, Rules(2, 0, False)) == [1, 1, 2, 2]
    assert assign([A] * 5, IDLE, Rules(1, 0, False)) == [1, 2, 1, 2, 1]


def test_prompts_that_share_enough_blocks_meet_up_to_the_fair_share() -> None:
    assert assign([A, C], {1: 0.0}, Rules(-1, 2, False)) == [1, 1]
    assert assign([A, C], IDLE, Rules(-1, 2, False)) == [1, 2]  # the fair share is one each
    assert assign([A, C, B, B], IDLE, Rules(-1, 2, False)) == [2, 2, 1, 1]
    assert assign([A, C], IDLE, Rules(-1, 3, False)) == [None, None]


def test_blocks_instead_of_requests_are_balanced() -> None:
    chains = [(1, 2, 3, 4), (1, 2, 3, 4), (5,), (5,), (6,), (6,)]
    assert assign(chains, IDLE, Rules(-1, 0, True)) == [1, 1, 2, 2, 2, 2]


def matches(plugin: Any, prompts: list[bytes]) -> list[list[float] | None]:
    c = candidates({"running_requests": [0.0, 0.0]})
    requests = [request(prompt) for prompt in prompts]
    waits = {plugin.produce(r, c) for r in requests}
    assert len(waits) == 1
    [(seconds, pause)] = plugin._services.pauses
    assert seconds == 0.1
    pause.finish()
    found = [r[prefix_match(BURST)] for r in requests]
    return [None if match is None or match.blocks is None else match.blocks.tolist() for match in found]


def test_requests_of_one_window_get_a_whole_match_at_their_endpoint() -> None:
    assert matches(made(BURST), [b"a" * 600, b"b" * 200, b"a" * 600]) == [[3.0, 0.0], None, [3.0, 0.0]]


def test_a_full_window_lets_further_requests_through_without_a_preference() -> None:
    plugin, c = made(BURST, maxBatchSize=1), candidates({"running_requests": [0.0]})
    plugin.produce(request(b"a"), c)
    with pytest.raises(ProducerFailed, match="maxBatchSize"):
        plugin.produce(request(b"a"), c)


def test_a_window_that_everybody_left_takes_no_further_requests() -> None:
    plugin, c = made(BURST), candidates({"running_requests": [0.0]})
    plugin.produce(request(b"a"), c).leave()
    plugin.produce(request(b"a"), c)
    assert len(plugin._services.pauses) == 2


@pytest.mark.parametrize("wrong", [{"maxPerReplica": 0}, {"maxBatchSize": 0}, {"maxPrefixTokensToMatch": 63}])
def test_values_that_allow_nothing_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        made(BURST, **wrong)
