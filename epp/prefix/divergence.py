"""Detects that predicted and reported cached tokens differ for a long time, and names the likely cause. This is pure code: sums in,
warnings out.

Time is divided into slices of SLICE_S. An endpoint diverges if, in each of the last SLICES slices, the predicted and the reported share of
its prompt tokens differ by more than APART in the same direction, and these slices together have at least CHECKED_MIN requests. Endpoints
with fewer requests are judged together, like one endpoint.

A server may omit a figure of 0, or not report at all. So an endpoint that has never reported cached tokens diverges if each slice has
requests with a predicted hit of more than APART of the prompt, and all slices together have at least CHECKED_MIN such requests.

The likely cause follows from other figures: KV cache usage, how steady the ratio of reported to predicted tokens is, evictions of the
picker's index. All endpoints with the same cause share one warning. A cause is reported at most once in SAY_AGAIN_S.

At most SLICES slices are kept, each with the endpoints that had requests in it.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Final, NamedTuple

SLICE_S: Final = 60.0
SLICES: Final = 5
CHECKED_MIN: Final = 50
APART: Final = 0.25  # a larger difference, as a share of the prompt tokens, is divergence
SAY_AGAIN_S: Final = 3600.0
ALMOST_NOTHING: Final = 0.02
KV_FULL: Final = 0.9
STEADY: Final = 0.1
NAMES_MAX: Final = 5

Key = tuple[str, ...]


class Cause(Enum):
    """Names why prediction and report differ. The text goes into the warning."""

    NEVER_REPORTED = (
        "they have never reported cached tokens, so their prefix cache is off, or they do not report its hits (vLLM needs "
        "--enable-prompt-tokens-details)"
    )
    CACHE_OFF = (
        "they report almost no cached tokens, so their prefix cache is off, or they hash with a cache salt, model or adapter "
        "that the picker does not see"
    )
    EVICTED_THERE = "their KV caches are {kv:.0%} full, so they evict blocks before a prompt needs them again: add KV memory or servers"
    BLOCK_SIZE = (
        "they report a steady {ratio:.0%} of the prediction, so they reuse larger blocks than their metrics say (cache_block_size), "
        "or their chat template rewrites earlier turns (a date, the reasoning of older turns)"
    )
    LOST_THERE = (
        "the reported share changes from minute to minute, so the servers were restarted, their caches are smaller than the picker "
        "assumes (lruCapacityPerServer, for servers that do not report their cache size), or requests that the picker does not see "
        "evict its blocks"
    )
    INDEX_TOO_SMALL = (
        "the picker's index evicted {evictions} entries that the servers still held: raise --index-entries, or raise "
        "lruCapacityPerServer for servers that do not report their cache size"
    )
    UNSEEN_TRAFFIC = "requests reach the servers without this picker (another replica or gateway), so it does not know all that they hold"


class Sums(NamedTuple):
    """Adds up the requests with a prediction that was compared with a report: their number, and their tokens.

    `prompt`: all prompt tokens. `predicted`, `reported`: tokens predicted and reported as cached. `missed`: number of other requests, which
    had a predicted hit at servers that have never reported cached tokens.
    """

    requests: int = 0
    prompt: int = 0
    predicted: int = 0
    reported: int = 0
    missed: int = 0

    def minus(self, other: "Sums") -> "Sums":
        return Sums(*map(int.__sub__, self, other))

    @property
    def apart(self) -> float:
        """Returns predicted minus reported tokens, as a share of the prompt tokens."""
        return (self.predicted - self.reported) / self.prompt if self.prompt else 0.0


NONE: Final = Sums()


class Divergence(NamedTuple):
    """Describes a warning: over `minutes`, the picker predicted for `requests` that the share `predicted` of prompt tokens was cached.

    `reported`: the share that the servers reported. `servers`: how many servers the warning concerns. `endpoints`: the names of the first
    NAMES_MAX servers. `reason`: the likely cause and what to do.
    """

    minutes: float
    requests: int
    predicted: str
    reported: str
    servers: int
    endpoints: list[str]
    reason: str


class Slice(NamedTuple):
    """Holds the sums of one slice. `kv`: mean share of KV blocks in use."""

    sums: Mapping[Key, Sums]
    kv: Mapping[Key, float]
    evictions: int


class Subject(NamedTuple):
    """Holds endpoints that are judged together, and their sums per slice."""

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
        """Returns whether prediction and report differ in every slice, in the same direction."""
        if self.silent:
            return all(each.missed for each in self.slices)
        apart = [each.apart for each in self.slices]
        return (min(apart) > APART or max(apart) < -APART) and self.requests >= CHECKED_MIN

    @property
    def missed(self) -> int:
        return sum(each.missed for each in self.slices)

    @property
    def silent(self) -> bool:
        """Returns whether servers reported no cached tokens although many hits were predicted."""
        return not self.requests and self.missed >= CHECKED_MIN

    @property
    def ratios(self) -> list[float]:
        """Returns reported over predicted tokens, per slice that has predicted tokens."""
        return [each.reported / each.predicted for each in self.slices if each.predicted]


class Watch:
    """Watches predictions and reports. Call `saw` every few seconds. When it returns True, the slice is over: call `close`.

    A `Key` holds the values of an endpoint's metric labels, the endpoint's name first.
    """

    def __init__(self) -> None:
        self._slices: deque[Slice] = deque(maxlen=SLICES)
        self._began: float | None = None
        self._before: Mapping[Key, Sums] = {}
        self._evictions = 0
        self._kv: dict[Key, tuple[float, int]] = {}
        self._warned: dict[Cause, float] = {}

    def saw(self, now: float, kv: Mapping[Key, float]) -> bool:
        """Adds a sample of the servers' KV cache usage. Returns whether the slice is over."""
        for key, share in kv.items():
            before, count = self._kv.get(key, (0.0, 0))
            self._kv[key] = before + share, count + 1
        return self._began is None or now - self._began >= SLICE_S

    def close(self, now: float, totals: Mapping[Key, Sums], evictions: int) -> list[Divergence]:
        """Ends a slice and returns the warnings that are due. `totals` (per endpoint) and `evictions`: running totals."""
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

    def _due(self, now: float) -> Iterable[Divergence]:
        causes: dict[Cause, list[Subject]] = {}
        for subject in subjects(self._slices):
            if subject.diverges:
                causes.setdefault(self._cause(subject), []).append(subject)
        for cause, those in causes.items():
            last = self._warned.get(cause)
            if last is None or now - last >= SAY_AGAIN_S:
                self._warned[cause] = now
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
        """Returns the mean KV cache usage of these endpoints over all slices; 0 if no server reports it."""
        keys = [key for subject in those for key in subject.keys]
        shares = [each.kv[key] for each in self._slices for key in keys if key in each.kv]
        return sum(shares) / len(shares) if shares else 0.0

    def _warning(self, cause: Cause, those: Sequence[Subject]) -> Divergence:
        whole = total(subject.whole for subject in those)
        names = sorted({key[0] for subject in those for key in subject.keys})
        because = cause.value.format(kv=self._fullness(those), ratio=whole.reported / max(1, whole.predicted), evictions=self._evicted())
        never = cause is Cause.NEVER_REPORTED
        return Divergence(
            minutes=SLICES * SLICE_S / 60,
            requests=whole.missed if never else whole.requests,
            predicted=f"more than {APART:.0%}" if never else f"{whole.predicted / whole.prompt:.0%}",
            reported="none" if never else f"{whole.reported / whole.prompt:.0%}",
            servers=len(names),
            endpoints=names[:NAMES_MAX],
            reason=because,
        )


def subjects(slices: Sequence[Slice]) -> Iterable[Subject]:
    """Returns each endpoint with enough requests by itself, and all others together."""
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
    """Returns the sum of all `sums`, per field."""
    return Sums(*map(sum, zip(*sums, strict=True)))
