"""Lint warnings: valid configurations that probably do not do what their authors want."""

from collections.abc import Sequence

import pytest

from epp.config.findings import ConfigWarning
from epp.config.lint import Surroundings
from epp.config.load import ConfigErrors, load
from tests.epp.config_plugins import HERE

# The example in the reference picker's documentation for endpoints from a file. It starts there without a warning, and routes at random.
DOCUMENTED = """\
plugins:
  - name: file-disc
    type: file-discovery
    parameters:
      path: /etc/epp/endpoints.yaml
      watchFile: true

  - name: kv-cache-scorer
    type: kv-cache-utilization-scorer

  - name: random-picker
    type: random-picker

  - name: single-profile
    type: single-profile-handler
    parameters:
      scorer: kv-cache-scorer
      picker: random-picker

schedulingProfiles:
  - name: default
    plugins:
      - pluginRef: single-profile

dataLayer:
  discovery:
    pluginRef: file-disc
"""


def warned(text: str | None, surroundings: Surroundings = Surroundings()) -> Sequence[ConfigWarning]:  # noqa: B008 - frozen
    return load(text, "c.yaml", surroundings=surroundings).warnings


def rules(text: str | None, surroundings: Surroundings = Surroundings()) -> list[str]:  # noqa: B008 - frozen
    return [warning.rule for warning in warned(text, surroundings)]


def profile(*members: str, more: str = "") -> str:
    """A configuration with one plugin per type and one profile with all of them. A member is `type` or `type, weight: 2`."""
    types = ", ".join(f"{{type: {member.partition(',')[0]}}}" for member in members)
    refs = ", ".join(f"{{pluginRef: {member}}}" for member in members)
    return f"plugins: [{types}]\nschedulingProfiles:\n- name: a\n  plugins: [{refs}]\n{more}"


def test_the_documented_example_that_routes_at_random_gets_a_warning() -> None:
    warnings = {warning.rule: warning for warning in warned(DOCUMENTED)}
    assert warnings.keys() == {"unused-plugin", "parameters-ignored", "not-scheduling", "no-scorer", "deprecated"}
    assert (warnings["unused-plugin"].line, warnings["no-scorer"].line) == (8, 21)
    assert "'kv-cache-scorer' is in no profile" in warnings["unused-plugin"].message
    assert "picked at random" in warnings["no-scorer"].message


def test_a_profile_that_lists_the_random_picker_gets_no_warning() -> None:
    assert rules(profile("random-picker")) == []
    assert rules("plugins: [{type: random-picker}]") == []


def test_weights_without_effect_or_with_the_opposite_effect_are_warned_of_at_their_line() -> None:
    text = profile("queue-scorer, weight: 0", "kv-cache-utilization-scorer, weight: -2", "max-score-picker, weight: 1")
    assert [(w.rule, w.line) for w in warned(text)] == [("weight-zero", 4), ("weight-negative", 4), ("weight-ignored", 4)]


@pytest.mark.parametrize(
    ("members", "warns"),
    [
        (("prefix-cache-scorer", "queue-scorer"), False),
        (("prefix-cache-scorer, weight: 2", "queue-scorer"), True),
        (("prefix-cache-scorer, weight: 3", "queue-scorer, weight: 2", "kv-cache-utilization-scorer, weight: 2"), True),
        (("prefix-cache-scorer, weight: 3", "queue-scorer, weight: 2", "active-request-scorer, weight: 2"), False),
        (("prefix-cache-scorer",), True),
        (("prefix-cache-scorer", "lora-affinity-scorer, weight: 5"), True),
        (("prefix-cache-scorer, weight: 0", "queue-scorer, weight: 0"), False),
    ],
)
def test_a_prefix_scorer_that_outweighs_all_load_scorers_gets_a_warning(members: tuple[str, ...], warns: bool) -> None:
    assert ("prefix-outweighs-load" in rules(profile(*members))) is warns


def test_the_built_in_configuration_gets_no_warnings() -> None:
    assert rules(None) == []


SESSIONS = """\
plugins: [{type: queue-scorer}, {type: session-affinity-scorer}]
schedulingProfiles:
- {name: a, plugins: [{pluginRef: queue-scorer}%s]}
- {name: b, plugins: [{pluginRef: session-affinity-scorer}], shadow: true}
"""


