"""Keys of held blocks: events and requests give the same ones."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.prefix.blocks import MEDIA_MAX
from epp.prefix.held import adapter_word, held_links, held_root, index_keys, request_extras
from epp.request import Feature

SECRET = 7


def ids(count: int, start: int = 0) -> np.ndarray:
    return np.arange(start, start + count, dtype=np.uint32)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=900), st.integers(1, 40), st.lists(st.integers(0, 60), max_size=12))
def test_the_same_tokens_in_any_grouping_have_the_same_keys(tokens, size, cuts) -> None:
    words = np.array(tokens, dtype=np.uint32)
    whole = held_links(words, size, held_root("", size, SECRET), SECRET)
    link, at, parts = held_root("", size, SECRET), 0, []
    for cut in [*cuts, 10**6]:
        part = held_links(words[at * size : (at + cut) * size], size, link, SECRET)
        parts += part.tolist()
        link, at = (part.item(-1) if len(part) else link), at + len(part)
    assert parts == whole.tolist()
    assert len(whole) == len(tokens) // size


def test_only_whole_blocks_have_keys() -> None:
    assert len(held_links(ids(31), 16, 1, SECRET)) == 1
    assert len(held_links(ids(0), 16, 1, SECRET)) == 0


def test_adapter_block_size_secret_and_content_make_other_keys() -> None:
    chains = [
        held_links(tokens, size, held_root(name, size, secret), secret).tolist()[0]
        for tokens, size, name, secret in (
            (ids(32), 16, "", 7), (ids(32), 16, "sql", 7), (ids(32), 32, "", 7), (ids(32), 16, "", 8), (ids(32, 1), 16, "", 7),
        )
    ]  # fmt: skip
    assert len(set(chains)) == len(chains)
    assert adapter_word("a", SECRET) != adapter_word("b", SECRET)


def test_the_salt_belongs_to_the_first_block_and_so_changes_all_keys() -> None:
    plain = held_links(ids(64), 16, 1, SECRET)
    salted = held_links(ids(64), 16, 1, SECRET, request_extras((), "salt", 16, 4))
    assert not set(plain.tolist()) & set(salted.tolist())
    assert salted.tolist() == held_links(ids(64), 16, 1, SECRET, {0: ["salt"]}).tolist()


def test_a_medium_belongs_to_each_block_that_its_placeholder_overlaps() -> None:
    extras = request_extras([Feature("image", "abc", 20, 20), Feature("image", "d", 39, 1), Feature("image", "", 0, 4)], "", 16, 3)
    assert extras == {1: ["abc"], 2: ["abc", "d"]}


@pytest.mark.parametrize(("offset", "length"), [(0, 1 << 62), (20, 1 << 62), (1 << 62, 1), (1 << 62, 1 << 62)])
def test_a_placeholder_of_any_length_costs_no_more_than_the_prompt(offset: int, length: int) -> None:
    extras = request_extras([Feature("image", "abc", offset, length)], "", 16, 3)
    assert extras == {block: ["abc"] for block in range(offset // 16, 3)}


def test_media_that_cover_each_other_stop_counting() -> None:
    everywhere = [Feature("image", str(number), 0, 1 << 40) for number in range(MEDIA_MAX)]
    extras = request_extras(everywhere, "", 1, 10_000)
    assert sum(map(len, extras.values())) <= 10_000 + MEDIA_MAX


def test_a_long_name_in_every_block_is_hashed_once_and_differs_from_other_names() -> None:
    long, longer = "n" * 1_000_000, "n" * 1_000_001
    chains = [held_links(ids(2000), 1, 1, SECRET, {block: [name] for block in range(2000)}).tolist() for name in (long, longer)]
    assert not set(chains[0]) & set(chains[1])
    salts = [held_links(ids(16), 16, 1, SECRET, {0: ["s" * size]}).tolist() for size in (127, 128, 129, 130)]
    assert len({salt for [salt] in salts}) == 4


def test_extra_keys_count_in_any_order_and_only_for_whole_blocks() -> None:
    one, two = ({0: names, 9: ["far"]} for names in (["a", "b"], ["b", "a"]))
    assert held_links(ids(32), 16, 1, SECRET, one).tolist() == held_links(ids(32), 16, 1, SECRET, two).tolist()
    assert held_links(ids(16), 16, 1, SECRET, {0: ["ab"]}).tolist() != held_links(ids(16), 16, 1, SECRET, {0: ["a", "b"]}).tolist()


def test_index_keys_stand_for_one_block_each() -> None:
    assert not (index_keys(held_links(ids(4096), 16, 1, SECRET)) & np.uint64(1 << 16)).any()
