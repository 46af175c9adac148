"""The largest of several saturations, by stage. Expected values are computed by hand."""

from textwrap import dedent
from typing import Any

import msgspec
import pytest

from epp.candidates import Candidates
from epp.config.load import ConfigErrors, load
from epp.plugin import NoParams, SaturationDetector
from epp.plugins.saturation.maximum import MaxSaturation
from tests.fakes import FakeServices, candidates

POOL = candidates({"waiting_requests": [0.0, 0.0]})


class Fixed(SaturationDetector):
    """Always reports one saturation, step and number of stale endpoints."""

    def __init__(self, saturation: float, step: float = 0.1, stale: int = 0) -> None:
        super().__init__("fixed", NoParams())
        self._values = saturation, step, stale

    def saturation(self, candidates: Candidates) -> float:
        return self._values[0]

    def step(self, candidates: Candidates) -> float:
        return self._values[1]

    def stale(self, candidates: Candidates) -> int:
        return self._values[2]


def combined(services: FakeServices | None = None, *, stages: dict[str, list[str]] | None = None, **children: Fixed) -> MaxSaturation:
    params = {"detectors": list(children), "stages": stages or {}}
    made = MaxSaturation("most", msgspec.convert(params, MaxSaturation.Params))
    made.resolve(children)
    made.start(services or FakeServices())
    return made


def test_the_fullest_signal_counts_and_each_one_is_shown() -> None:
    services = FakeServices()
    made = combined(services, a=Fixed(0.25), b=Fixed(0.75))
    assert made.saturation(POOL) == 0.75
    assert services.shown["flow_control_detector_saturation"].values == {("a", ""): 0.25, ("b", ""): 0.75}


def test_a_detector_counts_for_its_stages_only_and_for_endpoints_without_stages() -> None:
    made = combined(a=Fixed(0.25), b=Fixed(0.75), stages={"b": ["prefill"]})
    assert made.stage_saturation(POOL, "prefill") == 0.75
    assert made.stage_saturation(POOL, "decode") == 0.25
    assert made.saturation(POOL) == 0.75


def test_a_stage_without_a_detector_is_idle() -> None:
    made = combined(a=Fixed(2.0), stages={"a": ["decode"]})
    assert made.stage_saturation(POOL, "prefill") == 0.0


def test_the_step_is_the_largest_and_unknown_if_one_is_unknown() -> None:
    assert combined(a=Fixed(0.0, 0.25), b=Fixed(0.0, 0.5)).step(POOL) == 0.5
    assert combined(a=Fixed(0.0, 0.25), b=Fixed(0.0, 0.0)).step(POOL) == 0.0


def test_the_endpoints_of_the_detector_with_most_stale_ones_count_as_stale() -> None:
    assert combined(a=Fixed(0.0, stale=1), b=Fixed(0.0, stale=2)).stale(POOL) == 2


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"detectors": ["a", "a"]}, r"detectors\[1\]: 'a' is given twice"),
        ({"detectors": ["a"], "stages": {"b": ["decode"]}}, "stages.b: is not among the detectors"),
        ({"detectors": []}, "length >= 1"),
        ({"detectors": ["a"], "stages": {"a": []}}, "length >= 1"),
        ({"detectors": ["a"], "stages": {"a": ["encode"]}}, "Invalid enum value 'encode'"),
    ],
)
def test_impossible_parameters_are_refused(params: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, msgspec.ValidationError), match=words):
        MaxSaturation("most", msgspec.convert(params, MaxSaturation.Params))


CONFIG = """
    featureGates: [flowControl]
    plugins:
    - {type: max-saturation-detector, name: most, parameters: {detectors: [u, CHILD]}}
    - {type: utilization-detector, name: u}
    - {type: concurrency-detector, name: c}
    - {type: queue-scorer}
    flowControl: {saturationDetector: {pluginRef: most}}
"""


def test_the_detectors_may_stand_anywhere_in_the_configuration() -> None:
    effective = load(dedent(CONFIG).replace("CHILD", "c"), "c.yaml", allow_experimental=True)
    assert effective.flow is not None and effective.flow.detector.name == "most"
    assert "unused-plugin" not in {warning.rule for warning in effective.warnings}


@pytest.mark.parametrize(("child", "words"), [("queue-scorer", "not a saturation detector"), ("other", "undefined plugin 'other'")])
def test_what_is_no_detector_is_refused(child: str, words: str) -> None:
    with pytest.raises(ConfigErrors, match=words):
        load(dedent(CONFIG).replace("CHILD", child), "c.yaml", allow_experimental=True)
