"""Block hashes: two ways to compute them give the same numbers."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from epp.prefix import blocks
from epp.prefix.blocks import DENSE_BLOCKS, STRIDE, block_hashes, landmarks, root

SECRET = 0x1234_5678_9ABC_DEF0


def plain(prompt: bytes, block_bytes: int, start: int) -> list[int]:
    from xxhash import xxh3_64_intdigest

    chain, link = [], start
    for at in range(0, len(prompt), block_bytes):
        link = (link * blocks.P + xxh3_64_intdigest(prompt[at : at + block_bytes], SECRET)) % 2**64
        chain.append(link | blocks.WIDE if len(chain) >= DENSE_BLOCKS else link & ~blocks.WIDE)
    return chain


@given(st.binary(max_size=40_000), st.sampled_from([256, 512, 1024]), st.integers(0, 2**64 - 1))
def test_short_and_long_prompts_follow_the_same_recurrence(prompt: bytes, block_bytes: int, start: int) -> None:
    assert block_hashes(prompt, block_bytes, start, SECRET).tolist() == plain(prompt, block_bytes, start)


@given(st.binary(min_size=0, max_size=20_000), st.binary(max_size=20_000))
def test_a_prompt_that_grows_keeps_all_its_whole_blocks(prompt: bytes, more: bytes) -> None:
    before = block_hashes(prompt, 256, 7, SECRET)
    after = block_hashes(prompt + more, 256, 7, SECRET)
    whole = len(prompt) // 256
    assert (before[:whole] == after[:whole]).all()


def test_different_models_salts_and_secrets_share_no_hash() -> None:
    prompt = b"x" * 1024
    starts = [root("m", "", SECRET), root("n", "", SECRET), root("m", "s", SECRET), root("m", "", SECRET + 1), root("ms", "", SECRET)]
    chains = [set(block_hashes(prompt, 256, start, SECRET).tolist()) for start in starts]
    assert sum(len(c) for c in chains) == len(set().union(*chains))


def test_the_border_between_model_and_salt_matters() -> None:
    assert root("ab", "c", SECRET) != root("a", "bc", SECRET)


def test_a_hash_says_how_many_blocks_it_stands_for() -> None:
    from shm import index_capacity

    assert (blocks.WIDE, STRIDE) == (index_capacity.WIDE, index_capacity.WIDE_BLOCKS)
    chain = block_hashes(b"x" * 256 * 401, 256, 7, SECRET)
    assert abs(int(index_capacity.blocks_of(landmarks(chain)).sum()) - 401) < STRIDE


def test_an_empty_prompt_has_no_blocks() -> None:
    assert len(block_hashes(b"", 256, 7, SECRET)) == 0


@given(st.integers(0, 2000), st.integers(0, 2000))
def test_landmarks_lose_less_than_a_stride_of_any_shared_prefix(one: int, other: int) -> None:
    first = np.arange(1, one + 1, dtype=np.uint64)
    learned = set(landmarks(first).tolist())
    shared = min(one, other)
    deepest = max((block for block in range(1, shared + 1) if block in learned), default=0)
    assert shared - deepest < (STRIDE if shared > DENSE_BLOCKS else 1)
    assert not one or one in learned


def test_landmarks_include_the_blocks_that_are_probed_for_long_prompts() -> None:
    learned = set(landmarks(np.arange(2000, dtype=np.uint64)).tolist())
    assert learned.issuperset(range(0, 2000, 32)) and 1999 in learned
    assert len(learned) < 2000 // 3


@given(st.integers(0, 1000), st.data())
def test_landmarks_from_a_start_are_the_landmarks_of_the_whole_from_there(count: int, data: st.DataObject) -> None:
    chain = np.arange(count, dtype=np.uint64)
    start = data.draw(st.integers(0, count))
    assert landmarks(chain, start).tolist() == [block for block in landmarks(chain).tolist() if block >= start]
