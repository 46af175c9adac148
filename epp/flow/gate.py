"""Decides, fast and without overshooting the ceiling, whether the pool has room for one more request of a band.

A reading (detector over all endpoints, then the usage limits) costs about 10 us. It is kept for 1 ms, or for 10 ms while the
saturation is far below all ceilings. In between, each request that *any* shard has let through since the reading adds `step`, so that
N shards with old readings do not overshoot together. Requests that ended since the reading matter only while the gate is closed.
When the estimate on the left reaches the ceiling, the gate reads the pool again. Only a new reading closes the gate:

    room = (saturation read + (pending + let through since) * step) < ceiling of the band

*Pending* requests have passed the gate and have no endpoint yet, so the detector cannot see them in flight. If the detector does not
know how much one request adds (`step` 0), requests pass one at a time: the next one passes when the previous one is in flight and the
pool was read again.

If the detector or the usage-limit policy raises, the gate counts the failure and stays open: to stop all requests would be worse than
an overload.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from epp.flow.failure_breaker import Report
from epp.flow.ports import PoolLoad, Probe, Reading
from epp.plugin import UsageLimitPolicy

KEPT_S: Final = 0.001
# How long a reading is kept while the saturation is far below all ceilings. That is safe, because dispatched requests are added to the
# reading, and scraped values change every 50 ms only.
KEPT_FAR_S: Final = 0.010
FAR: Final = 0.5  # a saturation below this share of the lowest ceiling is far below it
DIGITS: Final = 9  # saturations are sums of fractions; rounding makes an exactly full pool compare as full
ROUNDED: Final = 1e-9  # rounding to DIGITS moves a number by less than this; the gate rounds (1 us) only where that matters
UNKNOWN: Final = PoolLoad(saturation=0.0, step=1e-12)  # a tiny step: 0 would mean "unknown", one request at a time


class PoolGate:
    """Implements `epp.flow.ports.Gate` with a probe of the pool."""

    def __init__(self, probe: Probe, limits: UsageLimitPolicy, detector: str, *, now: Callable[[], float], report: Report) -> None:
        self._probe = probe
        self._limits = limits
        self._detector = detector  # the name of the detector, for reports
        self._now = now
        self._report = report
        self._priorities: Sequence[int] = ()
        self._ceilings: Mapping[int, float] = {}
        # What the usage-limit policy returned when `_ceilings` was made.
        self._raw_ceilings: tuple[float, ...] | None = None
        self._load = UNKNOWN
        self._base = 0.0
        self._pending = 0
        self._dispatched = 0  # how many requests all shards had dispatched at the reading
        self._read_at = float("-inf")
        self._kept_s = KEPT_S
        self._freed = False  # whether a request in flight has ended since the reading, which may be too high now

    def bands(self, priorities: Sequence[int]) -> None:
        self._priorities = tuple(priorities)
        self._raw_ceilings = None
        self._read_at = float("-inf")

    @property
    def one_by_one(self) -> bool:
        return not self._load.step

    def room(self, priority: int) -> bool:
        if self._now() - self._read_at > self._kept_s:
            self._measure()
        moved = self._probe.dispatched() - self._dispatched
        if moved < 0 or not self._load.step:
            self._measure()
            moved = 0
            if self._pending and not self._load.step:
                return False
        ceiling = self._ceilings[priority]
        estimate = self._base + moved * self._load.step
        full = moved and estimate > ceiling - ROUNDED and round(estimate, DIGITS) >= ceiling
        # Requests that ended since the reading matter only if the gate is closed, so read again only then.
        if full or (self._freed and (self._load.empty or self._base >= ceiling)):
            self._measure()
            ceiling = self._ceilings[priority]
        return not self._load.empty and self._base < ceiling

    def read(self) -> Reading:
        if self._freed or self._now() - self._read_at > KEPT_S or self._probe.dispatched() != self._dispatched:
            self._measure()
        return Reading(self._base, self._ceilings, self._load.empty, self._load.stages)

    def freed(self) -> None:
        self._freed = True

    def _measure(self) -> None:
        probe = self._probe
        # Read this before the load: then a request may be counted twice, but none is missed.
        self._dispatched = probe.dispatched()
        pending = self._pending = probe.pending()
        try:
            load = probe.load()
            if load.saturation != load.saturation:
                raise ValueError("the saturation is not a number")
        except Exception as problem:  # FAIL-OPEN
            self._report(self._detector, problem)
            load = UNKNOWN
        self._load = load
        self._base = round(load.saturation + pending * load.step, DIGITS)
        self._ceilings = self._limited(self._base)
        far = not load.empty and self._base < FAR * min(self._ceilings.values(), default=0.0)
        self._kept_s = KEPT_FAR_S if far else KEPT_S
        self._read_at = self._now()
        self._freed = False

    def _limited(self, saturation: float) -> Mapping[int, float]:
        priorities = self._priorities
        try:
            raw = self._limits.ceilings(saturation, priorities)
            if self._raw_ceilings is not None and tuple(raw) == self._raw_ceilings:
                return self._ceilings
            ceilings = {p: round(ceiling, DIGITS) for p, ceiling in zip(priorities, raw, strict=True)}
            if any(ceiling != ceiling for ceiling in ceilings.values()):
                raise ValueError("a ceiling is not a number")
            self._raw_ceilings = tuple(raw)
            return ceilings
        except Exception as problem:  # FAIL-OPEN
            self._report(self._limits.name, problem)
            self._raw_ceilings = None
            return dict.fromkeys(priorities, 1.0)
