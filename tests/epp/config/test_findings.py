import re
from pathlib import Path

import pytest

import epp
from epp.config.findings import ERRORS, FINDINGS_MAX, WARNINGS, WHOLE, ConfigErrors, Findings, Place, nearest


def test_a_rule_is_either_an_error_or_a_warning_and_has_a_meaning() -> None:
    assert not ERRORS.keys() & WARNINGS.keys()
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", rule) for rule in (*ERRORS, *WARNINGS))
    assert all(text.endswith(".") for text in (*ERRORS.values(), *WARNINGS.values()))


def test_every_rule_is_used() -> None:
    folder = Path(epp.__path__[0])
    commands = folder.parent / "workers" / "cli"
    files = [*(folder / "config").glob("*.py"), commands / "configuration.py", commands / "several_pools.py"]
    files.remove(folder / "config" / "findings.py")
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    unused = [rule for rule in (*ERRORS, *WARNINGS) if f'"{rule}"' not in text and f"error[{rule}]" not in text]
    assert unused == []


def test_a_rule_outside_of_its_table_is_a_bug() -> None:
    findings = Findings("c.yaml")
    with pytest.raises(AssertionError):
        findings.error(WHOLE, "weight-zero", "a warning")
    with pytest.raises(AssertionError):
        findings.warning(WHOLE, "kind", "an error")


def test_a_finding_prints_like_a_compiler_message_and_is_noted_once() -> None:
    findings = Findings("c.yaml")
    for _ in range(2):
        findings.error(Place(3, 4), "kind", "it is wrong", "fix it")
        findings.warning(WHOLE, "no-scorer", "it is odd")
    assert [str(error) for error in findings.errors] == ["c.yaml:3:4: error[kind]: it is wrong (fix it)"]
    assert [str(warning) for warning in findings.warnings] == ["c.yaml: warning[no-scorer]: it is odd"]


def test_errors_are_sorted_by_place_and_those_without_a_place_come_last() -> None:
    findings = Findings("c.yaml")
    findings.raise_errors()
    for place in (WHOLE, Place(2, 1), Place(1, 9), Place(1, 2)):
        findings.error(place, "kind", "x")
        findings.warning(place, "no-scorer", "x")
    with pytest.raises(ConfigErrors) as caught:
        findings.raise_errors()
    order = [(1, 2), (1, 9), (2, 1), (0, 0)]
    assert [(error.line, error.column) for error in caught.value.errors] == order
    assert [(warning.line, warning.column) for warning in caught.value.warnings] == order


def test_the_number_of_findings_is_bounded() -> None:
    findings = Findings("c.yaml")
    for line in range(1, 2 * FINDINGS_MAX):
        findings.error(Place(line, 1), "kind", "x")
        findings.warning(Place(line, 1), "no-scorer", "x")
    assert (len(findings.errors), len(findings.warnings)) == (FINDINGS_MAX, FINDINGS_MAX)


@pytest.mark.parametrize(
    ("name", "known", "hint"),
    [
        ("Queue", ("queue", "other"), "did you mean 'queue'?"),
        ("zzz", ("b", "a"), "known: a, b"),
        ("zzz", tuple(map(str, range(13))), ""),
        ("zzz", (), ""),
    ],
)
def test_a_hint_is_the_most_similar_name_or_all_names_if_they_are_few(name: str, known: tuple[str, ...], hint: str) -> None:
    assert nearest(name, known) == hint
