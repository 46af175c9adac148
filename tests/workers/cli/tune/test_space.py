"""Which values `epp tune` may change."""

import msgspec

from epp.config import registry, yaml_nodes
from epp.config.load import DEFAULT_TEXT, load
from epp.tuning import RANGE
from workers.cli.replay.configurations import Configuration
from workers.cli.tune.search import Space
from workers.cli.tune.space import changed, knobs

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
    assert {
        "default/q weight",
        "default/prefix-cache-scorer weight",
        "concurrency-detector.maxConcurrency",
    } <= found.keys()
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
    all_knobs = knobs(yaml_nodes.plain(TEXT), registry.known())
    text = Space(Configuration("test", TEXT, allow_experimental=False), TEXT, all_knobs).text_with(
        {knob.path: knob.rounded(knob.low) for knob in all_knobs}
    )
    assert text.startswith("# kept\n") and "# the queue" in text
    load(text, "test")


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
