"""The kernels for the areas of workers and replicas in Python. They define what `areas.c`, `histograms.c`, `prefills.c` and `replicas.c`
compute, and run where those are not built. `shm.areas`, `shm.histograms` and `shm.prefills` have the layouts.
"""

from bisect import bisect_left, bisect_right
from struct import Struct
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Hashes = NDArray[np.uint64]
Ints = NDArray[np.int64]
Prefill = tuple[int, int, float, float]
Loads = dict[int, tuple[int, int]]

SINCE, BLOCKS, LAST, MARKS = 0, 4, 5, 6  # words of the record of a prefill
HEAD: Final = Struct("=dQQdQQ")  # the words before its marks
ROW: Final = Struct("<QIQ")
NONE: Final = (0, 0)


def area_sums(areas: Ints, serving: Ints, at: int, slots: int, more: Ints | None) -> Ints:
    """Sums each of the `slots` words from word `at` on, over the areas with a nonzero `serving` word. Adds `more` if it is given."""
    sums: Ints = areas[serving != 0, at : at + slots].sum(axis=0)
    return sums if more is None else sums + more[:slots]


def area_loads(
    areas: Ints, serving: Ints, requests_at: int, tokens_at: int, slots: int, more_requests: Ints | None, more_tokens: Ints | None
) -> tuple[Ints, Floats]:
    """Returns the results of `area_sums` for requests and for tokens; the sums of tokens are float64."""
    tokens = area_sums(areas, serving, tokens_at, slots, more_tokens)
    return area_sums(areas, serving, requests_at, slots, more_requests), tokens.astype(np.float64)


def area_total(areas: Ints, serving: Ints, at: int, skipped: int) -> int:
    """Sums one word over the areas with a nonzero `serving` word, except the area `skipped`."""
    words = areas[:, at].tolist()
    return sum(word for area, word in enumerate(words) if serving[area] and area != skipped)


def observe(cells: Ints, plan: Ints, bounds: Floats, base: int, index: int, value: float) -> None:
    """Counts a value in the histogram with this index.

    `cells`: the words of an area. `plan`: for each histogram, the place of its sum, less `base`, its first bound, and the number of its
    bounds. `bounds`: the bounds of all histograms.
    """
    place, first, count = plan[index].tolist()
    cells[base + place + 1 + bisect_left(bounds[first : first + count].tolist(), value)] += 1
    cells.view(np.float64)[base + place] += value


def observe_each(cells: Ints, plan: Ints, bounds: Floats, base: int, values: tuple[float, ...]) -> None:
    """Counts one value in each of the first histograms. NaN counts nowhere."""
    for index, value in enumerate(values):
        if value == value:
            observe(cells, plan, bounds, base, index, value)


def show_prefill(
    rows: Hashes, places: int, marked: Ints, worker: int, place: int, hashes: Hashes, owner: int, known: int, tokens: float, now: float
) -> bool:
    """Writes a record, then its key. Returns False if no block to show is marked. `marked`: the numbers of the marked blocks, from 1."""
    numbers, row = marked.tolist(), rows[worker]
    marks, first = bisect_right(numbers, len(hashes)), bisect_right(numbers, known)
    if first >= marks:
        return False
    record = _record(row, places, len(numbers), place)
    record[MARKS : MARKS + marks] = hashes[marked[:marks] - 1]
    HEAD.pack_into(record, 0, now, owner, known, tokens, len(hashes), hashes.item(-1))
    row[place] = hashes[numbers[first] - 1]
    return True


def prefills_under_way(rows: Hashes, places: int, marked: Ints, hashes: Hashes, now: float, old: float, most: int) -> list[Prefill]:
    """Returns prefills that compute leading blocks of a chain, at most `most`: owner, leading blocks in common, since when, and the tokens
    that it computes. Leaves out prefills that began `old` seconds ago or earlier.
    """
    found: list[Prefill] = []
    numbers = marked.tolist()
    own = set(hashes[marked[: bisect_right(numbers, len(hashes))] - 1].tolist())
    for row in rows:
        keys = row[:places].tolist()
        for place in [] if own.isdisjoint(keys) else range(places):
            if keys[place] not in own or len(found) == most:
                continue
            there = _record(row, places, len(numbers), place)
            record = there.copy()
            moved = row[place] != keys[place] or there[SINCE] != record[SINCE]
            since, owner, known, tokens, _, _ = HEAD.unpack_from(record)
            blocks = _shared(record, hashes, marked)
            if not moved and now - since < old and blocks > known:
                found.append((owner, blocks, since, tokens))
    return found


def _record(row: Hashes, places: int, marks: int, place: int) -> Any:
    size = MARKS + marks
    return row[places + place * size : places + (place + 1) * size]


def _shared(record: Hashes, hashes: Hashes, marked: Ints) -> int:
    """Returns how many leading blocks a record and a chain certainly share. If two hashes are equal, so are all blocks before them."""
    blocks, count = int(record[BLOCKS]), len(hashes)
    if blocks <= count and hashes[blocks - 1] == record[LAST]:
        return blocks
    marks = bisect_right(marked.tolist(), min(blocks, count))
    same = int(np.count_nonzero(record[MARKS : MARKS + marks] == hashes[marked[:marks] - 1]))
    return int(marked[same - 1]) if same else 0


def load_rows(areas: Ints, serving: Ints, places: Ints, keys: Hashes, said: Ints, whole: bool, requests_max: int, tokens_max: int) -> bytes:
    """Returns the rows of all endpoints with load if `whole`, else only of those whose load differs from `said`. Then notes the load in
    `said`.

    `places`, shape (endpoints, 2): the words of requests and tokens in an area. `keys`: the keys of the endpoints. Each row has a key,
    requests and tokens.
    """
    load = areas[serving != 0][:, places].sum(axis=0).clip(0, (requests_max, tokens_max))
    told = (load > 0 if whole else load != said).any(axis=1)
    said[:] = load
    return b"".join(ROW.pack(key, *row) for key, row in zip(keys[told].tolist(), load[told].tolist(), strict=True))


def merge_loads(loads: Loads, totals: Loads, changed: set[int], rows: bytes, requests_max: int, tokens_max: int, rows_max: int) -> None:
    """Takes over the loads that another replica reports for endpoints, lowered to their limits. `loads`: what that replica reported before.
    `totals`: the sums over all other replicas.

    Ignores endpoints beyond `rows_max`. Adds the keys of endpoints whose load changed to `changed`.
    """
    for key, requests, tokens in ROW.iter_unpack(rows):
        load, before = (min(requests, requests_max), min(tokens, tokens_max)), loads.get(key, NONE)
        if before == load or (before == NONE and len(loads) >= rows_max):
            continue
        total = totals.get(key, NONE)
        for each, now in ((loads, load), (totals, (total[0] + load[0] - before[0], total[1] + load[1] - before[1]))):
            if now == NONE:
                del each[key]
            else:
                each[key] = now
        changed.add(key)
