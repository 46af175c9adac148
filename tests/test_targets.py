"""Every test belongs to one target of the Makefile."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def of(paths: list[str]) -> list[Path]:
    """Returns the test modules of these paths: folders, or patterns of files."""
    found = [path for pattern in paths for path in ROOT.glob(pattern)]
    return [test for path in found for test in (path.glob("**/test_*.py") if path.is_dir() else [path])]


def test_each_test_belongs_to_make_test_or_make_test_e2e_or_make_test_kube() -> None:
    makefile = (ROOT / "Makefile").read_text()
    with (ROOT / "pyproject.toml").open("rb") as file:
        paths = tomllib.load(file)["tool"]["pytest"]["ini_options"]["testpaths"]
    for line in re.findall(r"-m pytest .*", makefile):
        paths += re.findall(r"tests/\S+", line)
    assert sorted(of(paths)) == sorted(ROOT.glob("tests/**/test_*.py"))
