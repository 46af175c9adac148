"""Fits a model of each server to a recording (`loadtest.replay.servers.Speed`).

Each server is run alone with the requests that it really got, at their recorded times and with the cached tokens that it reported, so no
decision disturbs the fit. First guesses come from requests that met an idle server. From these, a downhill simplex over the logarithms of
the values finds the values whose times are closest to the measured times. The server with the most answers decides which form of model is
used.

Slots: the most requests that a server ran while others waited, if others waited often. Cache: the size that the server reports; otherwise
the size with which a cache of recorded prompts has as many cached tokens as the server reported.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np

from loadtest.replay.reading import Asked, Recording, Sight
from loadtest.replay.runs import Run, runs_of
from loadtest.replay.servers import FORMS, UNBOUNDED, Cache, Form, Job, Speed, server
from loadtest.replay.simplex import Point, lowest

SAMPLES_MIN: Final = 20  # a server with fewer samples of its own gets the values of the others
WINDOW_MIN, WINDOW_MAX = 100, 500  # requests from which one server is fitted, one after the other
WINDOWS_TOTAL: Final = 3_000
LONGER: Final = 3  # windows of this many times the size, if answers are long
WARM_UP: Final = 0.1  # the first share of a window, which fills the model of the server
FULL_SHARE: Final = 0.03  # the share of the looks at a server that show its most requests, and waiting ones
# Searches, each around the best so far: by which share values differ at first, and how many to try.
COARSE: Final = ((0.4, 120),)
FINE: Final = ((0.15, 160), (0.07, 120))
DECODE_SHARES: Final = (1.0, 0.65, 0.4)  # shares of the seconds per token of fast answers, which may include other prompts
CLOSE_FORM: Final = 1.5  # a form whose coarse error is more than this many times the least is not searched further
PACES: Final = (1.0, 0.5, 2.0, 0.33, 3.0)
MOVED: Final = ("prefill_s", "overhead_s", "decode_s", "growth")
STEP_TOKENS: Final = (8192, 2048, 512)
GROWTH: Final = 0.005
END_WEIGHT: Final = 1.0  # the weight of the error in the time from the first token to the end
REST_QUANTILES: Final = 41
REST_TAIL: Final = 0.01  # the residuals below this quantile, and above 1 minus it, are left out
OVERHEAD_MIN_S: Final = 1e-4
CACHE_STEP: Final = 1.25
CACHE_MIN_TOKENS: Final = 4096
CLOSE: Final = 1.02  # an unbounded cache is close enough if it has this much more hits
STREAMED_S: Final = 1e-3  # if an answer took longer than this after its first piece, it came in pieces
QUEUED_S: Final = 0.02  # a request that waited longer was queued; shorter times of the picker are overhead
OUTPUT_TOKENS: Final = 100  # the assumed length of an answer that was not recorded

Fit = tuple[Speed, float]


class TooLittle(ValueError):
    """Raised if a recording has too few answers to fit a model."""


def fitted(recording: Recording, told: Callable[[str], object]) -> list[Speed]:
    """Returns the speed of each endpoint. `told` is called with a line about each form. Raises TooLittle."""
    each: list[list[Asked]] = [[] for _ in recording.endpoints]
    for asked in recording.asked:
        if asked.target >= 0 and not math.isnan(asked.lasted_s):
            each[asked.target].append(asked)
    samples = sum(fits(asked) for of in each for asked in of)
    if samples < SAMPLES_MIN:
        raise TooLittle(
            f"the recording has {samples} whole answers of a known length; at least {SAMPLES_MIN} are needed to fit servers. "
            "The length is known of streamed answers, and of others that report usage"
        )
    size = min(max(WINDOWS_TOTAL // len(each), WINDOW_MIN), WINDOW_MAX)
    windows = [_window(requests, size) for requests in each]
    caches = [_cache(requests, sight) for requests, sight in zip(each, recording.sights, strict=True)]
    slots = _like_others([_slots(sight) for sight in recording.sights])
    of = list(zip(windows, slots, caches, strict=True))
    counts = [sum(map(fits, window)) for window in windows]
    enough = [count >= SAMPLES_MIN for count in counts]
    fullest = counts.index(max(counts))
    first = of[fullest]
    if not enough[fullest]:  # no server has enough samples of its own: fit one model for all of them
        first = (sorted((asked for window in windows for asked in window), key=lambda asked: asked.at), UNBOUNDED, UNBOUNDED)
    like = _best_form(first, told)
    found = [like if at == fullest else _next(like[0], *each) for at, each in enumerate(of) if enough[at]] or [like]
    typical = _typical([speed for speed, _ in found])
    own = iter(found)
    return [
        next(own)[0] if each else msgspec.structs.replace(typical, slots=slot, cache_tokens=cache, samples=0)
        for each, slot, cache in zip(enough, slots, caches, strict=True)
    ]


def fits(asked: Asked) -> bool:
    """Returns whether a request can be compared with a model, because its answer is whole and its tokens are known."""
    return asked.answered and asked.output is not None


def _best_form(window: tuple[list[Asked], int, int], told: Callable[[str], object]) -> Fit:
    """Fits one server in each form, only coarsely for a start, and returns the form with the least error."""
    score = _Score(window[0])
    coarse = {form: _first(score, form, *window) for form in FORMS}
    least = min(error for _, error in coarse.values())
    found = []
    for start, error in coarse.values():
        if error <= CLOSE_FORM * least:
            fit = _finished(score, *_descended(score, start, FINE))
            told(f"{fit[0].form}: off by {fit[0].error:.1%}")
            found.append(fit)
    return min(found, key=lambda fit: fit[1])


def _typical(speeds: Sequence[Speed]) -> Speed:
    medians = {name: statistics.median(getattr(speed, name) for speed in speeds) for name in MOVED}
    return msgspec.structs.replace(speeds[0], **medians)


def _first(score: "_Score", form: Form, window: list[Asked], slots: int, cache: int) -> Fit:
    """Fits one server coarsely, from several first guesses, because steps of different lengths may explain the same times."""
    guess = _guess(form, window, slots, cache)
    starts = [
        msgspec.structs.replace(guess, decode_s=guess.decode_s * share, overhead_s=guess.overhead_s + (1 - share) * guess.decode_s)
        for share in DECODE_SHARES
    ]
    found = [_descended(score, start, COARSE) for start in starts]
    if form == "steps":
        best = min(found, key=lambda fit: fit[1])[0]
        found += [(other := msgspec.structs.replace(best, step_tokens=tokens), score(other)) for tokens in STEP_TOKENS[1:]]
    return min(found, key=lambda fit: fit[1])


def _next(like: Speed, window: list[Asked], slots: int, cache: int) -> Fit:
    """Fits one server from the values of another one, which may be faster or slower."""
    score = _Score(window)
    starts = [
        msgspec.structs.replace(like, prefill_s=like.prefill_s * by, decode_s=like.decode_s * by, slots=slots, cache_tokens=cache)
        for by in PACES
    ]
    return _finished(score, *_descended(score, min(starts, key=score), FINE))


def _descended(score: "_Score", start: Speed, searches: Sequence[tuple[float, int]]) -> Fit:
    """Returns the speed with the least error that the searches find around `start`."""
    names = MOVED if start.form == "steps" else MOVED[:3]

    def speed(point: Point) -> Speed:
        return msgspec.structs.replace(start, **dict(zip(names, np.exp(point).tolist(), strict=True)))

    point, error = np.log([getattr(start, name) for name in names]), math.inf
    for size, tries in searches:
        point, error = lowest(lambda at: score(speed(at)), point, size, tries)
    return speed(point), error


def _finished(score: "_Score", best: Speed, error: float) -> Fit:
    off, rest = score.off(best)
    return msgspec.structs.replace(best, samples=score.samples, error=off, rest_s=rest), error


class _Score:
    """Computes how far a model is from what one server did: the mean of |log(modelled / measured)|, and the same of p50 and p95.

    A streamed answer is compared by the time to its first token, and by the time from there to its end; any other answer is compared by its
    end alone. Requests that ended after the last arrival are ignored, because the model does not know what came then.
    """

    def __init__(self, window: Sequence[Asked]) -> None:
        last = window[-1].at
        counts = np.array([fits(asked) and asked.at + asked.lasted_s <= last for asked in window])
        if counts.sum() < SAMPLES_MIN:
            counts = np.array([fits(asked) for asked in window])
        warm = int(WARM_UP * len(counts))
        if counts[warm:].any():
            counts[:warm] = False
        self._counted = counts
        self._at = np.array([asked.at for asked in window])[counts]
        streaming = np.array([asked.streaming for asked in window])[counts]
        lasted = np.array([asked.lasted_s for asked in window])[counts]
        first = np.array([asked.first_s for asked in window])[counts]
        self._at_once = ~streaming
        self._first = np.where(streaming, first, lasted)
        self._rest = np.where(streaming, lasted - first, 0.0)
        self._streamed = self._rest > STREAMED_S
        self._jobs = [job_of(asked, number, None) for number, asked in enumerate(window)]
        self._arrivals = [asked.at + (asked.waited_s if asked.waited_s > QUEUED_S else 0.0) for asked in window]
        self._percentiles = np.percentile(self._first, (50, 95)) if len(self._first) else np.ones(2)
        self.samples = int(counts.sum())

    def __call__(self, speed: Speed) -> float:
        first, lasted = self._run(speed)
        ratios = np.abs(np.log(first / self._first)).mean()
        streamed = self._streamed
        rest = np.maximum((lasted - first)[streamed], 1e-6)
        ends = np.log(rest / self._rest[streamed]) if streamed.any() else np.zeros(1)
        ends = np.abs(ends).mean() + abs(ends.mean())
        spread = np.abs(np.log(np.percentile(first, (50, 95)) / self._percentiles)).sum()
        return float(ratios + END_WEIGHT * ends + spread)

    def off(self, speed: Speed) -> tuple[float, tuple[float, ...]]:
        """Returns the share by which the model misses a time (the median), and quantiles of the seconds by which it misses.

        This is the time to the first token; for an answer that is not streamed, the time to its end.
        """
        first, _ = self._run(speed)
        rest = np.quantile(self._first - first, np.linspace(REST_TAIL, 1 - REST_TAIL, REST_QUANTILES))
        return float(np.median(np.abs(first / self._first - 1))), tuple(rest.round(6).tolist())

    def _run(self, speed: Speed) -> tuple[np.ndarray, np.ndarray]:
        model, size = server(speed), len(self._jobs)
        first, lasted = [0.0] * size, [0.0] * size

        def note(until: float) -> None:
            for at, job, is_first in model.advance(until):
                (first if is_first else lasted)[job.number] = at

        for job, arrival in zip(self._jobs, self._arrivals, strict=True):
            if model.due <= arrival:
                note(arrival)
            model.submit(job.again(), arrival)
        while model.due < math.inf:
            note(model.due)
        counted, at = self._counted, self._at
        begun, ended = (np.maximum(np.array(times)[counted] - at, 1e-6) for times in (first, lasted))
        return np.where(self._at_once, ended, begun), ended


def job_of(asked: Asked, number: int, runs: Sequence[Run] | None) -> Job:
    """Returns what a server has to compute for a request.

    `runs`: the runs of its prompt; None if its cached tokens are those that were recorded. The recorded number is also used if the
    recording has no block hashes.
    """
    cached = -1
    if runs is None or not asked.hashes:
        cached = min(asked.expected if asked.cached is None else asked.cached, max(asked.prompt - 1, 0))
    output = asked.output if asked.output is not None else asked.max_tokens or OUTPUT_TOKENS
    return Job(number, runs or (), asked.server_block_tokens, asked.prompt, output, cached)


def _window(requests: list[Asked], size: int) -> list[Asked]:
    """Returns `size` requests from the middle, starting when the server was idle, because the model is idle at the start, too."""
    middle = max((len(requests) - size) // 2, 0)
    start, busy_until = 0, -math.inf
    for index, asked in enumerate(requests[: middle + 1]):
        if asked.at >= busy_until:
            start = index
        busy_until = max(busy_until, asked.at + asked.lasted_s)
    end, most = start + size, min(start + LONGER * size, len(requests))
    ends = sorted(asked.at + asked.lasted_s for asked in requests[start:end])
    half = ends[len(ends) // 2] if ends else 0.0
    # with long answers, more requests come before half of them have ended
    while end < most and requests[end].at <= half:
        end += 1
    return requests[start:end]


def _guess(form: Form, window: Sequence[Asked], slots: int, cache: int) -> Speed:
    """Returns first guesses: from fast answers, and a line through the times to the first token of requests that met an idle server."""
    per_token = [_seconds_per_token(asked) for asked in window if fits(asked) and asked.output is not None and asked.output > 1]
    decode = max(float(np.percentile(per_token, 5)), 1e-5) if per_token else 0.01
    points: list[tuple[float, float]] = []
    busy_until = -math.inf
    for asked in window:
        if asked.at >= busy_until and fits(asked):
            first_s = asked.first_s if asked.streaming else max(asked.lasted_s - decode * (asked.output or 0), OVERHEAD_MIN_S)
            points.append((asked.prompt - (asked.expected if asked.cached is None else asked.cached), first_s))
        busy_until = max(busy_until, asked.at + (asked.first_s if asked.first_s == asked.first_s else asked.lasted_s))
    tokens, seconds = np.array(points or [(1.0, 0.01)]).T
    spread = float(tokens.var())
    slope = float(((tokens - tokens.mean()) * seconds).mean()) / spread if spread else 0.0
    if slope <= 0:
        slope = float(seconds.mean() / max(tokens.mean(), 1.0)) / 2
    rest = float(seconds.mean()) - slope * float(tokens.mean())
    overhead = max(rest - (1.5 * decode if form == "steps" else 0.0), OVERHEAD_MIN_S)
    return Speed(form, overhead, slope, decode, GROWTH if form == "steps" else 0.0, STEP_TOKENS[0], slots, cache, 0, 0.0)


def _seconds_per_token(asked: Asked) -> float:
    """Returns the seconds per output token of an answer with at least two. If it is not streamed, they include its prompt."""
    tokens = asked.output or 0
    return (asked.lasted_s - asked.first_s) / (tokens - 1) if asked.streaming else asked.lasted_s / tokens


def _slots(sight: Sight) -> int:
    most = max(sight.looks, default=0)
    looks = sum(sight.looks.values())
    return most if most and sight.full[most] >= FULL_SHARE * looks else UNBOUNDED


def _like_others(slots: Sequence[int]) -> list[int]:
    """Gives each server that was never full the slots of the servers that were full."""
    known = [count for count in slots if count < UNBOUNDED]
    usual = int(statistics.median(known)) if known else UNBOUNDED
    return [min(count, usual) if count == UNBOUNDED else count for count in slots]


def _cache(requests: Sequence[Asked], sight: Sight) -> int:
    """Returns the tokens of the cache."""
    if sight.cache_tokens:
        return sight.cache_tokens
    measured = sum(asked.cached or 0 for asked in requests)
    if not measured:
        return UNBOUNDED
    told = [asked for asked in requests if asked.cached is not None]
    runs = runs_of([asked.whole_blocks() for asked in told])
    jobs = [job_of(asked, 0, each) for asked, each in zip(told, runs, strict=True)]
    if _hits(jobs, UNBOUNDED) <= CLOSE * measured:
        return UNBOUNDED
    size = float(CACHE_MIN_TOKENS)
    while _hits(jobs, int(size)) < measured and size < UNBOUNDED:
        size *= CACHE_STEP
    return int(size)


def _hits(jobs: Sequence[Job], tokens: int) -> int:
    """Returns the tokens that a cache of this size would have had for the requests of a server."""
    cache = Cache(tokens)
    return sum(cache.take(job, 0) for job in jobs)
