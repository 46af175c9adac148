"""The commit that is released: its version, its time, and a copy of its files."""

import os
import re
import subprocess
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from release.errors import Refused

ROOT: Final = Path(__file__).parent.parent
NAME: Final = "endpoint-picker"
RELEASE: Final = re.compile(r"\d+\.\d+\.\d+")


class Source(NamedTuple):
    """A commit. `tree`: the folder with its files; `epoch`: its time in seconds since 1970, the time of everything that is made from it."""

    tree: Path
    version: str
    commit: str
    epoch: int

    @property
    def environment(self) -> Mapping[str, str]:
        """Returns the environment of build commands: this process's, with the commit's time and name."""
        return os.environ | {
            "SOURCE_DATE_EPOCH": str(self.epoch),
            "EPP_COMMIT": self.commit,
            "PYTHONHASHSEED": "0",
            "PYTHONDONTWRITEBYTECODE": "1",
            "TZ": "UTC",
        }


def checked_out(into: Path, root: Path = ROOT) -> Source:
    """Copies the files of the current commit of `root` to the folder `into`. Raises Refused if the tree has changes."""
    if changed := _git(root, "status", "--porcelain"):
        raise Refused(f"the tree has changes that no commit has; commit or stash them:\n{changed}")
    packed = subprocess.run(["git", "archive", "HEAD"], cwd=root, check=True, capture_output=True).stdout
    subprocess.run(["tar", "--extract", "--directory", str(into)], input=packed, check=True)
    commit, epoch = _git(root, "log", "-1", "--format=%H %ct").split()
    return Source(into, version(into), commit, int(epoch))


def version(tree: Path) -> str:
    """Returns the version in pyproject.toml, which is the only place that has it. Raises Refused for a form other than 1.2.3."""
    found = str(tomllib.loads((tree / "pyproject.toml").read_text())["project"]["version"])
    if not RELEASE.fullmatch(found):
        raise Refused(f"pyproject.toml: the version is {found!r}; write three numbers, such as 1.2.3")
    return found


def _git(root: Path, *arguments: str) -> str:
    try:
        return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout.strip()
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or error
        raise Refused(f"a release is made from a Git checkout: {said}") from None
