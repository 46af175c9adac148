"""Canonical prompt bytes match the caching of engines: prompts have equal bytes exactly as far as their beginnings are equal.

Conversations are generated once and written as the clients of each API write them. The properties hold for every parser.
"""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.prefix.blocks import block_hashes
from tests.epp.plugins.conversations import BLOCK, WRITERS, Conversation, canonical, common, conversations
from tests.epp.plugins.parser_bodies import parsed
from tests.examples import examples


@pytest.mark.parametrize("api", WRITERS)
@given(turns=conversations())
@examples(60)
def test_a_conversation_that_grows_by_a_turn_keeps_its_blocks(api: str, turns: Conversation) -> None:
    chains = [block_hashes(canonical(api, turns[:end]), BLOCK, 5, 7).tolist() for end in range(2, len(turns) + 1)]
    sizes = [len(canonical(api, turns[:end])) for end in range(2, len(turns) + 1)]
    for shorter, longer, size in zip(chains, chains[1:], sizes, strict=False):
        whole = size // BLOCK
        assert longer[:whole] == shorter[:whole]
        assert len(longer) >= len(shorter)


@pytest.mark.parametrize("api", WRITERS)
@given(turns=conversations(), data=st.data())
@examples(60)
def test_conversations_that_differ_share_only_the_blocks_before_the_difference(api: str, turns: Conversation, data: st.DataObject) -> None:
    other = data.draw(conversations())
    keep = data.draw(st.integers(0, len(turns)))
    changed = [*turns[:keep], *other[keep:]]
    one, two = canonical(api, turns), canonical(api, changed)
    same = turns == changed
    assert (one == two) == same
    if not same:
        first = common(one, two) // BLOCK
        a, b = (block_hashes(made, BLOCK, 5, 7).tolist() for made in (one, two))
        assert a[:first] == b[:first]
        assert not set(a[first:]) & set(b[first:])


def shuffled(value: Any, rng: Any) -> Any:
    """The same JSON with its keys in another order."""
    if isinstance(value, dict):
        names = list(value)
        rng.shuffle(names)
        return {name: shuffled(value[name], rng) for name in names}
    return [shuffled(item, rng) for item in value] if isinstance(value, list) else value


def slashed(text: str) -> str:
    return text.replace("/", "\\/")


@pytest.mark.parametrize("api", ["chat", "responses", "conversations", "anthropic", "completions", "vllm", "sglang"])
@given(turns=conversations(), rng=st.randoms(use_true_random=False), indent=st.sampled_from([None, 1]))
@examples(40)
def test_the_form_of_the_json_does_not_matter(api: str, turns: Conversation, rng: Any, indent: int | None) -> None:
    parser, path, build = WRITERS[api]
    body = json.loads(build(turns))
    plain = parsed(parser, path, build(turns)).prompt.canonical
    other = json.dumps(shuffled(body, rng), ensure_ascii=False, indent=indent)
    assert parsed(parser, path, other.encode()).prompt.canonical == plain
    assert parsed(parser, path, slashed(other).encode()).prompt.canonical == plain
