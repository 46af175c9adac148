"""How full the pool is, as flow control asks: all endpoints, each stage of disaggregated inference by itself, the fullest counts.

Stages are told by the role label: *prefill* and *decode*; who serves both counts in both, endpoints that only encode in
neither. Without a stage the detector sees everybody.
"""

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from epp.candidates import Candidates, Endpoint, Mask, Roster
from epp.flow.ports import Load
from epp.plugin import SaturationDetector
from epp.plugins.filters.roles import ROLE_LABEL, DecodeFilter, PrefillFilter
from shm.flow_lanes import DISPATCHED, PENDING, FlowLanes

EMPTY: Final = Load(1.0, empty=True)
PREFILL: Final = "prefill"
DECODE: Final = "decode"
EFFECTIVE: Final = "effective"  # the stage that counts, as metrics call it


class PoolProbe:
    """`epp.flow.ports.Probe` over the pool and the lanes."""

    def __init__(self, candidates: Callable[[None], Candidates], detector: SaturationDetector, flow: FlowLanes) -> None:
        self._candidates = candidates
        self._detector = detector
        self._flow = flow
        self._roster: Roster | None = None
        self._stages: tuple[tuple[str, Mask | None], ...] = ()  # None: everybody

    def load(self) -> Load:
        candidates = self._candidates(None)
        if not len(candidates):
            return EMPTY
        roster = candidates.snapshot.roster
        if roster is not self._roster:
            self._roster = roster
            self._stages = stages(roster)
        detector = self._detector
        if len(self._stages) == 1:
            ((name, mask),) = self._stages
            stage = candidates if mask is None else candidates.keep(mask)
            saturation = detector.saturation(stage)
            return Load(saturation, step=detector.step(stage), stages={name: saturation} if name else {})
        found: dict[str, float] = {}
        step = 0.0
        for name, mask in self._stages:
            stage = candidates if mask is None else candidates.keep(mask)
            found[name] = detector.saturation(stage)
            step = max(step, detector.step(stage))
        return Load(max(found.values()), step=step, stages=found)

    def dispatched(self) -> int:
        return self._flow.total(DISPATCHED)

    def pending(self) -> int:
        return self._flow.total(PENDING)

    def stale(self) -> int:
        """Endpoints that the detector counts by what is in flight alone."""
        return self._detector.stale(self._candidates(None))


def stages(roster: Roster) -> tuple[tuple[str, Mask | None], ...]:
    """Stages that somebody serves; one without a name where nobody serves any."""
    masks = {
        PREFILL: np.array([_serves(PrefillFilter, e) for e in roster.endpoints], dtype=bool),
        DECODE: np.array([_serves(DecodeFilter, e) for e in roster.endpoints], dtype=bool),
    }
    found = tuple((name, None if mask.all() else mask) for name, mask in masks.items() if mask.any())
    return found or (("", None),)


def _serves(stage: type[PrefillFilter] | type[DecodeFilter], endpoint: Endpoint) -> bool:
    labels: Mapping[str, str] = endpoint.labels
    role = labels.get(ROLE_LABEL)
    return stage.unlabelled if role is None else role in stage.roles
