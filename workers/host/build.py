"""Finds the version of the running program, and the Git commit from which it was built.

Reads pip's files beside the installed packages (`*.dist-info`) without `importlib.metadata`, which takes 2 MiB of each process.
"""

import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from workers.host.cgroup import text

INSTALLATIONS = "endpoint_picker-*.dist-info"  # folders with the name and version of the distribution
SOURCE = Path(__file__).parents[2]
RECORDED = "workers/host/commit.txt"  # in sdists and wheels: the build writes the commit into it
SHORT = 12  # digits of a commit that people read
COMMIT = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")


def commit(environ: Mapping[str, str] = os.environ, source: Path = SOURCE) -> str:
    """Returns the commit as hexadecimal digits, or "" if it is unknown.

    The commit comes from the variable EPP_COMMIT, else from the file RECORDED, else from pip, else from the checkout.
    """
    given = environ.get("EPP_COMMIT", "") or text(source / RECORDED).strip()
    return given or _installed() or _checked_out(source / ".git")


def version() -> str:
    """Returns the version of the installed distribution; "" if the program runs from a source tree."""
    folder = _installation()
    return folder.name.removesuffix(".dist-info").partition("-")[2] if folder is not None else ""


def _installation() -> Path | None:
    return next((folder for place in sys.path for folder in Path(place or ".").glob(INSTALLATIONS)), None)


def _installed() -> str:
    """Returns the commit that pip recorded when it installed the program from a repository (direct_url.json, PEP 610)."""
    folder = _installation()
    try:
        origin = json.loads(text(folder / "direct_url.json") or "{}") if folder is not None else {}
    except ValueError:
        return ""
    return str(origin.get("vcs_info", {}).get("commit_id", ""))


def _checked_out(git: Path) -> str:
    """Reads the commit of a checkout from its `.git` folder. The file HEAD has a commit, or it names a branch.

    The commit of a branch is in a file of its own or in the file packed-refs.
    """
    head = text(git / "HEAD").strip()
    branch = head.removeprefix("ref: ")
    if branch != head:
        packed = (line.partition(" ") for line in text(git / "packed-refs").splitlines())
        head = text(git / branch).strip() or next((found for found, _, name in packed if name == branch), "")
    return head if COMMIT.fullmatch(head) else ""
