"""The kernels in C. Their references describe the functions that they have, too; the C code describes the others."""

from collections.abc import Coroutine, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiled.kernels.reference import Floats

Hashes = NDArray[np.uint64]
Ints = NDArray[np.int64]

def answers(data: bytes, at: int, most: int, /) -> tuple[list[int | tuple[bytes, bytes]], int]: ...
def add_scaled(totals: Floats, scores: NDArray[Any], weight: float, /) -> None: ...
def by_row(depths: Mapping[int, int], row_of: Mapping[int, int], rows: int, /) -> Floats: ...
def careful(
    point: float,
    points: float,
    prompt: float,
    outlook: Floats,
    inflight: NDArray[Any],
    before: Floats,
    scraped: Floats,
    running: Floats,
    usage: Floats,
    /,
) -> Floats: ...
def cell(outlook: Floats, row: int, index: int, /) -> float: ...
def chain(prompt: bytes, block_bytes: int, start: int, seed: int, rest: int, /) -> Hashes: ...
def cheapest(costs: Floats, load: NDArray[Any], near: float, least: float, part: float, /) -> Floats: ...
def column(outlook: Floats, index: int, /) -> list[float]: ...
def copied(values: Floats, /) -> Floats: ...
def data_header(size: int, number: int, /) -> bytes: ...
def features(
    uncached: float,
    place_s: float,
    overdue_s: float,
    limit: float,
    speed: float,
    tokens: float,
    ahead: float,
    elapsed: float,
    load: float,
    /,
) -> list[float]: ...
def fence() -> None: ...
def first_tokens(
    parameters: Floats,
    speeds: Floats,
    limits: Floats,
    starts: Floats,
    now: float,
    slots: NDArray[np.intp],
    prompt: float,
    held: Floats | None,
    block_tokens: float,
    ahead: NDArray[Any],
    inflight: NDArray[Any],
    before: Floats,
    running: Floats,
    waiting: Floats,
    /,
) -> Floats: ...
def fit(
    sums: Floats,
    prior: Floats,
    values: list[float],
    observed: float,
    floor: float,
    keep: float,
    most: float,
    share_max: float,
    weight: float,
    bounded: int,
    bound: int,
    /,
) -> list[float]: ...
def fewest(values: Floats, /) -> Floats: ...
def find(data: bytes, needle: bytes, start: int = ..., end: int = ..., /) -> int: ...
def flat_end(data: bytes, at: int, most: int, /) -> int: ...
def forget(
    entries: Hashes,
    ages: NDArray[np.uint32],
    held: Ints,
    hashes: Hashes,
    owners: int | NDArray[Any],
    before: int | None,
    /,
) -> int: ...
def framed_message(data: bytes, at: int, /) -> tuple[int, int, int, int, int]: ...
def free_oldest(
    entries: Hashes,
    ages: NDArray[np.uint32],
    held: Ints,
    places: NDArray[np.uint32],
    first: int,
    before: int,
    owner: int,
    excess: int,
    /,
) -> tuple[int, int]: ...
def header(message: bytes, needle: bytes, start: int, end: int, /) -> str | None: ...
def held(
    entries: Hashes, hashes: Hashes, row_of: Ints, weight_of: NDArray[np.int32], rows: int, /
) -> tuple[list[int], list[int]]: ...
def highest(totals: Floats, /) -> list[int]: ...
def increase(words: memoryview, at: int, by: int = ..., /) -> None: ...
def insert(
    entries: Hashes,
    ages: NDArray[np.uint32],
    states: NDArray[np.uint8],
    held: Ints,
    limits: Ints,
    hashes: Hashes | bytes,
    owners: int | NDArray[Any] | tuple[dict[int, int], bytes, bytes],
    age: int,
    near_owners: int,
    spills: bool,
    retired: bool,
    stale: int | None,
    /,
) -> tuple[int, int, int, int, bool, tuple[list[int], list[int], bytes] | None]: ...
def is_uuid(text: str, /) -> bool: ...
def items(text: bytes | memoryview, /) -> list[bytes | memoryview] | None: ...
def lane_loads(
    lanes: Ints,
    serving: Ints,
    requests_at: int,
    tokens_at: int,
    slots: int,
    more_requests: Ints | None,
    more_tokens: Ints | None,
    /,
) -> tuple[Ints, Floats]: ...
def lane_sums(lanes: Ints, serving: Ints, at: int, slots: int, more: Ints | None, /) -> Ints: ...
def lane_total(lanes: Ints, serving: Ints, at: int, skipped: int, /) -> int: ...
def load_rows(
    lanes: Ints,
    serving: Ints,
    places: Ints,
    keys: Hashes,
    said: Ints,
    whole: bool,
    requests_max: int,
    tokens_max: int,
    /,
) -> bytes: ...
def match(entries: Hashes, hashes: Hashes, /) -> dict[int, int]: ...
def mean_pressure(inflight: NDArray[Any], before: Floats, least: Floats, full: float, /) -> float: ...
def members(text: bytes | memoryview, names: tuple[bytes, ...], missing: object, /) -> tuple[Any, ...] | None: ...
def mentions(data: bytes, text: bytes, start: int, end: int, /) -> bool: ...
def numbered(frame: bytes, number: int, /) -> bytes: ...
def merge_loads(
    loads: dict[int, tuple[int, int]],
    totals: dict[int, tuple[int, int]],
    changed: set[int],
    rows: bytes,
    requests_max: int,
    tokens_max: int,
    rows_max: int,
    /,
) -> None: ...
def observe(cells: Ints, plan: Ints, bounds: Floats, base: int, index: int, value: float, /) -> None: ...
def observe_each(cells: Ints, plan: Ints, bounds: Floats, base: int, values: tuple[float, ...], /) -> None: ...
def owned(entries: Hashes, ages: NDArray[np.uint32], owners: list[int], newest: int, /) -> tuple[Hashes, Ints]: ...
def plain_head(data: bytes | memoryview, most: int, /) -> tuple[int, int] | None: ...
def prefills_under_way(
    rows: Hashes, places: int, marked: Ints, hashes: Hashes, now: float, old: float, most: int, /
) -> list[tuple[int, int, float, float]]: ...
def raise_to(cells: Floats, at: int, value: float, /) -> None: ...
def read_rows(rows: Hashes, /) -> tuple[Hashes, Hashes]: ...
def recall(page: bytes, text: bytes, at: int, name_line: bytes, type_line: bytes, /) -> tuple[int, float] | None: ...
def remove_links(
    table: Hashes, live: NDArray[np.uint8], hashes: Hashes, owner: int, tier: int, /
) -> tuple[Hashes, int, int, int]: ...
def seal(words: memoryview, /) -> None: ...
def reused(held: Floats, each: float, tokens: int, sizes: Floats, /) -> Floats: ...
def share(blocks: Floats, total: float, /) -> Floats: ...
def show_prefill(
    rows: Hashes,
    places: int,
    marked: Ints,
    worker: int,
    place: int,
    hashes: Hashes,
    owner: int,
    known: int,
    tokens: float,
    now: float,
    /,
) -> bool: ...
def step(coroutine: Coroutine[Any, Any, Any], /) -> tuple[bool, Any]: ...
def store_links(
    table: Hashes, live: NDArray[np.uint8], hashes: Hashes, owner: int, tier: int, links: Hashes, /
) -> tuple[Hashes, int, int]: ...
def token_load(ahead: Floats, tokens: int, held: Floats | None, block_tokens: float, threshold: float, /) -> Floats: ...
def waiting(inflight: NDArray[Any], before: Floats, scraped: Floats, /) -> Floats: ...
