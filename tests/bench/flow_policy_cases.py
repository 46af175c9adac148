"""Measures flow control's policies with 100,000 items in 10,000 flows, and one reading of a saturation detector."""

from collections.abc import Callable, Iterator
from itertools import count

import numpy as np

from epp.plugin import FairnessPolicy, SaturationDetector
from epp.plugins.displacement import Newest
from epp.plugins.ordering import FirstCome
from tests.bench.cases import Case
from tests.contract.waiting import Band, Waits, every, made
from tests.fakes import candidates

FLOWS, ITEMS = 10_000, 100_000
PICK_US, READING_US = 10.0, {8: 6.0, 100: 15.0}


def flow_policy_cases() -> Iterator[Case]:
    """Yields cases for fairness policies, displacement, and saturation detectors."""
    names = [f"tenant-{number}" for number in range(FLOWS)]
    for cls in every(FairnessPolicy):
        if not cls.__module__.startswith("epp."):
            continue
        band = Band(made(cls), made(FirstCome))
        for number in range(ITEMS):
            band.offer(Waits(names[number % FLOWS], arrival=number * 1e-4, bytes=1000))
        yield Case(f"{cls.type_name}: pick of {FLOWS} flows", lambda band=band: band.share.pick(10.0), PICK_US)  # type: ignore[misc]
        yield Case(f"{cls.type_name}: the same, dispatch and come back", turn(band))
    yield Case(f"newest-displacement-policy: a victim of {FLOWS} flows", displaced(band))
    for size, target in READING_US.items():
        for detector in every(SaturationDetector):
            if detector.__module__.startswith("epp."):
                yield from readings(detector, size, target)


def readings(detector: type[SaturationDetector], size: int, target: float) -> Iterator[Case]:
    """Yields cases for readings of a whole pool, and of a stage with half of its endpoints."""
    columns = {"waiting_requests": [1.0] * size, "kv_cache_usage": [0.5] * size}
    pool = candidates(columns, inflight=[2.0] * size, tokens=[99.0] * size)
    stage = pool.keep(np.arange(size) % 2 == 0)
    read = made(detector).saturation
    yield Case(f"{detector.type_name}: a reading of {size} endpoints", lambda: read(pool), target)
    yield Case(f"{detector.type_name}: a reading of half of {size} endpoints", lambda: read(stage), target)


def turn(band: Band) -> Callable[[], None]:
    """Returns a call for one cycle of a band that stays equally full. The clock advances, so that cached values are computed again."""
    ticks = count(1)

    def run() -> None:
        now = 10.0 + next(ticks) * 2e-4
        item = band.dispatch(now)
        assert item is not None
        item.arrival = now
        band.offer(item)

    return run


def displaced(band: Band) -> Callable[[], object]:
    """Returns a call for the search for a victim, which runs once per displaced request."""
    policy = made(Newest)
    view = type("View", (), {"flows": band.flows, "__len__": lambda self: ITEMS})()
    return lambda: policy.victim(view)
