"""What is wrong in a configuration, and where: errors refuse it, warnings do not.

Both are values that print like a compiler's messages: `file:line:column: error[rule]: message
(hint)`. Readers collect them in a `Findings` and go on, so that one run shows everything. Every rule
stands in ERRORS or WARNINGS, once, with what it says; a rule has one severity.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

FINDINGS_MAX = 100  # a file that is this wrong needs another look, not more lines

ERRORS: Mapping[str, str] = {
    "unreadable": "The file cannot be read, or is not UTF-8.",
    "yaml-syntax": "The text is neither YAML nor JSON.",
    "yaml-key": "A key is not a single word or text.",
    "yaml-tag": "A tag is not supported, or its value is not what it says.",
    "yaml-merge": "`<<` takes a mapping or a list of mappings.",
    "yaml-number": "A number is not finite.",
    "too-large": "The text has too many characters, levels or values.",
    "one-document": "There is more than one YAML document.",
    "duplicate-key": "A key is given twice in one mapping.",
    "api-version": "The apiVersion is not known.",
    "kind": "The kind is not EndpointPickerConfig.",
    "feature-gate": "A feature gate is not known, or its value is neither true nor false.",
    "unknown-field": "A field is not known; mostly it is misspelt.",
    "missing-field": "A field that is required is not given.",
    "wrong-type": "A value is of the wrong type, such as a number instead of text.",
    "bad-quantity": "A quantity is not one, negative or too large.",
    "bad-duration": "A duration is not one, negative or too large.",
    "bad-parameter": "A plugin's parameter is out of its range, or the plugin refuses it.",
    "duplicate-name": "Two plugins, profiles or data sources have one name.",
    "duplicate-priority": "Two bands have one priority.",
    "unknown-type": "A plugin type is not registered.",
    "unavailable-type": "A plugin type of llm-d-router does not exist here.",
    "experimental-type": "A plugin type is experimental and needs --allow-experimental-plugins.",
    "plugin-class": "The class that a plugin type names cannot be called as its extension points are.",
    "plugin-import": "The module that a plugin type names cannot be imported.",
    "unknown-ref": "A reference names a plugin that is not in `plugins`.",
    "wrong-kind": "A reference names a plugin that does not implement what is needed there.",
    "response-phase": "responsePhase is neither full nor none, or none where a plugin needs answers.",
    "reference-cycle": "Plugins name each other by their parameters, in a circle.",
    "name-taken": "A plugin has the name of a default plugin that is needed.",
    "no-handler": "There are several profiles and no profile handler.",
    "one-handler": "There is more than one profile handler.",
    "handler-profiles": "The profile handler cannot work with these profiles.",
    "only-shadows": "All profiles are shadows, so none can decide.",
    "one-picker": "A profile has more than one picker.",
    "no-source": "No data source is configured, and none is to be added.",
    "one-extractor": "A data source has two extractors of one type.",
    "two-producers": "Two plugins produce one value.",
    "block-sizes": "Two producers cut prompts into blocks of different sizes, and share one index.",
    "no-producer": "A plugin reads a value that nobody produces.",
    "type-clash": "A plugin reads a value as something else than it is produced.",
    "stage-order": "A plugin reads a value that is produced only after it has run.",
    "metric-clash": "Two plugins declare a metric of one name differently.",
    "producer-cycle": "Data producers wait for each other's values.",
    "no-discovery": "No place is given where endpoints come from (`epp serve` alone).",
    "two-discoveries": "Endpoints come from several of --endpoints, --endpoint-selector and a plugin (`epp serve` alone).",
    "bad-object": "An object of --objects-dir is wrong.",
    "bad-priority": "A priority does not fit 32 bits.",
    "too-many-bands": "There are more bands than have a place in shared memory.",
    "queue-mismatch": "A queue cannot do what its band's policies need.",
    "unsupported": "Something of llm-d-router is not supported by this version.",
}
WARNINGS: Mapping[str, str] = {
    "odd-object": "Something in --objects-dir has no effect, or hardly the one that is meant.",
    "deprecated-version": "The apiVersion is deprecated.",
    "deprecated-field": "A field has moved.",
    "deprecated-type": "A plugin type has a newer name.",
    "removed-gate": "A feature gate was removed.",
    "gate-missing": "The section flowControl is given without its feature gate.",
    "no-effect": "A field has no effect here.",
    "without-effect": "A parameter has no effect here.",
    "parameters-ignored": "Parameters are given to a plugin that takes none.",
    "unused-plugin": "A plugin is in no profile, or referenced nowhere.",
    "unread-producer": "Nothing reads what a data producer produces.",
    "not-scheduling": "A profile lists a plugin that is no filter, scorer or picker.",
    "ref-twice": "A list references a plugin twice.",
    "no-scorer": "A profile has no scorer, so it picks at random.",
    "weight-ignored": "A weight is given to a plugin that is no scorer.",
    "weight-zero": "A scorer's weight is 0.",
    "weight-negative": "A scorer's weight is negative: its best endpoint comes last.",
    "prefix-outweighs-load": "A prefix scorer weighs more than all of its profile that count requests: a full server keeps its own.",
    "idle-stage": "The profile handler is to run a profile that does not exist.",
    "shadow-untold": "A plugin that learns from requests is in shadow profiles alone, so it learns nothing.",
    "unreachable-profile": "The profile handler never runs this profile.",
    "staleness-below-interval": "Values count as stale before the next scrape can renew them.",
    "limit-above-total": "A band's limit is above that of all bands together, so it is never reached.",
    "no-isolation": "A band's fairness policy, by default, lets one flow starve the others.",
    "limit-above-memory": "More bytes may wait than the container has memory for.",
    "one-by-one": "The saturation detector does not say what one request more adds, so flow control lets one through at a time.",
    "limit-below-body": "Fewer bytes may wait than one request body may have.",
}


class Place(NamedTuple):
    """A position in the text, counted from 1; line 0 means the configuration as a whole."""

    line: int
    column: int


WHOLE = Place(0, 0)


@dataclass(frozen=True, slots=True)
class Finding:
    """One rule that is broken. `hint` says how to mend it, or is empty."""

    severity: ClassVar[str] = "note"
    file: str
    line: int
    column: int
    rule: str
    message: str
    hint: str = ""

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        hint = f" ({self.hint})" if self.hint else ""
        return f"{place}: {self.severity}[{self.rule}]: {self.message}{hint}"


@dataclass(frozen=True, slots=True)
class ConfigError(Finding):
    """Refuses the configuration."""

    severity: ClassVar[str] = "error"


@dataclass(frozen=True, slots=True)
class ConfigWarning(Finding):
    """Something that has no effect, or not the one it seems to have."""

    severity: ClassVar[str] = "warning"


class ConfigErrors(Exception):
    """Everything that is wrong in one configuration, in the order of the text."""

    def __init__(self, errors: Iterable[ConfigError], warnings: Iterable[ConfigWarning] = ()) -> None:
        self.errors = tuple(errors)
        self.warnings = tuple(warnings)
        super().__init__("\n".join(map(str, self.errors)))


@dataclass(slots=True)
class Findings:
    """Collects what the readers of one configuration find; at most FINDINGS_MAX of each kind."""

    source: str
    errors: list[ConfigError] = field(default_factory=list)
    warnings: list[ConfigWarning] = field(default_factory=list)

    def error(self, place: Place, rule: str, message: str, hint: str = "") -> None:
        """Notes an error, once."""
        assert rule in ERRORS, rule
        found = ConfigError(self.source, place.line, place.column, rule, message, hint)
        if found not in self.errors and len(self.errors) < FINDINGS_MAX:
            self.errors.append(found)

    def warning(self, place: Place, rule: str, message: str, hint: str = "") -> None:
        """Notes a warning, once."""
        assert rule in WARNINGS, rule
        found = ConfigWarning(self.source, place.line, place.column, rule, message, hint)
        if found not in self.warnings and len(self.warnings) < FINDINGS_MAX:
            self.warnings.append(found)

    def sorted_warnings(self) -> tuple[ConfigWarning, ...]:
        """In the order of the text."""
        return tuple(sorted(self.warnings, key=_position))

    def raise_errors(self) -> None:
        """Raises `ConfigErrors` if there is an error."""
        if self.errors:
            raise ConfigErrors(sorted(self.errors, key=_position), self.sorted_warnings())


def _position(finding: Finding) -> tuple[bool, int, int]:
    return (finding.line == 0, finding.line, finding.column)  # those without a place come last


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint: the known name that is nearest to a wrong one, or all of them if they are few."""
    names = sorted(set(known))
    folded: dict[str, str] = {}
    for candidate in names:
        folded.setdefault(candidate.lower(), candidate)
    close = difflib.get_close_matches(name.lower()[:128], folded, n=1)
    if close:
        return f"did you mean '{folded[close[0]]}'?"
    return f"known: {', '.join(names)}" if 0 < len(names) <= 12 else ""
