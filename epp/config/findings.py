"""Findings: the errors and warnings about a configuration, with their places.

An error refuses the configuration; a warning does not. Both print like a compiler's messages:
`file:line:column: error[rule]: message (hint)`. Readers collect them in a `Findings` and continue,
so that one run shows everything. ERRORS and WARNINGS list each rule once, with its meaning.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

FINDINGS_MAX = 100  # limit per kind of finding; beyond this limit, more lines do not help the author of the file
DEPRECATED_SHOWN_MAX = 4

ERRORS: Mapping[str, str] = {
    "unreadable": "The file cannot be read, or is not UTF-8.",
    "yaml-syntax": "The text is neither YAML nor JSON.",
    "yaml-key": "A key is not a single word or text.",
    "yaml-tag": "A tag is not supported, or its value is not what it says.",
    "yaml-merge": "`<<` takes a mapping or a list of mappings.",
    "yaml-number": "A number is not finite.",
    "too-large": "The text has too many characters, levels or values.",
    "no-document": "There is no YAML document: the text is empty or has only comments.",
    "one-document": "There is more than one YAML document.",
    "duplicate-key": "A key is given twice in one mapping.",
    "api-version": "The apiVersion is not known.",
    "kind": "The kind is not EndpointPickerConfig.",
    "feature-gate": "A feature gate is not known, or its value is neither true nor false.",
    "unknown-field": "A field is not known; it may be misspelt.",
    "missing-field": "A field that is required is not given.",
    "wrong-type": "A value is of the wrong type, such as a number instead of text.",
    "bad-quantity": "A quantity cannot be read, is negative or is too large.",
    "bad-duration": "A duration cannot be read, is negative or is too large.",
    "bad-parameter": "A plugin's parameter is out of range, or the plugin refuses it.",
    "duplicate-name": "Two plugins, profiles, data sources or pools have the same name.",
    "duplicate-priority": "Two bands have the same priority.",
    "unknown-type": "A plugin type is not registered.",
    "unavailable-type": "A plugin type of llm-d-router does not exist here.",
    "experimental-type": "A plugin type is experimental and needs --allow-experimental-plugins.",
    "plugin-class": "The class that a plugin type names does not fit its extension points.",
    "plugin-import": "The module that a plugin type names cannot be imported.",
    "unknown-ref": "A reference names a plugin that is not in `plugins`.",
    "wrong-kind": "A reference names a plugin of the wrong kind, such as a scorer instead of a parser.",
    "response-phase": "responsePhase is neither full nor none, or it is none although a plugin needs answers.",
    "reference-cycle": "Plugins refer to each other in a cycle through their parameters.",
    "name-taken": "A plugin has the name of a default plugin that is needed.",
    "no-handler": "There are several profiles and no profile handler.",
    "one-handler": "There is more than one profile handler.",
    "handler-profiles": "The profile handler cannot work with these profiles.",
    "only-shadows": "All profiles are shadows, so none can decide.",
    "one-picker": "A profile has more than one picker.",
    "one-extractor": "A data source has two extractors of the same type.",
    "two-producers": "Two plugins produce the same value.",
    "block-sizes": "Two producers cut prompts into blocks of different sizes, but they share one index.",
    "no-producer": "A plugin reads a value that no plugin produces.",
    "type-clash": "The reader and the producer of a value declare different types.",
    "stage-order": "A plugin reads a value before it is produced.",
    "metric-clash": "Two plugins declare different metrics with the same name.",
    "producer-cycle": "Data producers wait for each other's values.",
    "no-discovery": "No source of endpoints is given (`epp serve` only).",
    "two-discoveries": "Endpoints come from --endpoint-selector and also from --endpoints or a plugin.",
    "thread": "A plugin starts a thread before the fork (`epp serve`, `epp explain` and `epp config check`).",
    "no-lease": "Leader election is on, but endpoints do not come from Kubernetes.",
    "bad-name": "The name of a pool or a namespace has a form that Kubernetes does not allow.",
    "missing-package": "The configuration, or a flag, needs a Python package that is not installed.",
    "bad-object": "An object of --objects-dir is invalid.",
    "bad-priority": "A priority does not fit 32 bits.",
    "too-many-bands": "There are more bands than shared memory has places for.",
    "queue-mismatch": "A queue cannot do what its band's policies need.",
    "bad-pool": "A field of a pool has a value that cannot be, or two of its fields exclude each other (pools file only).",
    "two-pools": "Two pools have the same port, authority or model, or a pool has the port of a flag (pools file only).",
    "one-pool": "The configuration of a pool has what only a picker of one pool can have (pools file only).",
    "never-matched": "An authority or a model of a pool never matches, because an earlier one takes all of its requests (pools file only).",
    "too-many-pools": "There are more pools, or more matchers with `*`, than a picker serves (pools file only).",
    "tenants": "The section tenants is incomplete, has a wrong value, or lacks a secret that lasts.",
    "tenant-source": "A source of tenants is incomplete or wrong, or its header is not trusted.",
    "tenant-budget": "A budget of tenants is incomplete, is 0, or needs flow control or the response phase.",
    "tenant-keys": "A file of tenants' API keys is missing, or has a wrong line.",
    "unsupported": "Something of llm-d-router is not supported by this version.",
}
WARNINGS: Mapping[str, str] = {
    "odd-object": "Something in --objects-dir has no effect, or probably not the intended one.",
    "deprecated": "apiVersion, fields or plugin types of an older version; `epp config check --migrate` prints the current form.",
    "removed-gate": "A feature gate was removed.",
    "gate-missing": "The section flowControl is given without its feature gate.",
    "no-effect": "A field has no effect here.",
    "without-effect": "A parameter has no effect here.",
    "parameters-ignored": "Parameters are given to a plugin that takes none.",
    "unused-plugin": "A plugin is in no profile, or no field references it.",
    "unread-producer": "No plugin reads the data of a data producer.",
    "not-scheduling": "A profile lists a plugin that is not a filter, scorer or picker.",
    "ref-twice": "A list references a plugin twice.",
    "nothing-configured": "The configuration has only apiVersion and kind, so endpoints are picked at random.",
    "no-scorer": "A profile has no scorer, so it picks at random.",
    "weight-ignored": "A weight is given to a plugin that is not a scorer.",
    "weight-zero": "A scorer's weight is 0.",
    "weight-negative": "A scorer's weight is negative: its best endpoint is picked last.",
    "prefix-outweighs-load": "A prefix scorer outweighs all load scorers of its profile: a full endpoint keeps getting its prefixes.",
    "idle-stage": "The profile handler is set to run a profile that does not exist.",
    "shadow-untold": "A plugin that learns from requests is only in shadow profiles, so it learns nothing.",
    "unreachable-profile": "The profile handler never runs this profile.",
    "estimated-tokens": "A precise prefix producer gets estimated tokens, which never match those of a model server.",
    "staleness-below-interval": "Values become stale before the next scrape can renew them.",
    "limit-above-total": "A band's limit is above the limit over all bands, so it is never reached.",
    "no-isolation": "A band has the default fairness policy, which lets one flow starve the others.",
    "limit-above-memory": "The limit on waiting bytes is above the container's memory.",
    "one-by-one": "The saturation detector does not say how much one more request adds, so requests are dispatched one at a time.",
    "gateway-list": "The gateway of --gateway cannot use a list of endpoints as the picker's answer.",
    "gateway-headers": "The gateway of --gateway does not pass on headers that a plugin sets, or passes on those that the picker removes.",
    "gateway-response": "The gateway of --gateway does not show the picker the response that a plugin reads.",
    "gateway-metadata": "The gateway of --gateway ignores the metadata that a plugin sends.",
    "two-matchers": "Matchers of two pools can match the same request, which goes to the pool listed first (pools file only).",
    "only-metadata": "A pool has no port, authority or model, so it only gets requests that the gateway sends there (pools file only).",
    "keys-unread": "A file of tenants' API keys cannot be read here (`epp config check` only; `epp serve` needs it).",
    "limit-below-body": "A limit on waiting bytes is below the length that one request body may have.",
}

NOTES: Mapping[str, str] = {"client-headers": "Clients may set headers that the picker trusts, unless the gateway removes them."}


class Place(NamedTuple):
    """Gives a position in the text, counted from 1. Line 0 means the configuration as a whole."""

    line: int
    column: int


WHOLE = Place(0, 0)


@dataclass(frozen=True, slots=True)
class Finding:
    """Describes one broken rule. `hint` says how to fix it, or is empty."""

    severity: ClassVar[str]
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
class ConfigNote(Finding):
    """Describes what a configuration leaves to its surroundings. A note is no mistake, so `--strict` ignores notes."""

    severity: ClassVar[str] = "note"


@dataclass(frozen=True, slots=True)
class ConfigError(Finding):
    """Describes a broken rule that makes the configuration unusable."""

    severity: ClassVar[str] = "error"


@dataclass(frozen=True, slots=True)
class ConfigWarning(Finding):
    """Describes a broken rule that leaves the configuration usable: something has no effect, or another effect than expected."""

    severity: ClassVar[str] = "warning"


class ConfigErrors(Exception):
    """Carries all errors of one configuration, in the order of the text."""

    def __init__(self, errors: Iterable[ConfigError], warnings: Iterable[ConfigWarning] = ()) -> None:
        self.errors = tuple(errors)
        self.warnings = tuple(warnings)
        super().__init__("\n".join(map(str, self.errors)))


class Deprecated(NamedTuple):
    """Names, in words, something that is deprecated (`what`) and what to use instead (`current`)."""

    place: Place
    what: str
    current: str


@dataclass(slots=True)
class Findings:
    """Collects the findings of one configuration, at most FINDINGS_MAX of each kind. Joins all deprecations into one warning."""

    source: str
    errors: list[ConfigError] = field(default_factory=list)
    warnings: list[ConfigWarning] = field(default_factory=list)
    outdated: list[Deprecated] = field(default_factory=list)

    def error(self, place: Place, rule: str, message: str, hint: str = "") -> None:
        """Notes an error, unless it was noted before."""
        assert rule in ERRORS, rule
        finding = ConfigError(self.source, place.line, place.column, rule, message, hint)
        if finding not in self.errors and len(self.errors) < FINDINGS_MAX:
            self.errors.append(finding)

    def warning(self, place: Place, rule: str, message: str, hint: str = "") -> None:
        """Notes a warning, unless it was noted before."""
        assert rule in WARNINGS, rule
        finding = ConfigWarning(self.source, place.line, place.column, rule, message, hint)
        if finding not in self.warnings and len(self.warnings) < FINDINGS_MAX:
            self.warnings.append(finding)

    def deprecated(self, place: Place, what: str, current: str) -> None:
        """Notes that the configuration uses something deprecated, unless that was noted before."""
        if (entry := Deprecated(place, what, current)) not in self.outdated and len(self.outdated) < FINDINGS_MAX:
            self.outdated.append(entry)

    def sorted_warnings(self) -> tuple[ConfigWarning, ...]:
        """Returns the warnings in the order of the text; all deprecations are one warning."""
        outdated = [self._outdated()] if self.outdated else []
        return tuple(sorted([*self.warnings, *outdated], key=_position))

    def _outdated(self) -> ConfigWarning:
        entries = sorted(self.outdated, key=lambda entry: entry.place)
        told = [f"{entry.what} (line {entry.place.line}) is now {entry.current}" for entry in entries[:DEPRECATED_SHOWN_MAX]]
        told += [f"{len(entries) - len(told)} more"] if len(entries) > len(told) else []
        place = entries[0].place
        hint = "epp config check --migrate prints the file in its current form"
        return ConfigWarning(self.source, place.line, place.column, "deprecated", "; ".join(told), hint)

    def raise_errors(self) -> None:
        """Raises `ConfigErrors` if there is an error."""
        if self.errors:
            raise ConfigErrors(sorted(self.errors, key=_position), self.sorted_warnings())


def _position(finding: Finding) -> tuple[bool, int, int]:
    return (finding.line == 0, finding.line, finding.column)  # findings without a place come last


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns a hint for a wrong name: the most similar known name, or all known names if they are few; empty if neither helps."""
    names = sorted(set(known))
    if close := similar(name, names):
        return f"did you mean '{close[0]}'?"
    return f"known: {', '.join(names)}" if 0 < len(names) <= 12 else ""


def similar(name: str, known: Iterable[str]) -> list[str]:
    """Returns up to three known names that the author may have meant, the most similar one first. Ignores upper and lower case."""
    import difflib  # imported only here, because few processes see a wrong name

    folded: dict[str, str] = {}
    for candidate in sorted(set(known)):
        folded.setdefault(candidate.lower(), candidate)
    return [folded[close] for close in difflib.get_close_matches(name.lower()[:128], folded)]
