"""Tests of the prefills that workers show to each other."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiled import calls, kernels
from compiled.kernels import areas_reference
from epp.prefix.blocks import block_hashes
from shm.prefills import FOUND_MAX, LEAST_BLOCKS, MARKED, OLD_S, PLACES, Hashes, Prefills, PrefillsSchema, local_prefills
from shm.segment import Region

OWNER = 7

native_only = pytest.mark.skipif(not kernels.NATIVE, reason="the kernels in C are not built")


def chain(*parts: tuple[str, int]) -> Hashes:
    """Returns the chain of a prompt with so many blocks of each letter."""
    return block_hashes(b"".join(letter.encode() * 4 * blocks for letter, blocks in parts), 4, 1, 2)


def workers(count: int) -> list[Prefills]:
    schema = PrefillsSchema(count)
    region = Region(memoryview(bytearray(schema.bytes)))
    return [Prefills(schema, region, index) for index in range(count)]


def test_all_workers_see_a_prefill_from_its_begin_to_its_end() -> None:
    one, other = workers(2)
    document = chain(("d", 100))
    place = one.begins(document, OWNER, 0, 6_400.0, 5.0)
    assert one.under_way(document, 5.001) == other.under_way(document, 5.001) == [(OWNER, 100, 5.0, 6_400.0)]
    one.ends(place)
    assert one.under_way(document, 5.002) == other.under_way(document, 5.002) == []


@given(shared=st.integers(0, 400), rest=st.integers(1, 60), asked=st.integers(1, 60), known=st.integers(0, 460))
def test_at_least_four_of_five_shared_blocks_are_found_and_never_more(shared: int, rest: int, asked: int, known: int) -> None:
    prefills = local_prefills()
    prefills.begins(chain(("d", shared), ("x", rest)), OWNER, known, 1.0, 0.0)
    found = prefills.under_way(chain(("d", shared), ("y", asked)), 0.0)
    for _, blocks, _, _ in found:
        assert max(known, 0.8 * shared - 1) < blocks <= shared
    if not found:
        assert shared < LEAST_BLOCKS or known >= 0.8 * shared - 1


def test_a_prompt_that_continues_a_whole_one_shares_all_of_it() -> None:
    prefills = local_prefills()
    prefills.begins(chain(("d", 97)), OWNER, 0, 1.0, 0.0)
    assert prefills.under_way(chain(("d", 97), ("more", 5)), 0.0)[0][1] == 97


def test_blocks_that_the_endpoint_held_before_are_not_under_way() -> None:
    prefills = local_prefills()
    prefills.begins(chain(("d", 50), ("x", 50)), OWNER, 50, 1.0, 0.0)
    assert prefills.under_way(chain(("d", 50), ("y", 50)), 0.0) == []


def test_short_prompts_are_not_shown() -> None:
    prefills = local_prefills()
    short = chain(("d", LEAST_BLOCKS - 1))
    assert prefills.begins(short, OWNER, 0, 1.0, 0.0) == -1
    prefills.ends(-1)
    assert prefills.under_way(short, 0.0) == prefills.under_way(chain(), 0.0) == []


def test_without_a_free_place_a_prefill_is_not_shown_and_places_are_used_again() -> None:
    prefills = local_prefills()
    places = [prefills.begins(chain((chr(200 + n), 8)), OWNER, 0, 1.0, 0.0) for n in range(PLACES)]
    assert sorted(places) == list(range(PLACES))
    assert prefills.begins(chain(("d", 8)), OWNER, 0, 1.0, 0.0) == -1
    prefills.ends(places[3])
    assert prefills.begins(chain(("d", 8)), OWNER, 0, 1.0, 0.0) == places[3]


def test_the_number_of_prefills_found_is_bounded() -> None:
    prefills = local_prefills()
    for _ in range(PLACES):
        prefills.begins(chain(("d", 8)), OWNER, 0, 1.0, 0.0)
    assert len(prefills.under_way(chain(("d", 8)), 0.0)) == FOUND_MAX


def test_what_a_dead_worker_has_left_ends_with_its_age_or_its_successor() -> None:
    schema = PrefillsSchema(2)
    region = Region(memoryview(bytearray(schema.bytes)))
    other = Prefills(schema, region, 1)
    Prefills(schema, region, 0).begins(chain(("d", 8)), OWNER, 0, 1.0, 10.0)
    assert other.under_way(chain(("d", 8)), 10.0 + OLD_S - 1.0)
    assert not other.under_way(chain(("d", 8)), 10.0 + OLD_S)
    Prefills(schema, region, 0)
    assert not other.under_way(chain(("d", 8)), 10.0)


@native_only
@given(
    data=st.data(),
    shown=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 40), st.integers(0, 130)), max_size=PLACES),
    asked=st.tuples(st.integers(0, 90), st.integers(0, 40)),
)
def test_the_kernels_write_and_find_what_their_references_do(
    data: st.DataObject, shown: list[tuple[int, int, int]], asked: tuple[int, int]
) -> None:
    schema = PrefillsSchema(2)
    memories = [bytearray(schema.bytes), bytearray(schema.bytes)]
    native, reference = (Prefills(schema, Region(memoryview(memory)), 1) for memory in memories)
    for place, (common, rest, known) in enumerate(shown):
        hashes, since = chain(("d", common), ("x", rest)), data.draw(st.sampled_from([0.0, 1.0, OLD_S]))
        said = (PLACES, MARKED, 1, place, hashes, place + 1, known, 2.5, since)
        assert calls.show_prefill(native._rows, *said) == areas_reference.show_prefill(reference._rows, *said)
    assert memories[0] == memories[1]
    wanted = chain(("d", asked[0]), ("y", asked[1]))
    assert native.under_way(wanted, OLD_S) == reference_under_way(reference._rows, wanted, OLD_S)


@native_only
def test_the_kernels_refuse_places_outside_of_the_rows() -> None:
    prefills, document = local_prefills(), chain(("d", 8))
    for worker, place in ((1, 0), (-1, 0), (0, PLACES), (0, -1)):
        with pytest.raises(IndexError, match="no place"):
            calls.show_prefill(prefills._rows, PLACES, MARKED, worker, place, document, OWNER, 0, 1.0, 1.0)
    with pytest.raises(ValueError, match="has no 65 places"):
        calls.prefills_under_way(prefills._rows, PLACES + 1, MARKED, document, 1.0, OLD_S, FOUND_MAX)
    with pytest.raises(TypeError, match="contiguous"):
        calls.prefills_under_way(prefills._rows[:, ::2], PLACES, MARKED, document, 1.0, OLD_S, FOUND_MAX)


def test_a_place_that_is_used_again_while_it_is_read_does_not_count() -> None:
    prefills = local_prefills()
    document = chain(("d", 8))
    place = prefills.begins(document, OWNER, 0, 1.0, 1.0)

    class Moving(np.ndarray):
        """Records whose copy is taken just before the writer uses the place again."""

        def copy(self, order: str = "K") -> np.ndarray:  # type: ignore[override]
            before = np.array(self)
            prefills.ends(place)
            prefills.begins(document, OWNER + 1, 0, 1.0, 2.0)
            return before

    assert reference_under_way(prefills._rows.view(Moving), document, 2.0) == []
    assert reference_under_way(prefills._rows, document, 2.0)[0][0] == OWNER + 1


def reference_under_way(rows: np.ndarray, hashes: np.ndarray, now: float) -> list[tuple[int, int, float, float]]:
    return areas_reference.prefills_under_way(rows, PLACES, MARKED, hashes, now, OLD_S, FOUND_MAX)


def test_a_schema_without_workers_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one worker"):
        PrefillsSchema(0)
