"""The origin of each line of an effective configuration."""

from epp.config.effective import PLACES_MAX
from epp.config.load import DEFAULT_TEXT, load

FILE = """\
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
featureGates: [flowControl]
plugins:
- type: queue-scorer
- name: mine
  type: utilization-detector
  parameters:
    queueDepthThreshold: 7
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: queue-scorer, weight: 3}
flowControl:
  saturationDetector: {pluginRef: mine}
  priorityBands:
  - priority: 5
    maxRequests: 9
"""


def origins(text: str | None) -> list[tuple[str, int]]:
    effective, lines = load(text, "file").with_origins()
    return [(line.strip(), origin) for line, origin in zip(effective.splitlines(), lines, strict=True)]


def test_a_value_of_the_file_has_its_line_and_a_default_has_none() -> None:
    found = dict(origins(FILE))
    assert found["queueDepthThreshold: 7"] == 9
    assert found["weight: 3"] == 13
    assert found["- flowControl=true"] == 3
    assert found["maxRequests: 9"] == 18
    assert found["kvCacheUtilThreshold: 0.8"] == 0
    assert found["responsePhase: full"] == 0


def test_every_line_of_every_written_value_is_shown_once_the_defaults_are_added() -> None:
    shown = {line for _, line in origins(FILE)}
    assert shown >= {5, 6, 7, 9, 11, 13, 15, 17, 18}


def test_the_built_in_configuration_has_lines_too() -> None:
    lines = {line for _, line in origins(None)}
    assert 0 in lines
    assert max(lines) <= len(DEFAULT_TEXT.splitlines())
    assert len(lines) > 10


def test_a_file_with_very_many_values_is_remembered_in_part() -> None:
    bands = "".join(f"  - {{priority: {n}, maxRequests: 5}}\n" for n in range(20))
    text = FILE.partition("  priorityBands")[0] + "  priorityBands:\n" + bands
    assert 0 < len(load(text, "file").places) < PLACES_MAX
