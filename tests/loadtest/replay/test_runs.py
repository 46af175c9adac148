"""Runs of blocks, against a count of the blocks themselves."""

import itertools
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from loadtest.replay.runs import HASH_BYTES, Runs, leading, runs_of
from tests.loadtest.replay.recordings import blocks, chained, ints

CHAINS = st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=12)


@given(CHAINS)
def test_a_run_has_the_blocks_that_occur_only_together(prompts: list[list[int]]) -> None:
    chains = [chained(words) for words in prompts]
    counts = Counter(block for chain in chains for block in blocks(chain))
    for chain, runs in zip(chains, runs_of(chains), strict=True):
        assert b"".join(run.hashes for run in runs) == chain
        assert [run.blocks for run in runs] == [len(blocks(run.hashes)) for run in runs]
        for run in runs:
            assert len({counts[block] for block in blocks(run.hashes)}) == 1
        for one, other in itertools.pairwise(runs):
            assert counts[blocks(one.hashes)[-1]] > counts[blocks(other.hashes)[0]]


@given(CHAINS)
def test_adding_a_prompt_tells_where_the_runs_end_that_earlier_prompts_had(prompts: list[list[int]]) -> None:
    runs, seen, ends = Runs(), set[bytes](), set[bytes]()
    for chain in map(chained, prompts):
        each = blocks(chain)
        found = runs.add(chain)
        assert found[0] == 0 and found == sorted(set(found))
        assert found[-1] == sum(block in seen for block in each)
        assert {each[end - 1] for end in found[1:]} >= ends.intersection(each)
        seen.update(each)
        ends.update(each[-1:])


def test_equal_runs_of_prompts_are_the_same_object() -> None:
    first, second = runs_of([chained([1, 2, 3]), chained([1, 2, 4, 5])])
    assert first[0] is second[0] and [run.blocks for run in (*first, second[1])] == [2, 1, 2]


def test_the_first_blocks_end_with_a_run() -> None:
    runs = Runs()
    whole = chained([1, 2, 3, 4])
    runs.add(whole)
    runs.add(whole[: 3 * HASH_BYTES])
    found = runs.of(whole)
    assert [leading(found, blocks) for blocks in (0, 3, 4, 9)] == [[], [found[0]], list(found), list(found)]


@given(st.lists(st.lists(st.integers(0, 3), max_size=8), max_size=12))
def test_a_trace_whose_hashes_stand_for_single_blocks_has_runs_too(prompts: list[list[int]]) -> None:
    chains = [ints(*words) for words in prompts]
    for chain, runs in zip(chains, runs_of(chains), strict=True):
        assert sum(run.blocks for run in runs) >= len(blocks(chain))
