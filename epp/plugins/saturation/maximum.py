"""Measures the saturation by the fullest of several signals."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import msgspec

from epp.candidates import Candidates
from epp.metrics import gauge
from epp.plugin import Gauge, Need, Plugin, SaturationDetector, Services, plugin

DETECTOR_SATURATION = gauge(
    "flow_control_detector_saturation", "Saturation that each of several detectors reports.", "detector", "stage", over_workers="mean"
)

Stage = Literal["prefill", "decode"]
Stages = Annotated[tuple[Stage, ...], msgspec.Meta(min_length=1)]
Names = Annotated[tuple[Annotated[str, msgspec.Meta(min_length=1)], ...], msgspec.Meta(min_length=1)]


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """The detectors, as in the reference picker.

    detectors: The names of the detectors.
    stages: Name of a detector -> the stages of disaggregated inference for which this detector counts. Default: all stages.
    """

    detectors: Names
    stages: Mapping[str, Stages] = msgspec.field(default_factory=dict)


@plugin("max-saturation-detector")
class MaxSaturation(SaturationDetector):
    """Reports the largest saturation of the named detectors, each for its `stages`.

    The saturation of a stage without a detector is 0. This plugin is no filter: to filter, list the detectors themselves in profiles.
    """

    Params = Parameters
    metrics = (DETECTOR_SATURATION,)

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        for at, detector in enumerate(params.detectors):
            if detector in params.detectors[:at]:
                raise ValueError(f"detectors[{at}]: '{detector}' is given twice; name each detector once")
        for detector in params.stages:
            if detector not in params.detectors:
                raise ValueError(f"stages.{detector}: is not among the detectors; add it there, or remove it")
        self.needs = {d: Need(f"detectors[{at}]", d, SaturationDetector) for at, d in enumerate(params.detectors)}
        self._all: Sequence[tuple[str, SaturationDetector, frozenset[str]]] = ()
        self._shown: Gauge

    def resolve(self, found: Mapping[str, Plugin]) -> None:
        self._all = [
            (name, detector, frozenset[str](self.params.stages.get(name, ())))
            for name, detector in found.items()
            if isinstance(detector, SaturationDetector)
        ]

    def start(self, services: Services) -> None:
        self._shown = services.gauge(self, DETECTOR_SATURATION)

    def saturation(self, candidates: Candidates) -> float:
        return self.stage_saturation(candidates, "")

    def stage_saturation(self, candidates: Candidates, stage: str) -> float:
        most = 0.0
        for name, detector in self._of(stage):
            saturation = detector.stage_saturation(candidates, stage)
            self._shown.set(saturation, name, stage)
            most = max(most, saturation)
        return most

    def step(self, candidates: Candidates) -> float:
        """Returns the largest step of the detectors; 0 (unknown) if the step of any detector is unknown."""
        steps = [detector.step(candidates) for _, detector, _ in self._all]
        return max(steps) if all(steps) else 0.0

    def stale(self, candidates: Candidates) -> int:
        return max(detector.stale(candidates) for _, detector, _ in self._all)

    def _of(self, stage: str) -> Sequence[tuple[str, SaturationDetector]]:
        return [(name, detector) for name, detector, only in self._all if not (stage and only) or stage in only]
