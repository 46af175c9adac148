"""Measures for flow control how full the pool is: the saturation of the pool's fullest stage, prefill or decode.

The role label names the stages of an endpoint: *prefill*, *decode*, or both. Endpoints that only encode have neither stage. If no endpoint
has a stage, the detector gets all endpoints.
"""

from collections.abc import Callable, Mapping
from typing import Final, Protocol

import numpy as np

from epp.candidates import Candidates, Endpoint, EndpointList, Mask
from epp.endpoints.label_selectors import ROLE_LABEL
from epp.flow.ports import PoolLoad
from epp.plugin import SaturationDetector
from epp.plugins.filters.roles import DecodeFilter, PrefillFilter
from shm.flow_areas import DISPATCHED, PENDING

EMPTY: Final = PoolLoad(1.0, empty=True)
PREFILL: Final = "prefill"
DECODE: Final = "decode"
EFFECTIVE: Final = "effective"  # the label of the fullest stage in metrics


class Totals(Protocol):
    """The counts of all shards, as in `shm.flow_areas.FlowAreas`."""

    def total(self, word: int) -> int:
        """Returns the sum of a word over all serving shards."""


class PoolProbe:
    """Measures the saturation of the pool. Implements `epp.flow.ports.Probe` over the pool and the areas."""

    def __init__(self, candidates: Callable[[None], Candidates], detector: SaturationDetector, flow: Totals) -> None:
        self._candidates = candidates
        self._detector = detector
        self._flow = flow
        self._endpoint_list: EndpointList | None = None
        # (name, mask) of each stage. The mask is None if all endpoints have the stage.
        self._stages: tuple[tuple[str, Mask | None], ...] = ()

    def load(self) -> PoolLoad:
        candidates = self._candidates(None)
        if not len(candidates):
            return EMPTY
        endpoint_list = candidates.snapshot.endpoint_list
        if endpoint_list is not self._endpoint_list:
            self._endpoint_list = endpoint_list
            self._stages = stages(endpoint_list)
        detector = self._detector
        if len(self._stages) == 1:
            ((name, mask),) = self._stages
            stage = candidates if mask is None else candidates.keep(mask)
            saturation = detector.stage_saturation(stage, name)
            return PoolLoad(saturation, step=detector.step(stage), stages={name: saturation} if name else {})
        saturations: dict[str, float] = {}
        step = 0.0
        for name, mask in self._stages:
            stage = candidates if mask is None else candidates.keep(mask)
            saturations[name] = detector.stage_saturation(stage, name)
            step = max(step, detector.step(stage))
        return PoolLoad(max(saturations.values()), step=step, stages=saturations)

    def dispatched(self) -> int:
        return self._flow.total(DISPATCHED)

    def pending(self) -> int:
        return self._flow.total(PENDING)

    def stale(self) -> int:
        """Returns the number of endpoints with stale metrics. The detector judges these endpoints only by their requests in flight."""
        return self._detector.stale(self._candidates(None))


def stages(endpoint_list: EndpointList) -> tuple[tuple[str, Mask | None], ...]:
    """Returns the stages that have endpoints, with their masks. If no endpoint has a stage, returns one stage with the name ""."""
    masks = {
        PREFILL: np.array([_serves(PrefillFilter, e) for e in endpoint_list.endpoints], dtype=bool),
        DECODE: np.array([_serves(DecodeFilter, e) for e in endpoint_list.endpoints], dtype=bool),
    }
    served = tuple((name, None if mask.all() else mask) for name, mask in masks.items() if mask.any())
    return served or (("", None),)


def _serves(stage: type[PrefillFilter] | type[DecodeFilter], endpoint: Endpoint) -> bool:
    labels: Mapping[str, str] = endpoint.labels
    role = labels.get(ROLE_LABEL)
    return stage.unlabelled if role is None else role in stage.roles
