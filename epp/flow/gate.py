"""The gate: whether the pool has room for one request more of a band, quickly and without letting through too many.

A reading (detector over all endpoints, then the usage limits) costs about 10 us and is kept for a millisecond, far below all
ceilings for ten. In between, what was let through since by *all* shards counts as `step` each, so that N shards with old readings
do not overshoot together; what has ended since is looked at where the gate is closed. Where that sum reaches a ceiling the pool is
read again, and only such an exact reading closes the gate:

    room = (saturation read + (pending + let through since) * step) < ceiling of the band

*Pending* are requests that were let through and have no endpoint yet: the detector cannot see them in flight. Where it cannot say what
one more adds (`step` 0), one is let through at a time: the next when that one is in flight and the pool was read again.
A detector or limit that raises is counted and fails open: without a reading there is no overload to be seen, and a full stop is worse.
"""

from collections.abc import Callable, Mapping, Sequence

from epp.flow.fallback import Report
from epp.flow.ports import Load, Probe, Reading
from epp.plugin import UsageLimitPolicy

KEPT_S = 0.001
KEPT_FAR_S = (
    0.010  # of a reading far below all ceilings: what is in flight is counted in between, and scrapes come every 50 ms
)
FAR = 0.5
DIGITS = 9  # saturations are sums of fractions; rounded, a pool that is exactly full is full
UNKNOWN = Load(saturation=0.0, step=1e-12)  # what one adds is known: nothing that counts


class PoolGate:
    """`epp.flow.ports.Gate` over a probe of the pool."""

    def __init__(
        self, probe: Probe, limits: UsageLimitPolicy, detector: str, *, now: Callable[[], float], report: Report
    ) -> None:
        self._probe = probe
        self._limits = limits
        self._detector = detector  # its name, for reports
        self._now = now
        self._report = report
        self._priorities: Sequence[int] = ()
        self._ceilings: Mapping[int, float] = {}
        self._given: tuple[float, ...] | None = None  # what the ceilings were made of
        self._load = UNKNOWN
        self._base = 0.0
        self._pending = 0
        self._dispatched = 0  # of all shards, at the reading
        self._read_at = float("-inf")
        self._kept_s = KEPT_S
        self._freed = False  # something in flight has ended since the reading: it may be too high

    def bands(self, priorities: Sequence[int]) -> None:
        self._priorities = tuple(priorities)
        self._given = None
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
        full = moved and round(self._base + moved * self._load.step, DIGITS) >= ceiling
        if full or (
            self._freed and (self._load.empty or self._base >= ceiling)
        ):  # what is open need not be looked at again
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
        self._dispatched = probe.dispatched()  # before the load: who is counted in both counts twice, never not at all
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
            given = self._limits.ceilings(saturation, priorities)
            if self._given is not None and tuple(given) == self._given:
                return self._ceilings
            ceilings = {p: round(ceiling, DIGITS) for p, ceiling in zip(priorities, given, strict=True)}
            if any(ceiling != ceiling for ceiling in ceilings.values()):
                raise ValueError("a ceiling is not a number")
            self._given = tuple(given)
            return ceilings
        except Exception as problem:  # FAIL-OPEN
            self._report(self._limits.name, problem)
            self._given = None
            return dict.fromkeys(priorities, 1.0)
