"""Whether predicted and reported cached tokens go apart for long, and why. Pure: sums in, warnings out.

Time is cut into slices of SLICE_S. An endpoint diverges when, in each of the last SLICES slices, predicted and reported shares
of its prompt tokens were more than APART apart on the same side, over CHECKED_MIN requests at least. Endpoints with fewer are
judged together, as if they were one. An endpoint that has never reported cached tokens (a server may leave out a figure of 0, or not
report at all) diverges when, in each slice, some of its requests were predicted to hit by more than APART, over CHECKED_MIN at least.

The cause is the likeliest by what else is known: KV caches in use, how steady the ratio is, evictions of our own index. All
endpoints with the same cause are one warning, and a cause is named once in SAY_AGAIN_S at most.

At most SLICES slices are kept, with the endpoints that had requests in them.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Final, NamedTuple

SLICE_S: Final = 60.0
SLICES: Final = 5
CHECKED_MIN: Final = 50
APART: Final = 0.25  # of the prompt tokens
SAY_AGAIN_S: Final = 3600.0
ALMOST_NOTHING: Final = 0.02
KV_FULL: Final = 0.9
STEADY: Final = 0.1
NAMES_MAX: Final = 5

Key = tuple[str, ...]


class Cause(Enum):
    """Why the two go apart; the text goes into the warning."""

    NEVER_REPORTED = (
        "they have never reported any, so their prefix cache is off, or they do not say what it gave (vLLM needs "
        "--enable-prompt-tokens-details)"
    )
    CACHE_OFF = (
        "they report next to none, so their prefix cache is off, or they hash with a cache salt, model or adapter that the "
        "picker does not see"
    )
    EVICTED_THERE = (
        "their KV caches are {kv:.0%} full, so they evict blocks before these are asked for again: they need more KV memory, or "
        "more servers beside them"
    )
    BLOCK_SIZE = (
        "reported is a steady {ratio:.0%} of predicted, so their cache blocks are larger than the picker's (blockSizeTokens), or "
        "their chat template rewrites what was sent before (a date, the reasoning of older turns)"
    )
    LOST_THERE = (
        "it changes from minute to minute, so they were restarted, their caches take less than the picker thinks (lruCapacityPerServer, "
        "where servers do not report their cache's size), or requests that it does not see push its blocks out"
    )
    INDEX_TOO_SMALL = (
        "the picker's index let go of {evictions} entries meanwhile, which the servers still held: it needs a larger --index-entries, "
        "or, where servers do not report their cache's size, a larger lruCapacityPerServer"
    )
    UNSEEN_TRAFFIC = (
        "requests reach them past this picker (another replica or gateway), so it does not know all that they hold"
    )


class Sums(NamedTuple):
    """Of requests whose prediction was compared: how many, and tokens. `missed`: predicted hits at servers that have reported none ever."""

    requests: int = 0
    prompt: int = 0
    predicted: int = 0
    reported: int = 0
    missed: int = 0

    def minus(self, other: "Sums") -> "Sums":
        return Sums(*map(int.__sub__, self, other))

    @property
    def apart(self) -> float:
        """Predicted less reported, as a share of the prompt tokens."""
        return (self.predicted - self.reported) / self.prompt if self.prompt else 0.0


NONE: Final = Sums()


class Slice(NamedTuple):
    """What one slice came to. `kv`: mean share of KV blocks in use."""

    sums: Mapping[Key, Sums]
    kv: Mapping[Key, float]
    evictions: int


class Subject(NamedTuple):
    """Endpoints that are judged together, and their sums per slice."""

    keys: Sequence[Key]
    slices: Sequence[Sums]

    @property
    def whole(self) -> Sums:
        return total(self.slices)

    @property
    def requests(self) -> int:
        return sum(each.requests for each in self.slices)

    @property
    def diverges(self) -> bool:
        """In every slice, and to the same side."""
        if self.silent:
            return all(each.missed for each in self.slices)
        apart = [each.apart for each in self.slices]
        return (min(apart) > APART or max(apart) < -APART) and self.requests >= CHECKED_MIN

    @property
    def missed(self) -> int:
        return sum(each.missed for each in self.slices)

    @property
    def silent(self) -> bool:
        """Nothing was compared, and much was predicted."""
        return not self.requests and self.missed >= CHECKED_MIN

    @property
    def ratios(self) -> list[float]:
        """Reported by predicted, slice by slice."""
        return [each.reported / each.predicted for each in self.slices if each.predicted]


class Watch:
    """`saw` every few seconds; when it says that a slice is over, `close` it. A key is an endpoint's labels, the name first."""

    def __init__(self) -> None:
        self._slices: deque[Slice] = deque(maxlen=SLICES)
        self._began: float | None = None
        self._before: Mapping[Key, Sums] = {}
        self._evictions = 0
        self._kv: dict[Key, tuple[float, int]] = {}
        self._said: dict[Cause, float] = {}

    def saw(self, now: float, kv: Mapping[Key, float]) -> bool:
        """What servers say of their KV caches now; whether a slice is over."""
        for key, share in kv.items():
            before, count = self._kv.get(key, (0.0, 0))
            self._kv[key] = before + share, count + 1
        return self._began is None or now - self._began >= SLICE_S

    def close(self, now: float, totals: Mapping[Key, Sums], evictions: int) -> list[str]:
        """`totals` since ever, per endpoint; `evictions` of our index since ever. The warnings that are due."""
        if self._began is not None:
            new = {key: sums.minus(self._before.get(key, NONE)) for key, sums in totals.items()}
            self._slices.append(
                Slice(
                    {key: sums for key, sums in new.items() if any(sums)},
                    {key: share / count for key, (share, count) in self._kv.items()},
                    evictions - self._evictions,
                )
            )
        self._began, self._before, self._evictions, self._kv = now, totals, evictions, {}
        return list(self._due(now)) if len(self._slices) == SLICES else []

    def _due(self, now: float) -> Iterable[str]:
        causes: dict[Cause, list[Subject]] = {}
        for subject in subjects(self._slices):
            if subject.diverges:
                causes.setdefault(self._cause(subject), []).append(subject)
        for cause, those in causes.items():
            last = self._said.get(cause)
            if last is None or now - last >= SAY_AGAIN_S:
                self._said[cause] = now
                yield self._warning(cause, those)

    def _cause(self, subject: Subject) -> Cause:
        whole = subject.whole
        if subject.silent:
            return Cause.NEVER_REPORTED
        if whole.predicted < whole.reported:
            return Cause.INDEX_TOO_SMALL if self._evicted() else Cause.UNSEEN_TRAFFIC
        full = self._fullness([subject]) >= KV_FULL
        if not whole.reported or (whole.reported <= ALMOST_NOTHING * whole.prompt and not full):
            return Cause.CACHE_OFF
        if full:
            return Cause.EVICTED_THERE
        ratios = subject.ratios
        return Cause.BLOCK_SIZE if max(ratios) - min(ratios) <= STEADY else Cause.LOST_THERE

    def _evicted(self) -> int:
        return sum(each.evictions for each in self._slices)

    def _fullness(self, those: Sequence[Subject]) -> float:
        """Mean over these endpoints and the window; 0 where no server says."""
        keys = [key for subject in those for key in subject.keys]
        shares = [each.kv[key] for each in self._slices for key in keys if key in each.kv]
        return sum(shares) / len(shares) if shares else 0.0

    def _warning(self, cause: Cause, those: Sequence[Subject]) -> str:
        whole = total(subject.whole for subject in those)
        names = sorted({key[0] for subject in those for key in subject.keys})
        more = f" and {len(names) - NAMES_MAX} more" if len(names) > NAMES_MAX else ""
        because = cause.value.format(
            kv=self._fullness(those), ratio=whole.reported / max(1, whole.predicted), evictions=self._evicted()
        )
        at = f"at {', '.join(names[:NAMES_MAX])}{more}; likely cause: {because}"
        if cause is Cause.NEVER_REPORTED:
            return (
                f"prefix caches are not what they are taken for: over {SLICES * SLICE_S / 60:g} minutes {whole.missed} requests were "
                f"predicted to find more than {APART:.0%} of their prompt tokens cached and none was reported, {at}"
            )
        return (
            f"prefix caches are not what they are taken for: over {SLICES * SLICE_S / 60:g} minutes {whole.predicted / whole.prompt:.0%} "
            f"of the prompt tokens of {whole.requests} requests were predicted to be cached and {whole.reported / whole.prompt:.0%} "
            f"reported, {at}"
        )


def subjects(slices: Sequence[Slice]) -> Iterable[Subject]:
    """Every endpoint with enough requests, and the others as one."""
    few: list[Key] = []
    for key in sorted({key for each in slices for key in each.sums}):
        subject = Subject([key], [each.sums.get(key, NONE) for each in slices])
        if subject.requests >= CHECKED_MIN or subject.silent:
            yield subject
        else:
            few.append(key)
    if few:
        yield Subject(few, [total([each.sums.get(key, NONE) for key in few]) for each in slices])


def total(sums: Iterable[Sums]) -> Sums:
    """All together."""
    return Sums(*map(sum, zip(*sums, strict=True)))
