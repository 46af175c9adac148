"""The page docs/parity.md as text."""

import textwrap
from collections.abc import Iterator, Mapping
from typing import Final

from tests.parity.listed import ROOT, VERDICTS, Section, in_code, read

PAGE: Final = ROOT / "docs" / "parity.md"
WIDTH: Final = 140
ONLY_HERE: Final = ("types", "flags", "metrics", "fields")  # headers of the code are also those of HTTP


def page() -> str:
    """The whole page."""
    about, sections = read()
    return "\n".join(_lines(about, sections)) + "\n"


def _lines(about: Mapping[str, str], sections: Mapping[str, Section]) -> Iterator[str]:
    yield "# Parity with the reference picker"
    yield ""
    yield from _text(
        f"This page compares the picker with the reference picker: {about['reference']} at commit {about['commit']} ({about['dated']}), "
        f"{about['newer']}. *Same*: both have it. *Better*: both have it, and this picker does more. *Different*: both accept it, with "
        "another effect. *Absent*: only the reference picker has it. [Migrating](migrating.md) explains what this means for users. "
        "`python -m tests.parity` generates this page from `tests/parity/reference.toml`."
    )
    code = in_code()
    yield ""
    yield "| | same | better | different | absent | only here |"
    yield "|---|---|---|---|---|---|"
    for name, section in sections.items():
        counts = [len(section.same), *(len(section.why[verdict]) for verdict in VERDICTS)]
        only = len(_only(code[name], section)) if name in ONLY_HERE else "–"
        yield f"| {section.title.lower()} | {' | '.join(map(str, counts))} | {only} |"
    for name, section in sections.items():
        yield from _section(section, _only(code[name], section) if name in ONLY_HERE else set())


def _only(code: set[str], section: Section) -> set[str]:
    """Returns the names that the reference picker lacks, without the fields of a field that it lacks."""
    only = code - set(section.all())
    return {name for name in only if not any(name.startswith(f"{outer}.") for outer in only)}


def _section(section: Section, only: set[str]) -> Iterator[str]:
    yield ""
    yield f"## {section.title}"
    if section.note:
        yield ""
        yield from _text(section.note)
    yield ""
    yield from _text(f"**Same** ({len(section.same)}): {_listed(section.same)}.")
    if rows := [row for verdict in VERDICTS for row in _rows(verdict, section.why[verdict])]:
        yield from ("", "| name | | difference |", "|---|---|---|", *rows)
    if only:
        yield ""
        yield from _text(f"**Only here** ({len(only)}): {_listed(sorted(only))}.")


def _rows(verdict: str, whys: Mapping[str, str]) -> Iterator[str]:
    """Rows of a table. Names with the same reason share one."""
    reasons: dict[str, list[str]] = {}
    for name, why in whys.items():
        reasons.setdefault(why, []).append(name)
    yield from (f"| {_listed(names)} | {verdict} | {why} |" for why, names in reasons.items())


def _listed(names: object) -> str:
    assert isinstance(names, (tuple, list))
    return ", ".join(f"`{name}`" for name in names)


def _text(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False)
