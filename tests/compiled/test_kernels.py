"""The kernels in C against their references in NumPy and Python, and both against plain definitions."""

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from compiled import kernels
from compiled.kernels import index_reference, reference
from epp.prefix.blocks import XXH3_SHORT_MAX, block_hashes, reference_hashes
from shm.areas import Areas, AreaSchema
from shm.held_blocks import HeldReader, HeldWriter, Owners, schemas
from shm.histograms import Histograms
from shm.seqlock import reference_read_rows
from tests.shm.memory import region_for

native_only = pytest.mark.skipif(not kernels.NATIVE, reason="the kernels in C are not built")

COUNTS = (0, 1, 2, 8, 32, 33, 300, 1024)
NUMBER = st.floats(-1e9, 1e9) | st.sampled_from([0.0, -0.0, 1.0, math.inf, -math.inf, math.nan])


@st.composite
def columns(draw: st.DrawFn, count: int) -> list[np.ndarray]:
    """`count` arrays of one length: of a few drawn numbers, or long ones of repeated draws."""
    size = draw(st.sampled_from(COUNTS))
    arrays = []
    for _ in range(count):
        few = draw(st.lists(NUMBER, min_size=1, max_size=12))
        values = np.array([random.Random(size).choice(few) if i >= len(few) else few[i] for i in range(size)])
        arrays.append(laid_out(values.astype(np.float64), draw(st.sampled_from(LAYOUTS))))
    return arrays


def laid_out(values: np.ndarray, layout: str) -> np.ndarray:
    """The same values, in another layout in memory."""
    if layout == "strided":
        wide = np.zeros(2 * len(values), values.dtype)
        wide[::2] = values
        return wide[::2]
    if layout == "unaligned":
        raw = bytearray(values.nbytes + 1)
        view = np.frombuffer(raw, np.uint8)[1:].view(values.dtype)
        view[:] = values
        return view
    if layout == "swapped":
        return values.astype(values.dtype.newbyteorder())
    if layout == "read-only":
        copy = values.copy()
        copy.flags.writeable = False
        return copy
    return values


LAYOUTS = ("plain", "strided", "unaligned", "swapped", "read-only")


def same(one: Callable[..., Any], other: Callable[..., Any], *arguments: Any) -> Any:
    """What both functions return for these arguments; it must be equal to the last bit, NaN like NaN."""
    with np.errstate(all="ignore"):
        first, second = one(*arguments), other(*arguments)
    np.testing.assert_array_equal(np.asarray(first), np.asarray(second))
    return first


# Scores


@native_only
@given(columns(1))
def test_fewest_and_copied_are_equal(arrays: list[np.ndarray]) -> None:
    same(kernels.fewest, reference.fewest, *arrays)
    same(kernels.copied, reference.copied, *arrays)


@native_only
@given(columns(3), st.booleans())
def test_waiting_is_equal(arrays: list[np.ndarray], counted: bool) -> None:
    inflight, *more = arrays
    if counted:
        inflight = np.nan_to_num(inflight, posinf=9, neginf=-9).astype(np.int64)
    same(kernels.waiting, reference.waiting, inflight, *more)


@native_only
@given(columns(3), st.booleans(), st.sampled_from([1.0, 5.0, 0.25]))
def test_mean_pressure_is_equal(arrays: list[np.ndarray], counted: bool, full: float) -> None:
    inflight, *more = arrays
    if counted:
        inflight = np.nan_to_num(inflight, posinf=9, neginf=-9).astype(np.int64)
    if not len(inflight):
        for kernel in (kernels.mean_pressure, reference.mean_pressure):
            with pytest.raises(ValueError, match="differ in length"):
                kernel(inflight, *more, full)
        return
    same(kernels.mean_pressure, reference.mean_pressure, inflight, *more, full)


@native_only
@given(columns(2), st.sampled_from([0.0, 1.0, -2.5, 1e300, math.nan]))
def test_add_scaled_is_equal(arrays: list[np.ndarray], weight: float) -> None:
    totals, scores = arrays
    if not totals.flags.writeable:
        with pytest.raises(ValueError, match=r"read-?only|writeable"):
            kernels.add_scaled(totals, scores, weight)
        return
    expected = totals.copy()
    with np.errstate(all="ignore"):
        reference.add_scaled(expected, scores, weight)
        kernels.add_scaled(totals, scores, weight)
    np.testing.assert_array_equal(totals, expected)


@pytest.mark.parametrize("scores", [np.array([1, 2]), np.array([True, False]), np.ones(2, np.float32), np.array([3.0])])
def test_add_scaled_takes_other_numbers_and_one_score_for_all(scores: np.ndarray) -> None:
    totals = np.array([10.0, 20.0])
    kernels.add_scaled(totals, scores, 2.0)
    assert totals.tolist() == (np.array([10.0, 20.0]) + 2.0 * scores).tolist()


