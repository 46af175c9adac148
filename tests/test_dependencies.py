"""docs/dependencies.md lists what is installed, and nothing in it is old."""

import re
import tomllib
from datetime import date
from pathlib import Path

from release.image.left_out import BUILDS
from release.locked import pins

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/dependencies.md").read_text()
MONTHS_MAX = 24
OF_DEVELOPMENT = ("dev", "docs", "fuzz", "load")  # extras
_ROW = re.compile(r"^\| ([a-z0-9-]+) \|(.*)\|$", re.MULTILINE)


def rows(title: str) -> dict[str, list[str]]:
    """Returns the table of a section, by package."""
    (section,) = [part for part in PAGE.split("\n## ") if part.startswith(title)]
    return {name: [cell.strip() for cell in cells.split("|")] for name, cells in _ROW.findall(section) if name != "package"}


def named(requirements: list[str]) -> set[str]:
    return {re.match(r"[a-z0-9-]+", each)[0] for each in requirements}  # type: ignore[index]


def test_every_dependency_is_listed_with_its_reason_and_licence() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: each for name, each in project["optional-dependencies"].items() if name not in OF_DEVELOPMENT}
    own = named(project["dependencies"])
    of_extras = named([each for requirements in extras.values() for each in requirements])
    assert rows("Of the picker").keys() == own
    assert rows("Of extras").keys() == of_extras - own - {"endpoint-picker"}
    installed = {pin.name for pin in pins("image") if pin.name not in BUILDS and pin.applies("3.11")}
    assert rows("What these bring").keys() == installed - own - of_extras
    assert all(all(cells) for title in ("Of the picker", "Of extras", "What these bring") for cells in rows(title).values())


def test_every_dependency_had_a_release_within_two_years_before_the_check() -> None:
    checked = date.fromisoformat(re.search(r"Checked on ([\d-]+)", PAGE)[1])  # type: ignore[index]
    for name, cells in (rows("Of the picker") | rows("Of extras")).items():
        year, month = map(int, cells[2].split("-"))
        assert (checked.year - year) * 12 + checked.month - month <= MONTHS_MAX, name
