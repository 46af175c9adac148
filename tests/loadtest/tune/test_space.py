"""Which values `epp record tune` may change."""

import msgspec
import pytest

from epp.config import registry, yaml_nodes
from epp.config.load import DEFAULT_TEXT, load
from epp.points.parameters import RANGE
from loadtest.replay.configurations import Configuration
from loadtest.tune.search import Space
from loadtest.tune.space import changed, knobs

TEXT = """\
# kept
plugins:
- type: prefix-cache-scorer
- {type: queue-scorer, name: q}
- {type: concurrency-detector, parameters: {maxConcurrency: 40}}
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: q, weight: 2}   # the queue
  - pluginRef: prefix-cache-scorer
"""


def test_weights_of_scorers_and_parameters_with_a_range_may_change() -> None:
    found = {knob.name: knob for knob in knobs(yaml_nodes.plain(TEXT), registry.known())}
    assert {"default/q weight", "default/prefix-cache-scorer weight", "concurrency-detector.maxConcurrency"} <= found.keys()
    weight, most = found["default/q weight"], found["concurrency-detector.maxConcurrency"]
    assert (weight.low, weight.now, weight.high, weight.log) == (2 / 64, 2.0, 128.0, True)
    assert (most.low, most.now, most.high, most.integer) == (1, 40, 1024, True)


def test_the_weight_of_an_only_scorer_and_shadow_profiles_stay() -> None:
    document = yaml_nodes.plain(TEXT)
    document["schedulingProfiles"][0]["plugins"].pop()
    assert not any(knob.name.endswith("weight") for knob in knobs(document, registry.known()))
    document = yaml_nodes.plain(TEXT)
    document["schedulingProfiles"][0]["shadow"] = True
    assert not any(knob.name.endswith("weight") for knob in knobs(document, registry.known()))


def test_changed_values_leave_the_rest_of_the_text_and_load() -> None:
    made = Space(Configuration("test", TEXT, allow_experimental=False), TEXT)
    text = made.text_with({knob.path: knob.rounded(knob.low) for knob in made.knobs})
    assert text.startswith("# kept\n") and "# the queue" in text
    load(text, "test")


def test_an_added_scorer_is_in_candidates_only() -> None:
    made = Space(Configuration("test", TEXT, allow_experimental=False), TEXT, ["token-load-scorer"])
    (knob,) = (knob for knob in made.knobs if knob.name == "default/token-load-scorer weight")
    assert knob.low <= knob.now < 0.01 < 10 < knob.high
    assert made.text_with({}) == TEXT
    text = made.text_with({knob.path: 7.0})
    assert "token-load-scorer" in text
    weights = {member.name: weight for member, weight in load(text, "test").pipeline.wiring.profiles[0].members}
    assert weights["token-load-scorer"] == 7.0


@pytest.mark.parametrize(("name", "why"), [("random-picker", "is no scorer"), ("queue-scorer", "already")])
def test_what_cannot_be_added_is_named(name: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Space(Configuration("test", TEXT, allow_experimental=False), TEXT, [name])


def test_every_range_is_allowed_at_both_ends() -> None:
    """Each tuned range of each plugin type lies within what the parameter accepts."""
    tried = 0
    for name, cls in registry.known().items():
        document = {"plugins": [{"type": name}]}
        for knob in knobs(document, {name: cls}):
            for end in (knob.low, knob.high):
                values = changed(document, {knob.path: knob.rounded(end)})["plugins"][0]["parameters"]
                msgspec.convert(values, cls.Params)
                tried += 1
    assert tried >= 10


def test_the_built_in_configuration_has_values_to_tune() -> None:
    assert len(knobs(yaml_nodes.plain(DEFAULT_TEXT), registry.known())) >= 2
    assert RANGE.startswith("x-")
