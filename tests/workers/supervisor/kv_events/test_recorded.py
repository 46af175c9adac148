"""What real vLLM servers published is held as they held it. `recorded/` has the payloads of their messages, in order, as one msgpack array.

vLLM 0.32.0 with blocks of 32 tokens: two turns of a chat, four messages of the adapter `ad1`, the cache salts `b`, `b` and `a`, a message
with evictions, and at last a reset. The hybrid model has a group with a sliding window beside the one with full attention.
"""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from epp.prefix.held import adapter_word
from tests.workers.supervisor.kv_events.test_holdings import SECRET, World

RECORDED = Path(__file__).with_name("recorded")
SIZE = 32


def payloads(name: str) -> list[bytes]:
    return msgspec.msgpack.decode((RECORDED / f"{name}.msgpack").read_bytes(), type=list[bytes])


def tokens(payload: bytes) -> list[int]:
    """The token ids of the first event of a message."""
    events: list[dict[str, Any]] = msgspec.msgpack.decode(payload)[1]
    return events[0]["token_ids"]


@pytest.fixture
def world() -> World:
    return World()


def test_a_chat_of_vllm_is_held_with_its_second_turn(world: World) -> None:
    first, second, *_ = payloads("vllm-0.32.0")
    for payload in (first, second):
        world.holders[0].apply(payload)
    assert world.held(tokens(first) + tokens(second), size=SIZE)[0] == [13]
    assert (world.holders[0].block_tokens, world.holders[0].malformed) == (SIZE, 0)


def test_adapters_and_salts_of_vllm_are_prompts_of_their_own(world: World) -> None:
    messages = payloads("vllm-0.32.0")
    for payload in messages[:9]:
        world.holders[0].apply(payload)
    adapter, salted = tokens(messages[2]), tokens(messages[6])
    assert world.held(adapter, size=SIZE, adapter="ad1")[0] == [12]
    assert world.held(adapter, size=SIZE)[0] < [12]
    assert world.held(salted, size=SIZE, salt="b")[0] == [11]
    assert world.held(salted, size=SIZE, salt="c")[0] == [0]
    assert world.holdings.known_words == {adapter_word("ad1", SECRET)}
    assert not world.holders[0].nameless


def test_evictions_are_applied_and_a_reset_leaves_nothing(world: World) -> None:
    *messages, evictions, reset = payloads("vllm-0.32.0")
    for payload in (*messages, evictions):
        world.holders[0].apply(payload)
    world.holdings.flush(1)
    counts = world.holdings.counts
    # The recording has not all messages between these, so the server evicts blocks of which it does not tell.
    assert (counts.removed, counts.removed + counts.removals_skipped) == (5, 22)
    assert world.holders[0].held > 50 and world.holders[0].malformed == 0
    world.holders[0].apply(reset)
    assert world.holders[0].held == 0


def test_of_a_model_with_a_sliding_window_the_blocks_with_full_attention_count(world: World) -> None:
    (message,) = payloads("vllm-0.32.0-hybrid")
    world.holders[0].apply(message)
    assert world.held(tokens(message), size=SIZE)[0] == [16]
    assert (world.holders[0].group, world.holders[0].malformed) == (1, 0)