def test_a_plugin_that_learns_from_requests_and_is_only_in_shadows_gets_a_warning() -> None:
    def by_rule(text: str) -> dict[str, str]:
        warnings = load(text, "c.yaml", allow_experimental=True).warnings
        return {warning.rule: str(warning) for warning in warnings}

    shadow_only = by_rule(SESSIONS % "")
    assert shadow_only.keys() == {"shadow-untold"}
    assert shadow_only["shadow-untold"].startswith("c.yaml:4:35: warning[shadow-untold]: profile 'b' is a shadow")
    assert by_rule(SESSIONS % ", {pluginRef: session-affinity-scorer}") == {}


def test_the_warning_about_a_plugin_in_no_profile_says_that_its_hooks_run() -> None:
    profiles = "schedulingProfiles: [{name: a, plugins: [{pluginRef: queue-scorer}]}]"
    text = f"plugins: [{{type: queue-scorer}}, {{type: no-hit-lru-scorer}}]\n{profiles}"
    (warning,) = warned(text)
    assert warning.message == (
        "plugin 'no-hit-lru-scorer' is in no profile and does not take part in decisions; its other extension points run"
    )


def test_a_header_profile_handler_without_its_default_profile_gets_a_warning() -> None:
    text = """\
plugins: [{type: queue-scorer}, {type: header-profile-handler%s}]
schedulingProfiles:
- {name: a, plugins: [{pluginRef: queue-scorer}]}
- {name: b, plugins: [{pluginRef: queue-scorer}]}
"""
    (warning,) = load(text % "", "c.yaml", allow_experimental=True).warnings
    assert (warning.rule, warning.line) == ("idle-stage", 1)
    assert "uses profile 'decode' for requests without header epp-profile, but there is no such profile" in warning.message
    assert load(text % ", parameters: {defaultProfile: b}", "c.yaml", allow_experimental=True).warnings == ()


def test_a_profile_that_the_handler_never_runs_gets_a_warning_unless_it_is_a_shadow() -> None:
    text = f"""\
plugins: [{{type: queue-scorer}}, {{type: '{HERE}:OnlyFirst', name: handler}}]
schedulingProfiles:
- {{name: a, plugins: [{{pluginRef: queue-scorer}}]}}
- {{name: b, plugins: [{{pluginRef: queue-scorer}}]}}
- {{name: c, plugins: [{{pluginRef: queue-scorer}}], shadow: true}}
"""
    (warning,) = warned(text)
    assert (warning.rule, warning.line) == ("unreachable-profile", 4)
    assert "profile 'b' is never run: profile handler 'handler' runs 'a'" in warning.message


def detector(threshold: str, interval: str = "") -> str:
    source = f"{{type: metrics-data-source, parameters: {{interval: {interval}}}}}" if interval else "{type: queue-scorer}"
    return f"""\
plugins:
- {{type: random-picker}}
- {source}
- type: {HERE}:Stale
  name: full
  parameters:
    metricsStalenessThreshold: {threshold}
flowControl: {{saturationDetector: {{pluginRef: full}}}}
schedulingProfiles: [{{name: a, plugins: [{{pluginRef: random-picker}}]}}]
"""


def test_values_that_are_stale_before_the_next_scrape_get_a_warning() -> None:
    slow = Surroundings(scrape_interval_s=0.2)
    assert "staleness-below-interval" not in rules(detector("200ms"))
    (warning,) = [w for w in warned(detector("200ms"), slow) if w.rule == "staleness-below-interval"]
    assert warning.line == 7
    assert "0.2s is not above the scrape interval 0.2s" in warning.message
    assert "staleness-below-interval" in rules(detector("200ms", interval="1s"))
    assert "staleness-below-interval" not in rules(detector("200ms", interval="50ms"), slow)
    assert "staleness-below-interval" not in rules(detector("nonsense"), slow)


