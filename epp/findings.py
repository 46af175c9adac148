"""What is wrong in a configuration, and where: errors refuse it, warnings do not.

Both are values that print like a compiler's messages: `file:line:column: error[rule]: message
(hint)`. Readers collect them in a `Findings` and go on, so that one run shows everything.
"""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

FINDINGS_MAX = 100  # a file that is this wrong needs another look, not more lines


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
        found = ConfigError(self.source, place.line, place.column, rule, message, hint)
        if found not in self.errors and len(self.errors) < FINDINGS_MAX:
            self.errors.append(found)

    def warning(self, place: Place, rule: str, message: str, hint: str = "") -> None:
        """Notes a warning, once."""
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