def test_add_scaled_refuses_scores_of_another_length() -> None:
    with pytest.raises(ValueError, match=r"differ in length|broadcast"):
        kernels.add_scaled(np.zeros(3), np.zeros(2), 1.0)


@native_only
@given(columns(1), st.integers(1, 10_000))
def test_share_is_equal(arrays: list[np.ndarray], total: int) -> None:
    same(kernels.share, reference.share, *arrays, total)


@native_only
@given(columns(1), st.sampled_from([1.0, 16.0, 64.0]), st.integers(0, 1 << 32), st.sampled_from([1.0, 16.0, 48.0, 128.0]))
def test_reused_is_equal(arrays: list[np.ndarray], each: float, tokens: int, size: float) -> None:
    (held,) = arrays
    same(kernels.reused, reference.reused, np.abs(np.nan_to_num(held)), each, tokens, np.full(len(held), size))


def test_reused_refuses_sizes_of_another_length() -> None:
    with pytest.raises(ValueError, match=r"differ in length|broadcast"):
        kernels.reused(np.zeros(3), 64.0, 100, np.ones(2))


@native_only
@given(columns(2), st.booleans(), st.integers(0, 1 << 40), st.sampled_from([1.0, 49.0, 4096.0, 262144.0]))
def test_token_load_is_equal(arrays: list[np.ndarray], known: bool, tokens: int, threshold: float) -> None:
    ahead, held = arrays
    same(kernels.token_load, reference.token_load, ahead, tokens, held if known else None, 64.0, threshold)


@native_only
@given(columns(1))
def test_highest_is_equal(arrays: list[np.ndarray]) -> None:
    same(kernels.highest, reference.highest, *arrays)


@pytest.mark.parametrize("count", [3, 35])
def test_nan_is_never_the_highest_unless_all_are(count: int) -> None:
    totals = np.full(count, math.nan)
    assert kernels.highest(totals) == list(range(count))
    totals[1] = -math.inf
    assert kernels.highest(totals) == [1]
    totals[[0, 2]] = 5.0
    assert kernels.highest(totals) == [0, 2]


def test_nothing_has_no_scores_and_no_highest() -> None:
    nothing = np.empty(0)
    assert kernels.highest(nothing) == []
    for scores in (kernels.fewest(nothing), kernels.waiting(nothing, nothing, nothing), kernels.share(nothing, 3)):
        assert scores.shape == (0,)


@native_only
@given(st.dictionaries(st.integers(0, 40), st.integers(0, 9999)), st.dictionaries(st.integers(0, 40), st.integers(0, 7)))
def test_by_row_is_equal(depths: dict[int, int], row_of: dict[int, int]) -> None:
    same(kernels.by_row, reference.by_row, depths, row_of, 8)


def test_a_row_outside_the_array_is_refused() -> None:
    for row in (8, 1 << 40):
        with pytest.raises(IndexError):
            kernels.by_row({1: 1}, {1: row}, 8)


# Hashes


