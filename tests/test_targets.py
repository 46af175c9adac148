"""Every test belongs to a target of the Makefile."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_each_folder_with_tests_belongs_to_make_test_or_make_test_e2e() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        ours = {ROOT / path for path in tomllib.load(file)["tool"]["pytest"]["ini_options"]["testpaths"]}
    end_to_end = {ROOT / path for path in re.findall(r"-o testpaths=(\S+)", (ROOT / "Makefile").read_text())}
    folders = {ROOT / "tests" / path.relative_to(ROOT / "tests").parts[0] for path in ROOT.glob("tests/*/**/test_*.py")}
    assert ours | end_to_end == folders | {ROOT / "tests" / "test_*.py"}
    assert not ours & end_to_end