def test_limits_that_contradict_each_other_are_warned_of_at_their_line() -> None:
    text = """\
flowControl:
  maxBytes: 1Gi
  maxRequests: 100
  priorityBands:
  - {priority: 1, maxBytes: 2Gi, maxRequests: 100}
  - {priority: 0, maxBytes: 1M, maxRequests: 0}
  defaultPriorityBand: {maxRequests: 101}
"""
    assert [(w.rule, w.line) for w in warned(text)] == [
        ("gate-missing", 1), ("limit-above-total", 5), ("limit-below-body", 6), ("limit-above-total", 7),
        ("no-scorer", 0),
    ]  # fmt: skip
    messages = [w.message for w in warned(text)]
    assert "flowControl.priorityBands[0].maxBytes 2147483648 is above flowControl.maxBytes 1073741824" in messages[1]
    assert "flowControl.priorityBands[1].maxBytes 1000000 is below the length that one request body may have" in messages[2]
    assert "limit-below-body" not in rules(text, Surroundings(body_bytes_max=1000))
    assert "limit-below-body" in rules("flowControl: {maxBytes: 500}", Surroundings(body_bytes_max=1000))
    assert "limit-above-total" not in rules("flowControl: {maxBytes: 0, defaultPriorityBand: {maxBytes: 5G}}")


@pytest.mark.parametrize(
    ("section", "line", "message"),
    [
        ("{maxBytes: 1G}", 2, "flowControl.maxBytes 1000000000 is above the container's memory, 536870912 bytes"),
        ("{}", 0, "maxBytes is not given, and a band's maxBytes 1000000000 is above"),
        ("{defaultPriorityBand: {maxBytes: 100M}, defaultNegativePriorityBand: {maxBytes: 600M}}", 0, "600000000"),
        ("{maxBytes: 500M}", None, ""),
        ("{defaultPriorityBand: {maxBytes: 500M}}", None, ""),
    ],
)
def test_a_limit_on_waiting_bytes_above_the_container_s_memory_gets_a_warning(section: str, line: int | None, message: str) -> None:
    text = f"featureGates: [flowControl]\nflowControl: {section}\n"
    warnings = [w for w in warned(text, Surroundings(memory_bytes=512 << 20)) if w.rule == "limit-above-memory"]
    assert [w.line for w in warnings] == ([] if line is None else [line])
    assert all(message in w.message for w in warnings)
    assert "limit-above-memory" not in rules(text), "the container's memory is not known"
    assert "limit-above-memory" not in rules(text.partition("\n")[2], Surroundings(memory_bytes=1)), "flow control is off"


def test_a_bands_ttl_above_the_global_one_is_warned_of_at_its_line() -> None:
    text = """\
featureGates: [flowControl]
flowControl:
  defaultRequestTTL: 30s
  priorityBands:
  - {priority: 1, defaultRequestTTL: 30s}
  - priority: -1
    defaultRequestTTL: 5m
  - {priority: -2, defaultRequestTTL: 0s}
"""
    found = [w for w in warned(text) if w.rule == "limit-above-total"]
    assert [w.line for w in found] == [7, 8]
    of_band = "flowControl.priorityBands[%d].defaultRequestTTL %s is above flowControl.defaultRequestTTL 30s"
    assert [w.message for w in found] == [of_band % (1, "300s"), of_band % (2, "0s (no limit)")]
    assert {w.hint for w in found} == {"lower it, or raise or remove flowControl.defaultRequestTTL"}
    for no_limit in ("defaultRequestTTL: 0s", "maxRequests: 10"):
        assert "limit-above-total" not in rules(text.replace("  defaultRequestTTL: 30s", f"  {no_limit}", 1))


def test_a_detector_without_a_step_gets_a_warning() -> None:
    text = detector("1s")
    assert "one-by-one" not in rules(text), "flow control is off"
    (warning,) = [w for w in warned("featureGates: [flowControl]\n" + text) if w.rule == "one-by-one"]
    assert "saturation detector 'full'" in warning.message
    assert "one-by-one" not in rules("featureGates: [flowControl]\n")


def test_with_an_error_only_warnings_that_do_not_depend_on_plugins_are_noted() -> None:
    text = "featureGates: [nothing]\nflowControl: {maxBytes: 1G, defaultPriorityBand: {maxBytes: 5G}}"
    with pytest.raises(ConfigErrors) as caught:
        load(text, "c.yaml")
    assert [warning.rule for warning in caught.value.warnings] == ["limit-above-total"]
