"""Fits a model of each server to a recording (`Speed`).

Prefill: least squares of the time to the first piece over the uncached tokens, over requests that met no other prompt at their server.
Decode: the median time per token. Slots: the most requests that a server ran while others waited, if it often did; otherwise unbounded.
"""

import math
import statistics
from collections.abc import Iterable, Sequence

import numpy as np

from epp.data import CACHE_BLOCK_SIZE, CACHE_NUM_BLOCKS, RUNNING, WAITING
from epp.recording.trace import Trace, Traced
from workers.cli.replay.servers import UNBOUNDED, Speed

SAMPLES_MIN = 20  # with fewer of its own, a server gets the speed of all servers together
FULL_SHARE = 0.03  # of the looks at a server: it runs its most requests, and others wait
Point = tuple[float, float]  # uncached tokens, seconds to the first piece


def answered(request: Traced) -> bool:
    """Returns whether the recording has a whole streamed answer with its tokens."""
    ended = request.ended
    return (
        ended is not None
        and ended.status == 200
        and ended.whole
        and not math.isnan(ended.first_s)
        and ended.completion is not None
    )


def fitted(requests: Sequence[Traced], trace: Trace, slots: Iterable[int]) -> dict[int, Speed]:
    """Returns slot -> speed. Raises ValueError if the recording has too few answers to fit anything."""
    done = [request for request in requests if answered(request)]
    points = {slot: _alone([r for r in done if r.ended is not None and r.ended.slot == slot]) for slot in slots}
    every = [point for each in points.values() for point in each]
    if len(every) < SAMPLES_MIN:
        raise ValueError(f"{len(every)} requests met an idle server and have usage; at least {SAMPLES_MIN} are needed")
    decode = {
        slot: [s for r in done if r.ended is not None and r.ended.slot == slot and (s := r.ended.per_token_s)]
        for slot in points
    }
    all_decode = [seconds for each in decode.values() for seconds in each] or [0.0]
    speeds = {}
    for slot, own in points.items():
        overhead, prefill = _line(own if len(own) >= SAMPLES_MIN else every)
        token = statistics.median(decode[slot] if len(decode[slot]) >= SAMPLES_MIN else all_decode)
        speeds[slot] = Speed(overhead, prefill, token, *_size(requests, trace, slot), len(own))
    return speeds


def uncached(request: Traced) -> float:
    """Returns the tokens of the prompt that the server had to compute, as it reported them."""
    ended = request.ended
    assert ended is not None
    prompt = ended.prompt if ended.prompt is not None else request.decided.prompt_tokens
    return float(prompt - (ended.cached or 0))


def _alone(requests: list[Traced]) -> list[Point]:
    """Returns the points of the requests that arrived at their server while it computed no other prompt."""
    points: list[Point] = []
    busy_until = 0.0
    for request in sorted(requests, key=lambda each: each.decided.at):
        assert request.ended is not None
        at, first_s = request.decided.at, request.ended.first_s
        if at >= busy_until:
            points.append((uncached(request), first_s))
        busy_until = max(busy_until, at + first_s)
    return points


def _line(points: list[Point]) -> tuple[float, float]:
    """Returns the overhead in seconds and the seconds per token, both at least 0."""
    tokens, seconds = np.array(points).T
    spread = float(tokens.var())
    slope = max(float(((tokens - tokens.mean()) * seconds).mean()) / spread, 0.0) if spread else 0.0
    return max(float(seconds.mean()) - slope * float(tokens.mean()), 0.0), slope


def _size(requests: Sequence[Traced], trace: Trace, slot: int) -> tuple[int, int]:
    """Returns the slots and the tokens of the cache, as far as the scrapes tell them."""
    looks = [found for request in requests if (found := trace.scraped(slot, request.decided.at)) is not None]
    rows = [dict(zip(trace.columns, values.tolist(), strict=False)) for values, _ in looks]
    nothing = math.nan
    running = [row.get(RUNNING.name, nothing) for row in rows if row.get(RUNNING.name, nothing) >= 1]
    most = max(running, default=0.0)
    full = sum(row.get(RUNNING.name) == most and row.get(WAITING.name, 0.0) > 0 for row in rows)
    sizes = [row.get(CACHE_BLOCK_SIZE.name, nothing) * row.get(CACHE_NUM_BLOCKS.name, nothing) for row in rows]
    cache = next((int(size) for size in sizes if size > 0), UNBOUNDED)
    return (int(most) if running and full >= FULL_SHARE * len(rows) else UNBOUNDED), cache
