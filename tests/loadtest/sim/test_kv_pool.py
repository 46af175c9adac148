"""The KV cache of a simulated server."""

from hypothesis import given
from hypothesis import strategies as st

from loadtest.sim.kv_pool import CPU, GPU, Dropped, Gained, KvPool, Offloaded, block_hashes, token_count

PROMPT = bytes(range(256)) * 2  # 128 tokens, 8 blocks of 16


def test_a_token_is_about_four_bytes_and_a_prompt_has_at_least_one() -> None:
    assert [token_count(b"x" * n) for n in (0, 1, 4, 5, 64)] == [1, 1, 1, 2, 16]


def test_equal_beginnings_have_equal_hashes_and_a_difference_changes_all_later_hashes() -> None:
    other = PROMPT[:130] + b"!" + PROMPT[131:]
    first, second = block_hashes(PROMPT, 16, b"m"), block_hashes(other, 16, b"m")
    assert len(first) == 8
    assert first[:2] == second[:2]
    assert not set(first[2:]) & set(second[2:])


def test_only_whole_blocks_are_hashed() -> None:
    assert block_hashes(PROMPT[:63], 16, b"m") == []
    assert len(block_hashes(PROMPT[:65], 16, b"m")) == 1


def test_prompts_with_different_salts_share_no_hash() -> None:
    assert not set(block_hashes(PROMPT, 16, b"a")) & set(block_hashes(PROMPT, 16, b"b"))


def test_a_released_prompt_is_found_again_and_a_shared_one_counts_once() -> None:
    pool = KvPool(10)
    assert pool.allocate([1, 2, 3], 4, 9) == 0
    assert pool.allocate([1, 2, 3], 4, 9) == 3
    assert pool.in_use == 5  # three shared, one private each
    pool.release([1, 2, 3], 4)
    pool.release([1, 2, 3], 4)
    assert (pool.in_use, pool.idle) == (0, 3)
    assert pool.allocate([1, 2, 9], 3, 9) == 2


def test_the_last_token_of_a_prompt_is_never_a_hit() -> None:
    pool = KvPool(10)
    pool.allocate([1, 2], 2, 9)
    assert pool.allocate([1, 2], 2, 1) == 1


def test_too_many_blocks_are_refused_and_nothing_changes() -> None:
    pool = KvPool(5)
    pool.allocate([1, 2], 3, 9)
    assert pool.allocate([7], 3, 9) is None
    assert (pool.in_use, pool.idle) == (3, 0)


def test_room_is_foreseen_at_the_end_of_the_request_whose_blocks_suffice() -> None:
    pool = KvPool(10)
    for hashes, needed in (([1, 2], 3), ([1, 2, 3], 4), ([4], 2)):
        pool.allocate(hashes, needed, 9)
    held = [(5.0, ([1, 2, 3], 4)), (1.0, ([1, 2], 3)), (9.0, ([4], 2))]
    assert pool.in_use == 7
    assert pool.room_in([([7, 8], 3)], held) == 0.0
    assert pool.room_in([([7, 8], 4)], held) == 1.0, "the private block of the first one to end"
    assert pool.room_in([([7, 8], 5)], held) == 5.0, "its other blocks are used until then"
    assert pool.room_in([([7, 8], 3), ([7, 8, 9], 4)], held) == 5.0, "the second one shares the blocks of the first one"
    assert pool.room_in([([1, 2, 3], 4), ([7, 8], 4)], held) == 5.0
    assert pool.room_in([([1, 2, 3], 9)], held) == 9.0, "blocks that it uses itself do not become free"


def test_idle_blocks_that_a_request_hits_make_no_room_for_its_other_blocks() -> None:
    pool = KvPool(4)
    pool.allocate([1, 2], 2, 9)
    pool.release([1, 2], 2)
    assert pool.allocate([1, 2], 5, 9) is None
    assert pool.allocate([1, 2], 4, 9) == 2


def test_the_longest_idle_chain_is_evicted_first_and_from_its_end() -> None:
    pool = KvPool(4)
    for chain in ([1, 2], [3, 4]):
        pool.allocate(chain, 2, 9)
        pool.release(chain, 2)
    pool.allocate([5], 1, 9)
    assert pool.allocate([1, 2], 2, 9) == 1
    pool.forget()
    assert pool.idle == 0


CHAINS = st.integers(0, 5).flatmap(lambda root: st.integers(0, 6).map(lambda n: [root * 10 + i for i in range(n)]))


@given(st.lists(st.tuples(st.booleans(), CHAINS, st.integers(0, 4)), max_size=60))
def test_random_allocations_and_releases_leak_no_blocks(moves: list[tuple[bool, list[int], int]]) -> None:
    pool, held = KvPool(12), []
    for enters, chain, private in moves:
        if enters:
            needed = len(chain) + private
            before = (pool.in_use, pool.idle)
            if pool.allocate(chain, needed, 99) is None:
                assert (pool.in_use, pool.idle) == before
            else:
                held.append((chain, needed))
        elif held:
            pool.release(*held.pop(0))
        shared = {block for chain, _ in held for block in chain}
        assert pool.in_use == len(shared) + sum(n - len(c) for c, n in held)
        assert pool.in_use + pool.idle <= pool.total
    for chain, needed in held:
        pool.release(chain, needed)
    assert pool.in_use == 0


def test_evicted_blocks_go_to_the_cpu_tier_and_are_loaded_again() -> None:
    pool = KvPool(3, 2, logs=True)
    for block in (1, 2, 3, 4):
        pool.allocate([block], 1, 9)
        pool.release([block], 1)
    assert pool.log == [Gained(0, 1), Gained(0, 1), Gained(0, 1), Gained(0, 1), Offloaded(1), Dropped(1, GPU)]
    assert (pool.blocks(GPU), pool.blocks(CPU)) == ({2, 3, 4}, {1})
    pool.log.clear()
    assert pool.allocate([1, 9], 2, 9) == 1
    assert pool.loaded == 1
    assert pool.log[0] == Gained(0, 2)
    assert pool.log[1:] == [Offloaded(2), Dropped(2, GPU), Offloaded(3), Dropped(3, GPU), Dropped(1, CPU)]
    pool.forget()
    assert (pool.blocks(GPU), pool.blocks(CPU)) == ({1, 9}, set())


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 8), st.integers(0, 3)), max_size=60), st.sampled_from([0, 3, 9]))
def test_the_log_tells_what_each_tier_holds(requests: list[tuple[int, int, int]], cpu_blocks: int) -> None:
    pool = KvPool(12, cpu_blocks, logs=True)
    held: dict[str, set[int]] = {GPU: set(), CPU: set()}
    for start, count, more in requests:
        hashes = [100 * start + n for n in range(count)]
        assert pool.allocate(hashes, count + more, count) is not None
        assert pool.log is not None
        for change in pool.log:
            match change:
                case Gained(first, last):
                    assert not held[GPU] & set(hashes[first:last])
                    held[GPU] |= set(hashes[first:last])
                case Offloaded(block):
                    held[CPU].add(block)
                case Dropped(block, tier):
                    held[tier].remove(block)
        pool.log.clear()
        pool.release(hashes, count + more)
        assert (held[GPU], held[CPU]) == (pool.blocks(GPU), pool.blocks(CPU))
