"""Canonical prompt bytes match the caching of engines: prompts have equal bytes exactly as far as their beginnings are equal.

Conversations are generated once and written as the clients of each API write them. The properties hold for every parser.
"""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from epp.prefix.blocks import block_hashes
from tests.epp.plugins.conversations import BLOCK, WRITERS, Conversation, canonical, common, conversations
from tests.epp.plugins.parser_bodies import parsed
from tests.examples import examples


@given(turns=conversations())
@examples(60)
def test_a_conversation_that_grows_by_a_turn_keeps_its_blocks(turns: Conversation) -> None:
    for api in WRITERS:  # in one test: to make the conversations costs more than to read them
        prompts = [canonical(api, turns[:end]) for end in range(2, len(turns) + 1)]
        chains = [block_hashes(prompt, BLOCK, 5, 7).tolist() for prompt in prompts]
        for shorter, longer, prompt in zip(chains, chains[1:], prompts, strict=False):
            whole = len(prompt) // BLOCK
            assert longer[:whole] == shorter[:whole], api
            assert len(longer) >= len(shorter), api


@given(turns=conversations(), other=conversations(), data=st.data())
@examples(60)
def test_conversations_that_differ_share_only_the_blocks_before_the_difference(
    turns: Conversation, other: Conversation, data: st.DataObject
) -> None:
    keep = data.draw(st.integers(0, len(turns)))
    changed = [*turns[:keep], *other[keep:]]
    same = turns == changed
    for api in WRITERS:
        one, two = canonical(api, turns), canonical(api, changed)
        assert (one == two) == same, api
        if not same:
            first = common(one, two) // BLOCK
            a, b = (block_hashes(made, BLOCK, 5, 7).tolist() for made in (one, two))
            assert a[:first] == b[:first], api
            assert not set(a[first:]) & set(b[first:]), api


def shuffled(value: Any, rng: Any) -> Any:
    """The same JSON with its keys in another order."""
    if isinstance(value, dict):
        names = list(value)
        rng.shuffle(names)
        return {name: shuffled(value[name], rng) for name in names}
    return [shuffled(item, rng) for item in value] if isinstance(value, list) else value


def slashed(text: str) -> str:
    return text.replace("/", "\\/")


@given(turns=conversations(), rng=st.randoms(use_true_random=False), indent=st.sampled_from([None, 1]))
@examples(40)
def test_the_form_of_the_json_does_not_matter(turns: Conversation, rng: Any, indent: int | None) -> None:
    for api in ("chat", "responses", "conversations", "anthropic", "completions", "vllm", "sglang"):
        parser, path, build = WRITERS[api]
        written = build(turns)
        plain = parsed(parser, path, written).prompt.canonical
        other = json.dumps(shuffled(json.loads(written), rng), ensure_ascii=False, indent=indent)
        assert parsed(parser, path, other.encode()).prompt.canonical == plain, api
        assert parsed(parser, path, slashed(other).encode()).prompt.canonical == plain, api