@native_only
@given(st.integers(0, 9000), st.sampled_from([241, 256, 300, 1024, 1025, 4096]), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
@example(256 * 64, 256, 1, 0)
@example(256 * 65, 256, 1, 2**64 - 1)
@example(256 * 1600 + 1, 256, 2**64 - 1, 1)
def test_a_chain_is_equal(size: int, block_bytes: int, start: int, secret: int) -> None:
    prompt = random.Random(size).randbytes(size)
    same(block_hashes, reference_hashes, prompt, block_bytes, start, secret)


@native_only
def test_the_kernel_refuses_blocks_that_xxh3_hashes_in_another_way() -> None:
    with pytest.raises(ValueError, match=f"more than {XXH3_SHORT_MAX} bytes"):
        kernels.chain(b"x" * 1000, XXH3_SHORT_MAX, 0, 0, 0)


# Rows and histograms


@native_only
@given(st.integers(1, 9), st.integers(0, 6), st.randoms(use_true_random=False))
def test_rows_and_whether_they_are_torn_are_equal(width: int, count: int, rng: random.Random) -> None:
    rows = np.array([[rng.randrange(4) for _ in range(width)] for _ in range(count)], np.uint64).reshape(count, width)
    for array in (rows, rows.copy()):
        array.flags.writeable = array is rows
        for one, other in zip(kernels.read_rows(array), reference_read_rows(array), strict=True):
            assert (one != 0).tolist() == (other != 0).tolist()
    np.testing.assert_array_equal(kernels.read_rows(rows)[0], rows)


@given(NUMBER, st.sampled_from([(1.0,), (0.0, 1.0, 2.5), tuple(float(i) for i in range(40))]))
def test_a_value_counts_in_the_first_bucket_whose_bound_is_not_below_it(value: float, bounds: tuple[float, ...]) -> None:
    schema = AreaSchema(1, (), (), (("before", (1.0,)), ("values", bounds), ("after", (1.0,))), areas=1)
    area = OneArea(schema)
    area.observe(1, value)
    expected = next((place for place, bound in enumerate(bounds) if not bound < value), len(bounds))
    counts, total = area.histograms()["values"]
    assert [place for place, n in enumerate(counts) if n] == [expected]
    np.testing.assert_array_equal(total, value + 0.0)
    assert sum(map(sum, (area.histograms()[name][0] for name in ("before", "after")))) == 0


class OneArea:
    """One area and its reader."""

    def __init__(self, schema: AreaSchema) -> None:
        self._areas = Areas(schema, region_for(schema))
        self.observe = self._areas.area(0).observe
        self.histograms = self._areas.histograms


@native_only
def test_a_histogram_outside_its_area_is_refused() -> None:
    plan = np.array([(1, 0, 1)])
    for base in (-2, 7, 1 << 62):
        with pytest.raises(ValueError, match="outside its area"):
            kernels.observe(np.zeros(10, np.int64), plan, np.array([1.0]), base, 0, 1.0)
    with pytest.raises(ValueError, match="outside its area"):  # there are no such bounds
        kernels.observe(np.zeros(10, np.int64), plan + 1, np.array([1.0]), 0, 0, 1.0)
    with pytest.raises(IndexError, match="no histogram 1"):
        kernels.observe(np.zeros(10, np.int64), plan, np.array([1.0]), 0, 1, 1.0)


@given(st.lists(st.floats(allow_infinity=False), max_size=3))
def test_each_value_counts_in_its_own_histogram_and_nan_counts_nowhere(values: list[float]) -> None:
    schema = AreaSchema(1, (), (), tuple((str(i), tuple(range(i + 1))) for i in range(3)), areas=1)
    region, other = region_for(schema), region_for(schema)
    places, bounds = schema.histograms_at, [bounds for _, bounds in schema.histograms]
    at_once, singly = (Histograms(each.part(schema.areas_at, schema.area_bytes), schema.end, places, bounds) for each in (region, other))
    at_once.observe_each(0, tuple(values))
    for index, value in enumerate(values):
        if value == value:
            singly.observe(0, index, value)
    assert bytes(region.bytes) == bytes(other.bytes)


# Held blocks


@native_only
@given(st.integers(0, 3_000), st.lists(st.tuples(st.integers(0, 2_999), st.integers(0, 70)), max_size=20), st.booleans())
def test_held_is_equal(count: int, gaps: list[tuple[int, int]], weighted: bool) -> None:
    index, links = schemas(1 << 14)
    memory, linked = region_for(index), region_for(links)
    writer, reader = HeldWriter(index, memory, links, linked), HeldReader(index, memory)
    rng = np.random.default_rng(count)
    keys = rng.integers(1, 2**63, count, dtype=np.uint64) << np.uint64(1) & np.uint64(~(1 << 16) & (2**64 - 1))
    rows = 70 if count < 200 else 3  # many holders of one block need far buckets
    owners = Owners(rows)
    for row in range(rows):
        owner = writer.new_owner()
        owners.add(owner, row, (1000, 800, 300)[row % 3] if weighted else 1000)
        missing = {block for block, gap in gaps if gap % rows == row}
        writer.insert(keys[[block for block in range(count) if block not in missing]], owner, 1)
    found = index_reference.held(reader._table, keys, owners.row_of, owners.weight_of, rows)
    assert reader.held(keys, owners) == found


@native_only
def test_held_refuses_arrays_that_are_not_an_index() -> None:
    table = np.zeros((64, 8), dtype=np.uint64)
    row_of, weight_of = np.zeros(1 << 16, dtype=np.int64), np.zeros(1 << 16, dtype=np.int32)
    hashes = np.ones(3, dtype=np.uint64)
    assert kernels.held(table, hashes, row_of, weight_of, 2) == ([0, 0], [0, 0])
    for bad in ((table[:8], row_of, weight_of, 2), (table, row_of[:5], weight_of, 2), (table, row_of, weight_of, -2)):
        with pytest.raises(ValueError, match="not those of one index"):
            kernels.held(bad[0], hashes, *bad[1:])
    with pytest.raises(TypeError, match="contiguous"):
        kernels.held(table, hashes, weight_of, weight_of, 2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes 5 arguments, not 1"):
        kernels.held(table)  # type: ignore[call-arg]
